"""Tables, and the blocks of pages that they fill: the one way in which bench prints numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tensorlens.studies.report import FEW_UNITS, with_interval
from tensorlens.studies.report import markdown as markdown

DOCS = Path(__file__).parents[1] / "docs"


def ranged(
    mean: float | None, low: float | None = None, high: float | None = None, *, form: str = ".3f", n: int = FEW_UNITS
) -> str:
    """A mean with its interval, from `n` items; a dash where there is none."""
    if mean is None:
        return "–"
    return f"{mean:{form}}" if low is None or high is None else with_interval(mean, (low, high), n, form)


def fill(page: Path, name: str, block: Callable[[str], str | None]) -> int:
    """Put tables into a page, between ``<!-- NAME: KEY -->`` and ``<!-- /NAME -->``; the rest is written by hand.

    Args:
        page: A Markdown file.
        name: What the blocks are called.
        block: From a key to what belongs there; None leaves it as it is.

    Returns:
        How many blocks were filled.
    """
    count = 0

    def filled(match: re.Match[str]) -> str:
        nonlocal count
        made = block(match[2] or "")
        count += made is not None
        return match[0] if made is None else f"{match[1]}\n{made}\n\n{match[4]}"

    pattern = rf"(<!-- {name}(?:: (.*?))? -->\n)(.*?)(<!-- /{name} -->)"
    page.write_text(re.sub(pattern, filled, page.read_text("utf-8"), flags=re.DOTALL), "utf-8")
    return count
