"""The measurements, one function each: a name to plain data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch

import tensorlens as tl
from benchmarks.models import body_function, build, token_ids
from benchmarks.paper_way import WAYS, patched
from benchmarks.timing import Timing, copy_peak, finish, matmul_peak, timed
from tensorlens.models.precision import matmul_mode
from tensorlens.operators.estimates import estimate
from tensorlens.operators.norms import frobenius_norms, sketched_norms
from tensorlens.operators.operator import FrozenOperator

Rows = list[dict[str, Any]]
TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def tensor_of(model: Any, n_tokens: int, precision: Any = None) -> Any:
    """The attention tensor of a model at random tokens."""
    T = tl.Lens(model)(token_ids(n_tokens))
    return T if precision is None else T.with_precision(precision)


def best_jacobian(
    model: Any,
    x: Any,
    device: str,
    precision: str,
    chunks: list[int],
    out_token: int,
    reference: Any,
    n: int = 3,
    ways: tuple[str, ...] = tuple(WAYS),
) -> dict[str, Any]:
    """The fastest way and chunk size for one slice, with its error against `reference`.

    Args:
        model: In float32; a copy is made in the type of the precision.
        x: X⁰ (token, channel).
        device: Where they are.
        precision: As for `rows`.
        chunks: Cotangents at a time to try, for each way.
        out_token: i.
        reference: T[i].
        n: Timed runs of each, after one that is checked.
        ways: Names in `WAYS`.
    """
    if TYPES[precision] is not torch.float32:
        model = deepcopy(model).to(TYPES[precision])
    x = x[None].to(TYPES[precision])
    tried: dict[str, Timing] = {}
    error = float("nan")
    with patched(model), matmul_mode(precision):
        function = body_function(model)
        for way, slice_ in ((way, WAYS[way]) for way in ways):
            for chunk in chunks:
                try:
                    error = relative(slice_(function, x, out_token, chunk), reference)
                    work = lambda slice_=slice_, chunk=chunk: slice_(function, x, out_token, chunk)  # noqa: E731
                    tried[f"{way}, {chunk}"] = timed(work, device, n=n, warm=0, most_seconds=6)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
    best = min(tried, key=lambda key: tried[key].seconds)
    return {"way": best, "error": error, **tried[best].as_dict(), "tried": {k: t.seconds for k, t in tried.items()}}


def relative(found: Any, expected: Any) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def slices(
    device: str,
    names: tuple[str, ...],
    precisions: tuple[str, ...],
    n_tokens: int = 128,
    n: int = 7,
    n_jacobian: int = 3,
    chunks: tuple[int, ...] = (),
    ways: tuple[str, ...] = tuple(WAYS),
) -> Rows:
    """T[i]: this library against the best Jacobian way at the same precision."""
    rows = []
    for name in names:
        model = build(name, device)
        T = tensor_of(model, n_tokens)
        i, d = n_tokens - 1, T.n_channels
        exact = T.with_precision("float32").rows(i)
        for precision in precisions:
            fast = T.with_precision(precision)
            first = _first_call(model, n_tokens, precision, device)
            ours = timed(lambda fast=fast, i=i: fast.rows(i), device, n=n, warm=2)
            flops = estimate(fast.operator, "rows").flops
            sizes = [c for c in chunks or ((64, 256, d) if device == "cuda" else (32, 128, d)) if c <= d] or [d]
            jacobian = best_jacobian(model, T.input, device, precision, sizes, i, exact, n_jacobian, ways)
            rows.append(
                {
                    "work": "slice",
                    "model": name,
                    "L": n_tokens,
                    "precision": precision,
                    "ours": ours.as_dict(),
                    "first_call": first,
                    "error": relative(fast.rows(i), exact),
                    "flops": flops,
                    "jacobian": jacobian,
                    "ratio": jacobian["seconds"] / ours.seconds,
                    "rate": flops / ours.seconds,
                    "bytes": slice_bytes(fast.operator),
                }
            )
            print(line(rows[-1]), flush=True)
            del fast
        del model, T, exact
        clear(device)
    return rows


def slice_bytes(operator: FrozenOperator) -> float:
    """The fewest bytes a slice moves: every block's cotangents read and written once, its weights read once."""
    folded = operator.folded
    assert folded is not None, "asked of an operator that folds"
    state = operator.shape[1] * operator.n_tokens * operator.n_channels * operator.compute_type.itemsize
    return sum(folded.block(n).n_bytes + 2 * state for n in range(len(folded)))


def _first_call(model: Any, n_tokens: int, precision: str, device: str) -> dict[str, float]:
    """Seconds of a recording by a lens that has seen the model, and of the first slice of a fresh tensor with it."""
    lens, ids = tl.Lens(model), token_ids(n_tokens)
    recording = timed(lambda: lens(ids), device, n=5, warm=1)
    fresh = [tensor_of(model, n_tokens, precision) for _ in range(2)]
    slice_ = timed(lambda: fresh.pop().rows(n_tokens - 1), device, n=2, warm=0)
    return {"recording": recording.seconds, "slice": slice_.seconds}


def norm_maps(
    device: str,
    names: tuple[str, ...],
    precisions: tuple[str, ...],
    n_tokens: int = 128,
    n: int = 3,
    n_checked: int = 8,
    known: dict[tuple[str, str], dict[str, Any]] | None = None,
) -> Rows:
    """The exact L×L norm map. The Jacobian way is timed on one slice, times L; the error is taken of some outputs.

    Args:
        device: Where.
        names: Models.
        precisions: As for `rows`.
        n_tokens: L.
        n: Timed runs.
        n_checked: Outputs whose norms are compared with float32.
        known: The Jacobian way's slices measured before in this run, by model and precision.
    """
    rows = []
    for name in names:
        model = build(name, device)
        T = tensor_of(model, n_tokens)
        some = list(range(0, n_tokens, n_tokens // n_checked))
        exact = frobenius_norms(T.with_precision("float32").operator, some)
        last = T.with_precision("float32").rows(n_tokens - 1)
        for precision in precisions:
            fast = T.with_precision(precision).operator
            found = frobenius_norms(fast, range(n_tokens))
            ours = timed(lambda fast=fast: frobenius_norms(fast, range(n_tokens)), device, n=n, warm=0, most_seconds=12)
            d = T.n_channels
            flops = estimate(fast, "norm").flops  # from sizes alone: of a causal model twice what it does
            chunks = [256, d] if device == "cuda" else [128]
            jacobian = (known or {}).get((name, precision)) or best_jacobian(
                model, T.input, device, precision, chunks, n_tokens - 1, last
            )
            jacobian_all = jacobian["seconds"] * n_tokens
            peak = matmul_peak_at(device, precision)
            rows.append(
                {
                    "work": "norm map",
                    "model": name,
                    "L": n_tokens,
                    "precision": precision,
                    "ours": ours.as_dict(),
                    "error": relative(found[some], exact),
                    "flops": flops,
                    "rate": flops / ours.seconds,
                    "peak": peak,
                    "share_of_peak": flops / ours.seconds / peak,
                    "jacobian": jacobian | {"all_outputs": jacobian_all},
                    "ratio": jacobian_all / ours.seconds,
                }
            )
            print(line(rows[-1]), flush=True)
            del fast
        del model, T, last
        clear(device)
    return rows


def matmul_peak_at(device: str, precision: str) -> float:
    """The matrix-product peak at a precision."""
    with matmul_mode(precision):
        return matmul_peak(device, TYPES[precision])


def sketches(device: str, names: tuple[str, ...], precisions: tuple[str, ...], n_tokens: int = 128) -> Rows:
    """16 probes for one output against the exact slice, and In+Out for all outputs."""
    rows = []
    for name in names:
        model = build(name, device)
        T = tensor_of(model, n_tokens)
        i = n_tokens - 1
        exact = frobenius_norms(T, (i,))[0]
        for precision in precisions:
            fast = T.with_precision(precision).operator
            slice_ = timed(lambda fast=fast, i=i: frobenius_norms(fast, (i,)), device, n=5, warm=1)
            outputs = itertools.cycle(range(n_tokens))  # another one each time, as in use
            sketch = timed(lambda fast=fast, o=outputs: sketched_norms(fast, (next(o),), 16), device, n=10, warm=3)
            found = sketched_norms(fast, (i,), 16).norms[0]
            in_out = timed(lambda fast=fast: _in_out(fast), device, n=10, warm=3)
            rows.append(
                {
                    "work": "sketch",
                    "model": name,
                    "L": n_tokens,
                    "precision": precision,
                    "ours": sketch.as_dict(),
                    "exact": slice_.as_dict(),
                    "ratio": slice_.seconds / sketch.seconds,
                    "spearman": spearman(found, exact),
                    "in_out_all": in_out.as_dict(),
                }
            )
            print(line(rows[-1]), f"   In+Out, all outputs {in_out.seconds * 1e3:.1f} ms", flush=True)
        del model, T
        clear(device)
    return rows


def _in_out(operator: FrozenOperator) -> Any:
    from tensorlens.maps.methods import Question
    from tensorlens.maps.tensor_maps import in_out_map

    return in_out_map(Question(operator=operator, out_tokens=tuple(range(operator.shape[0])))).scores


def spearman(a: Any, b: Any) -> float:
    """Rank correlation."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def profile(device: str, name: str, precision: str, n_tokens: int = 128) -> Rows:
    """Where the time of a slice and of a group of norms goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    T = tensor_of(build(name, device), n_tokens, precision)
    rows = []
    works: dict[str, Callable[[], Any]] = {
        "slice": lambda: T.rows(-1),
        "norms of 32 outputs": lambda: frobenius_norms(T.operator, range(max(0, n_tokens - 32), n_tokens)),
        "sketch": lambda: sketched_norms(T.operator, (n_tokens - 1,), 16),
    }
    kinds = [ProfilerActivity.CUDA] if device == "cuda" else [ProfilerActivity.CPU]
    for label, work in works.items():
        work()
        finish(device)
        with record(activities=kinds) as found:
            work()
            finish(device)
        time_of = (lambda e: e.self_device_time_total) if device == "cuda" else (lambda e: e.self_cpu_time_total)
        events = sorted(found.key_averages(), key=time_of, reverse=True)[:9]
        top = [{"kernel": e.key[:90], "ms": time_of(e) / 1e3, "calls": e.count} for e in events]
        rows.append({"work": "profile", "of": label, "model": name, "precision": precision, "kernels": top})
        print(f"profile of {label}, {name}, {precision}:", flush=True)
        for entry in top:
            print(f"   {entry['ms']:9.3f} ms {entry['calls']:5d} × {entry['kernel']}", flush=True)
    clear(device)
    return rows


def peaks(device: str) -> Rows:
    """What the device can do: matrix products and copies."""
    row: dict[str, Any] = {"work": "peaks", "copy": copy_peak(device)}
    row |= {precision: matmul_peak_at(device, precision) for precision in TYPES}
    print({k: f"{v / 1e12:.1f} T/s" for k, v in row.items() if k != "work"}, flush=True)
    return [row]


def clear(device: str) -> None:
    """Let go of what is no longer used."""
    import gc

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def line(row: dict[str, Any]) -> str:
    """One measurement in one line."""
    ours = {key: 1e3 * row["ours"][key] for key in ("seconds", "fastest", "slowest")}
    text = f"{row['work']:<9} {row['model']:<11} L={row['L']} {row['precision']:<9}"
    text += f" ours {ours['seconds']:9.2f} ms ({ours['fastest']:.2f}-{ours['slowest']:.2f})"
    if "jacobian" in row:
        seconds = row["jacobian"].get("all_outputs", row["jacobian"]["seconds"])
        text += f"  jacobian {seconds * 1e3:9.1f} ms [{row['jacobian']['way']}, error {row['jacobian']['error']:.0e}]"
    text += f"  ratio {row['ratio']:.2f}"
    if "rate" in row:
        text += f"  {row['rate'] / 1e12:.1f} TFLOP/s"
    if "share_of_peak" in row:
        text += f" = {row['share_of_peak']:.0%} of {row['peak'] / 1e12:.0f}"
    if "first_call" in row:
        first = {key: 1e3 * seconds for key, seconds in row["first_call"].items()}
        text += f"  first {first['slice']:.1f} ms, recording {first['recording']:.1f} ms"
    if "error" in row:
        text += f"  error {row['error']:.1e}"
    return text + (f"  spearman {row['spearman']:.3f}" if "spearman" in row else "")
