"""The rows of a data set as model inputs: texts are tokenised together, and a row that cannot be one says why."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorlens.errors import InputError, TensorLensError
from tensorlens.models.forward_signature import device_of, ids_parameter, max_tokens, takes_mapping, vocabulary_size
from tensorlens.models.inputs import ModelInput, make_input, tokenizer_of
from tensorlens.models.plain_text import IMAGE_SUFFIXES


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
    together: dict[int, ModelInput] = {}
    if not _has_decoder(model):
        tokenizer = tokenizer_of(processor)
        texts = [i for i, value in enumerate(values) if _is_text(value)] if getattr(tokenizer, "is_fast", False) else []
        rows = _of_texts([values[i] for i in texts], tokenizer, max_tokens(model) if truncate else None)
        lists = [i for i, value in enumerate(values) if _is_list_of_ids(value)]
        rows += [_Row(list(values[i])) for i in lists]
        together = _checked_together(dict(zip([*texts, *lists], rows, strict=True)), model)
    return [together[i] if i in together else _of_one(value, model, processor) for i, value in enumerate(values)]


@dataclass(frozen=True)
class _Row:
    """Token ids, and what they came from."""

    ids: list[int]
    text: str | None = None
    offsets: tuple[tuple[int, int] | None, ...] | None = None


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


def _is_list_of_ids(value: Any) -> bool:
    return isinstance(value, list) and {*map(type, value)} == {int}


def _of_texts(texts: list[str], tokenizer: Any, longest: int | None) -> list[_Row]:
    """Texts by one call of the tokenizer, cut at `longest` tokens."""
    if not texts:
        return []
    cut = {} if longest is None else {"truncation": True, "max_length": longest}
    made = tokenizer(texts, return_offsets_mapping=True, **cut)
    places = [tuple([(a, b) if b > a else None for a, b in of_text]) for of_text in made["offset_mapping"]]
    return [_Row(*row) for row in zip(made["input_ids"], texts, places, strict=True)]


def _checked_together(rows: dict[int, _Row], model: nn.Module) -> dict[int, ModelInput]:
    """The inputs of rows of token ids by one copy to the device; those that are no input are left to `make_input`."""
    limit, vocabulary = max_tokens(model), vocabulary_size(model)
    fits = {
        i: row
        for i, row in rows.items()
        if 0 < len(row.ids) <= (limit or len(row.ids)) and min(row.ids) >= 0 and max(row.ids) < (vocabulary or math.inf)
    }
    try:
        name, in_mapping = ids_parameter(model), takes_mapping(model)
    except InputError:  # it takes no ids; said of each row
        return {}
    flat = torch.tensor([i for row in fits.values() for i in row.ids], dtype=torch.long).to(device_of(model))
    found = {}
    for (i, row), ids in zip(fits.items(), flat[None].split([len(row.ids) for row in fits.values()], 1), strict=True):
        argument = {"input_ids": ids, "attention_mask": torch.ones_like(ids)} if in_mapping else ids
        kind = "ids" if row.text is None else "text"
        found[i] = ModelInput(
            arguments={name: argument}, kind=kind, text=row.text, offsets=row.offsets, ids=tuple(row.ids)
        )
    return found


def check_several(values: Any) -> None:
    """Refuse one input where several are asked for: a text is an iterable too, of letters."""
    if isinstance(values, (str, bytes, Path, Mapping, ModelInput)):
        raise InputError(
            f"Expected several inputs in a list; got one, of type {type(values).__name__}. Put it into a list."
        )
    if not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise InputError(f"Expected several inputs in a list; got {values!r:.60}.")


def row_error(row: int, error: TensorLensError) -> InputError:
    """The error of a row, with its number."""
    return InputError(
        f"Row {row}: {error} To leave such rows out pass `on_error='skip'` (--on-error skip); to cut long "
        "texts, `truncate=True` (--truncate)."
    )
