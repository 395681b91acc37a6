"""The rows of a data set as model inputs: texts are tokenised together, and a row that cannot be one says why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tensorlens.errors import InputError, TensorLensError
from tensorlens.models.forward_signature import device_of, ids_parameter, max_tokens, takes_mapping, vocabulary_size
from tensorlens.models.inputs import IMAGE_SUFFIXES, ModelInput, make_input, tokenizer_of


def make_inputs(
    values: Sequence[Any], model: nn.Module, processor: Any = None, *, truncate: bool = False
) -> list[ModelInput | TensorLensError]:
    """For each row the input that `make_input` makes of it, or the error that it would raise.

    Args:
        values: The rows; each as for `make_input`, or an input already.
        model: The model they are for.
        processor: Tokenizer or image processor.
        truncate: Whether texts longer than the model's inputs are cut at their end instead of being errors.
    """
    found: dict[int, ModelInput | TensorLensError] = {}
    if getattr(tokenizer_of(processor), "is_fast", False) and not _has_decoder(model):
        texts = [i for i, value in enumerate(values) if _is_text(value)]
        made = _of_texts([values[i] for i in texts], model, tokenizer_of(processor), truncate) if texts else []
        found = {i: one for i, one in zip(texts, made, strict=True) if one is not None}
    return [found[i] if i in found else _of_one(value, model, processor) for i, value in enumerate(values)]


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip()) and not value.lower().endswith(tuple(IMAGE_SUFFIXES))


def _of_one(value: Any, model: nn.Module, processor: Any) -> ModelInput | TensorLensError:
    if isinstance(value, ModelInput):
        return value
    try:
        return make_input(value, model, processor)
    except TensorLensError as error:
        return error


def _of_texts(texts: list[str], model: nn.Module, tokenizer: Any, truncate: bool) -> list[ModelInput | None]:
    """What texts become; None for one that is better refused by `make_input`."""
    limit, vocabulary, name = max_tokens(model), vocabulary_size(model), ids_parameter(model)
    cut = {"truncation": True, "max_length": limit} if truncate and limit is not None else {}
    made = tokenizer(texts, return_offsets_mapping=True, **cut)
    fits = [
        bool(ids) and (limit is None or len(ids) <= limit) and (vocabulary is None or max(ids) < vocabulary)
        for ids in made["input_ids"]
    ]
    kept = [ids for ids, fit in zip(made["input_ids"], fits, strict=True) if fit]
    # One copy to the device for all of them.
    flat = torch.tensor([i for ids in kept for i in ids], dtype=torch.long).to(device_of(model))
    pieces, in_mapping = iter(flat.split([len(ids) for ids in kept])), takes_mapping(model)
    found: list[ModelInput | None] = []
    for text, fit, offsets in zip(texts, fits, made["offset_mapping"], strict=True):
        if not fit:
            found.append(None)
            continue
        ids = next(pieces)[None]
        argument = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if in_mapping else ids
        places = tuple([(start, stop) if stop > start else None for start, stop in offsets])
        found.append(ModelInput(arguments={name: argument}, kind="text", text=text, offsets=places))
    return found


def row_error(row: int, error: TensorLensError) -> InputError:
    """The error of a row, with its number."""
    return InputError(
        f"Row {row}: {error} To leave such rows out pass `on_error='skip'`; to cut long texts, `truncate=True`."
    )
