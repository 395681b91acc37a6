"""Raw records of the benchmarks, and every number that the documentation prints from them.

`bench/records/NAME.jsonl.gz` holds one run: a line about it, then one line per item with its `judge`, `set`, `item`,
`truth` (one number per unit that is ranked) and `scores` (by method, one number per unit). Nothing is published that is
not computed from these files; ``python -m bench tables`` does it on any machine.

**Halves.** What to use is chosen on one half and reported on the other: sets of sentences by their order in `SETS`,
documents and prompts by their number. No item, and no document, is in both.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tensorlens.recording.conventions import RULE_SETS
from tensorlens.studies.judge_study import reciprocal_rank
from tensorlens.studies.report import FEW_UNITS, interval

FOLDER = Path(__file__).parent / "records"
SETS = (
    "anaphor_gender_agreement",
    "anaphor_number_agreement",
    "animate_subject_passive",
    "determiner_noun_agreement_1",
    "determiner_noun_agreement_irregular_1",
    "determiner_noun_agreement_with_adj_irregular_1",
    "determiner_noun_agreement_with_adjective_1",
    "distractor_agreement_relational_noun",
    "distractor_agreement_relative_clause",
    "ioi_dataset",
    "irregular_plural_subject_verb_agreement_1",
    "npi_present_1",
    "regular_plural_subject_verb_agreement_1",
)
"""Sets of sentences in the order of the alphabet: the first, third, … are for choosing. Others are for reporting."""
DRAWS = 2000
"""Bootstrap resamples of an interval."""
PACKAGES = ("lxt", "captum", "inseq", "flashtrace", "context_cite", "transformer_lens")
"""What the names of other packages' methods begin with."""

Line = dict[str, Any]


# Measures -------------------------------------------------------------------------------------------------------------


def first(scores: np.ndarray, truth: np.ndarray) -> float:
    """The chance that a right unit is ranked first, ties in random order."""
    best = scores == scores.max()
    return float((truth[best] > 0).mean())


def recovery(scores: np.ndarray, truth: np.ndarray) -> float:
    """The share of right units among the highest fifth of all; those on a level at its end count by chance."""
    n, right = -(-len(scores) // 5), truth > 0
    least = np.sort(scores)[-n]
    above, level = scores > least, scores == least
    part = (n - above.sum()) / level.sum()
    return float(((right & above).sum() + part * (right & level).sum()) / right.sum())


def correlation(scores: np.ndarray, truth: np.ndarray) -> float:
    """Pearson's correlation of predicted and true effects; 0 where one of them does not vary."""
    a, b = scores - scores.mean(), truth - truth.mean()
    size = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / size) if size else 0.0


def ordered(scores: np.ndarray, truth: np.ndarray) -> float:
    """The share of pairs of a right and a wrong unit in which the right one is higher; a tie counts half."""
    gaps = scores[truth > 0][:, None] - scores[truth <= 0]
    return float((gaps > 0).mean() + (gaps == 0).mean() / 2)


class Kind(NamedTuple):
    """What a judge asks, and how it measures."""

    question: str
    measure: Callable[[Any, Any], float]
    says: str
    by_set: bool


KINDS = {
    "evidence": Kind("word", reciprocal_rank, "reciprocal rank of the word that decides", True),
    "edits": Kind("word", reciprocal_rank, "reciprocal rank of the word that decides", False),
    "documents": Kind("passage", first, "right sentence first", False),
    "needles": Kind("passage", first, "needle first", False),
    "injections": Kind("passage", recovery, "share of the injected tokens in the top 20 %", False),
    "context": Kind("context", ordered, "more from what was used", False),
    "titles": Kind("title", reciprocal_rank, "reciprocal rank of the word that was copied", False),
    "concepts": Kind("similarity", reciprocal_rank, "reciprocal rank of the shared concept", False),
    "reactions": Kind("atom", ordered, "a reacting atom above another", False),
    "tracr": Kind("program", reciprocal_rank, "reciprocal rank of the token that the program reads", False),
    "patching": Kind("component", correlation, "correlation with patching the model", False),
}
"""By judge: the question, the measure, and whether halves are made of sets."""


# Reading --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Records:
    """One run.

    Attributes:
        name: The file's name.
        about: Model, device, versions and command.
        lines: One per item.
    """

    name: str
    about: dict[str, Any]
    lines: tuple[Line, ...]

    @property
    def judge(self) -> str:
        """The judge of all of its items."""
        return self.lines[0]["judge"]

    @property
    def model(self) -> str:
        """Short name of the model."""
        return self.about["model"]

    def half(self, line: Line) -> int:
        """0 for the half on which is chosen, 1 for the half that is reported."""
        if KINDS[self.judge].by_set:
            return SETS.index(line["set"]) % 2 if line["set"] in SETS else 1
        return _number(line["item"]) % 2


def _number(item: str) -> int:
    """The number of a document or prompt: `documents:7:` and `ioi:7` are both 7."""
    return int(next(part for part in item.split(":")[1:] if part))


def read(folder: Path = FOLDER) -> list[Records]:
    """Every run in a folder, by name."""
    return [_read(path) for path in sorted(folder.glob("*.jsonl.gz"))]


@cache
def _read(path: Path) -> Records:
    about, *lines = map(json.loads, gzip.decompress(path.read_bytes()).decode().splitlines())
    return Records(path.name.removesuffix(".jsonl.gz"), about, tuple(lines))


def keep(lines: Iterable[Line], about: dict[str, Any], path: Path) -> int:
    """Write the lines of a run as records, scores to five digits; the same lines give the same bytes.

    Lines of the same item are put together. A method that was not asked about every item is left out, unless it is
    another package's, and so is an item about which the model was wrong.
    """
    kept, found = [json.dumps(about, sort_keys=True, allow_nan=False)], dict[str, Line]()
    for line in lines:
        if line.get("truth") is not None and line.get("scores"):
            before = found.get(line["item"], line)
            found[line["item"]] = before | {"scores": before["scores"] | line["scores"]}
    common = set.intersection(*(set(line["scores"]) for line in found.values())) if found else set()
    for line in found.values():
        kept_scores = {name: some for name, some in line["scores"].items() if name in common or is_peer(name)}
        scores = {name: [_short(one) for one in some] for name, some in kept_scores.items()}
        truth = [_short(one) for one in line["truth"]]
        made = {"judge": line["judge"], "set": line["set"], "item": line["item"], "truth": truth, "scores": scores}
        kept.append(json.dumps(made, allow_nan=False))
    path.write_bytes(gzip.compress(("\n".join(kept) + "\n").encode(), 9, mtime=0))
    return len(kept) - 1


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


# Tables ---------------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """One method in one run.

    Attributes:
        method: Its name.
        chosen: The mean over the half on which is chosen.
        value: The mean over the half that is reported.
        low: Lower end of its 95 % interval.
        high: Upper end.
        n: Items of that half.
        values: The measure of each item of that half, by item.
    """

    method: str
    chosen: float
    value: float
    low: float
    high: float
    n: int
    values: dict[str, float]


def rows(run: Records) -> list[Row]:
    """Every method of a run, the best on the first half first."""
    kind, by_method = KINDS[run.judge], dict[str, tuple[dict[str, dict[str, float]], ...]]()
    for line in run.lines:
        truth, half = np.array(line["truth"], float), run.half(line)
        for method, given in line["scores"].items():
            scores = np.array([-np.inf if one is None else one for one in given], float)
            sets = by_method.setdefault(method, ({}, {}))[half]
            sets.setdefault(line["set"], {})[line["item"]] = kind.measure(scores, truth)
    found = []
    for method, (first_half, second) in by_method.items():
        values = {item: value for some in second.values() for item, value in some.items()}
        low, high = interval_of([list(some.values()) for some in second.values()])
        found.append(Row(method, of_sets(first_half), of_sets(second), low, high, len(values), values))
    return sorted(found, key=lambda row: -row.chosen)


def of_sets(sets: dict[str, dict[str, float]]) -> float:
    """The mean of the means of sets, so that a large set counts as one."""
    return float(np.mean([np.mean(list(some.values())) for some in sets.values()])) if sets else float("nan")


def interval_of(sets: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the mean of means, items drawn within their sets.

    Where a set has too few items to vary, such as an injected goal with one, the sets are drawn too.
    """
    kept, draw = [np.array(some) for some in sets if len(some)], np.random.default_rng(0)
    if not kept:
        return float("nan"), float("nan")
    means = np.stack([some[draw.integers(len(some), size=(DRAWS, len(some)))].mean(1) for some in kept])
    if len(kept) > 1 and min(map(len, kept)) < FEW_UNITS:
        means = np.take_along_axis(means, draw.integers(len(kept), size=means.shape), 0)
    return interval(means.mean(0))


def less(run: Records, a: Row, b: Row) -> tuple[float, float, float]:
    """How much a method is above another on the reported half: the mean paired difference, and its interval."""
    sets: dict[str, list[float]] = {}
    for line in run.lines:
        item = line["item"]
        if item in a.values and item in b.values:
            sets.setdefault(line["set"], []).append(a.values[item] - b.values[item])
    mean = float(np.mean([np.mean(some) for some in sets.values()]))
    return mean, *interval_of(list(sets.values()))


def is_same(run: Records, a: str, b: str) -> bool:
    """Whether two methods give the same scores wherever both were asked, to a thousandth of the largest of an item."""
    pairs = [(line["scores"][a], line["scores"][b]) for line in run.lines if {a, b} <= line["scores"].keys()]
    return all(np.allclose(x, y, rtol=0, atol=1e-3 * float(np.abs(x).max())) for x, y in pairs)


def is_ours(method: str) -> bool:
    """Whether a method is a map of T; what is not is a package's, a baseline or a control."""
    return method.startswith(("tensor.", "patching@", "pairs@")) or method.partition(", ")[0] in RULE_SETS


def is_peer(method: str) -> bool:
    """Whether a method is another package's; it may have been asked about a sample of the items."""
    return method.partition(".")[0] in PACKAGES


def chance(run: Records) -> float:
    """What a random order gets on the reported half."""
    kind, sets = KINDS[run.judge], dict[str, dict[str, float]]()
    for line in run.lines:
        if run.half(line):
            truth = np.array(line["truth"], float)
            value = 0.0 if kind.measure is correlation else kind.measure(np.zeros(len(truth)), truth)
            sets.setdefault(line["set"], {})[line["item"]] = value
    return of_sets(sets)
