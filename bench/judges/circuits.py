"""How much circuits recover: those of every rule set, of integrated gradients and of random edges, pair by pair.

`python -m bench.judges.circuits MODEL PAIRS --about WHERE`; PAIRS is a folder with ioi.csv and greater_than.csv. Each
pair becomes a line of bench/records/circuits/MODEL.jsonl.gz, and pairs in that file are not run again. `python -m bench
tables` computes CPR and CMD from these files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch

import tensorlens as tl
from bench.judges.pairs import patching_pairs
from bench.records import FOLDER
from tensorlens.inside.circuit import Order
from tensorlens.studies.options import MEMBERS


def circuits(lens: tl.Lens, item: Any) -> Iterator[tuple[str, Callable[[], tl.Circuit]]]:
    """Ways to score the edges of a pair, by name."""
    asked = (list(item.ids), list(item.extra["corrupted"]), item.extra["weights"])
    for member in MEMBERS:
        yield member, lambda member=member: tl.circuit(lens.with_rules(member), *asked, progress=False)
    yield "integrated gradients", lambda: tl.circuit(lens, *asked, scores="integrated", progress=False)

    def random() -> tl.Circuit:
        made = tl.circuit(lens, *asked, progress=False)
        scores = torch.rand(made.scores.shape, generator=torch.Generator().manual_seed(0), dtype=made.scores.dtype)
        return replace(made, scores=torch.where(made.is_wired, scores, 0))

    yield "random", random


def line_of(lens: tl.Lens, item: Any, orders: Sequence[Order]) -> dict[str, Any]:
    """What circuits of one pair recover at every share: by order, then by the way in which they were scored."""
    shares, n_edges, found = list[float](), 0, {order: dict[str, list[float]]() for order in orders}
    for name, make in circuits(lens, item):
        circuit = make()
        n_edges = circuit.size
        for order in orders:
            judged = circuit.faithfulness(order=order, progress=False)
            shares = [share for share, _ in judged.curve]
            found[order][name] = [round(f, 5) for f in judged.pairs[0]]
            sys.stderr.write(f"{item.name} {name}, {order}: CPR {judged.cpr:.3f}, CMD {judged.cmd:.3f}\n")
    return {"set": item.set, "item": item.name, "edges": n_edges, "shares": shares, "f": found}


def main() -> None:
    """Judge the pairs that are not there yet, the sets in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--about", required=True, help="Device and precision, in words.")
    parser.add_argument("--limit", type=int, default=5, help="Largest number of pairs per set.")
    parser.add_argument("--seconds", type=float, default=1e9, help="Start no pair after this many seconds.")
    parser.add_argument("--order", action="append", choices=get_args(Order), help="Ranking (default: magnitude).")
    parser.add_argument("--out", type=Path, default=FOLDER / "circuits")
    parser.add_argument("--device")
    given = parser.parse_args()
    lens = tl.load(given.model, **({} if given.device is None else {"device": given.device}))
    began, items = time.monotonic(), patching_pairs(lens, given.pairs, limit=given.limit).items
    path: Path = given.out / f"{given.model}.jsonl.gz"
    lines = [{"model": given.model, "ran": given.about}]
    if path.exists():
        lines = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    known = {line.get("item") for line in lines}
    for item in sorted(items, key=lambda one: int(one.name.rpartition(":")[2])):
        if item.name in known or time.monotonic() - began > given.seconds:
            continue
        lines.append(line_of(lens, item, given.order or ["magnitude"]))
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, sort_keys=True, allow_nan=False) + "\n" for line in lines)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
