"""Labels: token text made safe to look at, and which characters matplotlib can draw.

Tokens are shown and never interpreted: control characters, direction overrides and lone surrogates
become visible escapes. The page does the same in `static/labels.js`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from functools import cache
from typing import Any

_NAMED = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
_JOINERS = "\u200c\u200d"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
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


def visible(token: str) -> str:
    """The token with every invisible character spelled out; an empty one becomes ∅, a blank one ␣."""
    if not token:
        return "∅"
    if not token.strip(" "):
        return "␣" * len(token)
    shown = "".join(_visible_character(character) for character in token)
    # A combining mark alone would attach itself to the character before it.
    return f"◌{shown}" if unicodedata.combining(token[0]) else shown


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, ending in an ellipsis when cut."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def shorten_inside(text: str, width: int) -> str:
    """The text in at most `width` characters, cut near its middle where fewest digits are lost."""
    lost = len(text) - width + 1
    if lost <= 1:
        return text
    digits = [character.isdigit() for character in text]
    start = min(range(width), key=lambda k: (sum(digits[k : k + lost]), abs(2 * k + 1 - width)))
    return f"{text[:start]}…{text[start + lost :]}"


def distinct(names: Mapping[int, str], width: int) -> list[str]:
    """Names by their place, each in at most `width` characters; equal-looking names get their place appended."""
    short = {place: shorten_inside(name, width) for place, name in names.items()}
    behind: dict[str, set[str]] = {}
    for place, name in names.items():
        behind.setdefault(short[place], set()).add(name)
    return [
        shorten_inside(names[place], width - len(f" {place}")) + f" {place}" if len(behind[label]) > 1 else label
        for place, label in short.items()
    ]


def spelled(character: str) -> str:
    r"""A character as `\xNN`, `\uNNNN` or `\UNNNNNNNN`."""
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _visible_character(character: str) -> str:
    if character in _NAMED:
        return _NAMED[character]
    if character in _JOINERS or unicodedata.category(character) not in _HIDDEN:
        return character
    return spelled(character)


# In figures -----------------------------------------------------------------------------------------------------------


def drawable(text: str) -> str:
    r"""The text with each character that no font at hand can draw spelled out as `\uNNNN`."""
    known = _characters()
    return "".join(character if ord(character) in known else spelled(character) for character in text)


@cache
def font_families() -> list[str]:
    """The installed fonts to draw labels with, in order of preference."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in _WANTED if name in installed]


@cache
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, fontManager, get_font

    known: set[int] = set()
    for name in font_families():
        path = fontManager.findfont(FontProperties(family=[name]), fallback_to_default=False)
        known |= get_font(path).get_charmap().keys()
    return frozenset(known)


def text_width(text: str, size: float) -> float:
    """Width in inches of a line of text at `size` points."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=font_families(), size=size)
    width, _, _ = _renderer().get_text_width_height_descent(text, font, ismath=False)
    return width / _DOTS


def fitted(text: str, size: float, width: float) -> str:
    """The text, shortened until a line of it at `size` points is at most `width` inches wide."""
    for n_characters in range(min(len(text), 100), 1, -1):
        short = shorten_inside(text, n_characters)
        if text_width(short, size) <= width:
            return short
    return text[:1]


def wrapped(text: str, size: float, width: float) -> str:
    """The text in lines at most `width` inches wide at `size` points; a word that is wider is broken."""
    lines = [""]
    for word in re.findall(r"\s*\S+", text):
        if text_width(lines[-1] + word, size) <= width:
            lines[-1] += word
            continue
        rest = word.lstrip()
        while rest:
            n_fitting = next((k for k in range(len(rest), 1, -1) if text_width(rest[:k], size) <= width), 1)
            lines.append(rest[:n_fitting])
            rest = rest[n_fitting:]
    return "\n".join(lines).lstrip("\n")


@cache
def _renderer() -> Any:
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, _DOTS)
