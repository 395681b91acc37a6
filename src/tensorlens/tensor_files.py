"""Attention tensors in files: a program with its numbers, the marks on it, and what maps say of the input.

One safetensors file, its records as strict JSON in the header. Reading it imports no model library and runs no code of
the file: operations come from the table of this library.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import write_whole
from tensorlens.maps.targets import Classes, Context
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.constants import Constants
from tensorlens.program.files import (
    ProgramRecord,
    Reader,
    TensorsRecord,
    coded,
    constants_of,
    restore_program,
    restore_tensors,
    store_program,
    store_tensors,
)
from tensorlens.program.marks import Choice, Meeting, Mixture
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recording import Head, ModuleOutput, Recording, Span

FORMAT = "tensorlens.attention_tensor/2"

Weights = Literal["inside", "reference"]
"""Whether a file holds the model's weights, or their names and checksums for a lens that has them."""


class ContextRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What maps say of the input; see `Context`."""

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
    meetings: list[list[Any]]
    choices: list[tuple[int, str]]
    modules: list[tuple[str, int | None]]
    rules_applied: list[tuple[str, str, int]]
    name: str
    span: tuple[int, int]
    sample: int
    context: ContextRecord


class Packed(NamedTuple):
    """An attention tensor as it travels: records as JSON, and memories by name."""

    header: bytes
    memories: dict[str, Tensor]


# Writing --------------------------------------------------------------------------------------------------------------


def pack(operator: FrozenOperator, context: Context, weights: Weights = "inside") -> Packed:
    """An operator and what maps say of its input, as records and memories."""
    if weights not in ("inside", "reference"):
        raise InputError(f"`weights` must be 'inside' or 'reference'; got {weights!r:.60}.")
    recording = operator.recording
    constants = recording.program.constants
    assert isinstance(constants, Constants), "a recording's own program"
    constants.check()
    _refuse_long(recording)
    names = {f"c{n}": name for n, name in constants.names.items()}
    tensors = constants_of(recording.program) | _beside(operator)
    of_model = None
    if weights == "reference":
        model = recording.from_model("Storing weights by reference").model
        of_model = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    views, memories = store_tensors(tensors, names, of_model)
    record = TensorRecord(
        program=store_program(recording.program),
        tensors=views,
        slots=recording.slots,
        rules=recording.rules.as_dict(),  # type: ignore[arg-type]
        readout_slot=recording.readout_slot,
        n_encoder_blocks=recording.n_encoder_blocks,
        starts_at_embedding=recording.starts_at_embedding,
        gives_raw_logits=recording.gives_raw_logits,
        mixtures=[[*mark[:3], coded(mark.values), coded(mark.weights)] for mark in recording.mixtures],
        meetings=[list(mark) for mark in recording.meetings],
        choices=[(choice.block, choice.module) for choice in recording.choices],
        modules=[(one.path, one.slot) for one in recording.modules],
        rules_applied=[(rule, module, n) for (rule, module), n in recording.rules_applied.items()],
        name=recording.name,
        span=(operator.span.start, operator.span.stop),
        sample=operator.sample,
        context=_context_record(context),
    )
    return Packed(msgspec.json.encode(record), memories)


def _refuse_long(recording: Recording) -> None:
    if recording.is_streamed:
        raise InputError(
            "This input is too long for its operator to be stored: the values in its blocks are recorded again "
            "when they are needed. Save its maps instead, or use a shorter input."
        )


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


def _context_record(context: Context) -> ContextRecord:
    classes = context.classes
    return ContextRecord(
        tokens=context.tokens,
        out_tokens=context.out_tokens,
        n_classes=None if classes is None else classes.n_classes,
        labels=None if classes is None else classes.all_names(),
        meta=context.meta,
    )


def write_tensor(operator: FrozenOperator, context: Context, path: Path, weights: Weights) -> None:
    """Write a file whole or not at all."""
    if path.suffix != ".safetensors":
        raise InputError(f"Expected a file name that ends in .safetensors; got {path.name!r}.")
    packed = pack(operator, context, weights)
    header = {"format": FORMAT, "tensor": packed.header.decode(), "checksum": _checksum(packed.header)}
    memories = {name: memory.contiguous() for name, memory in packed.memories.items()}
    write_whole(path, lambda temporary: save_file(memories, temporary, header))


def _checksum(record: bytes) -> str:
    return f"{zlib.crc32(record):08x}"


# Reading --------------------------------------------------------------------------------------------------------------


def read_tensor(path: Path, model: torch.nn.Module | None, device: str | None) -> tuple[FrozenOperator, Context]:
    """The operator and the context of a file.

    Raises:
        InputError: there is no such file, it is of another kind or damaged, or it names other weights.
    """
    if not path.is_file():
        raise InputError(f"Expected a file that `AttentionTensor.save` wrote; {str(path)!r} does not exist.")
    try:
        with safe_open(path, "pt") as opened:
            header = opened.metadata() or {}
            if header.get("format") != FORMAT:
                raise InputError(
                    f"Expected a file of the format {FORMAT!r}, which `AttentionTensor.save` writes; {path.name!r} is "
                    f"of {header.get('format', 'no known format')!r:.60}."
                )
            record = header.get("tensor", "").encode()
            if header.get("checksum") != _checksum(record):  # steps with other arguments would only fail when asked
                raise InputError(
                    f"Expected a file as `AttentionTensor.save` wrote it; {path.name!r} was changed since."
                )
            # Copies: a file places tensors at any multiple of their size, and products of such memory round otherwise
            # than those of memory that torch has laid out. And whoever overwrites the file does not change T.
            return unpack(record, lambda name: opened.get_tensor(name).clone(), model, device)
    except SafetensorError as error:
        raise InputError(f"Expected a safetensors file; {path.name!r} is damaged: {str(error)[:300]}") from error


def unpack(
    header: bytes, memory: Callable[[str], Tensor], model: torch.nn.Module | None = None, device: str | None = None
) -> tuple[FrozenOperator, Context]:
    """The operator and the context of what `pack` made.

    Args:
        header: The records.
        memory: Gives a memory by its name.
        model: The model, for weights that are stored by name.
        device: Where everything goes; where it was if None, or on the CPU where this machine has no such device.
    """
    try:
        record = msgspec.json.decode(header, type=TensorRecord)
        to = Reader(_device(record, device))
        weights = None if model is None else {**dict(model.named_parameters()), **dict(model.named_buffers())}
        tensors = restore_tensors(record.tensors, memory, weights, to)
        return _operator(record, tensors, to), _context(record.context)
    except InputError:
        raise
    except (TensorLensError, msgspec.MsgspecError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"Expected a file as `AttentionTensor.save` wrote it; it is damaged: {str(error)[:300]}"
        ) from error


def _device(record: TensorRecord, asked: str | None) -> torch.device | None:
    if asked is not None:
        return torch.device(asked)
    needed = {torch.device(memory.device) for memory in record.tensors.memories}
    there = {"cpu"} | ({"cuda"} if torch.cuda.is_available() else set())
    is_there = all(one.type in there and (one.index or 0) < max(1, torch.cuda.device_count()) for one in needed)
    return None if is_there else torch.device("cpu")


def _operator(record: TensorRecord, tensors: Mapping[str, Tensor], to: Reader) -> FrozenOperator:
    names = {int(key[1:]): view.name for key, view in record.tensors.views.items() if view.name is not None}
    weight = tensors.get("head.weight")
    recording = Recording(
        program=restore_program(record.program, tensors, names, to),
        states=tuple([tensors[f"state.{n}"] for n in range(len(record.slots))]),
        slots=record.slots,
        rules=Rules(**record.rules),  # type: ignore[arg-type]
        readout=tensors.get("readout"),
        readout_slot=record.readout_slot,
        head=None if weight is None else Head(weight, tensors.get("head.bias")),
        n_encoder_blocks=record.n_encoder_blocks,
        starts_at_embedding=record.starts_at_embedding,
        gives_raw_logits=record.gives_raw_logits,
        mixtures=tuple(
            [Mixture(one[0], one[1], one[2], to.value(one[3]), to.value(one[4])) for one in record.mixtures]
        ),
        meetings=tuple([Meeting(*one) for one in record.meetings]),
        choices=tuple([Choice(*one, tensors[f"choice.{n}"]) for n, one in enumerate(record.choices)]),
        modules=tuple([ModuleOutput(path, slot) for path, slot in record.modules]),
        rules_applied={(rule, module): n for rule, module, n in record.rules_applied},
        name=record.name,
    )
    heads = {int(key.removeprefix("heads.")): value for key, value in tensors.items() if key.startswith("heads.")}
    return FrozenOperator(recording, Span(*record.span), heads, sample=record.sample)


def _context(record: ContextRecord) -> Context:
    classes = None if record.n_classes is None else Classes(n_classes=record.n_classes, labels=record.labels)
    return Context(tokens=record.tokens, classes=classes, meta=record.meta, out_tokens=record.out_tokens)
