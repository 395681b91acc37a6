"""Token maps on disk: what the JSON and safetensors files hold, and how a file is replaced whole.

A record here is a plain dict of labels, method, meta and two tensors, which keeps this file free
of `TokenMap` itself. Drawing formats (.html, .png, …) belong to `views`.
"""

from __future__ import annotations

import csv
import json
import math
import reprlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from tensorlens.errors import InputError

FORMAT = "tensorlens.token_map/1"
_FAMILY, _, _VERSION = FORMAT.rpartition("/")
_FORMULA = ("=", "+", "-", "−", "@", "＝", "＋", "－", "＠", "\t", "\r")
_TEXT_FIELDS = ("out_tokens", "in_tokens", "method", "meta")


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling of `path`, then put it in place; on failure nothing is left behind."""
    if not path.parent.is_dir():
        raise InputError(f"Expected an existing folder for {str(path)!r}, got none. Create {str(path.parent)!r} first.")
    if path.is_dir():
        raise InputError(f"Expected a file name, got the folder {str(path)!r}. Add a name such as 'map.html'.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        write(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Strict JSON with every digit of every score; NaN and infinities are written as strings."""
    document = {"format": FORMAT, **{name: record[name] for name in _TEXT_FIELDS}}
    document["meta"] = _encode(document["meta"])
    for name in ("scores", "bias_share"):
        tensor = record[name]
        document[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "values": [_number(value) for value in tensor.flatten().tolist()],
        }
    path.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The record in a file of `write_json`; `InputError` for a foreign, damaged or newer one."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise _damaged(path, error) from error
    _check_format(path, document.get("format") if isinstance(document, dict) else None)
    try:
        record = _text_fields(document)
        record["meta"] = _decode(record["meta"])
        record["scores"] = _tensor(document["scores"])
        record["bias_share"] = _tensor(document["bias_share"])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
        raise _damaged(path, error) from error
    return record


def write_safetensors(path: Path, record: dict[str, Any]) -> None:
    """Both tensors bit for bit, everything else as JSON in the header."""
    fields = {name: record[name] for name in _TEXT_FIELDS}
    text = json.dumps(fields | {"meta": _encode(fields["meta"])}, allow_nan=False)
    tensors = {name: record[name].contiguous() for name in ("scores", "bias_share")}
    path.write_bytes(save(tensors, metadata={"format": FORMAT, "record": text}))


def read_safetensors(path: Path) -> dict[str, Any]:
    """The record in a file of `write_safetensors`; `InputError` for a foreign, damaged or newer one."""
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            _check_format(path, header.get("format"))
            record = _text_fields(json.loads(header["record"]))
            record["meta"] = _decode(record["meta"])
            return record | {name: file.get_tensor(name) for name in ("scores", "bias_share")}
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise _damaged(path, error) from error


def write_csv(path: Path, record: dict[str, Any]) -> None:
    """One line per pair of output and input, for spreadsheets and data frames.

    A spreadsheet would run a label that begins like a formula; such a label is written behind an apostrophe.
    """
    with path.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["out_token", "out_text", "in_token", "in_text", "score"])
        for i, row in enumerate(record["scores"].tolist()):
            label = _cell(record["out_tokens"][i])
            writer.writerows((i, label, j, _cell(record["in_tokens"][j]), score) for j, score in enumerate(row))


def _cell(label: str) -> str:
    return f"'{label}" if label.startswith(_FORMULA) else label


def _text_fields(document: dict[str, Any]) -> dict[str, Any]:
    record = {name: document[name] for name in _TEXT_FIELDS}
    for name, kind in (("out_tokens", list), ("in_tokens", list), ("method", str), ("meta", dict)):
        if not isinstance(record[name], kind):
            raise TypeError(f"{name} is a {type(record[name]).__name__}")
    return record | {name: tuple(map(str, record[name])) for name in ("out_tokens", "in_tokens")}


def _check_format(path: Path, found: object) -> None:
    family, _, version = found.rpartition("/") if isinstance(found, str) else ("", "", "")
    if family != _FAMILY:
        raise InputError(
            f"Expected a token map ({FORMAT!r}) in {path.name!r}, got {reprlib.repr(found)} as its format. "
            "Pass a file that TokenMap.save wrote."
        )
    if version != _VERSION:
        raise InputError(
            f"Expected token map format {_VERSION} in {path.name!r}, got format {version[:20]}, which a newer "
            "TensorLens wrote. Upgrade with: pip install --upgrade attention-tensorlens"
        )


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"Expected a complete token map in {path.name!r}, got a file that cannot be read "
        f"({type(error).__name__}: {str(error)[:300]}). It may be cut short or of another kind; save the map again."
    )


def _tensor(entry: dict[str, Any]) -> Tensor:
    dtype = getattr(torch, entry["dtype"])
    values = np.array(entry["values"], dtype=np.float64)
    return torch.from_numpy(values).to(dtype).reshape(entry["shape"])


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else repr(value)


def _encode(value: Any) -> Any:
    """JSON has no NaN: a non-finite float inside meta becomes {"float": "nan"}."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if isinstance(value, dict):
        return {key: _encode(inner) for key, inner in value.items()}
    return [_encode(inner) for inner in value] if isinstance(value, list) else value


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {"float"} and isinstance(value["float"], str):
            return float(value["float"])
        return {key: _decode(inner) for key, inner in value.items()}
    return [_decode(inner) for inner in value] if isinstance(value, list) else value
