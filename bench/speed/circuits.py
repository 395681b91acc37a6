"""Patching in turns with TransformerLens, and a circuit judged at ten sizes: SmolLM2, one pair of prompts.

TransformerLens is timed where it can be imported. On a CPU, time is that of the process, which does not count what
others do on the machine.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tensorlens as tl
from bench.judges.peer_process import transformer_lens
from bench.judges.peers import save_model
from bench.speed.models import device
from bench.speed.timing import finish, timed

TEXT = "When Mary and John went to the store, {} gave a drink to"


def in_turns(works: dict[str, Callable[[], Any]], n: int = 7) -> dict[str, list[float]]:
    """Seconds of each, one after the other, n times."""
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(n + 2):
        for name, work in works.items():
            began = clock()
            work()
            finish()
            found[name] += [clock() - began] if turn > 1 else []
    return found


def circuit_rows() -> list[dict[str, str]]:
    """Effects predicted, measured, and circuits judged."""
    lens = tl.load("smollm2-135m", device=device())
    clean, corrupted = (lens.processor(TEXT.format(name))["input_ids"] for name in ("John", "Mary"))
    first, second = (lens.processor(name)["input_ids"][0] for name in (" Mary", " John"))

    def patch(rules: str, **more: Any) -> Callable[[], tl.Patching]:
        own = lens.with_rules(rules)
        return lambda: tl.patching(own, clean, corrupted, (first, second), progress=False, **more)

    works: dict[str, Callable[[], Any]] = {f"tl.patching, {rules}": patch(rules) for rules in ("paper", "jacobian")}
    labels = [*map(str, works["tl.patching, jacobian"]().labels)]
    question = {"ids": clean, "corrupted": corrupted, "weights": [(first, 1.0), (second, -1.0)], "labels": labels}
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_model(lens, Path(folder))
            score, _ = transformer_lens(folder, "")
        works["TransformerLens"] = lambda: score(question)
    except ImportError as error:
        sys.stderr.write(f"TransformerLens is not timed: {error}\n")
    seconds = in_turns(works)
    rivals, rows = seconds.get("TransformerLens"), []
    for name, some in seconds.items():
        ratio = "" if rivals is None else f"{median(a / b for a, b in zip(some, rivals, strict=True)):.2f}"
        what = f"{name}, {len(labels)} effects predicted"
        rows.append({"what": what, "time": f"{1e3 * median(some):.3g} ms", "ratio": ratio})

    def scored() -> tl.Circuit:
        return tl.circuit(lens.with_rules("jacobian"), clean, corrupted, (first, second), progress=False)

    circuit = scored()
    sizes = [min(1.0, 5000 / circuit.size) * k / 10 for k in range(1, 11)]
    times = {
        "the same effects measured": timed(patch("jacobian", verify=True), n=3),
        "tl.circuit, all edges scored": timed(scored),
        f"faithfulness at ten sizes up to 5,000 of {circuit.size} edges": timed(
            lambda: circuit.faithfulness(sizes, progress=False), n=3
        ),
    }
    return rows + [{"what": what, "time": str(one), "ratio": ""} for what, one in times.items()]
