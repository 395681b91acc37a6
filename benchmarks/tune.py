"""`python -m benchmarks.tune`: check, choose the constants by measurement, then measure with them; all in one go.

For a GPU that is there for a few minutes only: every part is tried by itself, a part that would not fit into the time
left is left out, and the JSON is written after each. The last lines are the table and the constants chosen.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import tensorlens as tl
from benchmarks import parts
from benchmarks.__main__ import setting
from benchmarks.long_inputs import long_inputs, long_model
from benchmarks.models import build, token_ids
from benchmarks.pieces import BERT, MANY, TINY, pieces
from benchmarks.timing import copy_peak, finish, median_seconds
from tensorlens.models.precision import matmul_mode
from tensorlens.operators import operator as operators
from tensorlens.operators.norms import frobenius_norms, sketched_norms
from tensorlens.program import folding
from tensorlens.recording import blocks
from tensorlens.recording.record import record

Rows = list[dict[str, Any]]
BOTH = ("tf32", "bfloat16")
LIMITS = {"float32": 1e-4, "tf32": 1e-2, "bfloat16": 6e-2, "long input": 1e-3}
"""Largest relative errors that pass."""


class Sizes(NamedTuple):
    """What is measured."""

    bert: str = "bert-base"
    gpt2: str = "gpt2-small"
    large: str = "pythia-1b"
    long: str = "llama-8b"
    n_tokens: int = 128
    n_long: int = 8192
    n_longest: int = 131072
    chunks: tuple[int, ...] = (256, 2048)


SMALL = Sizes("tiny-bert", "tiny-gpt2", "tiny-neox", "tiny-llama", 16, 64, 128, (64,))
"""For a run on any machine that only shows that everything works."""


class Tuning:
    """One run: where it is, what it found so far, and how much time is left."""

    def __init__(self, device: str, sizes: Sizes, out: Path, budget: float) -> None:
        self.device, self.sizes, self.out, self.budget = device, sizes, out, budget
        self.start = time.perf_counter()
        self.results: dict[str, Any] = {"setting": setting(device), "parts": {}, "seconds": {}, "failed": {}}
        self.peaks: dict[str, float] = {}
        self.long_model: Any = None

    @property
    def left(self) -> float:
        """Seconds left."""
        return self.budget - (time.perf_counter() - self.start)

    def attempt(self, name: str, part: Callable[[Tuning], Any], needs: float) -> None:
        """Run a part if there is time for it; whatever it does, the others go on."""
        if self.left < needs:
            self.results["failed"][name] = f"left out: {self.left:.0f} s left, about {needs:.0f} s needed"
            print(f"== {name}: {self.results['failed'][name]}", flush=True)
            return self.write()
        print(f"== {name} ({self.left:.0f} s left)", flush=True)
        start = time.perf_counter()
        try:
            self.results["parts"][name] = part(self)
        except BaseException as error:  # noqa: BLE001
            self.results["failed"][name] = f"{type(error).__name__}: {str(error)[:500]}"
            traceback.print_exc()
            if isinstance(error, KeyboardInterrupt):
                raise
        parts.clear(self.device)
        self.results["seconds"][name] = time.perf_counter() - start
        self.write()
        return None

    def write(self) -> None:
        """The JSON as it stands."""
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / f"{self.device}-tune.json").write_text(json.dumps(self.results, indent=1))


# Is it right? ---------------------------------------------------------------------------------------------------------


def check(run: Tuning) -> Rows:
    """Every fast path against single backward passes, on this device, on small models of every kind of block."""
    rows = []
    for name in ("tiny-bert", "tiny-gpt2", "tiny-llama", "tiny-neox"):
        T = tl.Lens(build(name, run.device))(token_ids(24))
        row: dict[str, Any] = {"work": "check", "model": name}
        try:
            row |= _path_errors(T, run.device) | {"long input": _long_input_error(T)}
            row["passed"] = all(row[key] <= LIMITS[key.split(",")[0]] for key in row if key.split(",")[0] in LIMITS)
        except Exception as error:  # noqa: BLE001  the other models still tell something
            traceback.print_exc()
            row |= {"passed": False, "failed": repr(error)[:300]}
        rows.append(row)
        print("  ", {k: f"{v:.1e}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return rows


def _path_errors(T: Any, device: str) -> dict[str, float]:
    last, found = T.n_tokens - 1, {}
    units = torch.eye(T.n_channels, device=device)
    starts = torch.zeros(8, *T.output.shape, device=device)
    starts[:, last] = units[:8]
    with matmul_mode("float32"):
        exact = torch.cat([T.operator.pull(u[None]) for u in starts])
    whole = T.with_precision("float32").rows(last).double().norm(dim=(0, 2))
    for precision in ("float32", *BOTH):
        fast = T.with_precision(precision)
        found[precision] = parts.relative(fast.rows(last)[:8], exact)
        for times in ("few", "few, again"):
            few = next(iter(fast.operator.pull_outputs((last,), units[None, :8]))).rows.transpose(0, 1)
            found[f"{precision}, {times}"] = parts.relative(few, exact)
        found[f"{precision}, norms"] = parts.relative(frobenius_norms(fast.operator, range(last + 1))[last], whole)
    return found


def _long_input_error(T: Any) -> float:
    recording = T.operator.recording
    with patch.object(blocks, "SHARE_OF_RECORDING", 0.0):  # nothing is kept: every block is recorded again
        long = record(recording.origin.anatomy, recording.origin.inputs, recording.rules)
    u = torch.randn(1, *T.output.shape, device=T.output.device)
    return parts.relative(long.pull(u, T.operator.span), recording.pull(u, T.operator.span))


def errors(run: Tuning) -> Rows:
    """Errors of each precision against float64, which the device computes by the same products."""
    rows = []
    for name in (run.sizes.bert, run.sizes.gpt2):
        model = build(name, run.device)
        wide = parts.tensor_of(build(name, run.device).double(), run.sizes.n_tokens)
        i = run.sizes.n_tokens - 1
        exact, norms = wide.rows(i), frobenius_norms(wide.operator, (i,))
        for precision in ("float32", *BOTH):
            fast = parts.tensor_of(model, run.sizes.n_tokens, precision)
            rows.append(
                {
                    "work": "error",
                    "model": name,
                    "precision": precision,
                    "slice": parts.relative(fast.rows(i), exact),
                    "norms": parts.relative(frobenius_norms(fast.operator, (i,)), norms),
                }
            )
            print("  ", rows[-1], flush=True)
        del model, wide, exact
        parts.clear(run.device)
    return rows


# The constants --------------------------------------------------------------------------------------------------------


def peaks(run: Tuning) -> Rows:
    """What the device can do."""
    run.peaks = {precision: parts.matmul_peak_at(run.device, precision) for precision in BOTH}
    row = {"work": "peaks", "copy": copy_peak(run.device), **run.peaks}
    run.peaks["copy"] = row["copy"]
    print("  ", {k: f"{v / 1e12:.1f} T/s" for k, v in row.items() if isinstance(v, float)}, flush=True)
    return [row]


def choose(run: Tuning) -> Rows:
    """Each constant at its best, one after the other, by the sum of the ratios over the works it matters to."""
    device, last = run.device, run.sizes.n_tokens - 1
    names = (run.sizes.bert, run.sizes.gpt2)
    tensors = {name: parts.tensor_of(build(name, device), run.sizes.n_tokens) for name in names}

    def fresh(name: str, precision: Any) -> Any:
        return tensors[name].with_precision(precision).operator

    def slices() -> dict[str, float]:
        found = {}
        for precision in BOTH:
            T = fresh(run.sizes.bert, precision)
            found[f"slice {precision}"] = median_seconds(lambda T=T: T.rows(last), device, n=5, warm=2)
        return found

    def norms() -> dict[str, float]:
        found = {}
        for name in tensors:
            T = fresh(name, "bfloat16")
            T.rows(last)
            found[f"norms {name}"] = median_seconds(
                lambda T=T: frobenius_norms(T, range(last + 1)), device, n=1, warm=1 if device == "cpu" else 0
            )
        return found

    d = tensors[run.sizes.bert].n_channels
    trials: list[tuple[str, Any, str, tuple[Any, ...], Callable[[], dict[str, float]]]] = [
        ("BYTES_OF_SCALED", folding.BYTES_OF_SCALED, device, tuple(2**n for n in (25, 26, 27, 28, 29, 30)), slices),
        ("MIXED_TOGETHER", folding.MIXED_TOGETHER, device, (64, 256, 1024, 4096), slices),
        ("MOST_COTANGENTS", operators.MOST_COTANGENTS, device, (4 * d, 8 * d, 16 * d), norms),
    ]
    rows = []
    norms()  # the first call of everything
    for name, table, key, values, work in trials:
        before, found = table[key], {}
        for value in values:
            table[key] = value
            try:
                found[value] = work()
            except torch.OutOfMemoryError:
                parts.clear(device)
            print(f"   {name} = {value}: {_milliseconds(found.get(value, {}))}", flush=True)
        best = _best(found) if found else before
        table[key] = best
        tried = {str(value): times for value, times in found.items()}
        rows.append({"work": "constant", "name": name, "before": before, "chosen": best, "tried": tried})
        run.results["constants"] = {row["name"]: row["chosen"] for row in rows}
    return rows


def _wall(work: Callable[[], Any], device: str, n: int = 15) -> float:
    """The host's time: what counts where launching costs as much as computing."""
    return parts.timed(work, device, n=n, warm=3).seconds


def _best(found: dict[Any, dict[str, float]]) -> Any:
    fastest = {work: min(times[work] for times in found.values()) for work in next(iter(found.values()))}
    return min(found, key=lambda value: sum(seconds / fastest[work] for work, seconds in found[value].items()))


def _milliseconds(times: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items())


# With them ------------------------------------------------------------------------------------------------------------


def slices(run: Tuning) -> Rows:
    """BERT's slice."""
    d = 768
    return parts.slices(run.device, (run.sizes.bert,), BOTH, run.sizes.n_tokens, 7, 3, (256, d))


def large_slices(run: Tuning) -> Rows:
    """Pythia's slice, a few runs: each takes a second."""
    options = {"chunks": run.sizes.chunks, "ways": ("batched VJPs",)}
    return parts.slices(run.device, (run.sizes.large,), BOTH, run.sizes.n_tokens, 3, 1, **options)


def norms(run: Tuning) -> Rows:
    """Both norm maps, with the Jacobian slices that are known by now."""
    known = {(row["model"], row["precision"]): row["jacobian"] for row in run.results["parts"].get("slices", [])}
    return parts.norm_maps(run.device, (run.sizes.bert, run.sizes.gpt2), BOTH, run.sizes.n_tokens, 2, 4, known)


def sketches(run: Tuning) -> Rows:
    """Sketches, and In+Out of all outputs against the Jacobian way."""
    rows = parts.sketches(run.device, (run.sizes.bert,), BOTH, run.sizes.n_tokens)
    known = {row["precision"]: row["jacobian"]["seconds"] for row in run.results["parts"].get("slices", [])}
    for row in rows:
        if row["precision"] in known:  # from whole slices, and the best case besides: one backward pass an output
            row["in_out_share"] = row["in_out_all"]["seconds"] / (known[row["precision"]] * run.sizes.n_tokens)
    return rows


def steps(run: Tuning) -> Rows:
    """Each step of a block by itself."""
    shapes = (BERT, MANY) if run.device == "cuda" else (TINY,)
    return [
        row
        for precision in BOTH
        for shape in shapes
        for row in pieces(run.device, precision, parts.TYPES[precision], shape, run.peaks[precision], run.peaks["copy"])
    ]


def profiles(run: Tuning) -> Rows:
    """Where the time goes, by kernel."""
    return parts.profile(run.device, run.sizes.bert, "bfloat16", run.sizes.n_tokens)


def long_input(run: Tuning) -> Rows:
    """In+Out against a plain forward and backward pass; the model stays for the next part."""
    run.long_model = long_model(run.sizes.long, run.device)
    return long_inputs(run.long_model, run.device, (run.sizes.n_long,), run.sizes.n_long, 3, run.sizes.long)


def longest_input(run: Tuning) -> Rows:
    """In+Out of an input so long that little else fits."""
    model = run.long_model or long_model(run.sizes.long, run.device)
    if run.device == "cuda":
        try:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        except Exception as error:  # noqa: BLE001  it may work without
            print("   no expandable segments:", error)
    return long_inputs(model, run.device, (run.sizes.n_longest,), run.sizes.n_long, 1, run.sizes.long)


PLAN: tuple[tuple[str, Callable[[Tuning], Any], float], ...] = (
    ("check", check, 3),
    ("peaks", peaks, 2),
    ("constants", choose, 10),
    ("slices", slices, 6),
    ("norms", norms, 12),
    ("sketches", sketches, 2),
    ("slices-large", large_slices, 20),
    ("steps", steps, 3),
    ("errors", errors, 3),
    ("profile", profiles, 3),
    ("long", long_input, 12),
    ("longest", longest_input, 45),
)
"""The parts in order of weight, with about how many seconds each takes on an H200."""


def main() -> None:
    """Run the plan."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tune", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--budget", type=float, default=150, help="seconds")
    parser.add_argument("--small", action="store_true", help="tiny models: only to see that it works")
    parser.add_argument("--only", nargs="*", help="names of parts")
    options = parser.parse_args()
    run = Tuning(options.device, SMALL if options.small else Sizes(), options.out, options.budget)
    torch.set_grad_enabled(True)
    for name, part, needs in PLAN:
        if not options.only or name in options.only:
            run.attempt(name, part, -1e9 if options.small else needs)
    finish(options.device)
    summary(run)


def summary(run: Tuning) -> None:
    """The short table, last."""
    print("\n== summary", {k: f"{v:.0f} s" for k, v in run.results["seconds"].items()})
    for name in ("slices", "slices-large", "norms", "sketches", "long", "longest"):
        for row in run.results["parts"].get(name, []):
            kept = {k: v for k, v in row.items() if k not in ("precision", "forward")}
            print(parts.line(row) if "ratio" in row else kept)
            if "in_out_share" in row:
                seconds, share = row["in_out_all"]["seconds"], row["in_out_share"]
                print(f"   In+Out, all outputs: {seconds * 1e3:.1f} ms, {share:.4f} of the Jacobian way")
    passed = {row["model"]: row["passed"] for row in run.results["parts"].get("check", [])}
    print("passed:", passed)
    print("failed:", run.results["failed"])
    print("constants:", run.results.get("constants"))


if __name__ == "__main__":
    main()
