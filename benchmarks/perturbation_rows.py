"""The rows of docs/performance.md about the perturbation study, from what `benchmarks/perturbation.py` wrote."""

from __future__ import annotations

from typing import Any

PERTURBATION = (
    "NVIDIA H200, torch 2.11, SmolLM2's shape, random weights but where it says real ones, windows of 128 tokens "
    "(of WikiText-2 with the real ones), one process, one replacement, "
    "all 20 methods, in groups of 16: maps of a group from one recording beside maps of one sample after the other; "
    "replaced copies of several samples share batches in both. One run, whose spread was not kept. In float32, one "
    "sample after the other, it had been 0.45 samples a second; ten times that was the bar."
)
HEADS = ["precision", "together, samples a second", "over 0.45", "one by one", "ratio", "where the time goes"]
NAMES = {
    "plain model": "replaced copies",
    "rollout.w_attn": "measures of `w_attn` and its kin",
    "rollout.attn": "attention",
}
"""What the first of several methods pays for all of them."""


def perturbation_rows(found: dict[str, Any]) -> list[list[str]]:
    """Samples a second together and one by one, and the parts that take more than two hundredths."""
    rows = []
    for name, one in found.items():
        together, alone = (one.get(f"{way}, samples a second") for way in ("together", "one by one"))
        beside = ["", ""] if alone is None else [f"{alone:.2f}", f"**{together / alone:.1f}×**"]
        said = _shares(dict(one.get("parts, seconds a sample", {})))
        rows.append([name, f"{together:.2f}", f"{together / 0.45:.1f}×", *beside, said])
    return rows


def _shares(parts: dict[str, float]) -> str:
    if not parts:
        return ""
    total = parts.pop("all")
    rest = total - sum(parts.values())
    largest = {NAMES.get(part, part): seconds for part, seconds in parts.items() if seconds > 0.02 * total}
    shares = [f"{part} {100 * seconds / total:.0f} %" for part, seconds in largest.items()]
    return ", ".join([*shares, f"the rest of the study {100 * rest / total:.0f} %"])
