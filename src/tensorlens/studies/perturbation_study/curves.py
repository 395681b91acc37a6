"""Curves as SVG text: one line a method, no script, no font and no drawing library needed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

WIDTH, HEIGHT = 720, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 232, 34, 44
# Colours that stay apart for colour-blind readers (Okabe and Ito), then the same dashed.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F", "#555555")
DASHES = ("", "6 3", "2 3", "8 3 2 3")


def curves_svg(
    curves: Mapping[str, Sequence[float]], grid: Sequence[float], title: str, label: str,
    x_label: str = "fraction of tokens replaced",
) -> str:  # fmt: skip
    """A line chart of one curve for each name, with the legend in the given order.

    Args:
        curves: Heights by name, one for each point of the grid.
        grid: Points along the horizontal axis.
        title: Printed above.
        label: What the height is.
        x_label: What the horizontal axis is.
    """
    top = max((max(curve) for curve in curves.values()), default=0.0) or 1.0
    step = _tick(top / 5)
    parts = [_frame(title, label, x_label), *_horizontal_lines(step, top), *_grid_labels(grid)]
    gap = min(18.0, (HEIGHT - TOP - 10) / max(len(curves), 1))
    for number, (name, curve) in enumerate(curves.items()):
        style = _style(number)
        points = " ".join(f"{_x(f, grid):.1f},{_y(value, top):.1f}" for f, value in zip(grid, curve, strict=True))
        y = TOP + 8 + number * gap
        end = WIDTH - RIGHT + 12
        parts.append(f'<polyline points="{points}" fill="none" {style}><title>{html.escape(name)}</title></polyline>')
        parts.append(f'<line x1="{end}" x2="{end + 24}" y1="{y:.1f}" y2="{y:.1f}" {style}/>')
        parts.append(f'<text x="{end + 30}" y="{y + 4:.1f}">{html.escape(name)}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{html.escape(title)}" font-family="system-ui, sans-serif" font-size="12" fill="currentColor">\n'
        f"{body}\n</svg>\n"
    )


def _frame(title: str, label: str, x_label: str) -> str:
    middle = (LEFT + WIDTH - RIGHT) / 2
    return (
        f'<text x="{LEFT}" y="18" font-weight="600">{html.escape(title)}</text>'
        f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x_label)}</text>'
        f'<text x="14" y="{HEIGHT / 2}" text-anchor="middle" transform="rotate(-90 14 {HEIGHT / 2})">'
        f"{html.escape(label)}</text>"
    )


def _horizontal_lines(step: float, top: float) -> list[str]:
    lines = []
    for count in range(int(top / step + 1e-9) + 1):
        y = _y(count * step, top)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.15"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{count * step:.3g}</text>'
        )
    return lines


def _grid_labels(grid: Sequence[float]) -> list[str]:
    every = max(1, len(grid) // 7)
    return [
        f'<text x="{_x(fraction, grid):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{fraction:.3g}</text>'
        for fraction in grid[::every]
    ]


def _x(fraction: float, grid: Sequence[float]) -> float:
    return LEFT + (fraction - grid[0]) / (grid[-1] - grid[0]) * (WIDTH - RIGHT - LEFT)


def _y(value: float, top: float) -> float:
    return HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)


def _style(number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // len(COLOURS) % len(DASHES)]
    return f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")


def _tick(rough: float) -> float:
    """The round number (1, 2 or 5 times a power of ten) at or above a rough step."""
    power = 10.0 ** int(f"{rough:e}".partition("e")[2])
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
