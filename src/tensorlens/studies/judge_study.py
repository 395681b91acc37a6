"""A judge that knows the answer: which method finds the word that decides?

A set of items is a .csv file with a head line or a .jsonl file with one object per line. Columns:

| column                | holds                                                                     |
|-----------------------|---------------------------------------------------------------------------|
| `prefix`              | the text that is continued                                                |
| `target` (or `good`)  | the right continuation                                                    |
| `against` (or `bad`)  | the wrong one; may be left out, and the right one is then explained alone |
| `evidence`            | the words of the prefix that decide; several with ; between them          |

`judge` runs every method on such sets. `run_judges` does the same for items of any origin (`Judge`).
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorlens.batches import Batch
from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.groups import find_groups
from tensorlens.maps.methods import METHODS, check_question
from tensorlens.maps.targets import Target
from tensorlens.models.inputs import forward_parameters, tokenizer_of
from tensorlens.models.plain_text import check_unicode
from tensorlens.models.runner import running
from tensorlens.studies.datasets import rows_of
from tensorlens.studies.identity import digest_of, model_settings
from tensorlens.studies.intervals import N_RESAMPLES, short
from tensorlens.studies.members import MEMBERS, check_member, member_lens, split
from tensorlens.studies.options import Options, chosen_options
from tensorlens.studies.report import Section, Table, with_interval, write_page
from tensorlens.studies.runs import Record, Run, StudyResult

SUFFIXES = (".csv", ".jsonl")
OTHER_NAMES = {"good": "target", "bad": "against"}
QUESTIONS = {
    "word": "Which word decided?",
    "passage": "Which passage?",
    "component": "Which component?",
    "removal": "What happens if it goes?",
}
"""What users ask."""
WRONG = "the model is wrong"
"""Why an item is left out that the model does not know."""
WORD_OVERLAP = "control.word_overlap"
REFERENCE = "tensor.in_class"
"""The paper's operator: every other method has its difference to it beside it."""
SAME_AS_A_MEMBER = "gradient.times_input"
"""Which is ``tensor.in_class@jacobian``."""
EXACTLY_KNOWN = "control.random"
"""What chance gets is computed for each item, and needs no draw."""
PROBES = 16
"""Random probes by which `tensor.norm` is sketched."""


class JudgeOptions(Options, frozen=True, kw_only=True):
    """Everything a run of judges depends on besides model and data.

    Attributes:
        methods: Names of maps, with the member of the family after an @ (``tensor.in_class@attn_lrp``); all if None.
        limit: Items of each set, at most.
        seed: Seed of the bootstrap.
        group_size: Items that share a recording. Numbers depend on it by rounding alone.
    """

    methods: Sequence[str] | None = None
    limit: int | None = None
    seed: int = 0
    group_size: int = 32

    def __post_init__(self) -> None:
        self.check_positive("limit", "group_size")
        if self.methods is not None:
            names = (self.methods,) if isinstance(self.methods, str) else tuple(dict.fromkeys(self.methods))
            for name in names:
                if name != WORD_OVERLAP:
                    check_question(split(name)[0])
                    check_member(name)
            self.settle(methods=names)


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question whose answer is known.

    Attributes:
        judge: Name of the judge.
        set: Name of the set within it.
        name: Where it came from: file and row.
        ids: The tokens that the model is given.
        target: A token, a pair for a contrast, or None for the model's own first choice.
        units: What is ranked: the tokens of each word or sentence. Tokens of no unit are not ranked.
        labels: A name for each unit.
        truth: The answer: for each unit 1 if it is evidence and 0 if not, or its true effect; None where the judge
            measures the effect.
        right: When the model is right about the item, others being left out: ``contrast`` (its target is positive),
            ``first`` (its target is the model's first choice), ``always`` (the item asks nothing of it).
        out_token: Where the target is read.
        overlap: Words by which the control of word overlap ranks.
        model: Which model is asked: the user's (empty), or one of the judge's own.
        extra: What else the judge needs.
    """

    judge: str
    set: str
    name: str
    ids: tuple[int, ...]
    target: Target | None
    units: tuple[tuple[int, ...], ...]
    labels: tuple[str, ...]
    truth: tuple[float, ...] | None
    right: str = "contrast"
    out_token: int = -1
    overlap: str = ""
    model: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Judge:
    """A judge, as data.

    Attributes:
        name: What it is called.
        question: What it decides; a key of `QUESTIONS`.
        measures: Names in `MEASURES`; the first is the one that ranks.
        items: What is asked.
        problems: A line for each row that could not be used, with file, row and reason.
        models: Lenses on models of its own, by `Item.model`.
        methods: What is asked if no methods were named; all of them if None.
        reference: The method that differences are taken to.
        truth: From lens, item, target and logits to the effects of the units, where items do not bring them.
        measure: Another way to make the records of items, from the user's lens, the items and the methods.
    """

    name: str
    question: str
    measures: tuple[str, ...]
    items: tuple[Item, ...]
    problems: tuple[str, ...] = ()
    models: Mapping[str, Lens] = field(default_factory=dict)
    methods: tuple[str, ...] | None = None
    reference: str = REFERENCE
    truth: Callable[[Lens, Item, int, Tensor], Sequence[float]] | None = None
    measure: Callable[[Lens, Sequence[Item], Sequence[str]], list[Record]] | None = None

    def digest(self) -> str:
        """What tells whether a run is continued on the same items."""
        return digest_of(repr((item.name, item.ids, item.target, item.units, item.truth)) for item in self.items)


def judge(
    lens: Lens,
    data: str | Path,
    out: str | Path,
    *,
    options: JudgeOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    """Compare maps, members of the family of rules and controls on items whose answer is known.

    Args:
        lens: A language model with its tokenizer.
        data: A .csv or .jsonl file of items, or a folder of them, each one set.
        out: The run's folder.
        options: Methods and limits; see `JudgeOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and where everything is. Started again with the same settings, a run continues where it stopped.
    """
    chosen = chosen_options(JudgeOptions, options, changes)
    return run_judges(lens, [evidence(lens, Path(data).expanduser(), limit=chosen.limit)], out, chosen, progress)


def run_judges(
    lens: Lens,
    judges: Sequence[Judge],
    out: str | Path,
    options: JudgeOptions,
    progress: bool | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    more: Callable[[Run, list[Record]], dict[str, Any]] = lambda run, records: {},
    tell: Callable[[str], None] = lambda said: None,
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
        tell: Is told what is being done, method by method.
    """
    items = [item for one in judges for item in one.items]
    if not items and judges:
        problems = [line for one in judges for line in one.problems]
        raise InputError(f"No row could be used; the first: {problems[0] if problems else 'there are no rows'}")
    about = {one.name: _about_judge(one) for one in judges}
    chosen = {"methods": options.methods, "seed": options.seed, "limit": options.limit, "judges": about}
    run = Run(out, "judge", model_settings(lens) | chosen | dict(settings or {}))
    by_name = {one.name: one for one in judges}
    scorers: dict[tuple[str, str], Scorer] = {}

    def measure(group: Sequence[int]) -> list[Record]:
        tell(f"{len(run.records())} of {len(items)} items done")
        some = [items[index] for index in group]
        of = by_name[some[0].judge]
        methods = options.methods or of.methods or default_methods()
        if of.measure is not None:
            found = []
            for item in some:  # each may take a minute
                tell(f"{of.name}: {item.name}, {len(run.records()) + len(found)} of {len(items)} items done")
                found += [_about(item) | one for one in of.measure(lens, [item], methods)]
            return found
        key = some[0].model, of.name
        if key not in scorers:
            scorers[key] = Scorer(of.models.get(some[0].model, lens), methods, tell)
        return scorers[key].records(some, of)

    def summary(records: list[Record]) -> dict[str, Any]:
        extra = more(run, records)
        return judge_summary(records, run.settings) | extra

    run.work(_groups(items, options.group_size), measure, progress)
    return run.finish(len(items), summary, judge_report)


def _about_judge(of: Judge) -> dict[str, Any]:
    return {
        "question": of.question,
        "measures": of.measures,
        "n": len(of.items),
        "items": of.digest(),
        "problems": of.problems,
        "reference": of.reference,
    }


def _groups(items: Sequence[Item], size: int) -> list[list[int]]:
    """Items that share a recording: of one judge, one model and one length, at most `size` of them."""
    by_kind: dict[Any, list[int]] = {}
    for index, item in enumerate(items):
        by_kind.setdefault((item.judge, item.model, len(item.ids), item.out_token), []).append(index)
    return [some[i : i + size] for some in by_kind.values() for i in range(0, len(some), size)]


def default_methods() -> tuple[str, ...]:
    """Every method, In+Class and In+Out under the other members too, and the control of word overlap."""
    base = [name for name in METHODS if name not in (SAME_AS_A_MEMBER, EXACTLY_KNOWN)]
    return (*base, *with_members(("tensor.in_class", "tensor.in_out")), WORD_OVERLAP)


def with_members(names: Iterable[str]) -> list[str]:
    """The names under every member but the paper's."""
    return [f"{name}@{member}" for name in names for member in MEMBERS if member != "paper"]


# Items ----------------------------------------------------------------------------------------------------------------


class PrefixText:
    """A text that a language model is to continue.

    Args:
        lens: The model and its tokenizer.
        text: The text.

    Raises:
        InputError: The lens has no tokenizer, it does not say where tokens stand, or it ends every text with a token of
            its own, so that nothing can come next.
    """

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

    def groups(self, kind: str) -> tuple[tuple[tuple[int, ...], ...], tuple[str, ...]]:
        """The tokens of each word or sentence with its label; tokens that are not text belong to none."""
        meta = {"text": self.text, "offsets": [pair and list(pair) for pair in self.offsets]}
        found = [
            (tuple(k for k in group.tokens if self.offsets[k] is not None), group.label)
            for group in find_groups(kind, self.labels, meta)
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
    """Where some words stand in a text, not as parts of longer ones."""
    return [found.span() for found in re.finditer(rf"(?<!\w){re.escape(words)}(?!\w)", text)]


def evidence(lens: Lens, data: Path, *, limit: int | None = None) -> Judge:
    """The judge of a file of items, or of a folder of such files.

    Args:
        lens: The model, with its tokenizer.
        data: Where the sets are; each file is one.
        limit: Rows that can be used, of each set, at most.
    """
    files = sorted(one for one in data.iterdir() if one.suffix in SUFFIXES) if data.is_dir() else [data]
    if not files or not all(one.is_file() and one.suffix in SUFFIXES for one in files):
        raise InputError(
            f"Expected a .csv or .jsonl file of items, or a folder of them; there is none at {str(data)!r}."
        )
    items, problems = items_of(files, partial(_item, lens), limit)
    measures = ("reciprocal_rank", "top_1", "reciprocal_rank_by_magnitude")
    return Judge(name="evidence", question="word", measures=measures, items=items, problems=problems)


def _item(lens: Lens, name: str, row: int, values: Mapping[str, Any]) -> Item:
    cells = {OTHER_NAMES.get(key, key): value for key, value in values.items() if isinstance(key, str)}
    prefix, target, wanted = (cell_of(cells, column) for column in ("prefix", "target", "evidence"))
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
    units, labels = prompt.groups("words")
    tokens = prompt.tokens_at(spans)
    if len(units) < 2:
        raise InputError("A prefix of one word leaves nothing to decide.")
    return Item(
        judge="evidence",
        set=name,
        name=f"{name}:{row}",
        ids=prompt.ids,
        target=good if bad is None else (good, bad),
        units=units,
        labels=labels,
        truth=tuple(float(bool(tokens & set(unit))) for unit in units),
        right="first" if bad is None else "contrast",
        overlap=target,
    )


def items_of(
    files: Iterable[Path], make: Callable[[str, int, Mapping[str, Any]], Item], limit: int | None
) -> tuple[tuple[Item, ...], tuple[str, ...]]:
    """The items of some files, and the problems of rows that cannot be used.

    Args:
        files: Each is one set.
        make: Gives the item of a set's name, the number of a row, and the row.
        limit: Items of each set, at most.
    """
    items: list[Item] = []
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
    """The methods of one lens; items of one length share one recording for each member of the rules.

    Args:
        lens: The model.
        methods: Names of maps, with the member after an @.
        tell: Is told which method is asked.
    """

    def __init__(self, lens: Lens, methods: Sequence[str], tell: Callable[[str], None] = lambda said: None) -> None:
        self.lens, self.has_overlap, self.tell = lens, WORD_OVERLAP in methods, tell
        self.methods: dict[str, list[str]] = {}
        for name in methods:
            if name != WORD_OVERLAP:
                self.methods.setdefault(split(name)[1], []).append(name)
        self.lenses = {member: member_lens(lens, member) for member in self.methods}

    def records(self, items: Sequence[Item], of: Judge) -> list[Record]:
        """A record for each of some items of one length: whether the model is right, what is true, every method."""
        logits = last_logits(self.lens, [item.ids for item in items], items[0].out_token)
        targets = [
            int(row.argmax()) if item.target is None else item.target for item, row in zip(items, logits, strict=True)
        ]
        right = [k for k, item in enumerate(items) if is_item_right(item, logits[k], targets[k])]
        records = [_about(item) | {"left_out": WRONG} for item in items]
        found = self.score([items[k] for k in right], [targets[k] for k in right]) if right else []
        for k, one in zip(right, found, strict=True):
            item, target = items[k], targets[k]
            truth = item.truth
            if truth is None:
                assert of.truth is not None and isinstance(target, int), "effects are measured on tokens"
                truth = [short(value, 7) for value in of.truth(self.lens, item, target, logits[k])]
            about = {"target": target, "labels": list(item.labels), "truth": list(truth)}
            records[k] = _about(item) | about | one
        return records

    def score(self, items: Sequence[Item], targets: Sequence[Target]) -> list[Record]:
        """`scores` and `seconds` by method of each item, and `missing`, why a method has none."""
        found: list[Record] = [{"scores": {}, "seconds": {}, "missing": {}} for _ in items]
        for member, names in self.methods.items():
            self._score_member(self.lenses[member], items, targets, names, found)
        if self.has_overlap:
            for item, one in zip(items, found, strict=True):
                one["scores"][WORD_OVERLAP] = word_overlap(item)
        return found

    def _score_member(
        self, lens: Lens, items: Sequence[Item], targets: Sequence[Target], names: Sequence[str], found: list[Record]
    ) -> None:
        try:
            began = now()
            batch = Batch(lens.specimen, [lens.prepare(list(item.ids)) for item in items])
            recorded = now() - began
        except (TensorLensError, torch.OutOfMemoryError) as error:
            for one in found:
                one["missing"] |= dict.fromkeys(names, reason_of(error))
            return
        tensors: list[Any] = []
        for name in names:
            self.tell(f"{items[0].judge}: {name} of {len(items)} items of {len(items[0].ids)} tokens")
            began, base, out_token = now(), split(name)[0], items[0].out_token
            try:
                if METHODS[base].takes_samples:
                    wanted = targets if METHODS[base].takes_target else None
                    probes = PROBES if base == "tensor.norm" else None
                    maps = batch.maps(base, out_token, targets=wanted, probes=probes)
                else:
                    tensors = tensors or list(batch)
                    wanted = targets if base.startswith("gradient.") else [None] * len(items)
                    maps = [
                        T.map(base, out_token=out_token, target=one) for T, one in zip(tensors, wanted, strict=True)
                    ]
            except (TensorLensError, torch.OutOfMemoryError) as error:
                for one in found:
                    one["missing"][name] = reason_of(error)
                continue
            seconds = (recorded + now() - began) / len(items)
            for item, one, made in zip(items, found, maps, strict=True):
                one["scores"][name] = unit_sums(item, made.scores[0].double().tolist())
                one["seconds"][name] = short(seconds, 7)


def _about(item: Item) -> Record:
    return {"judge": item.judge, "set": item.set, "item": item.name}


def is_item_right(item: Item, logits: Tensor, target: Target) -> bool:
    """Whether the model knows what the item asks: what it does not know it has no evidence for."""
    if item.right == "always":
        return True
    if isinstance(target, tuple):
        good, bad = (int(one) for one in target)
        return bool(logits[good] > logits[bad])
    return int(logits.argmax()) == target


def unit_sums(item: Item, scores: Sequence[float]) -> list[float]:
    """The scores of the tokens of each unit, added up."""
    return [short(sum(scores[k] for k in unit), 7) for unit in item.units]


def word_overlap(item: Item) -> list[float]:
    """How many of the words that the item names stand in each unit."""
    words, *of_units = (set(re.findall(r"\w+", text.lower())) for text in (item.overlap, *item.labels))
    return [float(len(words & unit)) for unit in of_units]


def last_logits(lens: Lens, ids: Sequence[Sequence[int]], out_token: int = -1) -> Tensor:
    """(sample, class) of the plain model at one output of inputs of one length."""
    device = next(lens.model.parameters()).device
    arguments = lens.specimen.arguments({"input_ids": torch.tensor(list(ids), device=device)})
    if out_token == -1 and "logits_to_keep" in forward_parameters(lens.model):
        arguments["logits_to_keep"] = 1  # a vocabulary of logits for each token fills the memory
    with running(lens.model):
        return lens.model(**arguments).logits[:, out_token].float().cpu()


def now() -> float:
    """Seconds on a clock, when everything asked of a GPU so far is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# Measures -------------------------------------------------------------------------------------------------------------
# Ties are broken at random, and the expectation is what counts: a method that says nothing gets what chance gets. A
# score that is not a number is the lowest of all.

Scores = Sequence[float | None]
Truth = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number for a ranking.

    Attributes:
        compute: From the scores of the units and their truth.
        random: What scores without any sense get, from the truth alone; by default what ties of all units get.
        perfect: The best value there is.
    """

    compute: Callable[[Scores, Truth], float]
    random: Callable[[Truth], float] | None = None
    perfect: float = 1.0

    def chance(self, truth: Truth) -> float:
        """What a ranking gets in which all units stand in random order."""
        return self.random(truth) if self.random is not None else self.compute([0.0] * len(truth), truth)


def as_floats(scores: Scores) -> np.ndarray:
    """Scores as floats, the missing ones as the lowest."""
    found = np.array([np.nan if one is None else one for one in scores], dtype=np.float64)
    return np.where(np.isnan(found), -np.inf, found)


def reciprocal_rank(scores: Scores, truth: Truth) -> float:
    """1 over the rank of the evidence that stands highest."""
    values, is_evidence = as_floats(scores), np.array(truth) > 0
    best = values[is_evidence].max()
    above, ties = int((values > best).sum()), values == best
    n_ties, n_evidence = int(ties.sum()), int((ties & is_evidence).sum())
    # The chance that the first of `n_evidence` among `n_ties` in random order stands at a place.
    places = range(1, n_ties - n_evidence + 2)
    chances = [math.comb(n_ties - place, n_evidence - 1) / math.comb(n_ties, n_evidence) for place in places]
    return sum(chance / (above + place) for place, chance in zip(places, chances, strict=True))


def top_one(scores: Scores, truth: Truth) -> float:
    """Whether a piece of evidence stands first."""
    values, is_evidence = as_floats(scores), np.array(truth) > 0
    ties = values == values.max()
    return float((ties & is_evidence).sum() / ties.sum())


def by_magnitude(compute: Callable[[Scores, Truth], float]) -> Callable[[Scores, Truth], float]:
    """The same measure with signs ignored."""
    return lambda scores, truth: compute([None if one is None else abs(one) for one in scores], truth)


MEASURES: dict[str, Measure] = {
    "reciprocal_rank": Measure(compute=reciprocal_rank),
    "reciprocal_rank_by_magnitude": Measure(compute=by_magnitude(reciprocal_rank)),
    "top_1": Measure(compute=top_one),
}
"""Every measure by name; judges from elsewhere may add theirs."""


# Summary --------------------------------------------------------------------------------------------------------------
# Intervals are paired bootstraps: the items of every set are drawn anew with replacement, the same ones for all
# methods. A judge's number is the mean over its sets, so that a large set counts no more than a small one.


def judge_summary(records: Sequence[Record], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The summary of a run, by judge.

    Args:
        records: The items, in the order of their index.
        settings: The run's settings, with the measures and problems of each judge.
    """
    return {
        "n_items": len(records),
        "judges": {
            name: _summary([record for record in records if record["judge"] == name], about, settings["seed"])
            for name, about in settings["judges"].items()
        },
    }


def _summary(records: Sequence[Record], about: Mapping[str, Any], seed: int) -> dict[str, Any]:
    measured = [record for record in records if "left_out" not in record]
    methods = list(dict.fromkeys(name for record in measured for name in record["scores"]))
    sets = list(dict.fromkeys(record["set"] for record in records))
    missing: dict[str, Counter[str]] = {}
    for record in measured:
        for name, reason in record.get("missing", {}).items():
            missing.setdefault(name, Counter())[reason] += 1
    cost = {name: [one["seconds"][name] for one in measured if name in one.get("seconds", {})] for name in methods}
    return {
        "question": about["question"],
        "n_items": len(records),
        "n_measured": len(measured),
        "n_problems": len(about["problems"]),
        "problems": about["problems"][:50],
        "sets": {one: _counts([record for record in records if record["set"] == one]) for one in sets},
        "missing": {
            name: {"n": sum(some.values()), "reason": some.most_common(1)[0][0]} for name, some in missing.items()
        },
        "seconds": {name: short(np.median(some), 6) if some else None for name, some in cost.items()},
        "measures": {
            measure: method_comparison(measured, sets, methods, measure, seed, about.get("reference", REFERENCE))
            for measure in about["measures"]
        }
        if measured
        else {},
    }


def _counts(records: Sequence[Record]) -> dict[str, Any]:
    left_out = Counter(record["left_out"] for record in records if "left_out" in record)
    return {"n": len(records), "n_measured": len(records) - sum(left_out.values()), "left_out": dict(left_out)}


def method_comparison(
    records: Sequence[Record],
    sets: Sequence[str],
    methods: Sequence[str],
    measure: str,
    seed: int,
    reference: str = REFERENCE,
) -> dict[str, Any]:
    """One measure of every method, over all sets and in each; best first."""
    known, by_set = MEASURES[measure], {one: [r for r in records if r["set"] == one] for one in sets}
    by_set = {name: some for name, some in by_set.items() if some}
    tables = [
        np.array([[measured_value(r, name, measure) for name in methods] for r in some]) for some in by_set.values()
    ]
    chance = [float(np.mean([known.chance(record["truth"]) for record in some])) for some in by_set.values()]
    generator = np.random.default_rng(seed)
    draws = [  # for each set how often each of its items is drawn, (resample, item)
        generator.multinomial(len(table), np.full(len(table), 1 / len(table)), N_RESAMPLES).astype(np.float64)
        for table in tables
    ]
    by_method = {
        name: _method([table[:, k] for table in tables], draws, list(by_set)) for k, name in enumerate(methods)
    }
    if reference in methods:
        base = methods.index(reference)
        for k, name in enumerate(methods):
            difference = [table[:, k] - table[:, base] for table in tables]
            by_method[name][f"less {reference}"] = _method(difference, draws, ())
    order = sorted(methods, key=lambda name: by_method[name]["mean"] or 0.0, reverse=known.perfect > 0)
    return {
        "perfect": known.perfect,
        "random": short(np.mean(chance), 6),
        "random_by_set": {name: short(one, 6) for name, one in zip(by_set, chance, strict=True)},
        "methods": {name: by_method[name] for name in order},
    }


def measured_value(record: Record, name: str, measure: str) -> float:
    """The measure of one item by one method; NaN where it has no scores."""
    scores = record["scores"].get(name)
    return np.nan if scores is None else MEASURES[measure].compute(scores, record["truth"])


def _method(columns: Sequence[np.ndarray], draws: Sequence[np.ndarray], names: Sequence[str]) -> dict[str, Any]:
    """The mean over sets with its interval, and the mean of each set."""
    present = [np.isfinite(column) for column in columns]
    kept = [k for k, some in enumerate(present) if some.any()]
    if not kept:
        return {"mean": None, "interval": None, "n": 0}
    means = [float(columns[k][present[k]].mean()) for k in kept]
    with np.errstate(invalid="ignore"):
        resampled = [
            (draws[k] @ np.where(present[k], columns[k], 0.0)) / (draws[k] @ present[k].astype(np.float64))
            for k in kept
        ]
    bounds = np.nanquantile(np.mean(resampled, axis=0), (0.025, 0.975))
    found: dict[str, Any] = {
        "mean": short(np.mean(means), 6),
        "interval": [short(bound, 6) for bound in bounds],
        "n": int(sum(some.sum() for some in present)),
    }
    return found | ({"sets": {names[k]: short(mean, 6) for k, mean in zip(kept, means, strict=True)}} if names else {})


# Report ---------------------------------------------------------------------------------------------------------------


def judge_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    sections = []
    for name, found in summary["judges"].items():
        text = "\n".join([QUESTIONS[found["question"]], counts_line(found), *found["problems"]])
        tables = [judge_table(found), set_table(found)] if found["measures"] else []
        sections.append(Section(title=name, text=text, tables=tables))
    write_page(run, f"Judges: {run.settings['model']}", sections)


def judge_table(found: dict[str, Any]) -> Table:
    """What each method of a judge gets, its interval, its difference to the reference, its cost."""
    measure, compared = next(iter(found["measures"].items()))  # the one that ranks
    head, less = measure.replace("_", " "), "less the paper's T"
    rows = []
    for name, one in compared["methods"].items():
        difference = next((value for key, value in one.items() if key.startswith("less ")), {"mean": None})
        cost = found["seconds"].get(name)
        shown = {head: _shown(one), less: _shown(difference, "+.3f"), "items": one["n"]}
        rows.append({"method": name} | shown | {"ms per item": "–" if cost is None else f"{1000 * cost:.3g}"})
    blank = {head: f"{compared['random']:.3f}", less: "", "items": "", "ms per item": ""}
    return [*rows, {"method": "(chance)"} | blank]


def set_table(found: dict[str, Any]) -> Table:
    """What each method of a judge gets, by set."""
    compared = next(iter(found["measures"].values()))
    means = {name: method.get("sets", {}) for name, method in compared["methods"].items()}
    return [
        {"method": name} | {one: f"{some[one]:.3f}" if one in some else "–" for one in compared["random_by_set"]}
        for name, some in (means | {"(chance)": compared["random_by_set"]}).items()
    ]


def _shown(one: dict[str, Any], form: str = ".3f") -> str:
    return "–" if one["mean"] is None else with_interval(one["mean"], one["interval"], form)


def counts_line(found: dict[str, Any]) -> str:
    """How many items were measured, and what became of the others."""
    left_out: Counter[str] = Counter()
    for one in found["sets"].values():
        left_out.update(one["left_out"])
    parts = [f"{found['n_measured']} of {found['n_items']} items measured"]
    parts += [f"{n} left out: {reason}" for reason, n in left_out.items()]
    parts += [f"{found['n_problems']} rows could not be used"] if found["n_problems"] else []
    return "; ".join(parts)
