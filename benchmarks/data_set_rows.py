"""The rows of docs/performance.md about maps of a data set, from what `benchmarks/data_sets.py` wrote."""

from __future__ import annotations

from typing import Any

BARS = {
    "128 tokens, in_class": 0.6,
    "256 tokens, in_class": 0.5,
    "in_out": 0.4,
    "sketch, 16 probes": 0.04,
    "contribution": 0.1,
}
"""What a map of a data set was to reach, by how its name ends."""


def data_set_rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]], str]:
    """Heads, rows and what is said before them: the ratios of each run, and the bars."""
    runs = [run["batches"] for run in found.get("runs", []) if "batches" in run]
    names = list(dict.fromkeys(name for run in runs for name in run))
    rows = []
    for name in names:
        ratios = [run[name]["ratio"] for run in runs if name in run]
        rates = [run[name]["samples a second"] for run in runs if "samples a second" in run.get(name, {})]
        each = [f"{run[name]['ratio']:.3f}" if name in run else "–" for run in runs]
        slowest, fastest = min(map(min, rates)), max(map(max, rates))
        bar = next(bar for end, bar in BARS.items() if name.endswith(end))
        each.append(f"{bar:g}" + (", missed" if ratios[-1] < bar else ""))
        rows.append([name, *each, f"{min(ratios):.3f}–{max(ratios):.3f}", f"{slowest:,.0f}–{fastest:,.0f}"])
    heads = ["samples and map", *(f"run {k + 1}" for k in range(len(runs)))]
    heads += ["bar, by the last run", "spread", "samples a second"]
    before = (
        f"{found.get('device', '')}. `lens.maps` with the batch size that it chooses, over plain input × gradient of "
        "the same samples at the better of batch sizes 128 and 256: 1 is as fast. Random weights; 2,048 samples, a "
        "quarter of them for sketches and an eighth for contributions. The runs are of successive states of the code "
        "on the same kind of machine, so that the spread is of both; samples a second, slowest to fastest, are of the "
        f"runs that kept them. In the last, input × gradient made {found.get('input x gradient, last run', '')}. In "
        "the better runs the decoder's maps are as fast; BERT's passes are so short that Python sets the pace. From "
        "run 6 on up to 512 samples go together, and no batch waits for the one before. In runs 6 and 7 the graphs of "
        "batches under way were kept too long, so that memory could run out, batches were halved and Python collected "
        "its garbage for 0.2 s; from run 8 on they are let go, the sample that proves a batch goes beside the next "
        "one, and norms and GELU take fewer kernels. Contributions go by folded blocks from run 4 on, in bands of 32 "
        "tokens there and of 16 since, from run 7 on by weights laid out for the matrix units. In "
        "run 8 smollm2's batches could still be halved on the way; run 9, which the clock ended after two rows, plans "
        "them with less memory than their graphs may take." + _peers(found.get("peers", {}))
    )
    return heads, rows, before


def _peers(found: dict[str, Any]) -> str:
    if not found:
        return ""
    rates = ", ".join(f"`{name}` {rate:,}" for name, rate in found["samples a second"].items())
    return (
        f" Beside them on that machine, as plain loops over {found['samples']:,} samples of smollm2's shape and "
        f"{found['tokens']} tokens in batches of {found['batch']}, samples a second: {rates}. `lxt`'s CP-LRP, whose "
        "backward pass leaves out queries and keys, is faster than our In+Class; its AttnLRP is as fast."
    )
