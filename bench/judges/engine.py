"""Judges as data, and one run of several of them: the library's scores and summary on items of any origin."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.records import correlation, first
from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.studies.judge_study import (
    MEASURES,
    Item,
    Scorer,
    as_floats,
    default_methods,
    item_groups,
    items_digest,
    judge_report,
    judge_summary,
)
from tensorlens.studies.options import JudgeOptions
from tensorlens.studies.runs import Record, Run, StudyResult, model_settings

MEASURES["top_1"] = lambda scores, truth: first(as_floats(scores), as_floats(truth))
MEASURES["pearson"] = lambda scores, truth: correlation(as_floats(scores), as_floats(truth))


@dataclass(frozen=True, kw_only=True)
class BenchItem(Item):
    """An item with what some judges need.

    Attributes:
        model: Which model is asked: the user's (empty), or one of the judge's own.
        extra: What else the judge needs.
    """

    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge, as data.

    Attributes:
        name: What it is called.
        measures: Names in `MEASURES`; the first is the one that ranks.
        items: What is asked.
        problems: A line for each row that could not be used, with file, row and reason.
        models: Lenses on models of its own, by `BenchItem.model`.
        methods: What is asked if no methods were named; all of them if None.
        measure: Another way to make the record of an item, from the user's lens, the item and the methods.
    """

    name: str
    measures: tuple[str, ...]
    items: tuple[BenchItem, ...]
    problems: tuple[str, ...] = ()
    models: Mapping[str, Lens] = field(default_factory=dict)
    methods: tuple[str, ...] | None = None
    measure: Callable[[Lens, BenchItem, Sequence[str]], Record] | None = None

    def about(self) -> dict[str, Any]:
        """What a run's settings say of it."""
        digest, n = items_digest(self.items), len(self.items)
        return {"measures": self.measures, "n": n, "items": digest, "problems": self.problems}


def run_judges(
    lens: Lens,
    judges: Sequence[Judge],
    out: str | Path,
    options: JudgeOptions,
    progress: bool | None = None,
    *,
    settings: Mapping[str, Any],
    more: Callable[[Run, list[Record]], dict[str, Any]],
    tell: Callable[[str], None],
) -> StudyResult:
    """Run judges on their items.

    Args:
        lens: The user's model.
        judges: What is asked.
        out: The run's folder.
        options: Methods, seed and group size.
        progress: Whether to show a bar; None shows it in a terminal.
        settings: What else the result depends on.
        more: Further parts of the summary, from the run and its records, whose scores it may add to.
        tell: Is told what is being done.
    """
    items = [item for one in judges for item in one.items]
    if not items:
        problems = [line for one in judges for line in one.problems]
        raise InputError(f"No row could be used; the first: {problems[0] if problems else 'there are no rows'}")
    chosen = {"methods": options.methods, "seed": options.seed, "limit": options.limit}
    about = {"judges": {one.name: one.about() for one in judges}}
    run = Run(out, "judge", model_settings(lens) | chosen | about | dict(settings))
    by_name = {one.name: one for one in judges}
    scorers: dict[tuple[str, str], Scorer] = {}

    def measure(group: Sequence[int]) -> list[Record]:
        some = [items[index] for index in group]
        of = by_name[some[0].judge]
        methods = options.methods or of.methods or default_methods()
        tell(f"{of.name}: {some[0].name}, {len(run.records())} of {len(items)} items done")
        if of.measure is not None:
            made = [(item, of.measure(lens, item, methods)) for item in some]
            return [{"judge": item.judge, "set": item.set, "item": item.name} | one for item, one in made]
        key = some[0].model, of.name
        if key not in scorers:
            scorers[key] = Scorer(of.models.get(some[0].model, lens), methods)
        return scorers[key].records(some)

    def summary(records: list[Record]) -> dict[str, Any]:
        extra = more(run, records)
        return judge_summary(records, run.settings) | extra

    kinds = [(item.judge, item.model, len(item.ids), item.out_token) for item in items]
    run.work(item_groups(kinds, options.group_size), measure, progress)
    return run.finish(len(items), summary, judge_report)
