"""Maps to draw, and labels that break careless renderers."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from tensorlens.views.record import MapView

WORDS = ("The", " E", "iff", "el", " Tower", " is", " in")
SCRIPT = "<script>window.hacked = 1</script>"
HOSTILE = (
    SCRIPT,
    f"</script>{SCRIPT}",
    "<img src=x onerror='window.hacked = 1'>",
    "\"'`&<!--",
    "<!--<script ",
    "שלום",
    " العربية",
    "e\u0301\u0323",
    "\u0301",
    "👩\u200d👩\u200d👧",
    "字字",
    "x" * 4000,
    "\n",
    "\t",
    "",
    "  ",
    "\u202eevil",
    "\ud800",
    "[bold]b[/bold]",
    "$a_b$",
    "\x1b[31m",
)
_PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
PIXEL = f"data:image/png;base64,{_PNG}"


def map_view(scores: Any, labels: Sequence[str] | None = None, **changes: Any) -> MapView:
    """A view of these scores; outputs and inputs take their labels from the same text."""
    scores = np.asarray(scores, dtype=np.float64)
    n_out, n_in = scores.shape
    text = tuple(labels or [f" w{k}" for k in range(max(n_out, n_in))])
    fields = {"out_tokens": text[:n_out], "in_tokens": text[:n_in], "title": "tensor.in_out"}
    return MapView(scores=scores, **(fields | {"bias_share": np.full(n_out, 0.25)} | changes))


def square() -> MapView:
    """A signed map of seven tokens; row i, column j is 7·i + j − 20."""
    scores = np.arange(49.0).reshape(7, 7) - 20
    return map_view(scores, labels=WORDS)


def background(locator) -> tuple[int, ...]:
    """The colour behind an element."""
    text = locator.evaluate("node => getComputedStyle(node).backgroundColor")
    return tuple(int(part) for part in text.removeprefix("rgb(").rstrip(")").split(","))


def eventually(check) -> None:
    """For what has no `expect`: pictures on a canvas follow with the next frame."""
    for _ in range(100):
        if check():
            return
        time.sleep(0.05)
    assert check()


def patience() -> float:
    """How many times longer work may take than on a quiet machine: processes that want a core, by cores."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
