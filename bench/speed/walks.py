"""What a question takes of Python: calls, files of the library, and runs of the model, counted on a toy when warm.

The numbers are the same on every machine; they stand in ARCHITECTURE.md.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import tensorlens as tl
from bench.speed.models import lens_of_numbers, token_ids
from tensorlens.studies import perturbation

LIBRARY = str(Path(tl.__file__).parent)


def walks(name: str, n_tokens: int) -> list[dict[str, Any]]:
    """Each walk of ARCHITECTURE.md, once to warm up and once counted."""
    lens, ids = lens_of_numbers(name), token_ids(n_tokens)
    texts = [" ".join(map(str, token_ids(n_tokens)[k:] + ids[:k])) for k in range(4)]

    def perturbed() -> None:
        with tempfile.TemporaryDirectory() as folder:
            perturbation(lens, texts, folder, n_tokens=n_tokens, replacements=("token",), progress=False)

    asked: dict[str, Callable[[], Any]] = {
        "recording": lambda: lens(ids),
        "map": lambda: lens(ids).map("tensor.in_class", -1),
        "slice": lambda: lens(ids).rows(n_tokens - 1),
        "data set of 4": lambda: list(lens.maps(texts, "tensor.in_class", progress=False)),
        "components": lambda: lens(ids).components(-1, 7),
        "certificate": lambda: lens(ids).certificate(),
        "perturbation of 4": perturbed,
    }
    return [{"walk": label} | counted(lens, work) for label, work in asked.items()]


def counted(lens: tl.Lens, work: Callable[[], Any]) -> dict[str, int]:
    """Python calls (in the library and in all), files of the library, and runs of the model."""
    work()
    runs, files, calls = list[None](), set[str](), [0, 0]
    handle = lens.model.register_forward_pre_hook(lambda *_: runs.append(None))
    work()  # a hook is another kind of model, whose parts are found again

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            place = frame.f_code.co_filename
            calls[0] += 1
            if place.startswith(LIBRARY):
                calls[1] += 1
                files.add(place)

    runs.clear()
    sys.setprofile(look)
    try:
        work()
    finally:
        sys.setprofile(None)
        handle.remove()
    return {"calls": calls[0], "in the library": calls[1], "files": len(files), "model runs": len(runs)}
