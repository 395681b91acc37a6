"""The measurements, one function each: a name to plain data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import tensorlens as tl
from benchmarks.models import body_function, build, token_ids
from benchmarks.paper_way import WAYS, patched
from benchmarks.timing import Timing, copy_peak, finish, matmul_peak, timed
from tensorlens.operators.budget import matmul_mode
from tensorlens.operators.estimates import folded_flops
from tensorlens.operators.matrix_free import FrozenOperator
from tensorlens.operators.norms import frobenius_norms, sketched_norms

Rows = list[dict[str, Any]]
TYPES = {"float32": torch.float32, "tf32": torch.float32, "bfloat16": torch.bfloat16}


def tensor_of(model: Any, n_tokens: int, precision: Any = None) -> Any:
    """The attention tensor of a model at random tokens."""
    T = tl.Lens(model)(token_ids(n_tokens))
    return T if precision is None else T.with_precision(precision)


def best_jacobian(name: str, device: str, n_tokens: int, precision: str, chunks: list[int], out_token: int,
                  reference: Any) -> dict[str, Any]:  # fmt: skip
    """The fastest way and chunk size for one slice, with its error against `reference`."""
    model = build(name, device, TYPES[precision])
    x = tensor_of(build(name, device), n_tokens).input[None].to(TYPES[precision])
    tried: dict[str, Timing] = {}
    error = float("nan")
    with patched(model), matmul_mode(precision):
        function = body_function(model)
        for way, slice_ in WAYS.items():
            for chunk in chunks:
                try:
                    error = relative(slice_(function, x, out_token, chunk), reference)
                    work = lambda slice_=slice_, chunk=chunk: slice_(function, x, out_token, chunk)  # noqa: E731
                    tried[f"{way}, {chunk}"] = timed(work, device, n=3, warm=0, most_seconds=6)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
    best = min(tried, key=lambda key: tried[key].seconds)
    return {"way": best, "error": error, **tried[best].as_dict(), "tried": {k: t.seconds for k, t in tried.items()}}


def relative(found: Any, expected: Any) -> float:
    """Relative error in the Frobenius norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def slices(device: str, names: tuple[str, ...], precisions: tuple[str, ...], n_tokens: int = 128) -> Rows:
    """T[i]: this library against the best Jacobian way at the same precision."""
    rows = []
    for name in names:
        model = build(name, device)
        T = tensor_of(model, n_tokens)
        i = n_tokens - 1
        exact = T.rows(i).clone()
        d = T.n_channels
        chunks = [c for c in ((64, 256, d) if device == "cuda" else (32, 128, d)) if c <= d]
        for precision in precisions:
            fast = T.with_precision(precision)
            first = _first_call(model, n_tokens, precision, device)
            ours = timed(lambda fast=fast, i=i: fast.rows(i), device, n=7, warm=2)
            flops = folded_flops(fast.operator, 1, d)
            jacobian = best_jacobian(name, device, n_tokens, precision, chunks, i, exact)
            rows.append({
                "work": "slice", "model": name, "L": n_tokens, "precision": precision, "ours": ours.as_dict(),
                "first_call": first, "error": relative(fast.rows(i), exact), "flops": flops, "jacobian": jacobian,
                "ratio": jacobian["seconds"] / ours.seconds, "rate": flops / ours.seconds,
            })  # fmt: skip
            print(line(rows[-1]), flush=True)
            del fast
        del model, T, exact
        clear(device)
    return rows


def _first_call(model: Any, n_tokens: int, precision: str, device: str) -> dict[str, float]:
    """Seconds of the recording and of the first slice of a fresh tensor, folding included."""
    recording = timed(lambda: tensor_of(model, n_tokens), device, n=2, warm=1)
    fresh = [tensor_of(model, n_tokens, precision) for _ in range(2)]
    slice_ = timed(lambda: fresh.pop().rows(n_tokens - 1), device, n=2, warm=0)
    return {"recording": recording.seconds, "slice": slice_.seconds}


def norm_maps(device: str, names: tuple[str, ...], precisions: tuple[str, ...], n_tokens: int = 128,
              n_sampled: int = 8) -> Rows:  # fmt: skip
    """The exact L×L norm map. The Jacobian way is timed on `n_sampled` outputs and scaled to all of them."""
    rows = []
    for name in names:
        model = build(name, device)
        T = tensor_of(model, n_tokens)
        some = list(range(0, n_tokens, n_tokens // n_sampled))
        exact = torch.stack([T.rows(i).double().norm(dim=(0, 2)) for i in some])
        for precision in precisions:
            fast = T.with_precision(precision)
            found = frobenius_norms(fast, range(n_tokens))
            ours = timed(lambda fast=fast: frobenius_norms(fast, range(n_tokens)), device, n=3, warm=0, most_seconds=12)
            d = T.n_channels
            flops = folded_flops(fast.operator, n_tokens, d)
            chunks = [256, d] if device == "cuda" else [128]
            jacobian = best_jacobian(name, device, n_tokens, precision, chunks, n_tokens - 1, T.rows(n_tokens - 1))
            jacobian_all = jacobian["seconds"] * n_tokens
            peak = matmul_peak_at(device, precision)
            rows.append({
                "work": "norm map", "model": name, "L": n_tokens, "precision": precision, "ours": ours.as_dict(),
                "error": relative(found[some], exact), "flops": flops, "rate": flops / ours.seconds, "peak": peak,
                "share_of_peak": flops / ours.seconds / peak, "jacobian": jacobian | {"all_outputs": jacobian_all},
                "ratio": jacobian_all / ours.seconds,
            })  # fmt: skip
            print(line(rows[-1]), flush=True)
            del fast
        del model, T
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
            sketch = timed(lambda fast=fast, i=i: sketched_norms(fast, (i,), 16), device, n=10, warm=2)
            found = sketched_norms(fast, (i,), 16).norms[0]
            in_out = timed(lambda fast=fast: _in_out(fast), device, n=5, warm=1)
            rows.append({
                "work": "sketch", "model": name, "L": n_tokens, "precision": precision, "ours": sketch.as_dict(),
                "exact": slice_.as_dict(), "ratio": slice_.seconds / sketch.seconds,
                "spearman": spearman(found, exact), "in_out_all": in_out.as_dict(),
            })  # fmt: skip
            print(line(rows[-1]), f"   In+Out, all outputs {in_out.seconds * 1e3:.1f} ms", flush=True)
        del model, T
        clear(device)
    return rows


def _in_out(operator: FrozenOperator) -> Any:
    from tensorlens.maps.collapse import in_out

    return in_out(operator, operator.input, operator.output, range(operator.shape[0]))


def spearman(a: Any, b: Any) -> float:
    """Rank correlation."""
    ranks = torch.stack([x.argsort().argsort().double() for x in (a, b)])
    return float(torch.corrcoef(ranks)[0, 1])


def long_inputs(device: str, name: str = "llama-8b", lengths: tuple[int, ...] = (8192, 65536, 131072),
                compare_up_to: int = 8192) -> Rows:  # fmt: skip
    """In+Out of one output from token ids, against a plain forward and backward pass."""
    rows = []
    model = build(name, device, torch.bfloat16 if device == "cuda" else torch.float32)
    lens = tl.Lens(model)
    vocabulary = model.config.vocab_size
    for n in lengths:
        ids = token_ids(n, vocabulary)
        work = lambda ids=ids: lens(ids).map("tensor.in_out", out_token=-1)  # noqa: E731
        few = n > compare_up_to
        try:
            ours = timed(work, device, n=1 if few else 5, warm=0 if few else 2, most_seconds=60)
        except torch.OutOfMemoryError as error:
            print(f"{name} L={n}: out of memory: {str(error)[:150]}", flush=True)
            clear(device)
            continue
        row: dict[str, Any] = {
            "work": "in_out",
            "model": name,
            "L": n,
            "precision": str(model.dtype),
            "ours": ours.as_dict(),
        }
        if not few:
            row |= _plain(model, ids, device)
            row["ratio_time"] = ours.seconds / row["forward_backward"]["seconds"]
            row["ratio_memory"] = (ours.extra_bytes or 0) / max(1, row["forward_backward"]["extra_bytes"] or 1)
            row["parts"] = _parts(lens, ids, device)
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("precision",)}, flush=True)
        clear(device)
    return rows


def _plain(model: Any, ids: list[int], device: str) -> dict[str, Any]:
    """A forward pass, and a forward and backward pass to the input, of the model left to itself."""
    x = model.get_input_embeddings()(torch.tensor([ids], device=device)).detach()

    def forward() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=x, use_cache=False).last_hidden_state

    def both() -> Any:
        leaf = x.clone().requires_grad_()
        y = model(inputs_embeds=leaf, use_cache=False).last_hidden_state[0, -1]
        return torch.autograd.grad(y, leaf, y.detach())[0]

    return {
        "forward": timed(forward, device, n=5, warm=1).as_dict(),
        "forward_backward": timed(both, device, n=5, warm=2).as_dict(),
    }


def _parts(lens: Any, ids: list[int], device: str) -> dict[str, float]:
    """Seconds of the recording and of the map alone."""
    recording = timed(lambda: lens(ids), device, n=3, warm=0)
    T = lens(ids)
    pulling = timed(lambda: T.map("tensor.in_out", out_token=-1), device, n=3, warm=1)
    return {"recording": recording.seconds, "map": pulling.seconds, "is_streamed": float(T.operator.is_streamed)}


def scaling(device: str) -> Rows:
    """Seconds of one slice over L, D and N, with the fitted exponents."""
    base = {"L": 128, "D": 512, "N": 6} if device == "cuda" else {"L": 32, "D": 128, "N": 3}
    rows = []
    for axis in base:
        points = []
        for factor in (0.5, 1, 2, 4):
            size = base | {axis: int(base[axis] * factor)}
            model = build("bert-base", device, hidden_size=size["D"], num_hidden_layers=size["N"],
                          num_attention_heads=size["D"] // 64, intermediate_size=4 * size["D"],
                          max_position_embeddings=1024)  # fmt: skip
            T = tensor_of(model, size["L"], "tf32")
            points.append((size[axis], timed(lambda T=T: T.rows(-1), device, n=5, warm=1).seconds))
            del model, T
        xs, ys = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points, strict=True))
        slope = float(((xs - xs.mean()) * (ys - ys.mean())).sum() / (xs - xs.mean()).square().sum())
        rows.append({"work": "scaling", "axis": axis, "base": base, "points": points, "exponent": slope})
        print(rows[-1], flush=True)
    return rows


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
