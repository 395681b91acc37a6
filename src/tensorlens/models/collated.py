"""The inputs of several samples as one: stacked where they are alike, padded at the end where lengths differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.models.forward_signature import forward_parameters, token_ids
from tensorlens.models.inputs import ModelInput


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
                "others whose sizes differ too, and nothing says where they would be filled up. Call the lens on each, "
                "or pass them to `lens.maps`."
            )
        self.arguments: dict[str, Any] = {
            name: _stack([one.arguments[name] for one in prepared], pad_id if name == "input_ids" else 0)
            for name in names
        }
        if self.is_padded and "attention_mask" in forward_parameters(model) and "attention_mask" not in names:
            places = torch.arange(max(self.lengths))[None] < torch.tensor(self.lengths)[:, None]
            self.arguments["attention_mask"] = places.long().to(next(model.parameters()).device)

    @property
    def is_padded(self) -> bool:
        """Whether any sample is shorter than the longest."""
        return len(set(self.lengths)) > 1


def length_of(prepared: ModelInput) -> int:
    """Tokens of one sample, as far as its arguments say; 0 for pictures and the like."""
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


def _stack(values: list[Any], pad: int) -> Any:
    if isinstance(values[0], Mapping):
        return {
            name: _stack([value[name] for value in values], pad if name == "input_ids" else 0) for name in values[0]
        }
    if not isinstance(values[0], Tensor):
        return values[0]
    longest = max(value.shape[1] for value in values) if values[0].dim() > 1 else 0
    if values[0].dim() > 1 and any(value.shape[1] != longest for value in values):
        values = [torch.cat([v, v.new_full((1, longest - v.shape[1], *v.shape[2:]), pad)], 1) for v in values]
    return torch.cat(values)
