"""Calls of single blocks, kept so that a block can be run or recorded again on its own.

- `BlockCall` runs a block at another state, for the laws of a certificate that compare the program with the model.
- `KeptBlocks` drops the constants of blocks for which there is no room and records a block again when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError
from tensorlens.memory import ALWAYS_FITS, SHARE_OF_RECORDING, free_bytes
from tensorlens.models.layouts import AxisLayout, put_state, state_of
from tensorlens.models.precision import in_float64, relative
from tensorlens.models.runner import running
from tensorlens.program.nodes import Constants, Held, Step, leaves
from tensorlens.program.program import Program
from tensorlens.recording.conventions import Rules
from tensorlens.recording.live import is_live, raw, spec_of
from tensorlens.recording.module_paths import ModuleCalls, ModulePlaces
from tensorlens.recording.tape import Tape, recording_on
from tensorlens.tolerances import CERTIFICATE


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCall:
    """How one block was called.

    Attributes:
        n: Index of this block call.
        module: The block.
        path: Where it is in the model.
        args: Its arguments, including the state.
        kwargs: Its named arguments.
        entry: Index of the state among the tensors it takes.
        place: Index of the state among the tensors it returns.
        layout: Layout of its input state.
        is_repeatable: Whether the call can be repeated: its arguments are tensors and plain values.
        is_closed: Whether it is repeatable, and the state is the only live thing that enters it.
    """

    n: int
    module: nn.Module
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: int
    place: int
    layout: AxisLayout
    is_repeatable: bool
    is_closed: bool

    def like(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """This call on another module."""
        return replace(self, module=module, args=args, kwargs=kwargs)

    def run(self, x: Tensor) -> Tensor:
        """The block's own output for a state (sample, token, channel), in the block's layout."""
        with running(self.module):
            args, kwargs = put_state(self.args, self.kwargs, self.layout.to_native(x), self.entry)
            return state_of(self.module(*args, **kwargs), self.place)

    def record(self, x: Tensor, rules: Rules) -> BlockProgram:
        """The program of the block at a state, with all its steps and constants."""
        places = ModulePlaces(self.module, self.path)
        run = Tape(rules, weights=places.weights)
        found = self._record(x, run, places)
        if not run.changed_constants():
            return found
        copying = Tape(rules, weights=places.weights, copies=True)  # the block has overwritten a constant
        return self._record(x, copying, places)

    def _record(self, x: Tensor, run: Tape, places: ModulePlaces) -> BlockProgram:
        calls = ModuleCalls(places, run)
        try:
            with running(self.module, observer=calls), recording_on(run):
                slot = run.new_slot(spec_of(x))
                live = self.layout.to_native(run.live(raw(Tensor.clone, x), slot))
                args, kwargs = put_state(self.args, self.kwargs, live, self.entry)
                run.block, n_before = self.n, len(run.steps)
                output: Any = state_of(self.module(*args, **kwargs), self.place)
                if not is_live(output):
                    raise AnatomyError(
                        f"The output of block {self.n} does not depend on its input state under any rule."
                    )
                end = run.slot_of(output)
        finally:
            run.close()
        program = Program(
            steps=tuple(run.steps),
            constants=Constants(run.constants),
            specs=run.specs,
            inputs=(slot,),
            outputs=(end,),
        )
        return BlockProgram(program, n_before, raw(Tensor.detach, output), run.rules_applied)


class BlockProgram(NamedTuple):
    """A block that was recorded on its own.

    Attributes:
        program: From (sample, token, channel) to the block's output in its own layout.
        n_before: Number of steps at its beginning that only change the layout of the state.
        output: The block's output.
        rules_applied: How often each rule was applied, by (rule, module).
    """

    program: Program
    n_before: int
    output: Tensor
    rules_applied: Mapping[tuple[str, str], int]


@dataclass
class _Kept:
    """One block of a recording.

    Attributes:
        steps: Its steps, without the dead ones.
        places: The index of each step among all steps of the block, before the dead ones were dropped.
        held: The places of the constants that only this block reads, without weights.
        output: The block's output state, if its constants were dropped; None if they are kept.
    """

    steps: list[Step]
    places: list[int]
    held: list[int]
    output: Tensor | None


class KeptBlocks:
    """The blocks of a recording in progress, and which of their constants are kept.

    Args:
        weights: The model's weights; their device is the one whose memory is budgeted.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        parameters = [one for one in weights if isinstance(one, nn.Parameter)]
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        self._device, self._spent, self._budget = device, 0, 0.0
        self.calls: list[BlockCall] = []
        self._blocks: list[_Kept] = []
        self._since = self._first = 0

    def begin(self, run: Tape) -> None:
        """A block begins."""
        self._since, self._first = len(run.steps), len(run.constants)

    def end(self, run: Tape, call: BlockCall, output: Any) -> None:
        """A block has ended: drop its dead steps, and its constants if there is no more room for them."""
        places = run.prune(self._since, self._first)
        self.calls.append(call)
        some = range(self._first, len(run.constants))
        held = [n for n in some if run.constants[n] is not None and n not in run.names]
        size = sum([run.constants[n].nbytes for n in held])  # type: ignore[union-attr]
        # An off-loaded weight is there while its module runs, and would stay as a constant.
        is_dropped = call.is_closed and (_is_offloaded(call.module) or not self._has_room(size))
        self._spent += 0 if is_dropped else size
        output = raw(Tensor.clone, output) if is_dropped else None
        self._blocks.append(_Kept(run.steps[self._since :], places, held, output))
        if is_dropped:
            for n in held:
                run.forget_constant(n)

    def _has_room(self, size: int) -> bool:
        """Whether this many more bytes fit into the recording's share of memory; small ones fit without a query."""
        spent = self._spent + size
        if spent > SHARE_OF_RECORDING * ALWAYS_FITS and not self._budget:
            self._budget = SHARE_OF_RECORDING * (free_bytes(self._device) + spent)
        return spent <= max(self._budget, SHARE_OF_RECORDING * ALWAYS_FITS)

    def make_fetchable(self, constants: Constants, states: Sequence[Tensor], rules: Rules) -> None:
        """Tell `constants` how to recompute those that were dropped: by recording their block again from its state."""
        gone = {n: kept.held for n, kept in enumerate(self._blocks) if kept.output is not None}
        if not gone:
            return
        calls, blocks = self.calls, self._blocks

        def remake(n: int) -> Mapping[int, Tensor]:
            again = calls[n].record(states[n], rules)
            _check_same(n, again.output, blocks[n].output)  # type: ignore[arg-type]
            return _matched(blocks[n], again.program, again.n_before)

        constants.let_go(gone, remake)


def _is_offloaded(module: nn.Module) -> bool:
    """Whether a module has weights that a hook loads when it runs."""
    return any(p.is_meta for p in module.parameters())


def _check_same(n: int, again: Tensor, first: Tensor) -> None:
    """Refuse a block that gives a different state when it is recorded again."""
    error = relative(in_float64(again) - in_float64(first), first)
    if not error <= CERTIFICATE[first.dtype]:
        raise InputError(
            f"Block {n} gave a different state when it was recorded again (relative difference {error:.1e}): the model "
            "has changed since this input was recorded, or keeps state between calls. Call the lens on the "
            "input again."
        )


def _matched(kept: _Kept, program: Program, n_before: int) -> Mapping[int, Tensor]:
    """The constants of a block from its second recording, by their places in the first."""
    found: dict[int, Tensor] = {}
    for step, place in zip(kept.steps, kept.places, strict=True):
        place += n_before
        again = program.steps[place] if place < len(program.steps) else None
        pairs = [] if again is None else list(zip(leaves(step.args), leaves(again.args), strict=False))
        if again is None or again.operation != step.operation:
            raise InputError(
                f"Block {step.block} took different steps when it was recorded again: expected `{step.operation}` in "
                f"`{step.module}`, got {'no step' if again is None else f'`{again.operation}` in `{again.module}`'}. "
                "The model has changed since; call the lens on the input again."
            )
        found |= {old.index: program.constants[new.index] for old, new in pairs if type(old) is Held}
    return {n: found[n] for n in kept.held}
