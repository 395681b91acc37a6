"""Where the model itself computes components, and runs of it in which they are read or replaced there, row by row.

A whole write is the output of some module; the heads of an attention are the input of its output projection. One run
may have several rows, each with its own input or its own changes, since samples of a batch do not affect each other; an
unchanged row beside them shows whether they do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.inside.block import Block, Part, StreamPass
from tensorlens.inside.stream import is_matrix
from tensorlens.inside.target import Pass
from tensorlens.memory import in_parts
from tensorlens.models.layouts import replace_state, state_of
from tensorlens.models.runner import AtBlock, AtModule
from tensorlens.models.runner import run as run_model
from tensorlens.program.marks import MOVES
from tensorlens.program.program import Program
from tensorlens.recording.recording import Recording
from tensorlens.tolerances import repeated

TOKENS_TOGETHER = {"cuda": 2**15, "cpu": 2**11}
"""Tokens of all rows of one run; more would not use the device better."""

Arguments = Mapping[str, Any]


class Edit(NamedTuple):
    """Another value for a part, in the shape of its own."""

    part: Part
    value: Tensor


class Seat(NamedTuple):
    """The module at which the model computes a slot.

    Attributes:
        slot: The slot of a write, or of a mixture of heads.
        path: The module that outputs it, or that reads it.
        way: For heads: the steps that lay them side by side for the module.
    """

    slot: int
    path: str
    way: Program | None

    def laid_out(self, x: Tensor) -> Tensor:
        """A value of the slot in the module's layout."""
        return x if self.way is None else self.way.run(x)[0]

    def from_module(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """The inverse: one row of the module's value in the shape of the slot; it only moves numbers."""
        if self.way is None:
            return x.reshape(tuple(shape))
        end = self.way.specs[self.way.outputs[0]].shape
        return self.way.linear.pull(x.reshape(end))[0]


def seat_of(run: StreamPass, part: Part) -> Seat | None:
    """The seat of a part; None if no module that is called once has it."""
    if part.head is None:
        path = _called_once(run, [module.path for module in run.recording.modules if module.slot == part.slot])
        return None if path is None else Seat(part.slot, path, None)
    found = _taking(run.block(part.block), part.slot)
    path = None if found is None else _called_once(run, [found[0]])
    return None if path is None or found is None else Seat(part.slot, path, found[1])


def _called_once(run: StreamPass, paths: Sequence[str]) -> str | None:
    """The outermost of some modules that was called once; several calls of a module cannot be told apart."""
    n_calls = run.calls_of_modules
    return next((path for path in reversed(paths) if n_calls[path] == 1), None)


def _taking(block: Block, slot: int) -> tuple[str, Program] | None:
    """The module that reads the mixture of heads by a matrix, and the steps that lay heads side by side for it."""
    program, end = block.program, slot
    while True:
        readers = program.readers.get(end, [])
        if len(readers) != 1:
            return None
        if is_matrix(readers[0], program):
            return readers[0].module, program.part((slot,), (end,))
        if readers[0].operation not in MOVES:
            return None
        end = readers[0].out


# Rows -----------------------------------------------------------------------------------------------------------------


def repeated_arguments(arguments: Arguments, n: int) -> dict[str, Any]:
    """The model's arguments for `n` copies of the one sample."""
    return {
        name: value.repeat(n, *(1 for _ in value.shape[1:]))
        if isinstance(value, Tensor) and value.dim() and len(value) == 1
        else value
        for name, value in arguments.items()
    }


def readout_of_model(
    recording: Recording,
    arguments: Arguments | None = None,
    *,
    n_rows: int = 1,
    taken: Mapping[nn.Module, AtModule] | None = None,
    given: Mapping[nn.Module, AtModule] | None = None,
    entering: AtBlock | None = None,
    leaving: AtBlock | None = None,
) -> Tensor:
    """The end of a run of the model: the input of its unembedding, or its logits, a row per sample."""
    origin = recording.from_model("A run of the model")
    end = run_model(
        origin.anatomy,
        dict(origin.inputs if arguments is None else arguments),
        to="readout",
        n_blocks=recording.n_blocks,
        taken=taken,
        given=given,
        entering=entering,
        leaving=leaving,
    )
    return recording.laid_out(end, n_rows)


def values_in_model(run: Pass, arguments: Arguments, seats: Sequence[Seat]) -> dict[int, Tensor]:
    """Values of some slots in a run of the model on one input."""
    model = run.recording.from_model("A run of the model").model
    kept: dict[tuple[str, bool], Tensor] = {}

    def keep(key: tuple[str, bool], x: Any) -> None:
        kept[key] = (x if isinstance(x, Tensor) else state_of(x)).clone()  # the model may write to it

    taken = {model.get_submodule(one.path): partial(keep, (one.path, True)) for one in seats if one.way is not None}
    given = {model.get_submodule(one.path): partial(keep, (one.path, False)) for one in seats if one.way is None}
    readout_of_model(run.recording, arguments, taken=taken, given=given)
    specs = run.recording.program.specs
    return {one.slot: one.from_module(kept[one.path, one.way is not None], specs[one.slot].shape) for one in seats}


def check_lengths(clean: Tensor, corrupted: Tensor) -> None:
    """Refuse two inputs, by states of theirs, whose components cannot be put in each other's place."""
    if clean.shape != corrupted.shape:
        raise InputError(
            f"Expected two inputs of the same length; got {len(clean)} and {len(corrupted)} tokens. Replace words "
            "with others that have as many tokens."
        )


def is_recorded(run: Pass, end: Tensor) -> bool:
    """Whether a row ended as the recording did."""
    readout = run.recording.readout
    assert readout is not None, "a target has a head"
    size = float(readout.norm())
    return end.shape == readout.shape and float((end - readout).norm()) <= repeated(readout.dtype) * size


# Changes --------------------------------------------------------------------------------------------------------------


def edited_logits(run: Pass, changes: Sequence[Sequence[Edit]]) -> list[Tensor | None]:
    """The model's own logits (class,) with all edits of a change at once, for each change.

    None if an edit cannot be made.
    """
    seats = {part: seat_of(run, part) for edits in changes for part, _ in edits}
    possible = [k for k, edits in enumerate(changes) if all(seats[part] is not None for part, _ in edits)]
    found: list[Tensor | None] = [None] * len(changes)
    device = run.operator.device
    most = max(1, TOKENS_TOGETHER.get(device.type, TOKENS_TOGETHER["cpu"]) // run.n_tokens - 1)
    # Rows are on the first axis of all arguments and results of modules.
    origin = run.recording.from_model("A run of the model")
    apart = len(possible) == 1 or origin.calls[0].layout.batch != 0

    def together(some: Tensor) -> list[Tensor]:
        nonlocal apart
        edits = [changes[k] for k in some.tolist()]
        if not apart:
            # The first row has no changes: it shows whether rows affect each other.
            end = _edited_readout(run, [(), *edits], seats)
            apart = end is None or not is_recorded(run, end[:1])
            if end is not None and not apart:
                return list(run.recording.logits(end[1:], run.out_token))
        ends = [_edited_readout(run, [one], seats) for one in edits]
        return [run.recording.logits(end, run.out_token)[0] for end in ends if end is not None]

    logits = [one for part in in_parts(torch.tensor(possible), most, together) for one in part] if possible else []
    for k, one in zip(possible, logits, strict=True):
        found[k] = one
    return found


def _edited_readout(run: Pass, rows: Sequence[Sequence[Edit]], seats: Mapping[Part, Seat | None]) -> Tensor | None:
    """The end of a run in which each row has edits of its own; None if the model does not take several rows."""
    model = run.recording.from_model("A run of the model").model
    by_module: dict[tuple[str, bool], list[tuple[int, Edit, Seat]]] = {}
    for row, edits in enumerate(rows):
        for edit in edits:
            seat = seats[edit.part]
            assert seat is not None, "only for edits that can be made"
            by_module.setdefault((seat.path, seat.way is not None), []).append((row, edit, seat))
    changes: dict[bool, dict[nn.Module, AtModule]] = {True: {}, False: {}}
    for (path, is_taken), some in by_module.items():
        changes[is_taken][model.get_submodule(path)] = _put_in(run, some, len(rows))
    arguments = repeated_arguments(run.recording.from_model("A run of the model").inputs, len(rows))
    end = readout_of_model(run.recording, arguments, n_rows=len(rows), taken=changes[True], given=changes[False])
    return end if len(end) == len(rows) else None


def _put_in(run: Pass, edits: Sequence[tuple[int, Edit, Seat]], n_rows: int) -> Callable[[Any], Any]:
    specs = run.recording.program.specs
    prepared = [(row, *_new(edit, seat, specs[seat.slot])) for row, edit, seat in edits]

    def put_in(output: Any) -> Any:
        state = output if isinstance(output, Tensor) else state_of(output)
        changed = state.clone(memory_format=torch.contiguous_format)
        by_row = changed.view(n_rows, -1)
        for row, new, is_new in prepared:
            here, new = by_row[row], new.flatten().to(state)
            here.copy_(new if is_new is None else torch.where(is_new.flatten(), new, here))
        return replace_state(output, state, changed)

    return put_in


def _new(edit: Edit, seat: Seat, spec: Any) -> tuple[Tensor, Tensor | None]:
    """An edit's value in the module's layout, and the place of the part in it; None for all of it."""
    if seat.way is None:
        return edit.value, None
    new = torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
    is_new = torch.zeros_like(new)
    edit.part.of(is_new).fill_(1)
    edit.part.of(new).copy_(edit.value)
    return seat.laid_out(new), seat.laid_out(is_new).bool()
