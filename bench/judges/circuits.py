"""CPR and CMD of circuits: every rule set, integrated gradients and random edges, on pairs of prompts.

`python -m bench.judges.circuits MODEL PAIRS [--limit N]`; PAIRS is a folder with ioi.csv and greater_than.csv. Circuits
are scored pair by pair, and judged by running the model with everything outside of them corrupted.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import tensorlens as tl
from bench.judges.pairs import patching_pairs
from tensorlens.errors import TensorLensError

MEMBERS = ("paper", "half_gate", "attn_lrp", "gim", "jacobian")


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


def main() -> None:
    """Print a line for every way and set."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("pairs", type=Path)
    parser.add_argument("--limit", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no further pair after so long.")
    parser.add_argument("--device")
    given = parser.parse_args()
    lens = tl.load(given.model, **({} if given.device is None else {"device": given.device}))
    found: dict[tuple[str, str, str], list[tl.Faithfulness]] = {}
    began, items = time.monotonic(), patching_pairs(lens, given.pairs, limit=given.limit).items
    for item in sorted(items, key=lambda one: int(one.name.rpartition(":")[2])):  # the sets in turn
        if time.monotonic() - began > given.seconds:
            break
        for name, make in circuits(lens, item):
            try:
                circuit = make()
                for order in ("magnitude", "signed"):
                    judged = circuit.faithfulness(order=order, progress=False)
                    found.setdefault((item.set, name, order), []).append(judged)
                    sys.stderr.write(f"{item.name} {name} {order} CPR {judged.cpr:.3f} CMD {judged.cmd:.3f}\n")
            except TensorLensError as error:
                sys.stderr.write(f"{item.name} {name}: {error}\n")
    for (set_, name, order), some in sorted(found.items()):
        cpr, cmd = (sum(getattr(one, area) for one in some) / len(some) for area in ("cpr", "cmd"))
        sys.stdout.write(f"| {set_} | {name} | {order} | {cpr:.3f} | {cmd:.3f} | {len(some)} |\n")


if __name__ == "__main__":
    main()
