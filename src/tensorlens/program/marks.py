"""Marks: slots with a meaning (attention times values, queries times keys), for questions about the inside."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import words
from tensorlens.program.program import Program
from tensorlens.program.steps import OPERATIONS, Held, Slot, Step, mapped


class Mixture(NamedTuple):
    r"""Attention times values: $\sum_j A_{h,ij} v_{h,j}$.

    Attributes:
        slot: Its result.
        block: The block.
        module: Path of the module.
        values: The values.
        weights: The attention matrix; None if a fused kernel did not form it.
    """

    slot: int
    block: int
    module: str
    values: Slot | Held
    weights: Slot | Held | None


class Meeting(NamedTuple):
    """Queries times keys, before the softmax.

    Attributes:
        slot: The scores; if a fused kernel did not form them, its result.
        block: The block.
        module: Path of the module.
        query: The slot of the queries.
        key: The slot of the keys; if the scores are formed, of their transpose.
        is_fused: Whether a fused kernel did it.
        end: The input of the softmax; None for a fused kernel, or if no softmax followed.
    """

    slot: int
    block: int
    module: str
    query: int
    key: int
    is_fused: bool
    end: int | None = None


class Choice(NamedTuple):
    """The experts that were chosen for each token.

    Attributes:
        block: The block.
        module: Path of the module that received their numbers.
        experts: The numbers, (token, choice).
    """

    block: int
    module: str
    experts: Tensor


MOVES = words("reshape permute expand cast index narrow select index_select flip as_strided")
"""Operations that move numbers without changing them."""

ALIKE = words("mul div add sub blend norm where")
"""Operations that leave every number in its place."""


def count_heads(program: Program, mixture: Mixture) -> int | None:
    """The number of heads of a mixture (…, head, token, channel), or None if its third-last axis counts something else.

    Heads are what the next layer reads side by side, as channels of one token. Windows and groups stand in the same
    but end up among the tokens. So every head is labelled by its number, and the labels are followed to that layer.
    """
    shape = program.specs[mixture.slot].shape
    if len(shape) < 3:
        return None
    n_heads = shape[-3]
    numbers = torch.arange(n_heads, dtype=torch.float32)[:, None, None].expand(shape)
    found = _followed(program, mixture.slot, numbers)
    if found is None:
        return n_heads if len(shape) == 4 else None
    varies_by_channel = bool((found != found[..., :1]).any())
    varies_by_token = bool((found != found.reshape(-1, found.shape[-1])[0]).any())
    return n_heads if (varies_by_channel or n_heads == 1) and not varies_by_token else None


def _followed(program: Program, slot: int, numbers: Tensor) -> Tensor | None:
    """The labels as they arrive at the first layer that reads them; None if they are lost on the way."""
    for step in program.readers.get(slot, ()):
        if step.operation == "linear":
            return numbers
        if step.operation in MOVES:
            moved = numbers if step.operation == "cast" else move(program, step, numbers)
        elif step.operation in ALIKE and program.specs[step.out].shape == tuple(numbers.shape):
            moved = numbers
        else:
            continue
        found = _followed(program, step.out, moved)
        if found is not None:
            return found
    return None


def move(program: Program, step: Step, numbers: Tensor) -> Tensor:
    """Apply a step that only moves numbers to the labels, on the CPU."""

    def given(leaf: Any) -> Any:
        kind = type(leaf)
        return numbers if kind is Slot else program.constants[leaf.index].cpu() if kind is Held else leaf

    return OPERATIONS[step.operation].run(*mapped(step.args, given), **step.options)
