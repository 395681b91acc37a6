"""The steps of one folded block by themselves: how close each comes to what the device can do.

Shapes are those of a model, numbers are random. Where a step can be written in several ways, each is timed, so that
the constants in `tensorlens.program.folding` have a reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from benchmarks.timing import median_seconds
from tensorlens.models.precision import matmul_mode


class Shape(NamedTuple):
    """Sizes of a block and of the work: tokens, cotangents, channels, inner channels, heads."""

    n_tokens: int = 128
    n_cotangents: int = 768
    d: int = 768
    n_inner: int = 3088
    n_heads: int = 12
    n_folded: int = 28


BERT = Shape()
MANY = Shape(n_cotangents=6144)
TINY = Shape(8, 32, 32, 128, 4, 2)


def pieces(device: str, precision: str, dtype: torch.dtype, shape: Shape, peak: float, copy: float) -> list[dict]:
    """Time of each step, with its share of the matrix-product peak and of the copy peak."""
    rows = []
    with matmul_mode(precision), torch.no_grad():
        for name, (work, flops, n_bytes) in _steps(device, dtype, shape).items():
            try:
                seconds = median_seconds(work, device, n=5, warm=2)
            except Exception as error:  # noqa: BLE001  one step must not cost the others
                rows.append({"work": "piece", "piece": name, "error": repr(error)[:200]})
                continue
            rows.append(
                {
                    "work": "piece",
                    "piece": name,
                    "precision": precision,
                    "shape": shape._asdict(),
                    "seconds": seconds,
                    "share_of_peak": flops / seconds / peak,
                    "share_of_copy": n_bytes / seconds / copy,
                }
            )
            label = f"   {precision:<9} {shape.n_cotangents:5d} {name:<34} {seconds * 1e3:8.3f} ms"
            shares = f"{rows[-1]['share_of_peak']:6.1%} of peak, {rows[-1]['share_of_copy']:6.1%} of copies"
            print(label, shares, flush=True)
    return rows


def _steps(device: str, dtype: torch.dtype, shape: Shape) -> dict[str, tuple[Callable[[], Any], float, float]]:
    n, c, d, inner, n_heads, k = shape
    e, size = d // n_heads, dtype.itemsize

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, device=device).to(dtype)

    x, y, weight, mix = (
        random(n, c, d),
        torch.empty(n, c, d, dtype=dtype, device=device),
        random(d, d),
        random(n_heads, n, n),
    )
    channels_first = x.permute(2, 0, 1).contiguous()  # (channel, token, cotangent), the layout of other days
    up, down, gain = random(d, inner), random(inner, d), random(k, inner)
    scaled, formed, matrices = random(k, d, inner), random(k, d, d), random(n, d, d)
    down_by_column = down.T.contiguous().T
    flat, flat_y, heads, into = x.flatten(0, 1), y.flatten(0, 1), x.view(n, c, n_heads, e), y.view(n, c, n_heads, e)

    def strided() -> None:
        for h in range(n_heads):
            torch.bmm(mix[h].expand(c, -1, -1), heads[:, :, h].transpose(0, 1), out=into[:, :, h].transpose(0, 1))

    def gathered(step: int) -> None:
        for part, target in zip(heads.split(step, 1), into.split(step, 1), strict=True):
            side = part.permute(2, 0, 1, 3).reshape(n_heads, n, -1)
            target.copy_(torch.bmm(mix, side).view(n_heads, n, -1, e).permute(1, 2, 0, 3))

    def old_mix() -> None:
        u, m = channels_first.unflatten(0, (n_heads, e)), torch.empty_like(channels_first).unflatten(0, (n_heads, e))
        for h in range(n_heads):
            torch.bmm(mix[h].expand(e, -1, -1), u[h], out=m[h])

    state, square = n * c * d * size, 2.0 * n * c * d * d
    forming, mixing = 2.0 * k * d * d * inner, 2.0 * n * n * c * d
    steps: dict[str, tuple[Callable[[], Any], float, float]] = {
        f"scale W_up for {k} tokens": (lambda: torch.mul(up, gain[:, None], out=scaled), 0, k * d * inner * size),
        "form P": (lambda: torch.mm(scaled.flatten(0, 1), down, out=formed.flatten(0, 1)), forming, 0),
        "form P, W_down by column": (
            lambda: torch.mm(scaled.flatten(0, 1), down_by_column, out=formed.flatten(0, 1)),
            forming,
            0,
        ),
        "P c, transposed operand": (lambda: torch.bmm(x, matrices.mT, out=y), square, 2 * state),
        "P c, plain operand": (lambda: torch.bmm(x, matrices, out=y), square, 2 * state),
        "P c, channels first": (
            lambda: torch.bmm(
                matrices, channels_first.transpose(0, 1), out=torch.empty_like(channels_first).transpose(0, 1)
            ),
            square,
            2 * state,
        ),
        "W_out y": (lambda: torch.mm(flat, weight.T, out=flat_y), square, 2 * state),
        "W_out y, plain operand": (lambda: torch.mm(flat, weight, out=flat_y), square, 2 * state),
        "W_out y, channels first": (lambda: torch.mm(weight, channels_first.flatten(1)), square, 2 * state),
        "mix, strided product a head": (strided, mixing, 2 * state),
        "mix, channels first": (old_mix, mixing, 2 * state),
        "y + W_value m": (lambda: flat_y.addmm_(flat, weight.T), square, 3 * state),
        "norms": (lambda: torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32), 0, state),
    }
    for step in (32, 64, 128, 256):
        if step <= c:
            steps[f"mix, {step} side by side"] = (lambda step=step: gathered(step), mixing, 2 * state)
    return steps
