"""A run over items: one line of JSON each, with raw scores, so that every number of a table can be computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorlens as tl
from bench.passages.items import Item
from bench.passages.scores import RULES, TARGETS, scores_of


def run(
    lens: tl.Lens,
    items: Sequence[Item],
    out: Path,
    *,
    rules: Sequence[str] = RULES,
    targets: Iterable[str] = TARGETS,
    seconds: float = 1e9,
    tell: Callable[[str], None] = print,
) -> int:
    """Measure the items that the file does not hold yet, until time is up; how many it holds then."""
    out.parent.mkdir(parents=True, exist_ok=True)
    known = {line["item"] for line in map(json.loads, out.read_text("utf-8").splitlines())} if out.is_file() else set()
    began = time.monotonic()
    with out.open("a", encoding="utf-8") as file:
        for number, item in enumerate(items):
            name = f"{item.judge}:{item.name}"
            if name in known:
                continue
            if time.monotonic() - began > seconds:
                break
            truth, found = scores_of(lens, item, rules, targets)
            digits = 3 if item.by_token else 5
            scores = {key: [float(f"{one:.{digits}g}") for one in some] for key, some in found.items()}
            line = {"judge": item.judge, "set": item.set, "item": name, "truth": truth, "scores": scores}
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            known.add(name)
            tell(f"{item.judge}: {number + 1} of {len(items)}")
    return len(known)


def write_lines(out: Path, lines: Iterable[dict[str, Any]], tell: Callable[[str], None] = print) -> int:
    """Append lines as they come; how many."""
    n = 0
    with out.open("a", encoding="utf-8") as file:
        for n, line in enumerate(lines, 1):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            tell(f"{line['judge']}: {n}")
    return n
