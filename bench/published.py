"""The tables of docs/what-to-use.md and docs/leaderboard.md, each cell from the records in `bench/records`."""

from __future__ import annotations

from bench.records import KINDS, Records, Row, chance, is_ours, less, read, rows
from bench.tables import DOCS, fill, markdown, ranged

PAGES = (DOCS / "what-to-use.md", DOCS / "leaderboard.md")
SHOWN = 10
"""Rows of a table; the others are folded."""


def block(key: str) -> str | None:
    """What belongs between the marks of a key: ``use QUESTION`` or ``judge NAME``."""
    kind, _, name = key.partition(" ")
    runs = [one for one in read() if name in (one.judge, KINDS[one.judge].question)]
    if not runs:
        return None
    return "\n\n".join(map(judge_table, runs)) if kind == "judge" else use_table(runs)


def judge_table(run: Records) -> str:
    """One run: every method, ordered by the half on which is chosen."""
    found, kind = rows(run), KINDS[run.judge]
    drawn = [_cells(row) for row in found]
    drawn.insert(min(SHOWN, len(drawn)), {"method": "chance", "chosen on": "", "held out [95 %]": f"{chance(run):.3f}"})
    held = f"{found[0].n} of {len(run.lines)} items held out"
    head = f"**{run.judge}, {run.model}**: {kind.says}; {held}. {run.about['ran']}."
    rest = drawn[SHOWN + 1 :]
    folded = (
        f"\n\n<details markdown><summary>{len(rest)} more</summary>\n\n{markdown(rest)}\n\n</details>" if rest else ""
    )
    return f"{head}\n\n{markdown(drawn[: SHOWN + 1])}{folded}"


def _cells(row: Row) -> dict[str, str]:
    name = f"**{row.method}**" if is_ours(row.method) else row.method
    value = ranged(row.value, row.low, row.high)
    return {"method": name, "chosen on": f"{row.chosen:.3f}", "held out [95 %]": value}


def use_table(runs: list[Records]) -> str:
    """By run: what was chosen on one half, what it has on the other, and how far it is from what else there is."""
    return markdown([_use(run) for run in runs])


def _use(run: Records) -> dict[str, str]:
    found = rows(run)
    ours = [row for row in found if is_ours(row.method)]
    others = [row for row in found if not is_ours(row.method)]
    best, rival = ours[0], max(others, key=lambda row: row.value, default=None)
    cells = {
        "judge": f"{run.judge}, {run.model}",
        "chosen": best.method,
        "held out": ranged(best.value, best.low, best.high),
    }
    if rival is None:
        return cells | {"best of the others": "–", "less it": "–"}
    return cells | {
        "best of the others": f"{rival.method}, {rival.value:.3f}",
        "less it": ranged(*less(run, best, rival), "+.3f"),
    }


def everything() -> str:
    """Every table, for a terminal."""
    questions = dict.fromkeys(KINDS[one.judge].question for one in read())
    parts = [f"# {question}\n\n{block(f'use {question}')}" for question in questions]
    return "\n\n".join(parts + [judge_table(one) for one in read()])


def write() -> None:
    """Fill the pages."""
    for page in PAGES:
        print(f"{page.name}: {fill(page, 'records', block)} tables")
