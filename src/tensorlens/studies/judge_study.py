"""A benchmark with known answers: which method finds the word that decides?

A set of items is a .csv file with a head line or a .jsonl file with one object per line. Columns:

| column                | holds                                                                     |
|-----------------------|---------------------------------------------------------------------------|
| `prefix`              | the text that is continued                                                |
| `target` (or `good`)  | the right continuation                                                    |
| `against` (or `bad`)  | the wrong one; may be left out, and the right one is then explained alone |
| `evidence`            | the words of the prefix that decide; several with ; between them          |

`judge` runs every method on such sets, the same items for all.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tensorlens.batches import Batch
from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.groups import find_groups
from tensorlens.maps.methods import METHODS
from tensorlens.maps.targets import Target
from tensorlens.models.inputs import forward_parameters
from tensorlens.models.runner import running
from tensorlens.models.texts import check_unicode, tokenizer_of
from tensorlens.studies.datasets import rows_of
from tensorlens.studies.options import MEMBERS, WORD_OVERLAP, JudgeOptions, chosen_options, member_lens, split
from tensorlens.studies.report import N_RESAMPLES, Section, Table, interval, short, with_interval, write_page
from tensorlens.studies.runs import Record, Run, StudyResult, digest_of, model_settings, reason_of

SUFFIXES = (".csv", ".jsonl")
OTHER_NAMES = {"good": "target", "bad": "against"}
WRONG = "the model is wrong"
"""The reason for leaving out an item that the model gets wrong."""
EVIDENCE = "evidence"
REFERENCE = "tensor.in_class"
"""The paper's operator: other methods are shown with their difference to it."""
LEFT_OUT = ("gradient.times_input", "control.random")
"""By default: the first is ``tensor.in_class@jacobian``, and the chance level is computed exactly for each item."""
PROBES = 16
"""Random probes by which `tensor.norm` is sketched."""
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question with a known answer.

    Attributes:
        judge: Name of the judge.
        set: Name of the set within it.
        name: Where it came from: file and row.
        ids: The tokens that the model is given.
        target: A token, which must be the model's first choice, or a pair whose first must be the likelier one; items
            that the model gets wrong are left out.
        units: The units that are ranked: the tokens of each word or sentence. Tokens of no unit are not ranked.
        labels: A name for each unit.
        truth: The answer: for each unit 1 if it is evidence and 0 if not.
        overlap: Words by which the control of word overlap ranks.
        right: Whether it is left out where the model gets it wrong: then the model has no evidence for the answer.
        out_token: Where the target is read.
    """

    judge: str
    set: str
    name: str
    ids: tuple[int, ...]
    target: Target
    units: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    truth: tuple[float, ...]
    overlap: str = ""
    right: bool = True
    out_token: int = -1


def judge(
    lens: Lens,
    data: str | Path,
    out: str | Path,
    *,
    options: JudgeOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    """Compare maps, rule sets and controls on items whose answer is known.

    Args:
        lens: A language model with its tokenizer.
        data: A .csv or .jsonl file of items, or a folder of such files, each of which is one set.
        out: The run's folder.
        options: Methods and limits; see `JudgeOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and the folder. To resume an interrupted run, call this again with the same settings.
    """
    chosen = chosen_options(JudgeOptions, options, changes)
    items, problems = evidence(lens, Path(data).expanduser(), chosen.limit)
    if not items:
        raise InputError(f"No row could be used; the first: {problems[0] if problems else 'there are no rows'}")
    about = {"measures": ["reciprocal_rank"], "n": len(items), "items": items_digest(items), "problems": problems}
    asked = {"methods": chosen.methods, "seed": chosen.seed, "limit": chosen.limit, "judges": {EVIDENCE: about}}
    run = Run(out, "judge", model_settings(lens) | asked)
    scorer = Scorer(lens, chosen.methods or default_methods())
    groups = item_groups([len(item.ids) for item in items], chosen.group_size)
    run.work(groups, lambda group: scorer.records([items[index] for index in group]), progress)
    return run.finish(len(items), partial(judge_summary, settings=run.settings), judge_report)


def items_digest(items: Sequence[Item]) -> str:
    """Identifies the items, so a run continues only on the same ones."""
    return digest_of(repr((item.name, item.ids, item.target, item.units, item.truth)) for item in items)


def item_groups(kinds: Sequence[Hashable], size: int) -> list[list[int]]:
    """Items that share a recording: at most `size` of one kind, such as a length."""
    by_kind: dict[Hashable, list[int]] = {}
    for index, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(index)
    return [some[i : i + size] for some in by_kind.values() for i in range(0, len(some), size)]


def default_methods() -> tuple[str, ...]:
    """Every method, In+Class and In+Out under the other rule sets too, and the control of word overlap."""
    base = [name for name in METHODS if name not in LEFT_OUT]
    return (*base, *with_members((REFERENCE, "tensor.in_out")), WORD_OVERLAP)


def with_members(names: Iterable[str]) -> list[str]:
    """The names under every rule set but the paper's."""
    return [f"{name}@{member}" for name in names for member in MEMBERS if member != "paper"]


# Items ----------------------------------------------------------------------------------------------------------------


class PrefixText:
    """A text that a language model is to continue."""

    def __init__(self, lens: Lens, text: str) -> None:
        self.tokenizer: Any = tokenizer_of(lens.processor)
        if self.tokenizer is None:
            raise InputError("Text benchmarks need a lens with a tokenizer. Use `tensorlens.Lens(model, tokenizer)`.")
        made = lens.prepare(text)
        self.text, self.ids = text, tuple(made.arguments["input_ids"][0].tolist())
        if made.offsets is None:
            raise InputError("This tokenizer does not report where its tokens are in the text, so words are not known.")
        self.offsets = [None if pair is None or pair[0] == pair[1] else pair for pair in made.offsets]
        if self.offsets[-1] is None:
            raise InputError("Next-word benchmarks need a causal language model.")
        self.labels = made.labels(len(self.ids), lens.model, lens.processor)

    def words(self) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The tokens of each word, and the words; tokens that are not text belong to none."""
        meta = {"text": self.text, "offsets": [pair and list(pair) for pair in self.offsets]}
        found = [
            (tuple(k for k in group.tokens if self.offsets[k] is not None), group.label)
            for group in find_groups("words", self.labels, meta)
        ]
        kept = [(tokens, label) for tokens, label in found if tokens]
        return tuple(tokens for tokens, _ in kept), tuple(label for _, label in kept)

    def tokens_at(self, spans: Sequence[tuple[int, int]]) -> set[int]:
        """The tokens that overlap some characters."""
        pairs = [(k, *pair) for k, pair in enumerate(self.offsets) if pair is not None]
        return {k for k, start, stop in pairs if any(start < b and a < stop for a, b in spans)}

    def next_token(self, continuation: str, *, apart: bool = True) -> int:
        """The first token of what follows the text, tokenised with it; a word is set apart by a space."""
        check_unicode(continuation)
        is_apart = apart and not self.text[-1:].isspace() and continuation[:1].isalnum()
        whole = self.tokenizer(self.text + " " * is_apart + continuation)["input_ids"]
        if tuple(whole[: len(self.ids)]) != self.ids or len(whole) <= len(self.ids):
            raise InputError(f"The prefix is tokenised differently in front of {continuation!r} than alone.")
        return int(whole[len(self.ids)])


def whole_words(text: str, words: str) -> list[tuple[int, int]]:
    """The places of some words in a text, where they are not parts of longer words."""
    return [found.span() for found in re.finditer(rf"(?<!\w){re.escape(words)}(?!\w)", text)]


def evidence(lens: Lens, data: Path, limit: int | None = None) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The items of a file, or of a folder of such files, and the problems of rows that cannot be used."""
    files = sorted(one for one in data.iterdir() if one.suffix in SUFFIXES) if data.is_dir() else [data]
    if not files or not all(one.is_file() and one.suffix in SUFFIXES for one in files):
        raise InputError(
            f"Expected a .csv or .jsonl file of items, or a folder of them; there is none at {str(data)!r}."
        )
    return items_of(files, partial(_item, lens), limit)


def _item(lens: Lens, name: str, row: int, values: Mapping[str, Any]) -> Item:
    cells = {OTHER_NAMES.get(key, key): value for key, value in values.items() if isinstance(key, str)}
    prefix, target, wanted = (cell_of(cells, column) for column in ("prefix", "target", EVIDENCE))
    prompt = PrefixText(lens, prefix)
    good, against = prompt.next_token(target), cells.get("against")
    bad = prompt.next_token(cell_of(cells, "against")) if against not in (None, "") else None
    if good == bad:
        raise InputError(f"{target!r} and {against!r} begin with the same token, so they cannot be told apart.")
    spans = []
    for words in (part.strip() for part in wanted.split(";")):
        found = whole_words(prefix, words)
        if not words or not found:
            raise InputError(f"The evidence {words!r} is not in the prefix {prefix!r:.80}.")
        spans += found
    units, labels = prompt.words()
    tokens = prompt.tokens_at(spans)
    if len(units) < 2:
        raise InputError("The prefix has a single word, so there is nothing to rank.")
    return Item(
        judge=EVIDENCE,
        set=name,
        name=f"{name}:{row}",
        ids=prompt.ids,
        target=good if bad is None else (good, bad),
        units=units,
        labels=labels,
        truth=tuple(float(bool(tokens & set(unit))) for unit in units),
        overlap=target,
    )


def items_of(
    files: Iterable[Path], make: Callable[[str, int, Mapping[str, Any]], Made], limit: int | None
) -> tuple[tuple[Made, ...], tuple[str, ...]]:
    """The items of some files, and the problems of rows that cannot be used."""
    items: list[Made] = []
    problems: list[str] = []
    for path in files:
        n_before = len(items)
        try:
            for row, values in enumerate(rows_of(path), 1):
                if limit is not None and len(items) - n_before >= limit:
                    break
                try:
                    items.append(make(path.stem, row, values))
                except TensorLensError as error:
                    problems.append(f"{path.name}, row {row}: {error}")
        except InputError as error:  # of the file itself
            problems.append(f"{path.name}: {error} What comes after it is not read.")
    return tuple(items), tuple(problems)


def cell_of(cells: Mapping[str, Any], column: str) -> str:
    """The text in a column of a row; anything else is refused."""
    value = cells.get(column)
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"Expected text in `{column}`; got {'nothing' if value in (None, '') else repr(value)}.")
    return value.strip()


# Scores ---------------------------------------------------------------------------------------------------------------


class Scorer:
    """The methods of one lens, those of T perhaps with a rule set after an @."""

    def __init__(self, lens: Lens, methods: Sequence[str]) -> None:
        self.lens, self.has_overlap = lens, WORD_OVERLAP in methods
        by_member: dict[str, list[str]] = {}
        for name in methods:
            if name != WORD_OVERLAP:
                by_member.setdefault(split(name)[1], []).append(name)
        self.asked = [(member_lens(lens, member), names) for member, names in by_member.items()]

    def records(self, items: Sequence[Item]) -> list[Record]:
        """A record for each of some items of one length and output, which share one recording per rule set.

        `scores` by method, and `missing`, why a method has none; or that the model is wrong.
        """
        logits = last_logits(self.lens, [item.ids for item in items], items[0].out_token)
        found: list[Record] = [{"judge": item.judge, "set": item.set, "item": item.name} for item in items]
        known: list[tuple[Item, Record]] = []
        for item, one, row in zip(items, found, logits, strict=True):
            if item.right and not _is_right(row, item.target):
                one["left_out"] = WRONG
                continue
            one |= {"target": item.target, "labels": list(item.labels), "truth": list(item.truth)}
            one |= {"scores": {}, "missing": {}}
            known.append((item, one))
        for lens, names in self.asked if known else ():
            _score(lens, known, names)
        for item, one in known if self.has_overlap else ():
            words, *units = (set(re.findall(r"\w+", text.lower())) for text in (item.overlap, *item.labels))
            one["scores"][WORD_OVERLAP] = [float(len(words & unit)) for unit in units]
        return found


def _score(lens: Lens, known: Sequence[tuple[Item, Record]], names: Sequence[str]) -> None:
    """Put the scores of some methods, or why they have none, into the records of items."""

    def missing(some: Sequence[str], error: BaseException) -> None:
        for _, one in known:
            one["missing"] |= dict.fromkeys(some, reason_of(error))

    targets, out_token = [item.target for item, _ in known], known[0][0].out_token
    try:
        batch = Batch(lens.specimen, [lens.prepare(list(item.ids)) for item, _ in known])
    except (TensorLensError, torch.OutOfMemoryError) as error:
        return missing(names, error)
    for name in names:
        base = split(name)[0]
        try:
            wanted = targets if METHODS[base].takes_target else None
            maps = batch.maps(base, out_token, targets=wanted, probes=PROBES if base == "tensor.norm" else None)
        except (TensorLensError, torch.OutOfMemoryError) as error:
            missing([name], error)
            continue
        for (item, one), made in zip(known, maps, strict=True):
            one["scores"][name] = unit_sums(item, made.scores[0].double().tolist())
    return None


def _is_right(logits: Tensor, target: Target) -> bool:
    """Whether the model knows the answer: if not, it has no evidence for it."""
    if isinstance(target, tuple):
        good, bad = (int(one) for one in target)
        return bool(logits[good] > logits[bad])
    return int(logits.argmax()) == target


def unit_sums(item: Item, scores: Sequence[float]) -> list[float]:
    """The scores of the tokens of each unit, added up."""
    return [short(sum(scores[k] for k in unit), 7) for unit in item.units]


def last_logits(lens: Lens, ids: Sequence[Sequence[int]], out_token: int = -1) -> Tensor:
    """(sample, class) of the plain model at one output of inputs of one length."""
    device = next(lens.model.parameters()).device
    arguments = lens.specimen.arguments({"input_ids": torch.tensor(list(ids), device=device)})
    if out_token == -1 and "logits_to_keep" in forward_parameters(lens.model):
        arguments["logits_to_keep"] = 1  # a vocabulary of logits for each token fills the memory
    with running(lens.model):
        return lens.model(**arguments).logits[:, out_token].float().cpu()


# Measures -------------------------------------------------------------------------------------------------------------
# Ties are broken at random, and the expectation is what counts: a method that says nothing scores at chance. A
# score that is not a number is the lowest of all.

Scores = Sequence[float | None]
Truth = Sequence[float]


def as_floats(scores: Scores) -> np.ndarray:
    """Scores as floats, the missing ones as the lowest."""
    found = np.array([np.nan if one is None else one for one in scores], dtype=np.float64)
    return np.where(np.isnan(found), -np.inf, found)


def reciprocal_rank(scores: Scores, truth: Truth) -> float:
    """1 over the rank of the best-placed evidence."""
    values, is_evidence = as_floats(scores), np.array(truth) > 0
    best = values[is_evidence].max()
    above, ties = int((values > best).sum()), values == best
    n_ties, n_evidence = int(ties.sum()), int((ties & is_evidence).sum())
    # The chance that the first of `n_evidence` among `n_ties` in random order stands at a place.
    places = range(1, n_ties - n_evidence + 2)
    chances = [math.comb(n_ties - place, n_evidence - 1) / math.comb(n_ties, n_evidence) for place in places]
    return sum(chance / (above + place) for place, chance in zip(places, chances, strict=True))


MEASURES: dict[str, Callable[[Scores, Truth], float]] = {"reciprocal_rank": reciprocal_rank}
"""By name; `bench` has more. Chance is what equal scores get."""


# Summary --------------------------------------------------------------------------------------------------------------
# Intervals are paired bootstraps: the items of every set are resampled with replacement, the same ones for all
# methods. A benchmark's number is the mean over its sets, so a large set counts no more than a small one.


def judge_summary(records: Sequence[Record], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, by benchmark; `settings` hold the measures and problems of each."""
    of: dict[str, list[Record]] = {name: [] for name in settings["judges"]}
    for record in records:
        of[record["judge"]].append(record)
    made = {name: _summary(of[name], about, settings["seed"]) for name, about in settings["judges"].items()}
    return {"n_items": len(records), "judges": made}


def _summary(records: Sequence[Record], about: Mapping[str, Any], seed: int) -> dict[str, Any]:
    measured = [record for record in records if "left_out" not in record]
    methods = list(dict.fromkeys(name for record in measured for name, _ in record["scores"].items()))
    missing: dict[str, Counter[str]] = {}
    for record in measured:
        for name, reason in record.get("missing", {}).items():
            missing.setdefault(name, Counter())[reason] += 1
    return {
        "n_items": len(records),
        "n_measured": len(measured),
        "n_problems": len(about["problems"]),
        "problems": about["problems"][:50],
        "sets": {name: _counts(some) for name, some in _by_set(records).items()},
        "missing": {
            name: {"n": reasons.total(), "reason": reasons.most_common(1)[0][0]} for name, reasons in missing.items()
        },
        "measures": {one: _comparison(measured, methods, one, seed) for one in (about["measures"] if measured else ())},
    }


def _by_set(records: Sequence[Record]) -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["set"], []).append(record)
    return found


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    left_out = Counter(record["left_out"] for record in records if "left_out" in record)
    return {"n": len(records), "n_measured": len(records) - left_out.total(), "left_out": dict(left_out)}


def _comparison(records: Sequence[Record], methods: Sequence[str], measure: str, seed: int) -> dict[str, Any]:
    """One measure of every method, best first, and the chance level."""
    sets = list(_by_set(records).values())
    generator = np.random.default_rng(seed)
    draws = [  # for each set how often each of its items is drawn, (resample, item)
        generator.multinomial(len(some), np.full(len(some), 1 / len(some)), N_RESAMPLES).astype(np.float64)
        for some in sets
    ]
    columns = {
        name: [np.array([measured_value(one, name, measure) for one in some]) for some in sets] for name in methods
    }
    by_method = {name: _method(values, draws) for name, values in columns.items()}
    for name, values in columns.items() if REFERENCE in columns else ():
        difference = [one - base for one, base in zip(values, columns[REFERENCE], strict=True)]
        by_method[name][f"less {REFERENCE}"] = _method(difference, draws)
    equal = [[MEASURES[measure]([0.0] * len(one["truth"]), one["truth"]) for one in some] for some in sets]
    order = sorted(methods, key=lambda name: by_method[name]["mean"] or 0.0, reverse=True)
    return {
        "random": short(np.mean(list(map(np.mean, equal))), 6),
        "methods": {name: by_method[name] for name in order},
    }


def measured_value(record: Record, name: str, measure: str) -> float:
    """The measure of one item by one method; NaN where it has no scores."""
    scores = record["scores"].get(name)
    return np.nan if scores is None else MEASURES[measure](scores, record["truth"])


def _method(columns: Sequence[np.ndarray], draws: Sequence[np.ndarray]) -> dict[str, Any]:
    """The mean over sets, with its interval."""
    every = [(np.isfinite(column), column, drawn) for column, drawn in zip(columns, draws, strict=True)]
    kept = [one for one in every if one[0].any()]
    if not kept:
        return {"mean": None, "interval": None, "n": 0}
    with np.errstate(invalid="ignore"):
        resampled = [
            (drawn @ np.where(there, column, 0.0)) / (drawn @ there.astype(float)) for there, column, drawn in kept
        ]
    return {
        "mean": short(np.mean([float(column[there].mean()) for there, column, _ in kept]), 6),
        "interval": [short(bound, 6) for bound in interval(np.mean(resampled, axis=0))],
        "n": int(sum(there.sum() for there, *_ in kept)),
    }


# Report ---------------------------------------------------------------------------------------------------------------


def judge_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    sections = [
        Section(title=name, text="\n".join([counts_line(found), *found["problems"]]), tables=[judge_table(found)])
        for name, found in summary["judges"].items()
    ]
    write_page(run, f"Judges: {run.settings['model']}", sections)


def judge_table(found: dict[str, Any]) -> Table:
    """The score of each method on a benchmark, its interval, and its difference to the paper's In+Class."""
    rows = []
    for measure, compared in list(found["measures"].items())[:1]:  # the one that ranks
        head, less = measure.replace("_", " "), "minus the paper's T"
        for name, one in compared["methods"].items():
            difference = one.get(f"less {REFERENCE}", {"mean": None})
            shown = {head: _shown(one), less: _shown(difference, "+.3f"), "items": one["n"]}
            rows.append({"method": name} | shown)
        rows.append({"method": "(chance)", head: f"{compared['random']:.3f}", less: "", "items": ""})
    return rows


def _shown(one: dict[str, Any], form: str = ".3f") -> str:
    return "–" if one["mean"] is None else with_interval(one["mean"], one["interval"], one["n"], form)


def counts_line(found: dict[str, Any]) -> str:
    """How many items were measured, and what happened to the others."""
    left_out: Counter[str] = Counter()
    for one in found["sets"].values():
        left_out.update(one["left_out"])
    parts = [f"{found['n_measured']} of {found['n_items']} items measured"]
    parts += [f"{n} left out: {reason}" for reason, n in left_out.items()]
    parts += [f"{found['n_problems']} rows could not be used"] if found["n_problems"] else []
    return "; ".join(parts)
