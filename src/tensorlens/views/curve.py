"""A curve over shares as a static picture: how much circuits of growing size recover."""

from __future__ import annotations

from collections.abc import Sequence

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 48, 28, 12


def curve_svg(points: Sequence[tuple[float, float]], labels: Sequence[str]) -> str:
    """(share, f) by size, equally spaced, since sizes grow by factors; lines at 0 and 1.

    Args:
        points: In the order of their shares.
        labels: What stands below each.
    """
    values = [f for _, f in points]
    low, high = min(0.0, *values), max(1.0, *values)
    xs = [LEFT + i * (WIDTH - LEFT - 24) / max(1, len(points) - 1) for i in range(len(points))]

    def y(value: float) -> float:
        return TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    line = " ".join(f"{x:.1f},{y(f):.1f}" for x, f in zip(xs, values, strict=True))
    parts = [
        f'<line x1="{LEFT}" x2="{WIDTH - 24}" y1="{y(v):.1f}" y2="{y(v):.1f}" stroke="currentColor" opacity="0.3"/>'
        f'<text x="{LEFT - 6}" y="{y(v) + 4:.1f}" text-anchor="end">{v:g}</text>'
        for v in (0.0, 1.0)
    ]
    parts += [
        f'<circle cx="{x:.1f}" cy="{y(f):.1f}" r="3" fill="currentColor"><title>{label}: {f:.3f}</title></circle>'
        f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>'
        for x, f, label in zip(xs, values, labels, strict=True)
    ]
    return (
        f'<svg role="img" aria-label="Faithfulness by size of the circuit" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" style="max-width:100%;font:11px sans-serif;fill:currentColor">'
        f'<polyline points="{line}" fill="none" stroke="currentColor" stroke-width="1.5"/>{"".join(parts)}</svg>'
    )
