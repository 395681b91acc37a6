"""Quantised `.gguf` files, dequantised once into a folder of safetensors.

The copy is float32: the blocks of a quantised file are products of a half-precision scale and small integers, which
neither float16 nor bfloat16 holds without rounding again.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorlens.errors import LoadError, missing_extra
from tensorlens.models.cache import cache_key, convert_once
from tensorlens.models.foreign_files import MOST_BLOCKS, check_proportion, foreign_reader
from tensorlens.models.gguf_header import read_once
from tensorlens.models.gguf_tokenizer import Metadata, read_tokenizer

_MAGIC = b"GGUF"


def convert_gguf(name: str, parts: Sequence[Path], *, pinned: bool = False) -> Path:
    """The folder a `.gguf` file converts to, made on first use.

    Args:
        name: For messages and the name of the copy.
        parts: The file, or the pieces it was cut into, in order.
        pinned: See `cache_key`.

    Raises:
        LoadError: The file is not GGUF, or its architecture is one transformers cannot read.
        MissingExtraError: `gguf` or `accelerate` is not installed.
    """
    check_magic(name, parts[0])

    def make(target: Path) -> None:
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise missing_extra("Reading a .gguf file", package, "gguf")
        with foreign_reader(lambda said: _unreadable(name, said)):  # noqa: SIM117  # the file is removed within
            with _one_file(parts, target) as file, _progress_for_people(), read_once(file):
                _dequantise(name, file, target)

    return convert_once(cache_key(name, parts, pinned=pinned), make)


def check_magic(name: str, file: Path) -> None:
    """Refuse a file that does not begin as GGUF files do.

    Raises:
        LoadError: It does not.
    """
    with file.open("rb") as stream:
        head = stream.read(len(_MAGIC))
    if head != _MAGIC:
        raise LoadError(
            f"{name}: a GGUF file begins with {_MAGIC!r}, but {file.name} begins with {head!r}. "
            "Check that the file was downloaded completely and is no link or web page."
        )


@contextlib.contextmanager
def _one_file(parts: Sequence[Path], target: Path) -> Iterator[Path]:
    """The file itself, or its pieces put together beside the copy for as long as the conversion takes."""
    if len(parts) == 1:
        yield parts[0]
        return
    whole = target / "assembled.gguf"
    with whole.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    yield whole
    whole.unlink()


@contextlib.contextmanager
def _progress_for_people() -> Iterator[None]:
    """Show the bar of the conversion, which takes up to a minute, in a terminal only: it cannot be switched off."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _unreadable(name: str, said: str) -> str:
    return (
        f"{name}: the .gguf file could not be converted ({said}). transformers reads a part of the GGUF "
        "architectures only; load the original checkpoint from its folder or hub id instead."
    )


def _dequantise(name: str, file: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    check_header(name, file)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    check_proportion(name, config, AutoModelForCausalLM, [file])
    read_tokenizer(file).save_pretrained(target)
    reader: Any = AutoModelForCausalLM
    model, info = reader.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    if missing := sorted(info["missing_keys"]):
        raise LoadError(
            f"{file.name}: every weight of a {type(model).__name__} was expected, but {missing[:5]} are missing "
            f"({len(missing)} in all). Load the original checkpoint from its folder or hub id instead."
        )
    # What is saved is no longer quantised, and must not be taken for it when read.
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)


def check_header(name: str, file: Path) -> None:
    """Refuse counts that would take for ever to build a model of.

    Raises:
        LoadError: The header counts more blocks than any model has.
    """
    metadata = Metadata(file)
    architecture = metadata.get("general.architecture", "")
    for what in ("block_count", "expert_count"):
        count = metadata.get(f"{architecture}.{what}", 0)
        if not isinstance(count, int) or not 0 <= count <= MOST_BLOCKS:
            raise LoadError(f"{name}: the header says {what} = {count}; at most {MOST_BLOCKS} are read.")
