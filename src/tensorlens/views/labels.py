"""Token text made safe to look at, the same for the terminal and for figures.

A token is shown, never obeyed: control characters, direction overrides and lone surrogates
become visible escapes. The page does the same in `static/labels.js`.
"""

from __future__ import annotations

import unicodedata

_NAMED = {"\n": "⏎", "\r": "␍", "\t": "⇥"}
_JOINERS = "\u200c\u200d"
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(token: str) -> str:
    """The token with every invisible character spelled out; an empty one becomes ∅, a blank one ␣."""
    if not token:
        return "∅"
    if not token.strip(" "):
        return "␣" * len(token)
    shown = "".join(_visible_character(character) for character in token)
    # A combining mark alone would attach itself to whatever stands before it.
    return f"◌{shown}" if unicodedata.combining(token[0]) else shown


def shorten(text: str, width: int) -> str:
    """The text in at most `width` characters, ending in an ellipsis when cut."""
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def escape(character: str) -> str:
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
    return escape(character)
