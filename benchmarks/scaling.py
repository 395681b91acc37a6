"""How the time of one slice and of one sketch grows with tokens, channels and blocks, and the picture of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from benchmarks.models import build
from benchmarks.parts import Rows, tensor_of
from benchmarks.timing import interleaved
from tensorlens.operators.norms import sketched_norms

NAMES = {"L": "tokens L", "D": "channels D", "N": "blocks N - 1"}
PICTURE = Path(__file__).parents[1] / "docs" / "assets" / "performance-scaling.svg"


def scaling(device: str, precision: str = "float32", rounds: int = 3) -> Rows:
    """Seconds over L, D and N, one at a time, with the fitted exponents.

    Of the last block only one token is live, so N counts the others.
    """
    base = {"L": 256, "D": 1024, "N": 8} if device == "cuda" else {"L": 32, "D": 128, "N": 4}
    rows = []
    for axis in base:
        points: dict[str, list[tuple[int, float]]] = {"slice": [], "sketch": []}
        for factor in (0.5, 1, 2, 4):
            size = base | {axis: int(base[axis] * factor)}
            model = build(
                "bert-base",
                device,
                hidden_size=size["D"],
                num_hidden_layers=size["N"] + 1,
                num_attention_heads=size["D"] // 32,
                intermediate_size=4 * size["D"],
                max_position_embeddings=2048,
            )
            T = tensor_of(model, size["L"], precision).operator
            last = size["L"] - 1
            works = {"slice": lambda: T.rows(last), "sketch": lambda: sketched_norms(T, (last,), 16)}  # noqa: B023
            for work in works.values():
                work()
            for name, timing in interleaved(works, device, rounds=rounds).items():
                points[name].append((size[axis], timing.seconds))
            del model, T
        rows += [
            {"work": f"scaling of a {name}", "axis": axis, "base": base, "points": found, "exponent": slope(found)}
            for name, found in points.items()
        ]
        print(rows[-2:], flush=True)
    return rows


def slope(points: list[tuple[int, float]]) -> float:
    """The exponent of the power law that fits best."""
    xs, ys = (torch.tensor(v, dtype=torch.float64).log() for v in zip(*points, strict=True))
    return float(((xs - xs.mean()) * (ys - ys.mean())).sum() / (xs - xs.mean()).square().sum())


def draw(rows: list[dict[str, Any]], path: Path = PICTURE) -> None:
    """Seconds of a slice and of a sketch over each size, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(
        {"svg.hashsalt": "tensorlens", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    ):
        figure, places = plt.subplots(1, len(NAMES), figsize=(8.4, 2.6), sharey=True, layout="constrained")
        for place, (axis, label) in zip(places, NAMES.items(), strict=True):
            for row in (row for row in rows if row["axis"] == axis):
                xs, ys = zip(*row["points"], strict=True)
                name = row["work"].split()[-1]
                style = {"slice": ("#1a5fb4", "o"), "sketch": ("#c64600", "s")}[name]
                place.loglog(xs, ys, color=style[0], marker=style[1], label=f"{name}: {row['exponent']:.2f}")
            place.set_xticks(xs, [str(x) for x in xs])  # type: ignore[possibly-unbound]
            place.minorticks_off()
            place.set_xlabel(label)
            place.grid(alpha=0.25)
            place.legend(frameon=False, title="exponent")
        places[0].set_ylabel("seconds")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
