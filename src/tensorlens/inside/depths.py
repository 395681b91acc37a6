"""Cotangents at the states of every depth, and the model's own head on any state."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.models.layouts import state_of
from tensorlens.models.runner import run
from tensorlens.program.several import of_each
from tensorlens.recording.recording import Recording, Span


def check_one_stream(recording: Recording) -> None:
    """Refuse a model whose states are not one stream of (token, channel).

    Raises:
        MethodError: there is an encoder, or states change their number of tokens on the way.
    """
    sizes = {state.shape[1] for state in recording.states}
    if recording.n_encoder_blocks or recording.starts_at_embedding or len(sizes) > 1:
        raise MethodError(
            f"`{recording.name}` has no single stream of (token, channel) from its first block to its last; the "
            "operator of a corpus needs one."
        )


def at_depths(recording: Recording, cotangents: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Cotangents (row, sample, token, channel) of $X^N$ at the state that enters each block, from the last block."""
    pieces = recording.pieces(Span(0, recording.n_blocks))
    waiting = {pieces.program.outputs[0]: cotangents}
    for n in reversed(range(recording.n_blocks)):
        pieces.programs[n].load()
        waiting = of_each(lambda one, n=n: pieces.pull(n, one)[1], waiting)
        yield n, waiting[recording.slots[n][0]]


def unembedded(recording: Recording, states: Tensor) -> Tensor:
    """Logits (token, class) of states after the final norm.

    Raises:
        MethodError: Something stands between the output state and the unembedding.
    """
    head, readout = recording.head, recording.readout
    is_direct = readout is not None and readout.shape == recording.states[-1].shape
    if head is None or readout is None or not is_direct or not torch.allclose(readout, recording.states[-1]):
        raise MethodError(
            f"`{recording.name}` does not read its words from the output state by one matrix; fit with "
            "`Rules(include_final_norm=False)`, which reads them by the model's own head."
        )
    return torch.nn.functional.linear(states, head.weight, head.bias)


def logits_from(recording: Recording, states: Tensor) -> Tensor:
    """The model's own logits (token, class) with `states` (token, channel) for what its last block gives."""
    origin, last = recording.from_model("The model's own head"), recording.n_blocks - 1

    def put_in(n: int, state: Tensor) -> Tensor | None:
        return states.reshape(state.shape).to(state) if n == last else None

    return state_of(run(origin.anatomy, origin.inputs, n_blocks=recording.n_blocks, leaving=put_in))[0]
