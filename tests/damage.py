"""Damage to files: bytes changed, cut, grown and moved; values of JSON documents replaced."""

from __future__ import annotations

import json
import random
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tensorlens.errors import TensorLensError

SAMPLE, ALL = 25, 500
MOST_SECONDS = 30.0
MOST_BYTES = 2 << 30
"""What one damaged file may take; it is larger than all of the files together by far."""

NUMBERS = (0, -1, 1, 3, 2**31 - 1, 2**31, 2**63 - 1, 10**12, 1e300, -(2**40))
VALUES = (*NUMBERS, None, True, "", "gelu", "\x00", "\ud800", [], {}, [[]], "a" * 10_000, "../../etc/passwd")

Damage = Callable[[random.Random, bytes], bytes]


def flip(draw: random.Random, content: bytes) -> bytes:
    """Some bytes changed, most of them where headers are."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8, 64))):
        near = draw.random() < 0.8
        changed[draw.randrange(min(len(changed), 2_000) if near else len(changed))] = draw.randrange(256)
    return bytes(changed)


def cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def grow(draw: random.Random, content: bytes) -> bytes:
    """A number of the header made large."""
    at = draw.randrange(min(len(content), 2_000) - 8)
    number = draw.choice((2**16, 2**31, 2**32 - 1, 2**40, 2**62, 2**64 - 1))
    return content[:at] + number.to_bytes(8, "little") + content[at + 8 :]


def splice(draw: random.Random, content: bytes) -> bytes:
    """A piece moved elsewhere."""
    start, stop, at = sorted(draw.randrange(len(content)) for _ in range(3))
    return content[:at] + content[start:stop] + content[at:]


def reword(draw: random.Random, content: bytes) -> bytes:
    """One value of a JSON document replaced, wherever it is."""
    document = json.loads(content)
    places = list(_places(document))
    for _ in range(draw.choice((1, 1, 2, 4))):
        parent, key = draw.choice(places)
        if isinstance(parent, dict) and draw.random() < 0.15:
            parent.pop(key, None)
        elif isinstance(parent, dict) or key < len(parent):
            parent[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def _places(value: object):
    for key, one in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(one)


def header_words(draw: random.Random, content: bytes) -> bytes:
    """The same in the JSON that stands in the header of a safetensors file, and in the record within it."""
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    records = [key for key, text in header.get("__metadata__", {}).items() if text.startswith("{")]
    if draw.random() < 0.7 and records:
        header["__metadata__"][records[0]] = reword(draw, header["__metadata__"][records[0]].encode()).decode()
        changed = json.dumps(header).encode()
    else:
        changed = reword(draw, json.dumps(header).encode())
    changed += b" " * (-len(changed) % 8)
    return len(changed).to_bytes(8, "little") + changed + content[8 + size :]


BYTES = (flip, cut, grow, splice)
WORDS = (reword, reword, reword, flip, cut)


def refusals(name: str, count: int, file: Path, damages: Sequence[Damage], read: Callable[[Path], object]) -> int:
    """Damage a file `count` times and read it: how often an error of ours came. Anything else that is raised fails."""
    content, refused = file.read_bytes(), 0
    for seed in range(count):
        draw = random.Random(f"{name} {seed}")
        file.write_bytes(draw.choice(damages)(draw, content))
        began, before = time.process_time(), peak()
        try:
            read(file)
        except TensorLensError as error:
            refused += 1
            assert len(str(error)) < 2_000
        except BaseException as error:
            pytest.fail(f"{name} {seed}: {type(error).__name__}: {error}")
        assert time.process_time() - began < MOST_SECONDS, seed
        assert peak() - before < MOST_BYTES, seed
    return refused


def peak() -> int:
    """The most memory that this process had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
