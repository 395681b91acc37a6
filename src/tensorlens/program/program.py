r"""`Program`: the affine function of a model at an input, as a list of steps.

Run forwards it is $\tilde F_X(x) = T x + B$. Its linear part, the same list without what is added, is T; walked
backwards by the transposes of its steps it is $T^\top$, with nothing kept on the way.

`Pieces` is a program cut where states enter blocks, each piece run and pulled on its own. The values inside a piece
come from running that piece alone; cotangents go from the last piece to the first, and those of a slot that an earlier
piece made wait until that piece is reached. A question about every block needs the memory of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from html import escape
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._C._functorch import _set_vmap_fallback_warning_enabled  # type: ignore[import-not-found]
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map

from tensorlens.errors import AnatomyError, InputError
from tensorlens.memory import is_out_of_memory
from tensorlens.program.printed import printed
from tensorlens.program.steps import NOT_PLAIN, OPERATIONS, Held, Slot, Spec, Step, fit, leaves, mapped

# Constants ------------------------------------------------------------------------------------------------------------

_fused_steps: Counter[int] = Counter()
"""Steps of fused optimisers by the storage they wrote to: torch does not count these writes."""


def _note_fused(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"] if group.get("fused") else ():
            if type(weight) is nn.Parameter:
                _fused_steps[weight.untyped_storage()._cdata] += 1


register_optimizer_step_post_hook(_note_fused)


def versions_of(values: Iterable[Tensor | None]) -> list[int | None]:
    """How often the memory of each tensor was written to, as far as this is counted; -1 if the memory was freed.

    None for a missing tensor, and for one made in inference mode, whose writes are not counted.
    """
    found = list[int | None]()
    for value in values:
        if value is None or value.is_inference():
            found.append(None)
        elif type(value) not in (Tensor, nn.Parameter):
            found.append(value._version)
        elif value.layout is torch.strided and not value.untyped_storage().nbytes() and value.numel():
            found.append(-1)
        else:
            found.append(value._version + (_fused_steps[value.untyped_storage()._cdata] if _fused_steps else 0))
    return found


Remake = Callable[[int], Mapping[int, Tensor]]
"""Recomputes the constants of a block, by their places."""


class Constants(Sequence[Tensor]):
    """Held tensors by their places.

    Weights are there by reference. The other constants of a block may not fit in the memory of a device. They are then
    dropped, and `remake` recomputes them whenever a step of that block reads one. One such block is kept at a time.

    Args:
        values: The tensors.
        names: The names of those that are weights of the model.
    """

    def __init__(self, values: Iterable[Tensor | None], names: Mapping[int, str] | None = None) -> None:
        self.values = list(values)
        self.names = dict(names or {})
        self._versions = versions_of([value if type(value) is Tensor else None for value in self.values])
        self._block_of: dict[int, int] = {}
        self._remake: Remake | None = None
        self._fetched: int | None = None

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, n: Any) -> Any:
        value = self.values[n]
        if value is None:
            self._fetch(self._block_of[n])
            value = self.values[n]
        return value

    @property
    def is_complete(self) -> bool:
        """Whether no constants were dropped."""
        return not self._block_of

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The values for callers that read many: as a list, if no constants were dropped."""
        return self.values if self.is_complete else self  # type: ignore[return-value]

    def let_go(self, places: Mapping[int, Iterable[int]], remake: Remake) -> None:
        """Drop the constants of some blocks, given by block."""
        self._remake = remake
        for block, some in places.items():
            for n in some:
                self._block_of[n] = block
                self.values[n] = None

    def _fetch(self, block: int) -> None:
        assert self._remake is not None, "only what can be made again is let go"
        for n, of in self._block_of.items():
            if of == self._fetched:
                self.values[n] = None
        self._fetched = block
        for n, value in self._remake(block).items():
            self.values[n] = value
            (self._versions[n],) = versions_of([value])

    def check(self, places: Iterable[int] | None = None) -> None:
        """Raise if a weight was written to since it was bound: T describes the model as it was.

        Args:
            places: The weights to check; all if None.
        """
        asked = range(len(self.values)) if places is None else list(places)
        for n, now in zip(asked, versions_of([self.values[n] for n in asked]), strict=True):
            if now is not None and self._versions[n] not in (None, now):
                name = self.names.get(n)
                raise InputError(
                    f"{f'`{name}`' if name else 'A tensor of the model'} was modified after this input was "
                    f"recorded, and this tensor describes the model as it was. Call the lens on the input again."
                )

    def check_storable(self) -> None:
        """Raise if some constants were dropped: recomputing them needs the model."""
        if not self.is_complete:
            raise InputError(
                "This input is too long for its operator to be stored: the values in its blocks are recorded again "
                "when they are needed. Save its maps instead, or use a shorter input."
            )

    def __getstate__(self) -> dict[str, Any]:
        """The tensors and names, for `pickle`."""
        self.check_storable()
        return {"values": [None if v is None else v.detach() for v in self.values], "names": self.names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["values"], state["names"])


# Programs -------------------------------------------------------------------------------------------------------------

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def without_gradients(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """`torch.no_grad`, but faster: torch's own takes longer than a short program."""

    @wraps(function)
    def called(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        try:
            return function(*args, **kwargs)
        finally:
            torch._C._set_grad_enabled(before)

    return called


class SideChannelError(AnatomyError):
    """A part of a program reads values from before its start that are not among its inputs."""

    def __init__(self, slots: Collection[int], module: str) -> None:
        super().__init__(f"`{module or 'the model'}` also reads what earlier blocks or the embeddings left for it.")
        self.slots, self.module = slots, module


@dataclass(frozen=True, eq=False, kw_only=True)
class Program:
    """A straight-line list of affine steps.

    Attributes:
        steps: In order.
        constants: The constants that they read.
        specs: Shape, dtype and device of each slot.
        inputs: Slots that are given to a run.
        outputs: Slots that a run returns.
    """

    steps: tuple[Step, ...]
    constants: Constants = field(repr=False)
    specs: Mapping[int, Spec] = field(repr=False)
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def __str__(self) -> str:
        """One line for each step."""
        return printed(self)

    def _repr_html_(self) -> str:
        """The printed text, for a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    # Parts: each is a program again -----------------------------------------------------------------------------------

    def part(self, inputs: Sequence[int], outputs: Sequence[int], also: Iterable[int] = ()) -> Program:
        """The program that computes `outputs` from `inputs`, with only the steps needed for that.

        Args:
            inputs: Slots that are given.
            outputs: Slots that are returned.
            also: Slots that must be computed too, though they are not returned.

        Raises:
            SideChannelError: the outputs also depend on a slot that neither is given nor can be computed from those.
        """
        given, needed, kept = set(inputs), {*outputs, *also}, list[Step]()
        for step in reversed(self.steps):
            if step.out in needed and step.out not in given:
                needed.update(step.slots)
                kept.append(step)
        made = given | {step.out for step in kept}
        if beside := needed - made:
            module = next((step.module for step in reversed(kept) if not beside.isdisjoint(step.slots)), "")
            raise SideChannelError(beside, module)
        return replace(self, steps=tuple(reversed(kept)), inputs=tuple(inputs), outputs=tuple(outputs))

    @cached_property
    def linear(self) -> Program:
        """T without B: the same steps with all added constants left out, and additions of nothing removed."""
        return _without_constants(self)

    def scaled(self, factors: Mapping[int, Tensor]) -> Program:
        """The same program with the values of some slots multiplied by constants, wherever they are read."""
        steps, specs = list[Step](), dict(self.specs)
        for step in self.steps:
            if step.out not in factors:
                steps.append(step)
                continue
            before = max(specs) + 1
            specs[before] = specs[step.out]
            args = (Slot(before), factors[step.out])
            steps += [replace(step, out=before), Step(step.out, "mul", args, {}, step.module, step.block)]
        return replace(self, steps=tuple(steps), specs=specs)

    def to(self, dtype: torch.dtype) -> Program:
        """The same program in another floating-point type: constants are cast, and casts go to that type."""

        def wide(value: Any) -> Any:
            if isinstance(value, torch.dtype):
                return dtype if value.is_floating_point else value
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        steps = tuple(replace(step, args=mapped(step.args, wide)) for step in self.steps)
        cast = [wide(self.constants[n]) if n in self.used else None for n in range(len(self.constants))]
        specs = {slot: spec._replace(dtype=wide(spec.dtype)) for slot, spec in self.specs.items()}
        return replace(self, steps=steps, constants=Constants(cast, self.constants.names), specs=specs)

    def cut(self, ends: Sequence[int]) -> list[Program]:
        """The same list in consecutive pieces; the inputs of a piece are the slots that it reads from earlier ones.

        Args:
            ends: For each piece but the last, the number of steps up to its end.
        """
        pieces, later = list[Program](), set(self.outputs)
        for start, stop in reversed([*zip((0, *ends), (*ends, len(self.steps)), strict=True)]):
            steps = self.steps[start:stop]
            made, read = {step.out for step in steps}, {slot for step in steps for slot in step.slots}
            inputs, outputs = tuple(sorted(read - made)), tuple(sorted(later & made))
            pieces.append(replace(self, steps=steps, inputs=inputs, outputs=outputs))
            later = (later | read) - made
        return pieces[::-1]

    @cached_property
    def makers(self) -> dict[int, Step]:
        """The step that makes each slot."""
        return {step.out: step for step in self.steps}

    @cached_property
    def readers(self) -> dict[int, list[Step]]:
        """The steps that read each slot, in order."""
        found: dict[int, list[Step]] = {}
        for step in self.steps:
            for slot in dict.fromkeys(step.slots):
                found.setdefault(slot, []).append(step)
        return found

    @cached_property
    def held_bytes(self) -> int:
        """The memory of its constants that is not the model's own."""
        values, names = self.constants.values, self.constants.names  # dropped constants stay dropped
        held = [values[n] for n in self.used if n not in names]
        storages = [value.untyped_storage() for value in held if value is not None]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    @cached_property
    def used(self) -> frozenset[int]:
        """The constants that its steps read."""
        return frozenset().union(*[step.held for step in self.steps])

    def load(self) -> None:
        """Recompute all dropped constants now: inside a `vmap` their blocks cannot be recorded again."""
        for n in self.used:
            self.constants[n]

    # Forwards ---------------------------------------------------------------------------------------------------------

    def run(self, *values: Tensor) -> tuple[Tensor, ...]:
        """The affine function at values of the inputs."""
        return self.run_each([values])[0]

    @without_gradients
    def run_each(self, several: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """`run` for several inputs: all go through one block before the next, which fetches its constants once."""
        every, kept = [dict(zip(self.inputs, given, strict=True)) for given in several], set(self.outputs)
        for places in self.by_block if len(every) > 1 else [range(len(self.steps))]:
            for values in every:
                self._forwards(values, places, kept)
        return [tuple([values[slot] for slot in self.outputs]) for values in every]

    @without_gradients
    def observe(self, values: Sequence[Tensor], slots: Collection[int]) -> dict[int, Tensor]:
        """The values of some slots in a run."""
        found = dict(zip(self.inputs, values, strict=True))
        self._forwards(found, range(len(self.steps)), set(slots))
        return {slot: found[slot] for slot in slots}

    def _forwards(self, values: dict[int, Any], places: range, kept: set[int]) -> None:
        """Run some steps, and drop values that no later step reads."""
        steps, tensors, last = self.steps, self.constants.tensors, self._last_uses
        for n in places:
            step, args = steps[n], list[Any]()
            for arg in step.args:  # as `filled` does, without a call for each step
                kind = type(arg)
                if kind is Slot:
                    args.append(values[arg.index])
                elif kind is Held:
                    args.append(tensors[arg.index])
                elif (kind is tuple or kind is list) and not NOT_PLAIN.isdisjoint(map(type, arg)):
                    args.append(filled(arg, values, tensors))
                else:
                    args.append(arg)
            values[step.out] = OPERATIONS[step.operation].run(*args, **step.options)
            for slot in last[n]:
                if slot not in kept:
                    del values[slot]

    @cached_property
    def by_block(self) -> list[range]:
        """Ranges of consecutive steps that belong to one block, or to none."""
        starts = [n for n, step in enumerate(self.steps) if n == 0 or step.block != self.steps[n - 1].block]
        return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(self.steps)], strict=True)]

    def zeros(self) -> tuple[Tensor, ...]:
        """Inputs that are zero."""
        return tuple([self._zero(slot) for slot in self.inputs])

    def _zero(self, slot: int) -> Tensor:
        spec = self.specs[slot]
        return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)

    @cached_property
    def _last_uses(self) -> list[set[int]]:
        """For each step, the slots that no later step reads."""
        last, later = list[set[int]](), set(self.outputs)
        for step in reversed(self.steps):
            slots = {*step.slots, step.out}
            last.append(slots - later)
            later |= slots
        return last[::-1]

    # Backwards --------------------------------------------------------------------------------------------------------

    def pull(self, *cotangents: Tensor) -> tuple[Tensor, ...]:
        """Tᵀu: cotangents of the outputs to cotangents of the inputs, step by step, memory freed as it goes."""
        return self.pull_each([cotangents])[0]

    @without_gradients
    def pull_each(self, several: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
        """`pull` for several cotangents: all go through one block before the next, which fetches its constants once."""
        every = list[dict[int, Tensor]]()
        for cotangents in several:
            waiting: dict[int, Tensor] = {}
            for slot, u in zip(self.outputs, cotangents, strict=True):
                waiting[slot] = waiting[slot] + u if slot in waiting else u
            every.append(waiting)
        ends = set(self.inputs)
        for places in reversed(self.by_block if len(every) > 1 else [range(len(self.steps))]):
            for waiting in every:
                self._backwards(waiting, places, {}, (), ends)
        return [
            tuple([waiting[slot] if slot in waiting else self._zero(slot) for slot in self.inputs]) for waiting in every
        ]

    @without_gradients
    def cotangents(
        self,
        starts: Mapping[int, Tensor],
        slots: Collection[int],
        *,
        stop: Collection[int] = (),
    ) -> dict[int, Tensor]:
        """The cotangents of some slots; zero for one that the outputs do not depend on.

        Args:
            starts: Cotangents to begin with, by slot.
            slots: The slots whose cotangents are returned.
            stop: Slots at which the walk backwards ends: nothing is passed on to what they were computed from.
        """
        waiting, found = dict(starts), dict[int, Tensor]()
        self._backwards(waiting, range(len(self.steps)), found, set(slots), {*self.inputs, *stop})
        found = waiting | found
        return {slot: found[slot] if slot in found else self._zero(slot) for slot in slots}

    def _backwards(
        self,
        waiting: dict[int, Tensor],
        places: range,
        found: dict[int, Tensor],
        wanted: Collection[int],
        ends: Collection[int],
    ) -> None:
        """Pull the waiting cotangents through some steps, and keep those that were asked for."""
        steps, specs, tensors = self.steps, self.specs, self.constants.tensors
        for n in reversed(places):
            step = steps[n]
            out = step.out
            u = waiting.pop(out, None)
            if u is None:
                continue
            if out in wanted:
                found[out] = u
            if out in ends:
                continue
            pulled = OPERATIONS[step.operation].pull(u, filled(step.args, specs, tensors), step.options)
            for slot, g in zip(step.slots, pulled, strict=True):
                shape, dtype, device = specs[slot]
                if g.dtype is not dtype or g.shape != shape or g.device != device:
                    g = fit(g, specs[slot])
                waiting[slot] = waiting[slot] + g if slot in waiting else g


def filled(args: Any, values: Mapping[int, Any], tensors: Sequence[Tensor]) -> Any:
    """The arguments of a step: tensors for constants, entries of `values` (tensors, or specs) for slots."""
    given = list[Any]()
    for arg in args:
        kind = type(arg)
        if kind is Slot:
            given.append(values[arg.index])
        elif kind is Held:
            given.append(tensors[arg.index])
        elif (kind is tuple or kind is list) and not NOT_PLAIN.isdisjoint(map(type, arg)):
            given.append(filled(arg, values, tensors))
        else:
            given.append(arg)
    return given if type(args) is list else tuple(given)


def _without_constants(program: Program) -> Program:
    """Leave out added constants, and the steps that then do nothing."""
    steps = list[Step]()
    same: dict[int, int] = {}  # for the result of each addition that was left out, the slot that now holds it

    def now(leaf: Any) -> Any:
        return Slot(same.get(leaf.index, leaf.index)) if type(leaf) is Slot else leaf

    def zero(leaf: Any) -> Any:
        if type(leaf) is not Held:
            return leaf if type(leaf) is Slot else 0
        value = program.constants[leaf.index]
        return value.new_zeros(()).expand(value.shape)

    for step in program.steps:
        operation, is_moved = OPERATIONS[step.operation], not same.keys().isdisjoint(step.slots)
        args = mapped(list(step.args), now) if is_moved else list(step.args)
        added = [place for place in operation.joint if place < len(args) and _is_added(args[place])]
        if step.operation in ("add", "sub") and added and (step.operation == "add" or added == [1]):
            source = args[1 - added[0]]
            if program.specs[source.index] == program.specs[step.out]:
                same[step.out] = source.index
                continue
        for place in added:
            args[place] = None if place in operation.optional else mapped(args[place], zero)
        steps.append(replace(step, args=tuple(args)) if added or is_moved else step)
    outputs = tuple([same.get(slot, slot) for slot in program.outputs])
    return replace(program, steps=tuple(steps), outputs=outputs)


def _is_added(value: Any) -> bool:
    """Whether a constant is among the values at a joint place."""
    return type(value) is not Slot and any(
        type(leaf) is Held or isinstance(leaf, (int, float, complex)) for leaf in leaves(value)
    )


# In pieces ------------------------------------------------------------------------------------------------------------


Cotangents = dict[int, Tensor]
"""Cotangents by slot."""


class Pieces:
    """A program in pieces, one after the other.

    Args:
        program: All of it.
        ends: For each piece but the last, the number of steps up to its end.
        known: Values at X of some slots, its inputs among them.
    """

    def __init__(self, program: Program, ends: Sequence[int], known: Mapping[int, Tensor]) -> None:
        self.program, self._known = program, known
        self.programs = program.cut(ends)

    def scaled(self, factors: Mapping[int, Tensor]) -> Pieces:
        """The same pieces with the values of some slots multiplied by constants, wherever they are read."""
        found = copy(self)
        found.__dict__.pop("at_cuts", None)
        found.programs = [
            piece.scaled({slot: factor for slot, factor in factors.items() if slot in piece.makers})
            for piece in self.programs
        ]
        return found

    def values(self, n: int, slots: Collection[int]) -> dict[int, Tensor]:
        """Values at X of slots that piece n makes or reads."""
        piece = self.programs[n]
        given = {slot: self.at_cuts[slot] for slot in piece.inputs}
        made = [slot for slot in slots if slot in piece.makers]
        found = piece.part(piece.inputs, made).observe(list(given.values()), made) if made else {}
        # A state that no later step reads was dropped with its steps.
        return {slot: found[slot] if slot in found else self.at_cuts[slot] for slot in slots}

    @cached_property
    def at_cuts(self) -> Mapping[int, Tensor]:
        """Values at X of the slots between pieces and at the end; unknown ones by one run from the start."""
        found = dict(self._known)
        missing = {slot for piece in self.programs for slot in piece.inputs}.union(self.program.outputs) - found.keys()
        for piece in self.programs if missing else ():
            here = missing.intersection(piece.outputs)
            if here:
                found |= piece.observe([found[slot] for slot in piece.inputs], here)
        return found

    def pull(
        self, n: int, waiting: Cotangents, slots: Collection[int] = (), *, stop: Collection[int] = ()
    ) -> tuple[Cotangents, Cotangents]:
        """Pull cotangents back through one piece.

        Args:
            n: Which piece.
            waiting: Cotangents of slots of this piece and of earlier ones.
            slots: Slots of this piece whose cotangents are requested.
            stop: Slots through which nothing goes further back.

        Returns:
            The requested cotangents, and those that now wait at earlier pieces.
        """
        piece = self.programs[n]
        here = {slot: u for slot, u in waiting.items() if slot in piece.makers}
        waiting = {slot: u for slot, u in waiting.items() if slot not in here}
        if not here:
            return piece.cotangents({}, slots), waiting
        found = piece.cotangents(here, {*slots, *piece.inputs}, stop=stop)
        for slot in piece.inputs:
            waiting[slot] = waiting[slot] + found[slot] if slot in waiting else found[slot]
        return {slot: found[slot] for slot in slots}, waiting


# Several values at once -----------------------------------------------------------------------------------------------


def of_each(function: Callable[[Any], Any], items: Any) -> Any:
    """A function applied to each item, (item, …): together if torch can, otherwise one by one.

    Args:
        function: Takes one tensor, or a dictionary of them.
        items: The same, with a leading axis.
    """
    n_items = len(next(iter(items.values()))) if isinstance(items, dict) else len(items)
    if n_items > 1:
        try:
            return _together(function, items)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if is_out_of_memory(error):
                raise
    found = [function(_one(items, n)) for n in range(n_items)]
    return tree_map(lambda *each: torch.stack(each), *found)


def _together(function: Callable[[Any], Any], items: Any) -> Any:
    # torch warns about operations that it runs one by one; we could not do better.
    _set_vmap_fallback_warning_enabled(False)
    try:
        return torch.vmap(function)(items)
    finally:
        _set_vmap_fallback_warning_enabled(True)


def _one(items: Any, n: int) -> Any:
    return tree_map(lambda tensor: tensor[n] if isinstance(tensor, Tensor) else tensor, items)
