"""Which characters matplotlib can draw here, a visible escape for those it cannot, and how wide a line is."""

from __future__ import annotations

from functools import cache
from typing import Any

from tensorlens.views.labels import escape

_DOTS = 300
# Outline fonts by the scripts they add, as found on Linux, macOS and Windows; colour emoji fonts cannot be drawn.
_WANTED = (
    "DejaVu Sans",
    "Noto Sans",
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Thai",
    "Noto Emoji",
    "Arial Unicode MS",
    "Hiragino Sans",
    "PingFang SC",
    "Microsoft YaHei",
    "Malgun Gothic",
    "Segoe UI Symbol",
)


def drawable(text: str) -> str:
    r"""The text with each character that no font at hand can draw spelled out as `\uNNNN`."""
    known = _characters()
    return "".join(character if ord(character) in known else escape(character) for character in text)


@cache
def families() -> list[str]:
    """The installed fonts to draw labels with, in order of preference."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in _WANTED if name in installed]


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    known: set[int] = set()
    for name in families():
        path = fontManager.findfont(FontProperties(family=[name]), fallback_to_default=False)
        known |= get_font(path).get_charmap().keys()
    return frozenset(known)


def text_width(text: str, size: float) -> float:
    """Width in inches of a line of text at `size` points."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=families(), size=size)
    width, _, _ = _renderer().get_text_width_height_descent(text, font, ismath=False)
    return width / _DOTS


@cache
def _renderer() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, _DOTS)
