"""Several samples: rows of a data set made into inputs, inputs collated into a batch, a processor's batch split.

Texts of a data set are tokenised together, and a row that cannot be an input says why. A batch is stacked where samples
are alike and padded at the end where lengths differ. A batch from a processor is split, and its padding dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import MappingKey, tree_map_with_path

from tensorlens.errors import InputError, TensorLensError
from tensorlens.models.inputs import (
    ModelInput,
    as_tensors,
    batch_size,
    device_of,
    drop_padding,
    forward_parameters,
    id_arguments,
    make_input,
    max_tokens,
    token_ids,
    vocabulary_size,
)
from tensorlens.models.texts import Offsets, names_image, tokenised, tokenizer_of

# Rows of a data set ---------------------------------------------------------------------------------------------------


def make_inputs(
    values: Sequence[Any], model: nn.Module, processor: Any = None, *, truncate: bool = False
) -> list[ModelInput | TensorLensError]:
    """For each row the input that `make_input` makes from it, or the error that it would raise.

    Args:
        values: The rows; each as for `make_input`, or an input already.
        model: The model they are for.
        processor: Tokenizer or image processor.
        truncate: Whether texts longer than the model's inputs are cut at their end instead of being errors.
    """
    together: dict[int, ModelInput] = {}
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        tokenizer = tokenizer_of(processor)
        is_fast = getattr(tokenizer, "is_fast", False)
        texts = [i for i, one in enumerate(values) if is_fast and isinstance(one, str) and one.strip()]
        texts = [i for i in texts if not names_image(values[i])]
        longest = max_tokens(model) if truncate else None
        cut = {} if longest is None else {"truncation": True, "max_length": longest}
        made = tokenised(tokenizer, [values[i] for i in texts], **cut) if texts else []
        rows = [_Row(ids, values[i], offsets) for i, (ids, offsets) in zip(texts, made, strict=True)]
        lists = [i for i, value in enumerate(values) if isinstance(value, list) and {*map(type, value)} == {int}]
        rows += [_Row(list(values[i])) for i in lists]
        together = _checked_together(dict(zip([*texts, *lists], rows, strict=True)), model)
    return [together[i] if i in together else _of_one(value, model, processor) for i, value in enumerate(values)]


@dataclass(frozen=True)
class _Row:
    """Token ids, and their origin."""

    ids: list[int]
    text: str | None = None
    offsets: Offsets | None = None


def _of_one(value: Any, model: nn.Module, processor: Any) -> ModelInput | TensorLensError:
    if isinstance(value, ModelInput):
        return value
    try:
        return make_input(value, model, processor)
    except TensorLensError as error:
        return error


def _checked_together(rows: dict[int, _Row], model: nn.Module) -> dict[int, ModelInput]:
    """The inputs of rows of token ids, by one copy to the device; all other rows go to `make_input`."""
    limit, vocabulary = max_tokens(model), vocabulary_size(model)
    fits = {
        i: row
        for i, row in rows.items()
        if 0 < len(row.ids) <= (limit or len(row.ids)) and min(row.ids) >= 0 and max(row.ids) < (vocabulary or math.inf)
    }
    flat = torch.tensor([i for row in fits.values() for i in row.ids], dtype=torch.long).to(device_of(model))
    found = {}
    for (i, row), ids in zip(fits.items(), flat[None].split([len(row.ids) for row in fits.values()], 1), strict=True):
        try:
            arguments = id_arguments(ids, model)
        except InputError:  # the model takes no ids: every row gets this error
            return {}
        kind = "ids" if row.text is None else "text"
        found[i] = ModelInput(arguments=arguments, kind=kind, text=row.text, offsets=row.offsets, ids=tuple(row.ids))
    return found


def check_several(values: Any) -> None:
    """Refuse a single input in place of several: a text is an iterable too, of letters."""
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


# A batch --------------------------------------------------------------------------------------------------------------


class Collated:
    """Several samples as one input of a model.

    Attributes:
        arguments: Keyword arguments of the model's forward.
        lengths: Tokens of each sample.
    """

    def __init__(self, prepared: Sequence[ModelInput], model: nn.Module, pad_id: int = 0) -> None:
        self.lengths = tuple(length_of(one) for one in prepared)
        names = prepared[0].arguments.keys()
        if any(one.arguments.keys() != names for one in prepared):
            raise InputError("A batch needs inputs of one kind; got samples with different arguments.")
        if len(prepared) > 1 and not all(map(has_sample_axis, prepared)):
            raise InputError("A batch needs inputs with an axis for samples; got some without. Call the lens on each.")
        if not all(_fits([one.arguments[name] for one in prepared], self.lengths) for name in names):
            raise InputError(
                "A batch needs samples that differ in the length of one text alone, with masks of its length; got "
                "samples whose other sizes differ too, and it is not known where to pad them. Call the lens on each, "
                "or pass them to `lens.maps`."
            )
        self.arguments = _stacked(prepared, pad_id)
        is_padded = len(set(self.lengths)) > 1
        if is_padded and "attention_mask" in forward_parameters(model) and "attention_mask" not in names:
            places = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]
            self.arguments["attention_mask"] = places.long().to(next(model.parameters()).device)


def length_of(prepared: ModelInput) -> int:
    """Number of tokens of one sample, as far as its arguments say; 0 for pictures and the like."""
    ids = token_ids(prepared.arguments)
    ids = prepared.arguments.get("inputs_embeds") if ids is None else ids
    return ids.shape[1] if isinstance(ids, Tensor) and ids.dim() > 1 else 0


def has_sample_axis(prepared: ModelInput) -> bool:
    """Whether every tensor of the input begins with an axis for samples; numbers for a plain module need not."""
    values = [value for value in prepared.arguments.values() if isinstance(value, Tensor)]
    least = 3 if prepared.kind == "values" else 1
    return all(value.dim() >= least and len(value) == 1 for value in values)


def _fits(values: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Whether values of one argument have the same sizes, or are as long as the text of their sample."""
    shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    return len(set(shapes)) < 2 or [shape[1:2] for shape in shapes] == [(n,) for n in lengths]


def _stacked(prepared: Sequence[ModelInput], pad_id: int) -> dict[str, Any]:
    """The arguments of all samples as one, the shorter ones padded at their end."""
    return tree_map_with_path(
        lambda path, *values: _stack(values, pad_id if path[-1] == MappingKey("input_ids") else 0),
        *(one.arguments for one in prepared),
    )


def _stack(values: Sequence[Any], pad: int) -> Any:
    if not isinstance(values[0], Tensor):
        return values[0]
    if values[0].dim() > 1 and len({value.shape[1] for value in values}) > 1:
        longest = max(value.shape[1] for value in values)
        values = [torch.cat([v, v.new_full((1, longest - v.shape[1], *v.shape[2:]), pad)], 1) for v in values]
    return torch.cat(list(values))


# A batch of a processor -----------------------------------------------------------------------------------------------


def split_batch(processed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of a processor's output one by one, padding dropped, on whichever side it was."""
    size, tensors = batch_size(processed), as_tensors(processed)
    return [drop_padding({name: _row(value, i, size) for name, value in tensors.items()}) for i in range(size)]


def _row(value: Any, i: int, size: int) -> Any:
    return value[i : i + 1] if isinstance(value, Tensor) and value.dim() and len(value) == size else value
