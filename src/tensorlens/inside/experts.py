r"""Experts of a mixture feed-forward: what each wrote, at the tokens that it was chosen for.

A module that takes states and, beside them, the numbers of the experts chosen for each token gives out

    y_j = Σ_{e ∈ chosen(j)} w_{j,e} f_e(x_j),

by adding the experts' rows to their tokens one expert after the other, or by a sum over the choices of each token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensorlens.program.marks import Choice
from tensorlens.program.nodes import Slot, Step
from tensorlens.program.program import Program
from tensorlens.recording.recording import Recording


class ExpertRows(NamedTuple):
    """What one expert wrote: the slot of rows that hold it, which of them are its own, and whose tokens these are."""

    expert: int
    slot: int
    rows: Tensor
    tokens: Tensor


def expert_rows(recording: Recording, program: Program, block: int) -> list[ExpertRows]:
    """What each expert of a block wrote; nothing where the block has none, or they cannot be told apart."""
    for choice in [one for one in recording.choices if one.block == block]:
        steps = [step for step in program.steps if f"{step.module}.".startswith(f"{choice.module}.")]
        found = _added(choice, steps, program) or _summed(choice, steps, program)
        if found:
            return found
    return []


def _added(choice: Choice, steps: list[Step], program: Program) -> list[ExpertRows]:
    """Rows that are added to their tokens, one expert after the other in the order of their numbers."""
    experts = choice.experts.unique().tolist()
    added = [step for step in steps if step.operation == "index_add" and _is_by_token(step)]
    if len(added) != len(experts):
        return []
    found = []
    for expert, step in zip(experts, added, strict=True):
        tokens = program.constants[step.args[2].index]
        found.append(ExpertRows(expert, step.args[3].index, torch.arange(len(tokens), device=tokens.device), tokens))
    return found


def _is_by_token(step: Step) -> bool:
    return step.args[1] == 0 and type(step.args[3]) is Slot


def _summed(choice: Choice, steps: list[Step], program: Program) -> list[ExpertRows]:
    """Rows (token, choice, channel) that are summed over choices."""
    chosen = choice.experts
    slots = [step.slots[0] for step in steps if step.operation == "sum" and step.args[1] in ((1,), (-2,))]
    slots = [slot for slot in slots if program.specs[slot].shape[:-1] == tuple(chosen.shape)]
    if not slots:
        return []
    places = {expert: (chosen.flatten() == expert).nonzero()[:, 0] for expert in chosen.unique().tolist()}
    return [ExpertRows(expert, slots[-1], rows, rows // chosen.shape[1]) for expert, rows in places.items()]
