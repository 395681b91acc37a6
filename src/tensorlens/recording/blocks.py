"""Single blocks: run as they are, or recorded again, from any state.

A recording keeps how each block was called. So a block can be run once more at another state, for the laws that compare
the program with the model, and recorded once more at its own, where an input is too long to keep what all blocks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError
from tensorlens.memory import SHARE_OF_RECORDING, free_bytes
from tensorlens.models.layouts import AxisLayout, put_state, state_of
from tensorlens.models.precision import in_float64
from tensorlens.models.runner import running
from tensorlens.program.constants import Constants
from tensorlens.program.nodes import Held, Step, leaves
from tensorlens.program.program import Program
from tensorlens.recording.conventions import Rules
from tensorlens.recording.live import is_live, raw
from tensorlens.recording.tape import Tape, recording_on, spec_of
from tensorlens.recording.walk import ModuleCalls, ModulePlaces, straight
from tensorlens.tolerances import CERTIFICATE, TINY


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockCall:
    """How one block was called.

    Attributes:
        n: Which call of a block it was.
        module: The block.
        path: Where it is in the model.
        args: Its arguments, the state among them.
        kwargs: Its named arguments.
        entry: Which of the tensors it takes is the state.
        place: Which of the tensors it gives is the state.
        layout: How the state that it takes is laid out.
        is_closed: Whether nothing live enters it but the state, and the call can be repeated.
        is_plain: Whether the call can be repeated: its arguments are tensors and plain values.
    """

    n: int
    module: nn.Module
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    entry: int
    place: int
    layout: AxisLayout
    is_closed: bool
    is_plain: bool

    def like(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """The same call of another module."""
        return replace(self, module=module, args=args, kwargs=kwargs)

    def run(self, x: Tensor) -> Tensor:
        """What the block itself gives at a state (sample, token, channel), in its own layout."""
        with running(self.module):
            args, kwargs = put_state(self.args, self.kwargs, self.layout.to_native(x), self.entry)
            return state_of(self.module(*args, **kwargs), self.place)

    def record(self, x: Tensor, rules: Rules) -> BlockProgram:
        """The program of the block at a state, nothing of it dropped."""
        places = ModulePlaces(self.module, self.path)
        run = Tape(rules, weights=places.weights.values())
        found = self._record(x, run, places)
        if not run.changed_constants():
            return found
        copying = Tape(rules, weights=places.weights.values(), copies=True)  # it has overwritten a constant
        return self._record(x, copying, places)

    def _record(self, x: Tensor, run: Tape, places: ModulePlaces) -> BlockProgram:
        calls = ModuleCalls(places, run, straight)
        try:
            with running(self.module, observer=calls), recording_on(run):
                slot = run.new_slot(spec_of(x))
                live = self.layout.to_native(run.live(raw(Tensor.clone, x), slot))
                args, kwargs = put_state(self.args, self.kwargs, live, self.entry)
                run.block, n_before = self.n, len(run.steps)
                output: Any = state_of(self.module(*args, **kwargs), self.place)
                if not is_live(output):
                    raise AnatomyError(f"What block {self.n} gives does not depend on its state, by any rule.")
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
        program: From (sample, token, channel) to what the block gives in its own layout.
        n_before: How many of its steps only lay out the state.
        output: What it gave.
        rules_applied: How often each rule was applied, by (rule, module).
    """

    program: Program
    n_before: int
    output: Tensor
    rules_applied: Mapping[tuple[str, str], int]


@dataclass
class _Kept:
    """One block of a recording.

    `steps` are those that are left of it, `places` their numbers among all steps that it had, `held` the constants that
    only they read, and `output` what the block gave; None if the constants are kept.
    """

    steps: list[Step]
    places: list[int]
    held: list[int]
    output: Tensor | None


class KeptBlocks:
    """The blocks of a recording under way, and how much of what they hold is kept.

    Args:
        weights: Those of the model, on whose device memory is asked for.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        parameters = [one for one in weights if isinstance(one, nn.Parameter)]
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        self._budget = SHARE_OF_RECORDING * free_bytes(device)
        self._has_other_weights = any([p.is_meta for p in parameters])
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
        held = [
            n
            for n in range(self._first, len(run.constants))
            if run.constants[n] is not None and not run.is_weight_constant(n)
        ]
        self._budget -= sum(run.constants[n].nbytes for n in held)  # type: ignore[union-attr]
        is_let_go = call.is_closed and (self._budget < 0 or self._has_other_weights)
        output = raw(Tensor.clone, output) if is_let_go else None
        self._blocks.append(_Kept(run.steps[self._since :], places, held, output))
        if is_let_go:
            for n in held:
                run.forget_constant(n)

    def let_go(self, program: Program, constants: Constants, states: Sequence[Tensor], rules: Rules) -> None:
        """Let blocks whose constants are gone be recorded again when a question needs them."""
        gone = {n: kept.held for n, kept in enumerate(self._blocks) if kept.output is not None}
        if not gone:
            return
        calls, blocks = self.calls, self._blocks

        def remake(n: int) -> Mapping[int, Tensor]:
            again = calls[n].record(states[n], rules)
            _check_same(n, again.output, blocks[n].output)  # type: ignore[arg-type]
            return _matched(blocks[n], again.program, again.n_before)

        constants.let_go(gone, remake)


def _check_same(n: int, again: Tensor, first: Tensor) -> None:
    """Refuse a block that gives a different state when it is recorded again."""
    expected = in_float64(first)
    error = float((in_float64(again) - expected).norm() / expected.norm().clamp_min(TINY))
    if not error <= CERTIFICATE[first.dtype]:
        raise InputError(
            f"Block {n} gave a different state when it was recorded again (relative difference {error:.1e}): the model "
            "has changed since this input was recorded, or keeps something from call to call. Ask the lens for the "
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
                f"Block {step.block} took another way when it was recorded again: expected `{step.operation}` in "
                f"`{step.module}`. The model has changed since; ask the lens for the input again."
            )
        found |= {old.index: program.constants[new.index] for old, new in pairs if type(old) is Held}
    return {n: found[n] for n in kept.held}
