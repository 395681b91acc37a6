"""Programs in files: steps as JSON, constants as tensors, operations from the table alone. Nothing is executed.

A constant is a view of a memory, with strides; memories are stored once, whoever shares them, so that a loaded program
gives the same numbers bit for bit. A weight may also be stored by its name and a checksum, for whoever has the model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.program.constants import Constants
from tensorlens.program.nodes import Held, Slot, Spec, Step
from tensorlens.program.operations import OPERATIONS
from tensorlens.program.program import Program
from tensorlens.program.verify import verify

Place = torch.device | str


class View(msgspec.Struct, array_like=True, frozen=True):
    """A constant: which memory it lies in, and how.

    Attributes:
        memory: Its number.
        shape: Sizes of the axes.
        strides: Distances in memory along them.
        offset: Where it begins.
        name: Name of the weight that it is, or is a view of.
    """

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    name: str | None = None


class Memory(msgspec.Struct, array_like=True, frozen=True):
    """A run of numbers that constants lie in.

    Attributes:
        dtype: Their type.
        device: Where they were.
        weight: The weight they belong to, where it is stored by name.
        start: Where in that weight's memory they begin.
        length: How many there are.
        checksum: Checksum of their bytes, where they are stored by name.
    """

    dtype: str
    device: str
    weight: str | None = None
    start: int = 0
    length: int = 0
    checksum: int | None = None


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """A step; arguments as `coded` writes them."""

    out: int
    operation: str
    args: Any
    options: dict[str, Any]
    module: str
    block: int | None
    note: str | None


class SpecRecord(msgspec.Struct, array_like=True, frozen=True):
    """What kind of tensor a slot holds."""

    shape: tuple[int, ...]
    dtype: str
    device: str


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A program without its numbers; constant n is the view named ``c<n>``."""

    steps: list[StepRecord]
    specs: dict[int, SpecRecord]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TensorsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Where tensors lie, by their names."""

    views: dict[str, View]
    memories: list[Memory]


# Writing --------------------------------------------------------------------------------------------------------------


def store_program(program: Program) -> ProgramRecord:
    """A program as a record."""
    met = {*program.inputs, *program.outputs, *(slot for step in program.steps for slot in (step.out, *step.slots))}
    specs = {slot: program.specs[slot] for slot in sorted(met)}
    return ProgramRecord(
        steps=[_step_record(step) for step in program.steps],
        specs={slot: SpecRecord(tuple(s.shape), _name(s.dtype), str(s.device)) for slot, s in specs.items()},
        inputs=program.inputs,
        outputs=program.outputs,
    )


def _step_record(step: Step) -> StepRecord:
    options = {name: coded(value) for name, value in step.options.items()}
    return StepRecord(step.out, step.operation, coded(step.args), options, step.module, step.block, step.note)


def constants_of(program: Program) -> dict[str, Tensor]:
    """The constants that a program reads, as a file calls them."""
    return {f"c{n}": program.constants[n] for n in sorted(program.used)}


def store_tensors(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], weights: Mapping[str, Tensor] | None = None
) -> tuple[TensorsRecord, dict[str, Tensor]]:
    """Tensors as views of memories, and the memories by their names in a file.

    Args:
        tensors: By name.
        names: Which of them are weights of the model, and what these are called there.
        weights: The model's, by name, if what lies in them is to be stored by name.
    """
    by_memory: dict[Any, list[Tensor]] = {}
    for key, value in tensors.items():
        by_memory.setdefault(_memory_of(_plain(value, names.get(key))), []).append(value)
    owners = {_memory_of(value): (name, value) for name, value in (weights or {}).items()}
    records, stored, places = list[Memory](), dict[str, Tensor](), dict[Any, tuple[int, int]]()
    for key, several in by_memory.items():
        run, start = _covered(several)
        record = Memory(_name(run.dtype), str(run.device), length=len(run))
        if key in owners:
            name, weight = owners[key]
            first = start - int(weight.storage_offset())
            record = Memory(record.dtype, record.device, name, first, len(run), _checksum(run))
        else:
            stored[str(len(records))] = run
        places[key] = len(records), start
        records.append(record)
    views = {}
    for key, value in tensors.items():
        memory, start = places[_memory_of(value)]
        views[key] = View(
            memory, tuple(value.shape), value.stride(), int(value.storage_offset()) - start, names.get(key)
        )
    return TensorsRecord(views=views, memories=records), stored


def _covered(several: list[Tensor]) -> tuple[Tensor, int]:
    """The part of a memory that some tensors cover, and where it begins."""
    spans = [_span(value) for value in several]
    start, stop = min(first for first, _ in spans), max(last for _, last in spans)
    return several[0].as_strided((stop - start,), (1,), start), start


def _plain(value: Tensor, name: str | None) -> Tensor:
    if type(value) is not Tensor or value.is_sparse or value.is_quantized or value.is_meta:
        raise InputError(
            f"Expected plain tensors to store; {f'`{name}`' if name else 'a constant'} is a {type(value).__name__}. "
            "Save its maps instead, or ask a lens on the model with ordinary weights."
        )
    return value


def _memory_of(value: Tensor) -> Any:
    return value.untyped_storage().data_ptr(), value.dtype, str(value.device)


def _span(value: Tensor) -> tuple[int, int]:
    """The first place of a tensor in its memory, and the one after its last."""
    first = int(value.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return first, first + (reach + 1 if value.numel() else 0)


def _checksum(run: Tensor) -> int:
    return zlib.crc32(run.cpu().contiguous().view(torch.uint8).numpy().data)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def coded(value: Any) -> Any:
    """An argument as JSON: numbers, strings and None as they are, all else as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", str(value)]
    if type(value) in (Slot, Held):
        return ["x" if type(value) is Slot else "c", value.index]
    if type(value) in (tuple, list):
        return [type(value).__name__, *map(coded, value)]
    if isinstance(value, torch.dtype):
        return ["dtype", _name(value)]
    if isinstance(value, torch.device):
        return ["device", str(value)]
    if isinstance(value, slice):
        return ["slice", value.start, value.stop, value.step]
    if type(value) is complex:
        return ["complex", value.real, value.imag]
    if value is Ellipsis:
        return ["ellipsis"]
    raise InputError(f"Expected steps of tensors and plain values; got a {type(value).__name__}, which is not stored.")


# Reading --------------------------------------------------------------------------------------------------------------


def restore_program(
    record: ProgramRecord, tensors: Mapping[str, Tensor], names: Mapping[int, str], to: Reader
) -> Program:
    """The program of a record.

    Raises:
        ValueError, KeyError, TypeError, NotLinearError: the record is damaged.
    """
    places = {int(key[1:]): value for key, value in tensors.items() if key.startswith("c")}
    values = [places.get(n) for n in range(max(places, default=-1) + 1)]
    program = Program(
        steps=tuple([to.step(step) for step in record.steps]),
        constants=Constants(values, names),
        specs={slot: to.spec(spec) for slot, spec in record.specs.items()},
        inputs=record.inputs,
        outputs=record.outputs,
    )
    if missing := program.used - places.keys():
        raise KeyError(f"constant {min(missing)}")
    verify(program)
    return program


def restore_tensors(
    record: TensorsRecord, memory: Callable[[str], Tensor], weights: Mapping[str, Tensor] | None, to: Reader
) -> dict[str, Tensor]:
    """The tensors of a record.

    Args:
        record: Where they lie.
        memory: Gives a memory by its name.
        weights: The model's, by name, for memories that are stored by name.
        to: Says on which device they go.

    Raises:
        InputError: the model's weights are others.
    """
    memories = [
        memory(str(n)) if one.weight is None else _weight(one, weights) for n, one in enumerate(record.memories)
    ]
    memories = [run.to(to.device(one.device)) for run, one in zip(memories, record.memories, strict=True)]
    return {
        key: memories[view.memory].as_strided(view.shape, view.strides, view.offset)
        for key, view in record.views.items()
    }


def _weight(memory: Memory, weights: Mapping[str, Tensor] | None) -> Tensor:
    if weights is None:
        raise InputError(
            f"The file names the weight `{memory.weight}` and does not hold it (weights='reference'). Pass the lens of "
            "the model it was saved from: `AttentionTensor.load(path, lens=lens)`."
        )
    weight = weights.get(memory.weight or "")
    if weight is not None and _name(weight.dtype) == memory.dtype:
        start = weight.storage_offset() + memory.start
        if start >= 0 and start + memory.length <= weight.untyped_storage().nbytes() // weight.element_size():
            run = weight.detach().as_strided((memory.length,), (1,), start)
            if _checksum(run) == memory.checksum:
                return run
    raise InputError(
        f"Expected the weight `{memory.weight}` ({memory.dtype}) as it was when the file was written; this model has "
        f"{'none of that name' if weight is None else 'a different one'}. Load the same model in the same type."
    )


class Reader:
    """Turns records back.

    Args:
        device: Where everything goes; where it was if None.
    """

    def __init__(self, device: Place | None) -> None:
        self._device = None if device is None else torch.device(device)

    def device(self, name: str) -> torch.device:
        """Where something goes."""
        return self._device or torch.device(name)

    def spec(self, record: SpecRecord) -> Spec:
        """What kind of tensor a slot holds."""
        return Spec(record.shape, _dtype(record.dtype), self.device(record.device))

    def step(self, record: StepRecord) -> Step:
        """A step."""
        if record.operation not in OPERATIONS:
            raise InputError(f"Expected operations of this library; the file has {record.operation!r:.60}.")
        args = tuple(self.value(one) for one in record.args[1:])
        options = {name: self.value(value) for name, value in record.options.items()}
        return Step(record.out, record.operation, args, options, record.module, record.block, record.note)

    def value(self, coded: Any) -> Any:
        """An argument."""
        if type(coded) is not list:
            return coded
        kind, *rest = coded
        if kind in ("x", "c"):
            return (Slot if kind == "x" else Held)(int(rest[0]))
        if kind in ("tuple", "list"):
            return (tuple if kind == "tuple" else list)([self.value(one) for one in rest])
        if kind == "dtype":
            return _dtype(rest[0])
        if kind == "device":
            return self.device(rest[0])
        if kind == "slice":
            return slice(*rest)
        if kind == "complex":
            return complex(*rest)
        if kind == "float":
            return float(rest[0])
        if kind == "ellipsis":
            return ...
        raise ValueError(f"an argument of the kind {kind!r:.60}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the type {name!r:.60}")
    return found
