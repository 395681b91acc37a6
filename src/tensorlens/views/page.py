"""Maps, pair maps and the inside of a model as HTML: a fragment for notebooks, or a page that opens from disk offline.

The component is plain JavaScript in `static/`. Data travels as JSON in a script tag that is never
run, and reaches the screen as text only: no label can become markup. The page also forbids, by its
content security policy, every script but our own and every request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tensorlens.views.captions import bias_by_output
from tensorlens.views.labels import shorten, visible
from tensorlens.views.record import MapView, by_strength, limit_of

_STATIC = Path(__file__).parent / "static"
_SCRIPTS = (
    *("labels", "colours", "scores", "viewport", "raster", "axes", "heatmap", "text", "patches", "panels", "aside"),
    *("group_words", "shade", "pictures", "answer", "lens", "graph", "grid", "inside", "pairs", "mount"),
)
_EXACT_UP_TO = 512
_FALLBACK_TOKENS = 12


def fragment(view: MapView) -> str:
    """The map for a notebook cell: self-contained, with its style kept apart from the page around it.

    If scripts do not run (an untrusted notebook, a preview), the strongest inputs are still shown as text.
    """
    return _cell(_host(view))


def page(views: Sequence[MapView], title: str) -> str:
    """A complete HTML document with one map below the other."""
    return _document([_host(view) for view in views], title)


def inside_page(data: dict[str, Any], title: str, *, below: Sequence[str] = ()) -> str:
    """A complete HTML document of the inside of a model at one input.

    Args:
        data: The result of `Inside.payload`.
        title: Its title.
        below: Paragraphs and pictures below it; a string that begins with a picture's tag is a picture.
    """
    after = [one if one.startswith("<svg") else f"<p>{as_text(one)}</p>" for one in below]
    return _document([host("inside", f"<p><strong>{as_text(title)}</strong></p>", data), *after], title)


def pairs_page(data: dict[str, Any], title: str) -> str:
    """A complete HTML document of a pair map, from the result of `PairMap.payload`."""
    return _document([_pairs_host(data, title)], title)


def pairs_fragment(data: dict[str, Any], title: str) -> str:
    """A pair map for a notebook cell; if scripts do not run, the question and the strongest pairs are shown as text."""
    return _cell(_pairs_host(data, title))


def _cell(part: str) -> str:
    start = "mountWaiting(document.currentScript?.getRootNode() ?? document);"
    return f"{part}\n<script>{isolated(component(), start)}</script>"


def _document(parts: Sequence[str], title: str) -> str:
    """A complete HTML document of some parts, in which only our script may run."""
    script = isolated(component(), "mountWaiting(document);")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{as_text(title)}</title>\n<style>{static_file('page.css')}</style>\n</head>\n<body>",
            *parts,
            f"<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _pairs_host(data: dict[str, Any], title: str) -> str:
    cells, rows, columns = data["cells"], data["rows"], data["columns"]
    lines = [f"<strong>{as_text(title)}</strong>"]
    for i, j in data["top"]:
        score = "no value" if cells[i][j] is None else f"{cells[i][j]:+.3g}"
        lines.append(f"{as_text(shorten(rows[i], 24)).strip()} × {as_text(shorten(columns[j], 24)).strip()} {score}")
    return host("pairs", f"<p>{'<br>'.join(lines)}</p>", data)


@cache
def component() -> str:
    """The JavaScript of all pages: defines `mount`, `Inside`, `Pairs` and `mountWaiting(root)` around it."""
    styles = {"STYLE": "component.css", "INSIDE_STYLE": "inside.css", "PAIRS_STYLE": "pairs.css"}
    constants = [f"const {name} = {as_json(static_file(file))};" for name, file in styles.items()]
    scripts = [static_file(f"{name}.js") for name in _SCRIPTS]
    return "\n".join([f"const PALETTES = {static_file('palettes.json')};", *constants, *scripts])


def payload(view: MapView) -> dict[str, Any]:
    """The argument of `mount`, as plain JSON values."""
    bias = [float(share) if np.isfinite(share) else None for share in view.bias_share]
    grid = view.grid
    return {
        "title": view.title,
        "caption": [list(line) for line in view.caption],
        "rowCaption": [[name, list(values)] for name, values in (*view.row_caption, bias_by_output(view.bias_share))],
        "inTokens": list(view.in_tokens),
        "outTokens": None if view.out_tokens == view.in_tokens else list(view.out_tokens),
        "outPositions": None if view.out_positions is None else list(view.out_positions),
        "isSigned": view.is_signed,
        "setAside": list(view.aside),
        "words": [list(word) for word in view.words],
        "sums": list(view.sums),
        "sink": list(view.sink),
        "biasShare": bias,
        "grid": None if grid is None else {"rows": grid.rows, "columns": grid.columns, "first": grid.first},
        "image": view.image,
        "answer": None if view.answer is None else asdict(view.answer),
        "scores": _encode(view),
    }


def _encode(view: MapView) -> dict[str, Any]:
    """Little-endian base64: single precision for small maps, half precision in units of the limit for long ones."""
    is_small = max(view.scores.shape, default=0) <= _EXACT_UP_TO
    in_range = 1e-30 < limit_of(view.scores) < 1e30
    dtype, unit = ("<f4", 1.0) if is_small and in_range else ("<f4" if is_small else "<f2", limit_of(view.scores))
    data = (view.scores / unit).astype(dtype).tobytes()
    name = "float32" if dtype == "<f4" else "float16"
    return {"dtype": name, "unit": unit, "data": base64.b64encode(data).decode()}


def _host(view: MapView) -> str:
    return host("map", _fallback(view), payload(view))


def host(kind: str, fallback: str, data: dict[str, Any]) -> str:
    """The element that a script fills: data that is never run, and the text shown if scripts do not run."""
    script = f'<script type="application/json">{as_json(data)}</script>'
    return f'<div data-tensorlens="{kind}">\n{fallback}\n{script}\n</div>'


def _fallback(view: MapView) -> str:
    n_out, n_in = view.scores.shape
    lines = [f"<strong>{as_text(view.title)}</strong> {n_out} × {n_in}"]
    if n_out and n_in:
        row = view.scores[-1]
        order = by_strength(row)[:_FALLBACK_TOKENS]
        sign = "+" if view.is_signed else ""
        pairs = (f"{as_text(shorten(view.in_tokens[j], 24)).strip()} {row[j]:{sign}.3g}" for j in order)
        lines.append(f"Output {as_text(shorten(view.out_tokens[-1], 24)).strip()} from: {', '.join(pairs)}")
    return f"<p>{'<br>'.join(lines)}</p>"


def isolated(*scripts: str) -> str:
    """Scripts in a scope of their own."""
    return "\n".join(["(() => {\n'use strict';", *scripts, "})();"])


def as_json(value: Any) -> str:
    """ASCII JSON in which nothing can end a script tag or open a comment."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def as_text(value: str) -> str:
    """Text escaped for markup."""
    return html.escape(visible(value))


@cache
def static_file(name: str) -> str:
    """A file of the component, by name."""
    return (_STATIC / name).read_text("utf-8")


# A static picture -----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 48, 28, 12


def curve_svg(points: Sequence[tuple[float, float]], labels: Sequence[str]) -> str:
    """(share, f) by size, equally spaced, since sizes grow by factors; lines at 0 and 1.

    Args:
        points: In the order of their shares.
        labels: The text below each point.
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
