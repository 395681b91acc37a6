"""The table of strangers: `make strangers`, or `python -m strangers.table [part of a name …]` from the folder of tests.

Every stranger is judged by its witness, and what became of it goes to `docs/strangers.json` and, as a page, to the end
of `docs/compatibility.md`. Without arguments those are judged that are not in the file yet; with them, those whose
group or name has one of them in it.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench.families.table import STRANGERS
from strangers.cases import Verdict

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = {
    "x_transformers": "x-transformers",
    "vit_pytorch": "vit-pytorch",
    "open_clip": "open_clip_torch",
    "esm": "fair-esm",
    "sentence_transformers": "sentence-transformers",
}
"""Distributions that are called otherwise than what is imported of them."""

INTRODUCTION = """
Made by `make strangers`. Each model is built by its own package, made small, with every weight drawn at random in
float64. T is compared with a derivative that shares no code with the library: the model's own gradients between two of
its states, with attention weights, statistics of norms, gates and the ratios of activations detached from the graph.
*Exact* is the largest relative difference over single and many cotangents, rows, the bias and maps; maps are kept in
float32. *Refused* is an error with its reason.
"""


class Case(NamedTuple):
    """One line to be."""

    group: str
    name: str
    judge: Callable[[], Verdict]


def cases() -> Iterator[Case]:
    from strangers import (
        adversary,
        foreign,
        known_layouts,
        odd_arrangements,
        odd_hooks,
        odd_operations,
        odd_streams,
        odd_structures,
        odd_types,
        timm_zoo,
    )
    from strangers.cases import judge

    for family, names in timm_zoo.FAMILIES.items():
        yield from (Case(f"timm: {family}", name, lambda n=name: timm_zoo.judge_timm(n)) for name in names)
    for one in foreign.FOREIGNERS:
        yield Case(one.package, one.name, lambda one=one: foreign.judge_foreigner(one))
    groups = {
        "put together otherwise": known_layouts,
        "code around blocks": odd_structures,
        "unusual steps": odd_operations,
        "hooks and heads": odd_hooks,
        "streams and writes": odd_streams,
        "beginning, end and state": odd_arrangements,
        "roundings": odd_types,
        "written to mislead": adversary,
    }
    for group, module in groups.items():
        yield from (Case(f"by hand: {group}", one.name, lambda one=one: judge(one)) for one in module.STRANGERS)


def main(*wanted: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = DOCS / "strangers.json"
    found: dict[str, dict[str, Any]] = (
        {one["name"]: one for one in json.loads(path.read_text())} if path.exists() else {}
    )
    for case in cases():
        if any(part in f"{case.group}: {case.name}" for part in wanted) if wanted else case.name not in found:
            start = time.perf_counter()
            verdict = case.judge()
            found[case.name] = {
                "group": case.group,
                "name": case.name,
                "outcome": verdict.outcome,
                "detail": verdict.detail,
            }
            print(f"{case.group} | {case.name} | {verdict} | {time.perf_counter() - start:.1f} s", flush=True)
            path.write_text(json.dumps(list(found.values()), indent=1, ensure_ascii=False) + "\n")
    order = {case.name: n for n, case in enumerate(cases())}
    records = sorted((one for one in found.values() if one["name"] in order), key=lambda one: order[one["name"]])
    path.write_text(json.dumps(records, indent=1, ensure_ascii=False) + "\n")
    compatibility = DOCS / "compatibility.md"
    compatibility.write_text(compatibility.read_text().partition(STRANGERS)[0].rstrip() + "\n\n" + page(records))


def page(records: list[dict[str, Any]]) -> str:
    """The end of the page, from its heading on."""
    packages = {
        one["group"].partition(":")[0]: one["group"] for one in records if not one["group"].startswith("by hand")
    }
    versions = ", ".join(f"{PACKAGES.get(name, name)} {_version(PACKAGES.get(name, name))}" for name in packages)
    lines = [STRANGERS, INTRODUCTION, f"Versions: {versions}.", "", *_summary(records)]
    by_group: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in records:
        by_group[one["group"].partition(":")[0]].append(one)
    for group, of_group in by_group.items():
        lines += ["", f"### {group}", "", "| kind | model | result |", "|---|---|---|"]
        lines += [f"| {one['group'].partition(': ')[2]} | {one['name']} | {_result(one)} |" for one in of_group]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(absent)"


def _summary(records: list[dict[str, Any]]) -> Iterator[str]:
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for one in records:
        counts[one["group"]][one["outcome"]] += 1
    outcomes = [name for name in ("exact", "refused", "wrong", "crash") if any(name in of for of in counts.values())]
    yield f"| models | {' | '.join(outcomes)} |"
    yield f"|---|{'---|' * len(outcomes)}"
    for group, of_group in counts.items():
        yield f"| {group} | {' | '.join(str(of_group[name]) for name in outcomes)} |"
    total = sum(counts.values(), Counter[str]())
    yield f"| all | {' | '.join(str(total[name]) for name in outcomes)} |"


def _result(one: dict[str, Any]) -> str:
    detail = " ".join(one["detail"].split()).replace("|", "\\|")
    return f"{one['outcome']}: {detail[:300]}"


if __name__ == "__main__":
    main(*sys.argv[1:])
