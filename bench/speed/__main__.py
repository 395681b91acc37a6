"""`python -m bench.speed PART …`: measure, print a table, keep it as JSON in bench/speed/results.

Numbers of docs/performance.md need a GPU; `--tiny` tries every part on tiny models and says nothing about speed.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.speed import large, parts
from bench.speed.circuits import circuit_rows
from bench.speed.pairs import pair_rows, search_rows
from bench.speed.sizes import size_rows
from bench.speed.walks import walks
from bench.tables import markdown
from tensorlens.__about__ import package_versions
from tensorlens.files import write_json

LARGE = ("Llama-8B", "Qwen3-8B", "Gemma3-12B", "DeepSeek-V3", "Phi-1.5", "Pythia-1B")
PARTS: dict[str, tuple[Callable[[], parts.Rows], Callable[[], parts.Rows]]] = {
    "slices": (
        lambda: parts.slices(("bert-base", "gpt2-small"), 128, ("tf32", "bfloat16")),
        lambda: parts.slices(("tiny-bert",), 8, ("float32",)),
    ),
    "scaling": (lambda: parts.scaling(256, 1024, 8), lambda: parts.scaling(8, 64, 2)),
    "certificates": (lambda: parts.certificates(LARGE, 1024, 8), lambda: parts.certificates(("tiny",), 8, 2)),
    "clock": (lambda: parts.clock(LARGE, 1024, 8), lambda: parts.clock(("tiny",), 8, 2)),
    "walks": (lambda: walks("tiny", 8), lambda: walks("tiny", 8)),
    "long": (lambda: parts.long_input("Llama-8B", 8192, 32), lambda: parts.long_input("tiny", 16, 2)),
    "answers": (lambda: parts.answers("Llama-8B", 6000, 200), lambda: parts.answers("tiny", 40, 20)),
    "grid": (
        lambda: large.grid("Llama-8B", large.GRID),
        lambda: large.grid("tiny", ((4, 20), (20, 4))),
    ),
    "row": (lambda: large.of_an_answer("Llama-8B", 6000, 200), lambda: large.of_an_answer("tiny", 20, 4)),
    "kernels": (
        lambda: large.kernels(("bert-base", "SmolLM2"), 128, 256),
        lambda: large.kernels(("tiny-bert", "tiny"), 8, 2),
    ),
    "longest": (lambda: large.longest("Llama-8B", 131072), lambda: large.longest("tiny", 32)),
    "longest-half": (lambda: large.longest("Llama-8B", 65536), lambda: large.longest("tiny", 16)),
    "offloaded": (
        lambda: large.offloaded(large.LLAMA_70B, 80, 40, 2048),
        lambda: large.offloaded(large.SMALL, 4, 2, 16),
    ),
    "experts": (
        lambda: large.experts(("Qwen3-30B-A3B", "GPT-OSS-120B"), 1024, 8),
        lambda: large.experts(("tiny-experts",), 8, 2),
    ),
    "batches": (lambda: parts.batches("SmolLM2", 4096, 128, 512), lambda: parts.batches("tiny", 4, 8, 2)),
    "perturbation": (lambda: parts.perturbed("SmolLM2", 96, 128), lambda: parts.perturbed("tiny", 2, 8)),
    "inside": (lambda: parts.inside("SmolLM2", 128), lambda: parts.inside("tiny", 8)),
    "pairs": (pair_rows, lambda: pair_rows(tiny=True)),
    "search": (search_rows, lambda: search_rows(4, 2)),
    "circuits": (circuit_rows, circuit_rows),
    "sizes": (size_rows, size_rows),
}
"""By name: at full size, and tiny."""


def main() -> None:
    """Run the parts named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.parts:
        print(f"== {name} on {device_name()}", flush=True)
        rows = PARTS[name][chosen.tiny]()
        print(markdown(rows), flush=True)
        if not chosen.tiny:
            write_json(chosen.out / f"{name}.json", record(rows))


def device_name() -> str:
    """The GPU, or the processor."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()


def record(rows: parts.Rows) -> dict[str, Any]:
    """What is kept of a measurement: the machine, the versions and the table."""
    plain = [
        {key: value if isinstance(value, (int, str)) else str(value) for key, value in row.items()} for row in rows
    ]
    return {"device": device_name(), "versions": dict(package_versions()), "rows": plain}


if __name__ == "__main__":
    main()
