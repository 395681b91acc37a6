"""The inside of a model as HTML: a complete page that opens from disk without a network.

Takes plain values (`payload` of `inside/inside_record.py`); knows no tensor and no model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from tensorlens.views.page import as_json, as_text, document, host, isolated, static_file

_SCRIPTS = ("labels", "colours", "shade", "graph", "inside")


def inside_page(payload: dict[str, Any], title: str) -> str:
    """A complete HTML document of one input."""
    start = "for (const host of document.querySelectorAll('[data-tensorlens=inside]')) mountInside(host);"
    place = host("inside", f"<p><strong>{as_text(title)}</strong></p>", payload)
    return document([place], title, isolated(inside_component(), start))


@cache
def inside_component() -> str:
    """The JavaScript: defines `Inside` and `mountInside(host)` in the scope it is put into."""
    style = f"const STYLE = {as_json(static_file('component.css'))};"
    own = f"const INSIDE_STYLE = {as_json(static_file('inside.css'))};"
    constants = f"const PALETTES = {static_file('palettes.json')};\n{style}\n{own}"
    mount = (
        "function mountInside(host) {\n"
        "  const data = JSON.parse(host.querySelector('script[type=\"application/json\"]').textContent);\n"
        "  host.tensorlens = new Inside(host, data);\n}"
    )
    return "\n".join([constants, *(static_file(f"{name}.js") for name in _SCRIPTS), mount])
