"""Patching: what the target does when a component's output is taken from another prompt, predicted and true.

Two sets are known by their columns: `ioi` (clean, corrupted, corrupted_hard: the indirect object against the subject)
and `greater_than` (clean, corrupted, label: the mean logit of larger first digits less that of smaller ones).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.judges.engine import BenchItem, Judge
from tensorlens.errors import InputError, TensorLensError
from tensorlens.inside.patching import Patching, patching
from tensorlens.lens import Lens
from tensorlens.studies.judge_study import WRONG, PrefixText, cell_of, items_of
from tensorlens.studies.options import MEMBERS, member_lens
from tensorlens.studies.report import short
from tensorlens.studies.runs import reason_of

MEASURES = ("pearson",)


def patching_pairs(lens: Lens, folder: Path, *, limit: int | None = None) -> Judge:
    """The judge of a folder of pairs.

    Args:
        lens: The model, with its tokenizer.
        folder: .csv files.
        limit: Pairs of each file that can be used, at most.
    """
    items, problems = items_of(sorted(folder.glob("*.csv")), partial(_item, lens), limit)
    return Judge(name="patching", measures=MEASURES, items=items, problems=problems, measure=patched)


def _item(lens: Lens, name: str, row: int, values: Mapping[str, Any]) -> BenchItem:
    clean, corrupted = PrefixText(lens, cell_of(values, "clean")), PrefixText(lens, cell_of(values, "corrupted"))
    if len(clean.ids) != len(corrupted.ids):
        raise InputError(f"The two prompts have {len(clean.ids)} and {len(corrupted.ids)} tokens; expected as many.")
    weights = (
        _object_weights(clean, values)
        if "corrupted_hard" in values
        else _digit_weights(clean, cell_of(values, "label"))
    )
    return BenchItem(
        judge="patching",
        set=name,
        name=f"{name}:{row}",
        ids=clean.ids,
        target=0,
        units=(),
        labels=(),
        truth=(),
        extra={"corrupted": corrupted.ids, "weights": weights},
    )


def _object_weights(clean: PrefixText, values: Mapping[str, Any]) -> dict[int, float]:
    """The indirect object less the subject: of the words that the two other prompts change, theirs and ours."""
    words, others = clean.text.split(), cell_of(values, "corrupted_hard").split()
    changed = [(ours, theirs) for ours, theirs in zip(words, others, strict=False) if ours != theirs]
    if len(changed) != 1 or len(words) != len(others):
        raise InputError("Expected `clean` and `corrupted_hard` to differ in one word.")
    subject, object_ = (clean.next_token(word) for word in changed[0])
    if subject == object_:
        raise InputError(f"{changed[0][0]!r} and {changed[0][1]!r} begin with the same token.")
    return {object_: 1.0, subject: -1.0}


def _digit_weights(clean: PrefixText, label: str) -> dict[int, float]:
    """The mean of the digits above the first digit of the label, less that of those below it."""
    tokens = [clean.next_token(str(digit), apart=False) for digit in range(10)]
    if label[0] not in "0123456789":
        raise InputError(f"Expected a number in `label`; got {label!r:.80}.")
    first = int(label[0])
    above, below = tokens[first + 1 :], tokens[:first]
    if len({*tokens}) < 10 or not above or not below:
        raise InputError(f"The first digit of {label!r} has no digits above and below it that are tokens of their own.")
    return {token: 1 / len(above) for token in above} | {token: -1 / len(below) for token in below}


def patched(lens: Lens, item: BenchItem, methods: Sequence[str]) -> dict[str, Any]:
    """The predicted effects by every member that the methods name, and the true ones once."""
    named = {name.partition("@")[2] for name in methods if "@" in name} | {"paper"}
    lenses = {member: member_lens(lens, member) for member in MEMBERS if member in named}
    found: dict[str, Any] = {"scores": {}, "missing": {}}
    truth: Patching | None = None
    for member, own in lenses.items():
        name = f"patching@{member}"
        try:
            made = _patching(own, item, verify=False)
            truth = truth or _patching(own, item, verify=True)
        except (TensorLensError, torch.OutOfMemoryError) as error:
            found["missing"][name] = reason_of(error)
            continue
        assert truth.true is not None, "asked for"
        found["scores"][name] = [short(one, 7) for one in made.predicted[~truth.true.isnan()].tolist()]
    if truth is None:
        return {"left_out": next(iter(found["missing"].values()))}
    if truth.clean <= 0:
        return {"left_out": WRONG}
    assert truth.true is not None, "asked for"
    known = ~truth.true.isnan()
    found["truth"] = [short(one, 7) for one in truth.true[known].tolist()]
    found["labels"] = [str(truth.labels[k]) for k in np.flatnonzero(known.numpy())]
    return found


def _patching(lens: Lens, item: BenchItem, *, verify: bool) -> Patching:
    return patching(lens, list(item.ids), list(item.extra["corrupted"]), item.extra["weights"], verify=verify)
