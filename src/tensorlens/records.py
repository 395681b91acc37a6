"""`Record`: a result that users can save and load. Every kind is a `msgspec` struct with the name of its format.

| file           | holds                                                                                          |
|----------------|------------------------------------------------------------------------------------------------|
| `.json`        | all fields; a tensor is ``{"dtype", "shape", "values"}``, a NaN or infinity ``{"float": "nan"}`` |
| `.safetensors` | tensors bit for bit; the other fields as the same JSON in the header                           |

The field `format` is the schema and its version, such as ``tensorlens.token_map/1``. `load` checks types by the struct,
and consistency (labels against scores) by its `__post_init__`, whoever made it. So a loaded record can be
printed, shown and saved; anything else is refused with one sentence.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
import numpy as np
import torch
from msgspec.structs import force_setattr
from rich.console import Console, RenderableType
from rich.text import Text
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensorlens.errors import InputError, check_path
from tensorlens.files import from_json, reading, to_json, write_whole
from tensorlens.views.printing import as_html, print_parts
from tensorlens.views.table import Tabular

Index = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
"""A position or a count, as a file may hold it."""

MOST_NESTED = 32
"""How deep lists and dictionaries of `meta` may be nested."""

Writer = Callable[[Path], object]


class Record(
    msgspec.Struct, Tabular, frozen=True, eq=False, weakref=True, tag_field="format", forbid_unknown_fields=True
):
    """Something that can be shown, saved and loaded.

    A subclass names its format as ``tag="tensorlens.<kind>/<version>"``, its headline, what is printed of it, and its
    numbers as a table.
    """

    loadable: ClassVar[tuple[str, ...]] = (".json",)
    """The suffixes of files that `load` reads."""

    def __post_init__(self) -> None:
        """Take copies: tensors on the CPU, `meta` as JSON would return it. Subclasses add checks of consistency."""
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                copied = value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
                force_setattr(self, name, copied)
            elif name == "meta":
                force_setattr(self, name, plain_meta(value))

    def _printed(self, k: int) -> Iterator[RenderableType]:
        """The text of `show`, with `k` lines of the longest list."""
        yield Text(self.headline, style="bold")

    def _writers(self) -> Mapping[str, Writer]:
        """The content of a file, by suffix."""
        return {suffix: partial(_WRITERS[suffix], self) for suffix in self.loadable}

    def show(self, k: int = 10, console: Console | None = None) -> None:
        """Print the strongest entries.

        Args:
            k: Number of lines.
            console: Where to; standard output if None.
        """
        print_parts(self._printed(k), console)

    def _repr_html_(self) -> str:
        return as_html(lambda console: self.show(console=console))

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file, as plain values; a tensor is its type, its shape and its numbers in order."""
        return msgspec.to_builtins(self, enc_hook=_entry)

    def save(self, path: str | Path) -> Path:
        """Write a file in the format of its suffix, whole or not at all.

        Raises:
            InputError: unknown suffix, or the folder does not exist.
        """
        path, writers = check_path(path), self._writers()
        write = writers.get(path.suffix.lower())
        if write is None:
            raise InputError(
                f"Expected a file name ending in one of {' '.join(writers)}, got {path.name!r}. Choose one of these."
            )
        return write_whole(path, write)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a file of `save`.

        Raises:
            InputError: no such file, another suffix, or a foreign, damaged or newer file.
        """
        path = check_path(path)
        read = _READERS[path.suffix.lower()] if path.suffix.lower() in cls.loadable else None
        if read is None:
            raise InputError(
                f"Expected a file ending in {' or '.join(cls.loadable)}, which `{cls.__name__}.load` reads; got "
                f"{path.name!r:.100}."
            )
        with reading(path, f"`{cls.__name__}.save`"):
            return msgspec.convert(read(path, cls), cls, dec_hook=_tensor)


def as_array(tensor: Tensor) -> np.ndarray:
    """A tensor for numpy, which has no bfloat16."""
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()


# Meta -----------------------------------------------------------------------------------------------------------------


def plain_meta(meta: Any) -> dict[str, Any]:
    """A copy of some `meta` as JSON would return it: lists for tuples, strings for keys; NaN stays a number.

    Raises:
        InputError: it is not a dictionary, holds what JSON cannot, or is nested without end.
    """
    if not isinstance(meta, dict):
        raise InputError(f"Expected meta to be a dict, got {type(meta).__name__}. Pass names and values.")
    return _plain(meta, MOST_NESTED)


_LEAVES = frozenset({str, int, float, bool, type(None)})


def _plain(value: Any, depth: int) -> Any:
    if depth == 0:
        raise InputError(f"Expected meta with at most {MOST_NESTED} levels, got more. Use flatter values in it.")
    if isinstance(value, (list, tuple)):
        return [one if type(one) in _LEAVES else _plain(one, depth - 1) for one in value]
    if isinstance(value, dict):
        return {
            name if type(name) is str else _key(name): one if type(one) in _LEAVES else _plain(one, depth - 1)
            for name, one in value.items()
        }
    for kind in (str, int, float):  # such as numpy's subclasses of Python's numbers
        if isinstance(value, kind):
            return kind(value)
    raise InputError(
        f"Expected meta that can be written as JSON, got a {type(value).__name__} in it. Use plain values."
    )


def _key(name: Any) -> str:
    return str(name) if isinstance(name, str) else to_json(name if type(name) in _LEAVES else _plain(name, 1))


# Tensors --------------------------------------------------------------------------------------------------------------


class TensorEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in JSON.

    Attributes:
        dtype: Type of its numbers.
        shape: Sizes of its axes.
        values: Its numbers, the last axis first; JSON knows neither NaN nor infinities.
    """

    dtype: Literal["float16", "bfloat16", "float32", "float64"]
    shape: tuple[Index, ...]
    values: list[float | Literal["nan", "inf", "-inf"]]


def _entry(value: Any) -> Any:
    if not isinstance(value, Tensor):
        raise TypeError(f"{type(value).__name__} in it")
    numbers = [one if math.isfinite(one) else repr(one) for one in value.flatten().tolist()]
    return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape), "values": numbers}


def _tensor(kind: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    entry = msgspec.convert(value, TensorEntry)
    if math.prod(entry.shape) != len(entry.values):
        raise ValueError(f"{len(entry.values)} values for a tensor of shape {entry.shape}")
    return (
        torch.tensor([*map(float, entry.values)], dtype=torch.float64)
        .to(getattr(torch, entry.dtype))
        .reshape(entry.shape)
    )


# Files ----------------------------------------------------------------------------------------------------------------


def _check_format(path: Path, record: type[Record], found: object) -> None:
    """The error for a file of a different format, or of a different version of this one."""
    ours = str(record.__struct_config__.tag)
    family, _, version = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    name, _, known = ours.rpartition("/")
    if family != name:
        got = reprlib.repr(found)
        why = f"expected {ours!r}, got {got} as its format. Pass a file that `{record.__name__}.save` wrote"
    elif version == known:
        return
    elif version.isdecimal() and len(version) < 9 and int(version) < int(known):
        why = f"expected format {known}, got format {version} of an older TensorLens. Compute and save it again"
    else:
        why = (
            f"expected format {known}, got format {version[:20]!r}, which a newer TensorLens wrote. Install the newer "
            "one from its wheel or clone (the package is not published yet)"
        )
    raise InputError(f"Could not load {path.name!r}: {why}.")


def _write_json(record: Record, path: Path) -> None:
    path.write_text(to_json(_coded(record.as_dict()), ascii_only=True), encoding="utf-8")


def _write_safetensors(record: Record, path: Path) -> None:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    tensors = {name: value.contiguous() for name, value in fields.items() if isinstance(value, Tensor)}
    document = record.as_dict()
    text = to_json(_coded({name: document[name] for name in fields if name not in tensors}), ascii_only=True)
    header = {"format": str(record.__struct_config__.tag), "record": text}
    save_file(tensors, path, header)


def _read_json(path: Path, record: type[Record]) -> Any:
    document = from_json(path.read_text("utf-8"))
    _check_format(path, record, document.get("format") if isinstance(document, dict) else None)
    return _decoded(document)


def _read_safetensors(path: Path, record: type[Record]) -> Any:
    with safe_open(path, framework="pt") as file:
        header = file.metadata() or {}
        _check_format(path, record, header.get("format"))
        fields = _decoded(from_json(header["record"]))
        if not isinstance(fields, dict):
            raise TypeError("no fields in its header")
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dictionary
    return fields | tensors | {"format": header["format"]}


_WRITERS: dict[str, Callable[[Record, Path], None]] = {".json": _write_json, ".safetensors": _write_safetensors}
_READERS: dict[str, Callable[[Path, type[Record]], Any]] = {".json": _read_json, ".safetensors": _read_safetensors}


def _coded(value: Any) -> Any:
    """JSON has no NaN: a float that is not finite becomes {"float": "nan"}."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, dict):
        return {key: _coded(inner) for key, inner in value.items()}
    return [_coded(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _decoded(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: _decoded(inner) for key, inner in value.items()}
    return [_decoded(inner) for inner in value] if isinstance(value, list) else value
