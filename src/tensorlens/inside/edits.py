r"""Other values for some components: what T says of it, and what the model itself does.

With the components of a set S held at other values at once, the frozen target changes by

    Δt = Σ_{c ∈ S} ⟨λ_c^S, y_c' − y_c⟩,   λ_c^S = λ_c − Σ_{c' ∈ S after c} (∂y_{c'}/∂y_c)ᵀ λ_{c'}^S:

a path that passes through another of them is cut there. The model itself is run with other values for what the modules
give that write the components, and for what those take that read the heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.inside.block import Block, StreamPass
from tensorlens.inside.stream import Component, is_matrix
from tensorlens.inside.target import Pass
from tensorlens.models.layouts import replace_state, state_of
from tensorlens.models.runner import AtModule
from tensorlens.models.runner import run as run_model
from tensorlens.program.marks import MOVES
from tensorlens.program.program import Program
from tensorlens.recording.recording import Recording


class Editable(NamedTuple):
    """A component that can be given another value: a whole write, or one head of its mixture."""

    component: Component
    block: int
    slot: int

    @property
    def head(self) -> int | None:
        """Its head, if it is one."""
        return self.component.head

    def of(self, x: Tensor) -> Tensor:
        """Its own part of what the slot holds; of a head (token, channel). A view."""
        # A mixture is (…, head, token, channel), and the axes before it are of size one.
        return x if self.head is None else x.flatten(0, -3)[self.head]


class Edit(NamedTuple):
    """Another value for a part, in the shape of its own."""

    part: Editable
    value: Tensor


def parts(block: Block) -> Iterator[Editable]:
    """Attention outputs, their heads, and feed-forwards of one block, in the order of the pass."""
    for write, kind in block.writes:
        yield Editable(Component(block=block.n, kind=kind), block.n, write.slot)
        mixture = block.heads_of(write)
        if mixture is None:
            continue
        for head in range(block.specs[mixture.slot].shape[-3]):
            yield Editable(Component(block=block.n, kind=f"{kind} head", head=head), block.n, mixture.slot)


# By T -----------------------------------------------------------------------------------------------------------------


def predicted_change(run: Pass, edits: Sequence[Edit]) -> float:
    """Δt of the frozen model with all edits at once: its cotangents, cut where something is held."""
    left = {part.slot: torch.ones_like(run.values(part.block)[part.slot]) for part, _ in edits}
    for part, _ in edits:
        part.of(left[part.slot]).zero_()
    pieces, waiting, change = run.pieces.scaled(left), run.waiting(run.stop), 0.0
    for n in reversed(range(run.start, run.stop)):
        here = [edit for edit in edits if edit.part.block == n]
        at, waiting = pieces.pull(n - run.start, waiting, {part.slot for part, _ in here})
        for part, value in here:
            change += float((part.of(at[part.slot]) * (value - part.of(run.values(n)[part.slot]))).sum())
    return change


# By the model itself --------------------------------------------------------------------------------------------------


def edited_logits(run: Pass, edits: Sequence[Edit]) -> Tensor | None:
    """The model's own logits with all edits at once; None if one of them cannot be made."""
    model = run.recording.from_model("Running it with other values").model
    taken: dict[nn.Module, AtModule] = {}
    given: dict[nn.Module, AtModule] = {}
    for edit in edits:
        change = _given(run, edit) if edit.part.head is None else _taken(run, edit)
        if change is None:
            return None
        path, function = change
        at, module = given if edit.part.head is None else taken, model.get_submodule(path)
        at[module] = function if module not in at else _both(at[module], function)
    return logits_of_model(run.recording, run.out_token, taken, given)


def _both(first: AtModule, second: AtModule) -> AtModule:
    return lambda x: second(first(x))


def _called_once(run: StreamPass, paths: Sequence[str]) -> str | None:
    """The outermost of some modules that was called once; one that is called again cannot be told from itself."""
    n_calls = Counter(module.path for module in run.recording.modules)
    return next((path for path in reversed(paths) if n_calls[path] == 1), None)


def _given(run: StreamPass, edit: Edit) -> tuple[str, AtModule] | None:
    """The module that gives out a write, and what to make of what it gives."""
    path = _called_once(run, [module.path for module in run.recording.modules if module.slot == edit.part.slot])

    def put_in(output: Any) -> Any:
        state = state_of(output)
        return replace_state(output, state, edit.value.reshape(state.shape).to(state))

    return None if path is None else (path, put_in)


def _taken(run: StreamPass, edit: Edit) -> tuple[str, AtModule] | None:
    """The module that takes in what heads mixed, and what to make of what it takes."""
    program, slot = run.block(edit.part.block).program, edit.part.slot
    ends = _taking(program, slot)
    path = None if ends is None else _called_once(run, [ends.module])
    if path is None or ends is None:
        return None
    way, spec = ends.way, program.specs[slot]
    new = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    is_edited = torch.zeros_like(new)
    edit.part.of(is_edited).fill_(1)
    edit.part.of(new).copy_(edit.value)
    (is_edited,), (new,) = way.run(is_edited), way.run(new)

    def put_in(x: Tensor) -> Tensor:
        return torch.where(is_edited.reshape(x.shape).bool(), new.reshape(x.shape).to(x), x)

    return path, put_in


class _Taking(NamedTuple):
    """The module that reads what heads mixed by a matrix, and the steps that lay heads side by side for it."""

    module: str
    way: Program


def _taking(program: Program, slot: int) -> _Taking | None:
    end = slot
    while True:
        readers = program.readers.get(end, [])
        if len(readers) != 1:
            return None
        if is_matrix(readers[0], program):
            return _Taking(readers[0].module, program.part((slot,), (end,)))
        if readers[0].operation not in MOVES:
            return None
        end = readers[0].out


def logits_of_model(
    recording: Recording,
    out_token: int,
    taken: Mapping[nn.Module, AtModule] | None = None,
    given: Mapping[nn.Module, AtModule] | None = None,
) -> Tensor:
    """Logits as the unembedding gives them, before any soft cap, where there is one."""
    origin = recording.from_model("A run of the model")
    end = run_model(origin.anatomy, origin.inputs, to="readout", n_blocks=recording.n_blocks, taken=taken, given=given)
    return recording.logits(end, out_token)[0]
