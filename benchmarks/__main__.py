"""`python -m benchmarks PART …`: measure, print a table, write JSON.

Parts: peaks, slices, norms, sketches, long, scaling, profile; `quick` is a small run of all on any device.
Beside it: `python -m benchmarks.tune` chooses the constants of a device, `python -m benchmarks.real_weights` takes
small models with their real weights, `python -m benchmarks.page` makes docs/performance.md of what they found.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import parts
from benchmarks.long_inputs import long_inputs, long_model
from benchmarks.scaling import scaling

BOTH = ("tf32", "bfloat16")

PARTS: dict[str, Any] = {
    "peaks": lambda d: parts.peaks(d),
    "slices": lambda d: parts.slices(d, ("bert-base", "pythia-1b"), BOTH),
    "slices-float32": lambda d: parts.slices(d, ("bert-base",), ("float32",)),
    "norms": lambda d: parts.norm_maps(d, ("bert-base", "gpt2-small"), BOTH),
    "sketches": lambda d: parts.sketches(d, ("bert-base",), BOTH),
    "long": lambda d: long_inputs(long_model("llama-8b", d), d),
    "scaling": lambda d: scaling(d),
    "profile": lambda d: [row for p in BOTH for row in parts.profile(d, "bert-base", p)],
    "quick": lambda d: [
        *parts.slices(d, ("tiny-bert", "tiny-gpt2", "tiny-llama"), ("float32",), 16),
        *parts.norm_maps(d, ("tiny-gpt2",), ("float32", "bfloat16"), 16),
        *parts.sketches(d, ("tiny-bert",), ("float32",), 16),
        *long_inputs(long_model("tiny-llama", d), d, (64,), 64),
        *parts.profile(d, "tiny-bert", "float32", 16),
    ],
}


def main() -> None:
    """Run the parts named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--out", type=Path, help="where to write the JSON; benchmarks/results if left out")
    options = parser.parse_args()
    torch.set_grad_enabled(True)
    if options.threads:
        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"setting": setting(options.device), "parts": {}}
    for name in options.parts:
        start = time.perf_counter()
        print(f"== {name} on {options.device}", flush=True)
        results["parts"][name] = PARTS[name](options.device)
        print(f"   ({time.perf_counter() - start:.0f} s)", flush=True)
    folder = options.out or Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{options.device}-{'-'.join(options.parts)}.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"written: {path}")
    for rows in results["parts"].values():
        for row in rows:
            if "ratio" in row:
                print(parts.line(row))


def setting(device: str) -> dict[str, Any]:
    """The machine, the versions and the commit."""
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
