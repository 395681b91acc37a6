"""The tables of docs/what-to-use.md and docs/leaderboard.md, each cell from the records in `bench/records`."""

from __future__ import annotations

from statistics import mean

from bench.records import KINDS, Records, Row, chance, is_ours, less, read, rows
from bench.tables import DOCS, fill, markdown, ranged

PAGES = (DOCS / "what-to-use.md", DOCS / "leaderboard.md")
PICTURE = DOCS / "assets" / "scaling.svg"
MILLIONS = {"smollm2-135m": 135, "gemma3-270m": 268, "qwen2.5-coder-0.5b": 494, "qwen2.5-coder-1.5b": 1544}
"""Parameters of each model of the picture."""
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
    drawn.insert(
        min(SHOWN, len(drawn)), {"method": "chance", "first half": "", "held-out half [95 %]": f"{chance(run):.3f}"}
    )
    held = f"{found[0].n} of {len(run.lines)} items in the held-out half"
    head = f"**{run.judge}, {run.model}**: {kind.says}; {held}. {run.about['ran']}."
    rest = drawn[SHOWN + 1 :]
    folded = (
        f"\n\n<details markdown><summary>{len(rest)} more</summary>\n\n{markdown(rest)}\n\n</details>" if rest else ""
    )
    return f"{head}\n\n{markdown(drawn[: SHOWN + 1])}{folded}"


def _cells(row: Row) -> dict[str, str]:
    name = f"**{row.method}**" if is_ours(row.method) else row.method
    value = ranged(row.value, row.low, row.high)
    return {"method": name, "first half": f"{row.chosen:.3f}", "held-out half [95 %]": value}


def use_table(runs: list[Records]) -> str:
    """What was chosen for a question over all its runs, and by run what it has on the other half."""
    best = chosen(runs)
    return f"Chosen: **{best}**\n\n{markdown([_use(run, best) for run in runs])}"


def chosen(runs: list[Records]) -> str:
    """The map of T with the highest mean over the first halves of all runs.

    On a tie it is the one whose rule set does best with all targets together.
    """
    by_run = [{row.method: row.chosen for row in rows(run) if is_ours(row.method)} for run in runs]
    common = {method: mean(of[method] for of in by_run) for method in by_run[0] if all(method in of for of in by_run)}

    def of_rules(method: str) -> float:
        rules = method.partition(", ")[0]
        return mean(value for other, value in common.items() if other.partition(", ")[0] == rules)

    return max(common, key=lambda method: (round(common[method], 6), of_rules(method)))


def _use(run: Records, method: str) -> dict[str, str]:
    found = {row.method: row for row in rows(run)}
    best = found.pop(method)
    others = [row for row in found.values() if not is_ours(row.method)]
    ours = [row for row in found.values() if is_ours(row.method)]
    cells = {"benchmark": f"{run.judge}, {run.model}", "held-out half": ranged(best.value, best.low, best.high)}
    for name, some in (("best baseline or control", others), ("best other map of T", ours)):
        rival = max(some, key=lambda row: row.value, default=None)
        said = "–" if rival is None else f"{rival.method} {rival.value:.3f}: {ranged(*less(run, best, rival), '+.3f')}"
        cells[name] = said
    return cells


def draw() -> None:
    """The held-out scores for words over the size of the model: the main rule sets and the best baseline or control."""
    import matplotlib.pyplot as plt

    runs = sorted((run for run in read() if run.judge == "evidence"), key=lambda run: MILLIONS[run.model])
    found = [{row.method: row for row in rows(run)} for run in runs]
    best = [max((row for row in one.values() if not is_ours(row.method)), key=lambda row: row.value) for one in found]
    lines = {"AttnLRP": "@attn_lrp", "gate halved": "@half_gate", "the paper's": "", "Jacobian": "@jacobian"}
    shown = {label: [one[f"tensor.in_class{ending}"] for one in found] for label, ending in lines.items()}
    with plt.rc_context({"svg.hashsalt": "scaling", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
        for label, drawn in (shown | {"best baseline or control": best}).items():
            values = [row.value for row in drawn]
            errors = [[row.value - row.low for row in drawn], [row.high - row.value for row in drawn]]
            style = "--" if drawn is best else "-"
            axes.errorbar([MILLIONS[run.model] for run in runs], values, errors, label=label, marker="o", ls=style)
        axes.set(xscale="log", ylabel="reciprocal rank of the deciding word", xlim=(110, 1900))
        axes.set_xticks([MILLIONS[run.model] for run in runs], [run.model.replace("-coder", "") for run in runs])
        axes.minorticks_off()
        figure.legend(frameon=False, loc="outside right upper")
        figure.savefig(PICTURE, metadata={"Date": None})
        plt.close(figure)


def everything() -> str:
    """Every table, for a terminal."""
    questions = dict.fromkeys(KINDS[one.judge].question for one in read())
    parts = [f"# {question}\n\n{block(f'use {question}')}" for question in questions]
    return "\n\n".join(parts + [judge_table(one) for one in read()])


def write() -> None:
    """Fill the pages."""
    for page in PAGES:
        print(f"{page.name}: {fill(page, 'records', block)} tables")
    draw()
