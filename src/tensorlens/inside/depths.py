"""The states of a replay in its graph, and the model's own head on any state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from tensorlens.errors import MethodError
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.layouts import replace_state, state_of
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import head_weights
from tensorlens.freezing.replayed import check_unchanged, replayed
from tensorlens.freezing.traced import constant, plain
from tensorlens.inside.stream import edge_of
from tensorlens.models.modes import evaluating, hooked


class Depths(NamedTuple):
    """The states that enter each block, (sample, token, channel), where they are in the graph, and where it ends."""

    states: list[Tensor]
    edges: list[GradientEdge]
    end: Tensor


class _BlockObserver:
    """Keeps the state that each block leaves."""

    def __init__(self, recording: Recording) -> None:
        self._blocks = {id(block) for block in recording.anatomy.blocks}
        self._place = recording.anatomy.state_place
        self.outputs: dict[int, tuple[Tensor, GradientEdge]] = {}

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Nothing to learn."""

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep the state that a block leaves."""
        if id(module) in self._blocks and run.block is None:
            state = state_of(output, self._place)
            self.outputs[run.place.block] = constant(state).clone(), edge_of(state)


@contextmanager
def depths_of(recording: Recording) -> Iterator[Depths]:
    """Replay all blocks at X and give every state with its graph.

    Raises:
        MethodError: States change their size on the way, or are laid out in another way than (sample, token, channel).
    """
    shapes = {tuple(state.shape[1:2]) for state in recording.states}
    is_plain = all(layout._is_plain for layout in recording.layouts)
    if recording.n_encoder_blocks or recording.starts_at_embedding or len(shapes) > 1 or not is_plain:
        raise MethodError(
            f"`{type(recording.model).__name__}` has no single stream of (token, channel) from its first block to its "
            "last; the operator of a corpus needs one."
        )
    with own_precision(), torch.enable_grad():
        x = recording.states[0].detach().clone().requires_grad_()
        seen = _BlockObserver(recording)
        end, _ = replayed(recording, x, Span(0, recording.n_blocks), grad=True, observers=(seen,))
        later = [seen.outputs[n] for n in range(recording.n_blocks - 1)]
        states, edges = [x.detach(), *(state for state, _ in later)], [edge_of(x), *(edge for _, edge in later)]
        yield Depths(states, edges, plain(end))


def unembedded(recording: Recording, states: Tensor) -> Tensor:
    """Logits (token, class) of states after the final norm.

    Raises:
        MethodError: Something stands between the output state and the unembedding.
    """
    unembedding, readout = recording.anatomy.unembedding, recording.readout
    is_direct = readout is not None and readout.shape == recording.states[-1].shape
    if unembedding is None or readout is None or not is_direct or not torch.allclose(readout, recording.states[-1]):
        raise MethodError(
            f"`{type(recording.model).__name__}` does not read its words from the output state by one matrix; fit with "
            "`Rules(include_final_norm=False)`, which reads them by the model's own head."
        )
    return torch.nn.functional.linear(states, *head_weights(unembedding, states))


def logits_from(recording: Recording, states: Tensor) -> Tensor:
    """The model's own logits (token, class) with `states` (token, channel) for what its last block gives."""
    anatomy, n_left = recording.anatomy, [0]

    def put_in(module: nn.Module, args: Any, output: Any) -> Any:
        n_left[0] += 1
        if n_left[0] < recording.n_blocks:
            return None
        old = state_of(output, anatomy.state_place)
        return replace_state(output, old, states.reshape(old.shape).to(old))

    check_unchanged(recording)
    replaced = hooked(after=[(block, put_in) for block in dict.fromkeys(anatomy.blocks)])
    with replaced, own_precision(), torch.no_grad(), evaluating(recording.model):
        return state_of(recording.model(**recording.inputs))[0]
