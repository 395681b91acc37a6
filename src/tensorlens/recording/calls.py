"""Calls of modules and blocks in a recording: paths, adapters, the weights as they were, blocks run again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from tensorlens.errors import AnatomyError, InputError
from tensorlens.memory import ALWAYS_FITS, SHARE_OF_RECORDING, free_bytes
from tensorlens.models.layouts import AxisLayout, main_tensor, put_state, state_of
from tensorlens.models.runner import forward_replaced, module_tree, running
from tensorlens.program.marks import Choice
from tensorlens.program.program import Constants, Program, versions_of
from tensorlens.program.steps import Held, Step, leaves
from tensorlens.recording.conventions import Rules
from tensorlens.recording.live import Live, address_of, found_in, is_live, raw, spec_of
from tensorlens.recording.rules.modules import (
    adapted_places,
    calls_kernels,
    find_adapter,
    has_adapter,
    qualified,
    with_kernels,
)
from tensorlens.recording.tape import Tape, recording_on
from tensorlens.tolerances import CERTIFICATE, in_float64, relative

Forward = Callable[..., Any]
At = Callable[[nn.Module, str, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""An action at a module: takes the module, its path, its forward and the arguments of the call."""


class ModuleOutput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The output of a module: its slot, or None if all of it is held."""

    path: str
    slot: int | None


class ModulePlaces:
    """Where modules and weights are in a model.

    Attributes:
        names: Paths of the modules, by identity.
        weights: Parameters and buffers by their paths; a shared one has an entry for each path.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model, self.tree = model, module_tree(model, prefix)
        self.names = {id(module): path for path, module in self.tree.items()}
        self.weights: dict[str, Tensor] = {}
        for path, module in self.tree.items():
            for kind in (module._parameters, module._buffers):
                for name, weight in kind.items():
                    full = f"{path}.{name}" if path else name
                    if type(weight) is nn.Parameter or type(weight) is Tensor:
                        self.weights[full] = weight
                    elif weight is not None:
                        self.weights |= _parts(full, weight)

    def adapted(self) -> dict[int, str]:
        """The modules that have an adapter because of their place in their parent: that place, by identity."""
        places = adapted_places()
        parents = {kind: qualified(kind) for kind in set(map(type, self.tree.values()))}
        wanted = {kind: name for kind, name in parents.items() if name in places}
        return {
            id(child): f"{wanted[type(parent)]}.{name}"
            for parent in (self.tree.values() if wanted else ())
            if type(parent) in wanted
            for name, child in parent._modules.items()
        }


def _parts(name: str, weight: Any) -> dict[str, Tensor]:
    """A weight by its name, or, for a packed weight, its parts by their names."""
    if not hasattr(weight, "__tensor_flatten__"):
        return {name: weight}
    return {f"{name}.{part}": getattr(weight, part) for part in weight.__tensor_flatten__()[0]}


class ModuleCalls:
    """The actions of a recording at each module.

    Args:
        places: Where modules are.
        run: The tape.
        at: The action at modules that are watched.
        watched: The modules that are watched, by identity.

    Attributes:
        outputs: The output of each module, in the order in which they returned, recorded while `is_noting` is set.
        choices: The experts whose numbers were passed to modules.
    """

    def __init__(
        self,
        places: ModulePlaces,
        run: Tape,
        at: At | None = None,
        watched: Collection[int] = (),
    ) -> None:
        self.run, self.at, self.watched = run, at, watched
        self.is_noting = False
        self.outputs: list[ModuleOutput] = []
        self.choices: list[Choice] = []
        self._names, self._adapted = places.names, places.adapted()
        self._plain: dict[type, bool] = {}

    def __call__(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module was called."""
        key = id(module)
        name = self._names.get(key)
        if name is None:
            return call(module, *args, **kwargs)
        path = self.run.path
        path.append(name)
        try:
            if key in self.watched and self.at is not None:
                return self.at(module, name, functools.partial(self._forward, module, call), args, kwargs)
            is_plain = self._plain.get(type(module))
            if is_plain and "forward" not in module.__dict__ and key not in self._adapted:
                output = call(module, *args, **kwargs)
            else:
                output = self._forward(module, call, *args, **kwargs)
            if self.is_noting:
                self.note(name, args, kwargs, output)
            return output
        finally:
            path.pop()

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the output of a module, and the numbers of the experts that were passed to it."""
        state = output[0] if type(output) is tuple and output else output
        state = state if type(state) is Live else raw(main_tensor, output)
        if type(state) is Live:
            self.outputs.append(ModuleOutput(name, self.run.slot_of(state)))
        elif state is not None and found_in(args, kwargs):
            self.outputs.append(ModuleOutput(name, None))
        if len(args) > 1 and self.run.block is not None:
            given = (x for x in args[1:] if isinstance(x, Tensor) and x.dim() == 2)
            chosen = next((x for x in given if x.dtype in (torch.int64, torch.int32)), None)
            if chosen is not None:
                self.choices.append(Choice(self.run.block, name, raw(Tensor.clone, chosen)))

    def _forward(self, module: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a module, by its adapter if it has one and a live tensor comes in."""
        kind = type(module)
        if kind not in self._plain:
            self._plain[kind] = issubclass(kind, ScriptModule) or not (has_adapter(kind) or calls_kernels(kind.forward))
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        adapter = find_adapter(module, self._adapted.get(id(module)))
        if adapter is not None and found_in(args, kwargs):
            forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with forward_replaced(module, forward):
            return call(module, *args, **kwargs)


class Weights:
    """Where the weights of a model were in memory, and how often that memory had been written to.

    Args:
        places: Where the parts of the model are.
    """

    def __init__(self, places: ModulePlaces) -> None:
        self._model, self._then = places.model, _memory(places)

    def check(self, what: str) -> None:
        """Refuse a question that runs the model again if its weights have changed.

        Args:
            what: The question.

        Raises:
            InputError: says which weight.
        """
        now = _memory(ModulePlaces(self._model))
        changed = next((name for name, then in self._then.items() if now.get(name) != then), None)
        if changed is not None:
            raise InputError(
                f"`{changed}` was modified or replaced after this input was recorded. {what} needs the model as it "
                "was: call the lens on the input again."
            )


def _memory(places: ModulePlaces) -> dict[str, tuple[int, int | None]]:
    """The storage of each weight, and how often it was written to."""
    weights = {name: one for name, one in places.weights.items() if isinstance(one, nn.Parameter)}
    found = {}
    for (name, one), version in zip(weights.items(), versions_of(weights.values()), strict=True):
        # Not the address: `share_memory` moves it. An off-loaded weight has a new, empty storage after each use.
        is_plain = type(one) is nn.Parameter and not one.is_meta
        found[name] = one.untyped_storage()._cdata if is_plain else address_of(one), version
    return found


# Calls of blocks, kept so that a block can be run or recorded again on its own ----------------------------------------
#
# - `BlockCall` runs a block at another state, for the laws of a certificate that compare the program with the model.
# - `KeptBlocks` drops the constants of blocks for which there is no room and records a block again when they are
#   needed.


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
        if run.changed_constants():  # the block has overwritten one
            found = self._record(x, Tape(rules, weights=places.weights, copies=True), places)
        return found

    def _record(self, x: Tensor, run: Tape, places: ModulePlaces) -> BlockProgram:
        calls = ModuleCalls(places, run)
        try:
            with running(self.module, observer=calls, tree=places.tree), recording_on(run):
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
        weights: The model's weights by their names; their device is the one whose memory is budgeted.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        parameters = [one for one in weights.values() if isinstance(one, nn.Parameter)]
        device = next((p.device for p in parameters if not p.is_meta), torch.device("cpu"))
        self._device, self._spent, self._budget = device, 0, 0.0
        self._offloaded = tuple([name for name, one in weights.items() if one.is_meta])
        """Weights that a hook loads when their module runs."""
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
        is_offloaded = any([name.startswith(f"{call.path}.") for name in self._offloaded])
        is_dropped = call.is_closed and (is_offloaded or not self._has_room(size))
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
