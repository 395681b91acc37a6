"""Tables of a page beside those of new runs: what the runs hold takes the place of what was printed, the rest stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from tensorlens.studies.pages import as_markdown

NOTHING = "No run yet."
COST = "ms an item"
JUDGE = re.compile(r"^\*\*(.+?)\*\*", re.MULTILINE)
MODEL = re.compile(r"^\*([^*,]+), [^*]+\*: ", re.MULTILINE)

Row = dict[str, str]


def kept(key: str, old: str, new: str, models: Sequence[str]) -> str:
    """A block of a page, with the cells that the new one has not.

    Args:
        key: What the block shows.
        old: What was printed.
        new: What the runs at hand say.
        models: Every model, in the order of columns and rows.
    """
    old, new = old.strip(), new.strip()
    if new == NOTHING or NOTHING in old or not old:
        return old if new == NOTHING else new
    if key in ("counts", "differences"):
        return as_markdown(rows_beside(rows_of(old), rows_of(new), models))
    if key in ("word", "passage", "component", "removal", "members"):
        return _by(JUDGE, old, new, lambda before, after: columns_beside(before, after, models))
    if key == "peers":
        return _by(MODEL, old, new, lambda _, after: after)
    return new


def rows_of(text: str) -> list[Row]:
    """The rows of a Markdown table."""
    lines = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    lines = [[*line, *[""] * (len(lines[0]) - len(line))] for line in lines]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def rows_beside(old: list[Row], new: list[Row], models: Sequence[str]) -> list[Row]:
    """By model and judge, the new rows or else the old ones."""
    known = {(row["model"], row["judge"]) for row in new}
    rows = [row for row in old if (row["model"], row["judge"]) not in known] + new
    judges = list(dict.fromkeys(row["judge"] for row in old + new))
    places = [*models, *(row["model"] for row in rows)]
    return sorted(rows, key=lambda row: (places.index(row["model"]), judges.index(row["judge"])))


def columns_beside(old: str, new: str, models: Sequence[str]) -> str:
    """A judge's table with the new columns of models in the place of the old ones, best method first."""
    before, after = ({row["method"]: row for row in rows_of(text)} for text in (old, new))
    heads = [*next(iter(before.values())), *next(iter(after.values()))]
    shown = [model for model in models if model in heads]
    cost = next(name for name in heads if name.startswith(COST))
    renewed = [model for model in shown if model in next(iter(after.values()))]
    rows = []
    for method in dict.fromkeys([*before, *after]):
        of = {model: (after if model in renewed else before).get(method, {}).get(model, "–") for model in shown}
        charged = after if cost in next(iter(after.values())) else before
        empty = "" if method == "chance" else "–"
        rows.append({"method": method} | of | {cost: charged.get(method, {}).get(cost, empty) or empty})
    rows = [row for row in rows if any(row[model] != "–" for model in shown)]
    rows.sort(key=lambda row: (row["method"] == "chance", -sum(_mean(row[model]) for model in shown)))
    head = (new if renewed == shown else old).partition("\n")[0]
    return f"{head}\n\n{as_markdown(rows)}"


def _mean(cell: str) -> float:
    return 0.0 if cell == "–" else float(cell.split(" ")[0])


def _by(name: re.Pattern[str], old: str, new: str, join: Callable[[str, str], str]) -> str:
    """Two texts cut where a name begins a line; parts of both are joined."""
    before, after = (_parts(name, text) for text in (old, new))
    return "\n\n".join(
        before[one] if one not in after else after[one] if one not in before else join(before[one], after[one])
        for one in dict.fromkeys([*before, *after])
    )


def _parts(name: re.Pattern[str], text: str) -> dict[str, str]:
    """By name, what follows it up to the next other name."""
    found: dict[str, str] = {}
    starts = [*name.finditer(text)]
    for here, following in zip(starts, [*starts[1:], None], strict=True):
        part = text[here.start() : following.start() if following else None].strip()
        found[here[1]] = f"{found[here[1]]}\n\n{part}" if here[1] in found else part
    return found
