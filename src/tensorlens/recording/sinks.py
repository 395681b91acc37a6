r"""Attention sinks: the first position, which heads attend to when they have nothing else to attend to.

In a causal model it sees itself alone, so nothing but its own column of T depends on it. Holding the values that
attention takes from it moves a part of this column into B and changes no other. `Rules.sink` says from which block on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tensorlens.models.precision import in_float64
from tensorlens.program.nodes import Slot
from tensorlens.program.program import Program
from tensorlens.recording.live import is_live, now, raw, value_of

if TYPE_CHECKING:
    from tensorlens.recording.recording import Recording

ALIKE = 0.99
"""The cosine above which two states are taken to be the same, whatever token stands there."""

COMMON = range(256, 512)
"""Tokens to try: vocabularies begin with special tokens and bytes, then come the most common ones."""

NOTE = "sink held"
"""Note of the step that replaces the first position's values by held ones."""


def without_sink(values: Any, axis: int = -2) -> Any:
    """Values as attention mixes them along an axis: those of the first position held, where the rules say so.

    They become $0 · v_1 + v_1^0$: the step that adds $v_1^0$ is where the sink enters the program.
    """
    run = now.tape
    since, block = run.rules.sink, run.block
    if not isinstance(since, int) or block is None or block < since or not is_live(values) or values.dim() < 2:
        return values
    run.note("attention: sink held")
    first = values.narrow(axis, 0, 1)
    held = raw(Tensor.clone, value_of(first))
    emptied = run.emit("mul", raw(torch.zeros_like, held), first, 0.0)
    sink = run.emit("add", held, emptied, raw(Tensor.clone, held), note=NOTE)
    return torch.cat([sink, values.narrow(axis, 1, values.shape[axis] - 1)], axis)


def with_live_sinks(program: Program) -> Program:
    """The program with no sink held; itself if none is."""
    if NOTE not in [step.note for step in program.steps]:
        return program
    emptied = program.makers
    steps = [
        # v₁ as it was before it was emptied
        replace(step, operation="mul", args=(emptied[step.slots[0]].args[0], 1.0)) if step.note == NOTE else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps))


def tokens_to_try(n_tokens: int) -> Tensor:
    """Inputs of one token each, (input, 1): common tokens of a vocabulary of this size."""
    return torch.arange(n_tokens)[COMMON.start if n_tokens >= COMMON.stop else 0 :][: len(COMMON), None]


def settled_block(recording: Recording) -> int:
    """The first block at which the first position no longer depends on what stands there.

    Args:
        recording: A recording of inputs of one token each, all different.

    Returns:
        The first block in which what attention reads there has a cosine above `ALIKE` to the mean over the other
        inputs, for each of the inputs; the number of blocks if there is none.
    """
    for n in range(recording.n_blocks):
        first = in_float64(_read_by_attention(recording, n)).flatten(1)
        others = (first.sum(0) - first) / (len(first) - 1)
        if bool((torch.cosine_similarity(first, others, dim=-1) > ALIKE).all()):
            return n
    return recording.n_blocks


def _read_by_attention(recording: Recording, n: int) -> Tensor:
    """What the layer reads that makes the values of block n; the state that enters it where there is no such layer."""
    makers = recording.program.makers
    slot = next((mark.values.index for mark in recording.mixtures if mark.block == n and type(mark.values) is Slot), -1)
    while slot in makers and makers[slot].operation != "linear" and makers[slot].slots:
        slot = makers[slot].slots[0]
    if slot not in makers or makers[slot].block != n:
        return recording.states[n]
    (read,) = makers[slot].slots
    return recording.values(n, [read])[read]
