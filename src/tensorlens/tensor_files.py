"""Attention tensors in files: a program with its numbers and marks, and the context of its input.

One safetensors file, its records as strict JSON in the header. Reading it imports no model library and runs no code of
the file: operations come from the table of this library. A constant is a view of a memory, with strides; memories are
stored once even if shared, so a loaded program gives the same numbers bit for bit. A weight may also be
stored by its name and a checksum, for users who have the model.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from tensorlens.errors import InputError, LoadError, check_choice, words
from tensorlens.files import reading, write_whole
from tensorlens.maps.targets import Classes, Context
from tensorlens.memory import chosen_device
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.marks import Choice, Meeting, Mixture
from tensorlens.program.program import Constants, Program
from tensorlens.program.steps import OPERATIONS, Held, Slot, Spec, Step
from tensorlens.program.verify import verify
from tensorlens.recording.calls import ModuleOutput, ModulePlaces
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recording import Head, Recording, Span

FORMAT = "tensorlens.attention_tensor/2"

Weights = Literal["inside", "reference"]
"""Whether a file holds the model's weights, or their names and checksums for a lens that has them."""

StepRecord = tuple[int, str, Any, dict[str, Any], str, int | None, str | None]
"""A step: slot, operation, arguments and options as `_coded` writes them, module, block, note."""


class View(NamedTuple):
    """A constant: its memory, and its layout there.

    Attributes:
        memory: The number of its memory.
        shape: Sizes of the axes.
        strides: Distances in memory along them.
        offset: Its start in the memory.
        name: Name of the weight that it is, or is a view of.
    """

    memory: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    name: str | None = None


class Memory(NamedTuple):
    """A contiguous run of numbers, shared by constants.

    Attributes:
        dtype: Their type.
        device: Their device when they were saved.
        weight: The weight they belong to, where it is stored by name.
        start: Their start in that weight's memory.
        length: How many there are.
        checksum: Checksum of their bytes, where they are stored by name.
    """

    dtype: str
    device: str
    weight: str | None = None
    start: int = 0
    length: int = 0
    checksum: int | None = None


class ProgramRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A program without its numbers; constant n is the view named ``c<n>``."""

    steps: list[StepRecord]
    specs: dict[int, Spec]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class TensorsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Views of memories, by the names of tensors."""

    views: dict[str, View]
    memories: list[Memory]


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The context that maps record; see `Context`."""

    tokens: tuple[str, ...]
    out_tokens: tuple[str, ...] | None
    n_classes: int | None
    labels: dict[int, str] | None
    meta: dict[str, Any]


class TensorRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An attention tensor without its numbers; see `Recording`, `FrozenOperator`."""

    program: ProgramRecord
    tensors: TensorsRecord
    slots: tuple[tuple[int, ...], ...]
    rules: dict[str, str | bool | int | float]
    readout_slot: int | None
    n_encoder_blocks: int
    starts_at_embedding: bool
    gives_raw_logits: bool
    mixtures: list[list[Any]]
    meetings: tuple[Meeting, ...]
    choices: list[tuple[int, str]]
    modules: tuple[ModuleOutput, ...]
    rules_applied: list[tuple[str, str, int]]
    name: str
    span: Span
    sample: int
    context: ContextRecord


AS_THEY_ARE = words("slots readout_slot n_encoder_blocks starts_at_embedding gives_raw_logits meetings modules name")
"""Fields of a `Recording` that its record has too."""


# Arguments of steps ---------------------------------------------------------------------------------------------------


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"the type {name!r:.60}")
    return found


KINDS: dict[str, tuple[type, Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "x": (Slot, lambda slot: [slot.index], lambda n: Slot(int(n))),
    "c": (Held, lambda held: [held.index], lambda n: Held(int(n))),
    "float": (float, lambda number: [str(number)], float),
    "complex": (complex, lambda number: [number.real, number.imag], complex),
    "dtype": (torch.dtype, lambda dtype: [_name(dtype)], _dtype),
    "device": (torch.device, lambda device: [str(device)], torch.device),
    "slice": (slice, lambda part: [part.start, part.stop, part.step], slice),
    "ellipsis": (type(...), lambda _: [], lambda: ...),
}
"""Types of arguments by their name in files, each with its parts as JSON and its inverse."""


def _coded(value: Any) -> Any:
    """An argument as JSON: numbers, strings and None as they are, anything else as a list that begins with its kind."""
    if value is None or type(value) in (bool, int, str) or type(value) is float and math.isfinite(value):
        return value
    if type(value) is tuple or type(value) is list:
        return [type(value).__name__, *map(_coded, value)]
    for kind, (of, parts, _) in KINDS.items():
        if type(value) is of:
            return [kind, *parts(value)]
    raise InputError(f"Expected steps of tensors and plain values; got a {type(value).__name__}, which is not stored.")


def _decoded(value: Any, device: torch.device | None) -> Any:
    """An argument from its JSON, with devices replaced by one if it is given."""
    if type(value) is not list:
        return value
    kind, *parts = value
    if kind in ("tuple", "list"):
        return (tuple if kind == "tuple" else list)([_decoded(one, device) for one in parts])
    if kind not in KINDS:
        raise ValueError(f"an argument of the kind {kind!r:.60}")
    return device if kind == "device" and device is not None else KINDS[kind][2](*parts)


# Writing --------------------------------------------------------------------------------------------------------------


def pack(operator: FrozenOperator, context: Context, weights: Weights = "inside") -> tuple[bytes, dict[str, Tensor]]:
    """An operator and the context of its input: records as JSON, and memories by name."""
    check_choice(weights, "weights", get_args(Weights))
    recording, classes = operator.recording, context.classes
    program, constants = recording.program, recording.program.constants
    constants.check()
    constants.check_storable()
    of_model = None
    if weights == "reference":
        of_model = ModulePlaces(recording.from_model("Storing weights by reference").model).weights
    names = {f"c{n}": name for n, name in constants.names.items()}
    tensors = {f"c{n}": constants[n].resolve_conj().resolve_neg() for n in sorted(program.used)} | _beside(operator)
    views, memories = _store_tensors(tensors, names, of_model)
    record = TensorRecord(
        **{name: getattr(recording, name) for name in AS_THEY_ARE},
        program=_store_program(program),
        tensors=views,
        rules=recording.rules.as_dict(),  # type: ignore[arg-type]
        mixtures=[[*mark[:3], _coded(mark.values), _coded(mark.weights)] for mark in recording.mixtures],
        choices=[(choice.block, choice.module) for choice in recording.choices],
        rules_applied=[(rule, module, n) for (rule, module), n in recording.rules_applied.items()],
        span=operator.span,
        sample=operator.sample,
        context=ContextRecord(
            tokens=context.tokens,
            out_tokens=context.out_tokens,
            n_classes=None if classes is None else classes.n_classes,
            labels=None if classes is None else classes.all_names(),
            meta=context.meta,
        ),
    )
    return msgspec.json.encode(record, enc_hook=lambda one: KINDS[type(one).__name__][1](one)[0]), memories


def _store_program(program: Program) -> ProgramRecord:
    met = {*program.inputs, *program.outputs, *(slot for step in program.steps for slot in (step.out, *step.slots))}
    steps = [
        (
            step.out,
            step.operation,
            _coded(step.args),
            {name: _coded(value) for name, value in step.options.items()},
            step.module,
            step.block,
            step.note,
        )
        for step in program.steps
    ]
    specs = {slot: program.specs[slot] for slot in sorted(met)}
    return ProgramRecord(steps=steps, specs=specs, inputs=program.inputs, outputs=program.outputs)


def _beside(operator: FrozenOperator) -> dict[str, Tensor]:
    """The tensors of an operator that no step reads."""
    recording, head = operator.recording, operator.recording.head
    found = {f"state.{n}": state for n, state in enumerate(recording.states)}
    found |= {f"choice.{n}": choice.experts for n, choice in enumerate(recording.choices)}
    found |= {f"heads.{block}": multiplier for block, multiplier in operator.heads.items()}
    if recording.readout is not None:
        found["readout"] = recording.readout
    if head is not None:
        found |= {"head.weight": head.weight.detach()} | (
            {} if head.bias is None else {"head.bias": head.bias.detach()}
        )
    return found


def _store_tensors(
    tensors: Mapping[str, Tensor], names: Mapping[str, str], weights: Mapping[str, Tensor] | None = None
) -> tuple[TensorsRecord, dict[str, Tensor]]:
    """Tensors as views of memories, and the memories by their names in a file.

    Args:
        tensors: By name.
        names: The names of those that are weights of the model.
        weights: The model's weights by name, if they are to be stored by name.
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
            record = Memory(record.dtype, record.device, name, first, len(run), _checksum_of(run))
        else:
            stored[str(len(records))] = torch.view_as_real(run).flatten() if run.is_complex() else run
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
    """The part of a memory that some tensors cover, and its start."""
    spans = [_span(value) for value in several]
    start, stop = min(first for first, _ in spans), max(last for _, last in spans)
    return several[0].as_strided((stop - start,), (1,), start), start


def _plain(value: Tensor, name: str | None) -> Tensor:
    if type(value) is not Tensor or value.is_sparse or value.is_quantized or value.is_meta:
        raise InputError(
            f"Expected plain tensors to store; {f'`{name}`' if name else 'a constant'} is a {type(value).__name__}. "
            "Save its maps instead, or use a lens on the model with ordinary weights."
        )
    return value


def _memory_of(value: Tensor) -> Any:
    return value.untyped_storage().data_ptr(), value.dtype, str(value.device)


def _span(value: Tensor) -> tuple[int, int]:
    """The first place of a tensor in its memory, and the place after its last."""
    first = int(value.storage_offset())
    reach = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return first, first + (reach + 1 if value.numel() else 0)


def _checksum_of(run: Tensor) -> int:
    return zlib.crc32(run.cpu().contiguous().view(torch.uint8).numpy().data)


def write_tensor(operator: FrozenOperator, context: Context, path: Path, weights: Weights) -> None:
    """Write a file whole or not at all."""
    if path.suffix != ".safetensors":
        raise InputError(f"Expected a file name that ends in .safetensors; got {path.name!r}.")
    record, memories = pack(operator, context, weights)
    header = {"format": FORMAT, "tensor": record.decode(), "checksum": _checksum(record)}
    memories = {name: memory.contiguous() for name, memory in memories.items()}
    write_whole(path, lambda temporary: save_file(memories, temporary, header))


def _checksum(record: bytes) -> str:
    return f"{zlib.crc32(record):08x}"


# Reading --------------------------------------------------------------------------------------------------------------


def read_tensor(path: Path, model: nn.Module | None, device: str | None) -> tuple[FrozenOperator, Context]:
    """The operator and the context of a file."""
    with reading(path, "`AttentionTensor.save`"), safe_open(path, "pt") as opened:
        header = opened.metadata() or {}
        if header.get("format") != FORMAT:
            raise InputError(
                f"Expected a file of the format {FORMAT!r}, which `AttentionTensor.save` writes; {path.name!r} is "
                f"of {header.get('format', 'no known format')!r:.60}."
            )
        record = header.get("tensor", "").encode()
        if header.get("checksum") != _checksum(record):  # steps with other arguments would only fail when asked
            raise InputError(f"Expected a file as `AttentionTensor.save` wrote it; {path.name!r} was changed since.")
        # Copies: a file places tensors at any multiple of their size, and products of such memory round otherwise
        # than those of memory that torch has laid out. And whoever overwrites the file does not change T.
        return unpack(record, lambda name: opened.get_tensor(name).clone(), model, device)


def unpack(
    header: bytes, memory: Callable[[str], Tensor], model: nn.Module | None = None, device: str | None = None
) -> tuple[FrozenOperator, Context]:
    """The operator and the context from the result of `pack`.

    Args:
        header: The records.
        memory: Returns a memory by its name.
        model: The model, for weights that are stored by name.
        device: The device for everything; if None, the one it was on, or the CPU if this machine has no such device.
    """
    record = msgspec.json.decode(header, type=TensorRecord, dec_hook=lambda kind, one: KINDS[kind.__name__][2](one))
    to = _device(record, device)
    tensors = _restore_tensors(record.tensors, memory, None if model is None else ModulePlaces(model).weights, to)
    of, n_classes = record.context, record.context.n_classes
    classes = None if n_classes is None else Classes(n_classes=n_classes, labels=of.labels)
    context = Context(tokens=of.tokens, classes=classes, meta=of.meta, out_tokens=of.out_tokens)
    return _operator(record, tensors, to), context


def _device(record: TensorRecord, asked: str | None) -> torch.device | None:
    if asked is not None:
        return chosen_device(asked)
    try:
        for memory in record.tensors.memories:
            chosen_device(memory.device)
    except LoadError:
        return torch.device("cpu")
    return None


def _operator(record: TensorRecord, tensors: Mapping[str, Tensor], device: torch.device | None) -> FrozenOperator:
    weight, decoded = tensors.get("head.weight"), partial(_decoded, device=device)
    recording = Recording(
        **{name: getattr(record, name) for name in AS_THEY_ARE},
        program=_restore_program(record, tensors, device),
        states=tuple([tensors[f"state.{n}"] for n in range(len(record.slots))]),
        rules=Rules(**record.rules),  # type: ignore[arg-type]
        readout=tensors.get("readout"),
        head=None if weight is None else Head(weight, tensors.get("head.bias")),
        mixtures=tuple([Mixture(one[0], one[1], one[2], *map(decoded, one[3:5])) for one in record.mixtures]),
        choices=tuple([Choice(*one, tensors[f"choice.{n}"]) for n, one in enumerate(record.choices)]),
        rules_applied={(rule, module): n for rule, module, n in record.rules_applied},
    )
    heads = {int(key.removeprefix("heads.")): value for key, value in tensors.items() if key.startswith("heads.")}
    return FrozenOperator(recording, record.span, heads, sample=record.sample)


def _restore_program(record: TensorRecord, tensors: Mapping[str, Tensor], device: torch.device | None) -> Program:
    """The program of a record; a damaged one raises whatever comes, which `reading` turns into one error."""
    stored = record.program
    places = {int(key[1:]): value for key, value in tensors.items() if key.startswith("c") and key[1:].isdigit()}
    names = {int(key[1:]): view.name for key, view in record.tensors.views.items() if view.name is not None}
    steps = list[Step]()
    for out, operation, args, options, module, block, note in stored.steps:
        if operation not in OPERATIONS:
            raise InputError(f"Expected operations of this library; the file has {operation!r:.60}.")
        options = {name: _decoded(value, device) for name, value in options.items()}
        steps.append(Step(out, operation, tuple(_decoded(args, device)), options, module, block, note))
    program = Program(
        steps=tuple(steps),
        constants=Constants([places.get(n) for n in range(max(places, default=-1) + 1)], names),
        specs={slot: spec._replace(device=device or spec.device) for slot, spec in stored.specs.items()},
        inputs=stored.inputs,
        outputs=stored.outputs,
    )
    if missing := program.used - places.keys():
        raise KeyError(f"constant {min(missing)}")
    verify(program)
    return program


def _restore_tensors(
    record: TensorsRecord,
    memory: Callable[[str], Tensor],
    weights: Mapping[str, Tensor] | None,
    device: torch.device | None,
) -> dict[str, Tensor]:
    """The tensors of a record."""
    memories = list[Tensor]()
    for n, one in enumerate(record.memories):
        run = memory(str(n)).view(getattr(torch, one.dtype)) if one.weight is None else _weight(one, weights)
        memories.append(run.to(device or torch.device(one.device)))
    return {
        key: memories[view.memory].as_strided(view.shape, view.strides, view.offset)
        for key, view in record.views.items()
    }


def _weight(memory: Memory, weights: Mapping[str, Tensor] | None) -> Tensor:
    if weights is None:
        raise InputError(
            f"The file names the weight `{memory.weight}` but does not contain it (weights='reference'). Pass a lens "
            "on the model it was saved from: `AttentionTensor.load(path, lens=lens)`."
        )
    weight = weights.get(memory.weight or "")
    if weight is not None and _name(weight.dtype) == memory.dtype:
        start = weight.storage_offset() + memory.start
        if start >= 0 and start + memory.length <= weight.untyped_storage().nbytes() // weight.element_size():
            run = weight.detach().as_strided((memory.length,), (1,), start)
            if _checksum_of(run) == memory.checksum:
                return run
    raise InputError(
        f"Expected the weight `{memory.weight}` ({memory.dtype}) as it was when the file was written; this model has "
        f"{'none of that name' if weight is None else 'a different one'}. Load the same model in the same type."
    )
