"""A run over items: one line of JSON each, with raw scores, so that every number of a table can be computed again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import tensorlens as tl
from bench.judges.peers import Peer, save_model
from bench.passages.items import Item
from bench.passages.scores import RULES, TARGETS, passages_of, scores_of, units_of


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


def ask_peers(
    lens: tl.Lens,
    items: Sequence[Item],
    names: Sequence[str],
    folder: Path,
    python: str | None,
    tell: Callable[[str], None] = print,
) -> Iterable[dict[str, Any]]:
    """Lines with the scores of other packages for the same items, and one line about these packages.

    They are given the passages as sources, and score tokens, which are added up where passages are ranked.
    """
    save_model(lens, folder / "model")
    lines, questions, units, about = list[dict[str, Any]](), list[dict[str, Any]](), list[Any](), dict[str, Any]()
    for index, item in enumerate(items, 1):
        answer = lens.answer(item.prompt, item.answer)
        truth, of = units_of(answer, item)
        asked = {"index": index, "ids": list(answer.prompt.ids), "answer": list(answer.ids), "by_token": item.by_token}
        questions.append(asked | {"units": [list(one.tokens) for one in passages_of(answer, item)]})
        units.append([one.tokens for one in of])
        line = {"judge": item.judge, "set": item.set, "item": f"{item.judge}:{item.name}", "truth": truth}
        lines.append(line | {"scores": {}})
    for name in names:
        found = Peer(name, folder, python, tell).run(folder / "model", questions)
        right = {index: one["scores"] for index, one in found["answers"].items() if "scores" in one}
        errors = {one["error"] for one in found["answers"].values() if "error" in one}
        for index, scores in right.items():
            lines[index - 1]["scores"][name] = [sum(scores[k] for k in tokens) for tokens in units[index - 1]]
        about[name] = {"error": errors.pop()} | found["about"] if errors else found["about"]
        about[name]["n"] = len(right)
    yield {"peers": about}
    yield from (line for line in lines if line["scores"])


def write_lines(out: Path, lines: Iterable[dict[str, Any]], tell: Callable[[str], None] = print) -> int:
    """Append lines as they come; how many."""
    n = 0
    with out.open("a", encoding="utf-8") as file:
        for n, line in enumerate(lines, 1):
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            tell(f"{line.get('judge', 'peers')}: {n}")
    return n
