"""The records of some items: whether the model is right, what is true, and what every method says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tensorlens.lens import Lens
from tensorlens.maps.targets import Target
from tensorlens.studies.judge_study.items import Item, Judge
from tensorlens.studies.judge_study.methods import default_methods
from tensorlens.studies.judge_study.options import JudgeOptions
from tensorlens.studies.judge_study.pairs import Patcher, members_of
from tensorlens.studies.judge_study.scoring import WRONG, Scorer, last_logits, short
from tensorlens.studies.judge_study.single_tokens import true_effects


class Measurement:
    """What is measured on a group of items of one judge, one model and one length.

    Args:
        lens: The user's model.
        judges: Those of the run.
        items: All items of the run.
        options: The run's options.
    """

    def __init__(self, lens: Lens, judges: Sequence[Judge], items: Sequence[Item], options: JudgeOptions) -> None:
        self.items, self.options = items, options
        self.lenses = {"": lens} | {name: one for each in judges for name, one in each.models.items()}
        self.scorers: dict[tuple[str, bool], Scorer] = {}

    def measure(self, group: Sequence[int]) -> list[dict[str, Any]]:
        """A record for each item."""
        items = [self.items[index] for index in group]
        if items[0].judge == "patching":
            patcher = Patcher(self.lenses[""], members_of(self._methods(items[0])))
            return [_about(item) | patcher.record(item) for item in items]
        lens = self.lenses[items[0].model]
        logits = last_logits(lens, [item.ids for item in items], items[0].out_token)
        targets = [_target(item, row) for item, row in zip(items, logits, strict=True)]
        right = [k for k, item in enumerate(items) if is_right(item, logits[k], targets[k])]
        records = [_about(item) | {"left_out": WRONG} for item in items]
        if right:
            found = self._scorer(items[0]).score([items[k] for k in right], [targets[k] for k in right])
            for k, one in zip(right, found, strict=True):
                item = items[k]
                if item.truth is None:
                    item = replace(item, truth=tuple(self._effects(lens, item, targets[k], logits[k])))
                records[k] = (
                    _about(item)
                    | {"target": targets[k], "labels": list(item.labels), "truth": list(item.truth or ())}
                    | one
                )
        return records

    def _effects(self, lens: Lens, item: Item, target: Target, logits: Any) -> list[float]:
        assert isinstance(target, int), "an effect is one of a token"
        return [short(one) for one in true_effects(lens, item, target, float(logits[target]))]

    def _methods(self, item: Item) -> Sequence[str]:
        return default_methods(long=item.judge == "needles") if self.options.methods is None else self.options.methods

    def _scorer(self, item: Item) -> Scorer:
        key = item.model, item.judge == "needles"
        if key not in self.scorers:
            self.scorers[key] = Scorer(self.lenses[item.model], self._methods(item))
        return self.scorers[key]


def _about(item: Item) -> dict[str, Any]:
    return {"judge": item.judge, "set": item.set, "item": item.name}


def _target(item: Item, logits: Any) -> Target:
    return int(logits.argmax()) if item.target is None else item.target


def is_right(item: Item, logits: Any, target: Target) -> bool:
    """Whether the model knows what the item asks: what it does not know it has no evidence for."""
    if item.right == "always":
        return True
    if isinstance(target, tuple):
        good, bad = (int(one) for one in target)
        return bool(logits[good] > logits[bad])
    return int(logits.argmax()) == target
