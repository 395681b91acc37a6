"""The perturbation results of docs/results.md. Each part is one run, described in perturbation.json.

    python experiments/perturbation.py --data DATA --out RUNS --part minilm-imdb --part dinov2-photographs

DATA holds imdb/reviews.csv, wikitext-2/ and images/. Weights go by their bundled names; others are given as folders or
files with --weights NAME=PATH. A part that was interrupted goes on; --limit makes a short trial of it and --seconds
ends it early.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import tensorlens as tl
from tensorlens.studies import StudyResult, perturbation
from tensorlens.studies.processes import Processes, hand_over, one_voice

CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MEMBERS = ("paper", "half_gate", "attn_lrp", "jacobian")
MEASURES = ("attn", "w_attn", "w_attn_res_ln", "glob_enc")
ONE_PASS = [
    "tensor.in_out",
    "tensor.in_class",
    "gradient.times_input",
    "alti",
    "rollout.attn_without_sink",
    "control.random",
    "control.recency",
    "control.position",
    "control.embedding_norm",
    *(f"{join}.{measure}" for join in ("rollout", "mean") for measure in MEASURES),
]
TENSOR = [name for name in tl.METHODS if name.startswith("tensor.")]
METHODS = {
    "one_pass": ONE_PASS,
    "tensor": [*TENSOR, "control.random"],
    "signed": ["tensor.in_out", "mean.attn"],
    "recency": ["mean.attn", "control.recency", "control.random"],
    "members": [
        *(f"{name}@{member}" for name in ("tensor.in_class", "tensor.in_out") for member in MEMBERS),
        "mean.attn",
        "control.recency",
        "control.random",
    ],
    "members_without_head": [
        *(f"tensor.in_out@{member}" for member in MEMBERS),
        "mean.attn",
        "control.recency",
        "control.random",
    ],
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with imdb/, wikitext-2/ and images/")
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, one folder a part")
    parser.add_argument("--part", action="append", choices=CONFIGS, help="which part; repeatable; all if not given")
    parser.add_argument("--weights", action="append", default=[], metavar="NAME=PATH", help="where weights are")
    parser.add_argument("--limit", type=int, help="samples, instead of the part's own number")
    parser.add_argument("--methods", help="methods, separated by commas, instead of the part's own")
    parser.add_argument("--processes", type=int, default=1, help="processes that share each part, on one device")
    parser.add_argument("--memory", type=float, default=0.95, help="part of the GPU's memory for all of them")
    parser.add_argument("--batch-size", type=int, help="replaced copies at a time; by the device if not given")
    parser.add_argument("--device", help="such as cpu; the GPU if there is one")
    parser.add_argument("--seconds", type=float, help="stop each part after so long; what is measured by then is kept")
    parser.add_argument("--tf32", action="store_true", help="let matrix products run in TF32")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if hand_over(options.processes, [__file__]):
        return
    weights = dict(pair.split("=", 1) for pair in options.weights)
    if options.tf32:
        torch.set_float32_matmul_precision("high")
    for part in options.part or CONFIGS:
        started = time.perf_counter()
        with one_voice():
            try:
                with bounded(options.seconds):
                    result = run(part, options, weights)
            except TimeUp:
                print(f"== {part}: stopped after {options.seconds:.0f} s; started again, it goes on", flush=True)
                continue
        if Processes.from_environment().is_first:
            print(table(part, result, time.perf_counter() - started), flush=True)


class TimeUp(BaseException):
    """Ends a part. Not an `Exception`, so that nothing takes it for a failure of a sample."""


@contextmanager
def bounded(seconds: float | None) -> Iterator[None]:
    """Interrupt what takes longer; a run can be stopped at any moment."""

    def stop(number: int, frame: Any) -> None:
        raise TimeUp

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds or 0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(part: str, options: argparse.Namespace, weights: dict[str, str]) -> StudyResult:
    """One part, in this process alone or as its share of several."""
    config: dict[str, Any] = dict(CONFIGS[part])
    name, gate = config.pop("model"), config.pop("gate", "freeze_gate")
    if options.processes > 1 and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(options.memory / options.processes)
    model = weights.get(name, name)
    loaded = tl.load(model, device=options.device)
    # By its name and not by its path, which differs from machine to machine.
    lens = tl.Lens(loaded.model, loaded.processor, rules=tl.Rules(gate=gate), name=name)
    data = find(config.pop("data"), options.data, model)
    chosen = config.pop("methods", None)
    methods = options.methods.split(",") if options.methods else METHODS[chosen] if chosen else None
    config["limit"] = options.limit or config["limit"]
    return perturbation(
        lens, data, options.out / part, methods=methods, batch_size=options.batch_size, progress=True, **config
    )


def find(name: str, folder: Path, model: str) -> Path:
    """A file or folder of the data; `@model/…` lies with the weights."""
    return Path(model) / name.removeprefix("@model/") if name.startswith("@model/") else folder / name


def table(part: str, result: StudyResult, seconds: float) -> str:
    """HS-MSE of each condition: the best methods of each kind, and the tensor against the best baseline."""
    summary = result.summary
    lines = [f"\n== {part}: {summary['n_measured']} samples, {summary['n_skipped']} skipped, {seconds:.0f} s"]
    for condition, found in summary["conditions"].items():
        areas = found["most"]["hs_mse"]
        methods = areas["methods"]
        best_first = sorted(methods, key=lambda name: -methods[name]["auc"])
        lines.append(f"{condition}: " + "  ".join(f"{name} {methods[name]['auc']:.4g}" for name in best_first[:8]))
        against = areas.get("tensor_against_baseline")
        if against and against["n"]:
            low, high = against["interval"]
            chance = f"; random {methods['control.random']['auc']:.4g}" if "control.random" in methods else ""
            lines.append(
                f"   {against['first']} - {against['second']} = {against['advantage']:+.4g} [{low:+.4g}, {high:+.4g}], "
                f"P = {against['probability']:.3f}{chance}"
            )
        lines += [f"   missing {name}: {gap['n']}, {gap['reason'][:90]}" for name, gap in found["missing"].items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
