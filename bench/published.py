"""The tables of docs/what-to-use.md, leaderboard.md and how-to/circuits.md, each cell from `bench/records`."""

from __future__ import annotations

from statistics import mean

from bench.records import FOLDER, KINDS, Records, Row, chance, interval_of, is_ours, is_peer, is_same, less, read, rows
from bench.tables import DOCS, fill, markdown, ranged
from tensorlens.inside.circuit import Faithfulness, faithfulness_of
from tensorlens.recommendations import recommended
from tensorlens.recording.conventions import RULE_SETS
from tensorlens.studies.report import FEW_UNITS

PAGES = (DOCS / "what-to-use.md", DOCS / "leaderboard.md", DOCS / "how-to" / "circuits.md")
PICTURE = DOCS / "assets" / "scaling.svg"
MILLIONS = {"smollm2-135m": 135, "gemma3-270m": 268, "qwen2.5-coder-0.5b": 494, "qwen2.5-coder-1.5b": 1544}
"""Parameters of each model of the picture."""
SHOWN = 4
"""Rows of a table; the others are folded."""


def block(key: str) -> str | None:
    """What belongs between the marks of a key: ``use QUESTION``, ``judge NAME`` or ``circuits ORDER``."""
    kind, _, name = key.partition(" ")
    if kind == "circuits":
        return circuit_tables(name)
    runs = [one for one in read() if name in (one.judge, KINDS[one.judge].question)]
    if not runs:
        return None
    return "\n\n".join(map(judge_table, runs)) if kind == "judge" else use_table(runs)


def judge_table(run: Records) -> str:
    """One run: every method, ordered by the half on which is chosen, and then packages, which are never folded."""
    every, kind = rows(run), KINDS[run.judge]
    n = max(row.n for row in every)
    found = [row for row in every if not is_peer(row.method)]
    drawn = [_cells(row, n) for row in (*found[:SHOWN], *(row for row in every if is_peer(row.method)))]
    rest = [_cells(row, n) for row in found[SHOWN:]]
    drawn.append({"method": "chance", "first half": "", "held-out half [95 %]": f"{chance(run):.3f}"})
    held = f"{n} of {len(run.lines)} items in the held-out half"
    head = f"**{run.judge}, {run.model}**: {kind.says}; {held}. {run.about['ran']}."
    folded = (
        f"\n\n<details markdown><summary>{len(rest)} more</summary>\n\n{markdown(rest)}\n\n</details>" if rest else ""
    )
    return f"{head}{_packages(run)}\n\n{markdown(drawn)}{folded}"


def _cells(row: Row, n: int) -> dict[str, str]:
    """A row; how many items of the half it has, where that is not all of them."""
    name = f"**{row.method}**" if is_ours(row.method) else row.method
    name += f" ({row.n} items)" * (row.n < n)
    value = ranged(row.value, row.low, row.high, n=row.n)
    return {"method": name, "first half": f"{row.chosen:.3f}", "held-out half [95 %]": value}


def _packages(run: Records) -> str:
    """The versions of other packages, and why one has no row."""
    said = []
    for name, about in run.about.get("peers", {}).items():
        reason = f" ({about['error']})" if "error" in about and not about["n"] else ""
        said.append(f"{name} {about.get('version', '')}".strip() + reason)
    return f" Packages: {', '.join(said)}." if said else ""


def use_table(runs: list[Records]) -> str:
    """What was chosen for a question over all its runs, whether it was confirmed, and by run the other half."""
    best = chosen(runs)
    rivals = [(run, *_rivals(run, best)) for run in runs]
    enough = [(run, own, *others) for run, own, *others in rivals if own.n >= FEW_UNITS]
    gaps = [[less(run, own, some[0]) for some in others[:2] if some] for run, own, *others in enough]
    gaps, said = [one for one in gaps if one], "no baseline is known"
    if gaps:
        above = sum(all(low > 0 for _, low, _ in one) for one in gaps)
        behind = sum(any(high < 0 for *_, high in one) for one in gaps)
        said = f"clearly above its best rivals in {above} of {len(gaps)} runs, clearly behind any in {behind}"
    same = {row.method for run in runs for row in rows(run) if is_peer(row.method) and is_same(run, best, row.method)}
    said += f"; {', '.join(sorted(same))} computes the same map" if same else ""
    drawn = [_use(*one) for one in rivals]
    if all(one[PACKAGE] == "–" for one in drawn):
        drawn = [{head: cell for head, cell in one.items() if head != PACKAGE} for one in drawn]
    return f"Chosen: **{best}**, {said}.\n\n{markdown(drawn)}"


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


def _rivals(run: Records, method: str) -> tuple[Row, list[Row], list[Row], list[Row]]:
    """The method's row, and the others by the held-out half: baselines with controls, packages, and maps of T.

    By how much they are ahead on the items that both have, since a package may have been asked about a sample. A
    package that computes the same map is none of them.
    """
    found = rows(run)
    own = next(row for row in found if row.method == method)
    others = sorted((row for row in found if row is not own and row.n), key=lambda row: less(run, own, row)[0])
    baselines = [row for row in others if not (is_peer(row.method) or is_ours(row.method))]
    peers = [row for row in others if is_peer(row.method) and not is_same(run, method, row.method)]
    return own, baselines, peers, [row for row in others if is_ours(row.method)]


PACKAGE = "best package"


def _use(run: Records, own: Row, others: list[Row], peers: list[Row], ours: list[Row]) -> dict[str, str]:
    def said(some: list[Row]) -> str:
        if not some:
            return "–"
        name = f"{some[0].method} ({some[0].n} items)" if some[0].n < own.n else some[0].method
        return f"{name} {some[0].value:.3f}: {ranged(*less(run, own, some[0]), form='+.3f', n=own.n)}"

    held = ranged(own.value, own.low, own.high, n=own.n)
    cells = {"benchmark": f"{run.judge}, {run.model}", "held-out half": held}
    return cells | {
        "best baseline or control": said(others),
        PACKAGE: said(peers),
        "best other map of T": said(ours),
    }


# Circuits -------------------------------------------------------------------------------------------------------------


def circuit_tables(order: str) -> str:
    """A table per model: the areas of circuits in this order, by the way in which their edges were scored."""
    parts = [markdown(circuits_compared())] if order == "magnitude" else []
    for run in read(FOLDER / "circuits"):
        found = judged_circuits(run, order)
        drawn = []
        for way in dict.fromkeys(way for _, way in found):
            cells = {"scored by": _way(way)}
            for (set_, other), one in found.items():
                if other == way:
                    name = f"{set_.replace('_', '-')} ({one.n_pairs} pair{'s' * (one.n_pairs > 1)})"
                    between = ((), ()) if one.n_pairs == 1 else (one.interval, one.cmd_interval)
                    cells[f"CPR, {name}"], cells[f"CMD, {name}"] = (
                        ranged(area, *ends) for area, ends in zip((one.cpr, one.cmd), between, strict=True)
                    )
            drawn.append(cells)
        if drawn:
            parts.append(f"**{run.model}**, {run.lines[0]['edges']:,} edges. {run.about['ran']}.\n\n{markdown(drawn)}")
    return "\n\n".join(parts)


def _way(name: str) -> str:
    return f"`{name}`" if name in RULE_SETS else name


def circuits_compared() -> list[dict[str, str]]:
    """The mean CMD over all pairs of all models, ordered by magnitude, and less that of the recommended rule set."""
    cmd: dict[str, list[float]] = {}
    for run in read(FOLDER / "circuits"):
        for line in run.lines:
            for way, f in line["f"]["magnitude"].items():
                cmd.setdefault(way, []).append(faithfulness_of([f], line["shares"], unit="edges", size=0).cmd)
    ours = str(recommended("component").rules.name)
    drawn = []
    for way in sorted(cmd, key=lambda way: mean(cmd[way])):
        apart = [a - b for a, b in zip(cmd[way], cmd[ours], strict=True)]
        less_ours = "–" if way == ours else ranged(mean(apart), *interval_of([apart]), form="+.3f")
        drawn.append(
            {
                "scored by": _way(way),
                f"CMD, all {len(apart)} pairs": f"{mean(cmd[way]):.3f}",
                f"minus `{ours}` [95 %]": less_ours,
            }
        )
    return drawn


def judged_circuits(run: Records, order: str) -> dict[tuple[str, str], Faithfulness]:
    """By set of pairs and way of scoring."""
    curves: dict[tuple[str, str], list[list[float]]] = {}
    for line in run.lines:
        for way, f in line["f"].get(order, {}).items():
            curves.setdefault((line["set"], way), []).append(f)
    shares = run.lines[0]["shares"]
    return {key: faithfulness_of(some, shares, unit="edges", size=0) for key, some in sorted(curves.items())}


def draw() -> None:
    """The held-out scores for words over the size of the model: the main rule sets and the best baseline or control."""
    import matplotlib.pyplot as plt

    runs = sorted((run for run in read() if run.judge == "evidence"), key=lambda run: MILLIONS[run.model])
    found = [{row.method: row for row in rows(run)} for run in runs]
    best = [
        max(
            (row for row in one.values() if not (is_ours(row.method) or is_peer(row.method))), key=lambda row: row.value
        )
        for one in found
    ]
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
        axes.set_xticks(
            [MILLIONS[run.model] for run in runs],
            ["\n".join(run.model.replace("-coder", "").rsplit("-", 1)) for run in runs],
        )
        axes.minorticks_off()
        figure.legend(frameon=False, loc="outside right upper")
        figure.savefig(PICTURE, metadata={"Date": None})
        plt.close(figure)


def everything() -> str:
    """Every table, for a terminal."""
    questions = dict.fromkeys(KINDS[one.judge].question for one in read())
    parts = [f"# {question}\n\n{block(f'use {question}')}" for question in questions]
    orders = [f"# circuits by {order}\n\n{circuit_tables(order)}" for order in ("magnitude", "signed")]
    return "\n\n".join(parts + [judge_table(one) for one in read()] + orders)


def write() -> None:
    """Fill the pages."""
    for page in PAGES:
        print(f"{page.name}: {fill(page, 'records', block)} tables")
    draw()
