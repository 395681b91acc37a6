"""`python -m benchmarks.page`: docs/performance.md from the JSON in benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "performance.md"

INTRODUCTION = """\
# Performance

Ratios of medians measured in one run, on real Hugging Face classes with the named configuration and random weights.
"The Jacobian way" is the paper's: the model patched by hand, differentiated at the best chunk size found
(`torch.func.jacrev` and batched backward passes are both tried), at the same precision. Run it yourself with
`python -m benchmarks peaks slices norms sketches long`, on a CPU or a GPU.
"""

OPEN = """\
## What remains

- By operation count a slice could be at most about twice as fast as backward passes (about 10·D² against 20·D² a token,
  cotangent and block); the measured ratio is close to that.
- The norm map reaches half of the measured peak or more in bfloat16, less in TF32. The rest is not yet profiled.
- At 131,072 tokens the 8B configuration runs out of memory on this device.
"""


def main() -> None:
    """Write the page."""
    parts: dict[str, Any] = {}
    settings: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.json")):
        content = json.loads(path.read_text())
        parts |= content["parts"]
        settings |= {key: str(value) for key, value in content["setting"].items() if value}
    peaks = parts["peaks"][0]
    sections = [
        INTRODUCTION,
        _setting(settings, peaks),
        _slices(parts),
        _norms(parts),
        _sketches(parts),
        _long(parts),
        OPEN,
    ]
    PAGE.write_text("\n".join(sections))


def _setting(settings: dict[str, str], peaks: dict[str, float]) -> str:
    rates = ", ".join(f"{name} {peaks[name] / 1e12:.0f} TFLOP/s" for name in ("float32", "tf32", "bfloat16"))
    where = f"{settings['device']}, torch {settings['torch']}, transformers {settings['transformers']}"
    return f"{where}. Measured peaks: {rates}, copies {peaks['copy'] / 1e12:.1f} TB/s.\n"


def _table(title: str, heads: list[str], rows: list[list[str]]) -> str:
    lines = [f"## {title}", "", "| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows), ""])


def _milliseconds(timing: dict[str, float]) -> str:
    return f"{timing['seconds'] * 1e3:.4g} ms ({timing['fastest'] * 1e3:.4g}–{timing['slowest'] * 1e3:.4g})"


def _slices(parts: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["precision"], _milliseconds(row["ours"]), f"{row['first_call']['slice'] * 1e3:.4g} ms",
         f"{row['jacobian']['seconds'] * 1e3:.4g} ms", f"**{row['ratio']:.2f}×**", f"{row['error']:.0e}"]
        for row in parts["slices"]
    ]  # fmt: skip
    heads = ["model", "precision", "T[i] (fastest–slowest)", "first call", "Jacobian way", "ratio", "error to float32"]
    return _table("One slice T[i], 128 tokens", heads, rows)


def _norms(parts: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["precision"], _milliseconds(row["ours"]), f"{row['jacobian']['seconds'] * row['L']:.3g} s",
         f"**{row['ratio']:.1f}×**", f"{row['share_of_peak']:.0%}", f"{row['error']:.0e}"]
        for row in parts["norms"]
    ]  # fmt: skip
    heads = [
        "model",
        "precision",
        "norm map",
        "Jacobian way (one slice × 128)",
        "ratio",
        "share of peak",
        "error to float32",
    ]
    return _table("The exact 128 × 128 norm map", heads, rows)


def _sketches(parts: dict[str, Any]) -> str:
    rows = [
        [row["model"], row["precision"], _milliseconds(row["ours"]), f"{row['ratio']:.1f}×", f"{row['spearman']:.3f}"]
        for row in parts["sketches"]
    ]
    heads = ["model", "precision", "16 probes, one output", "against the exact slice", "rank correlation"]
    return _table("The sketched norm", heads, rows)


def _long(parts: dict[str, Any]) -> str:
    rows = []
    for row in parts["long"]:
        against = (f"{row['ratio_time']:.2f}×", f"{row['ratio_memory']:.2f}×") if "ratio_time" in row else ("", "")
        memory = f"{row['ours']['extra_bytes'] / 2**30:.1f} GiB" if "extra_bytes" in row["ours"] else ""
        rows.append([f"{row['L']:,}", f"{row['ours']['seconds']:.3g} s", memory, *against])
    heads = ["tokens", "In+Out, one output", "memory beside the weights", "time of forward + backward", "its memory"]
    return _table("Long inputs: Llama-8B configuration, bfloat16", heads, rows)


if __name__ == "__main__":
    main()
