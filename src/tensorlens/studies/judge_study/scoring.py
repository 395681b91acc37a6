"""Scores of the units of some items by many methods; items of one length share one recording for each member."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import torch

from tensorlens.batches import Batch
from tensorlens.errors import TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.methods import METHODS
from tensorlens.maps.targets import Target
from tensorlens.models.inputs import forward_parameters
from tensorlens.models.runner import running
from tensorlens.studies.judge_study.items import Item
from tensorlens.studies.judge_study.methods import WORD_OVERLAP
from tensorlens.studies.members import member_lens, split

WRONG = "the model is wrong"
"""Why an item is left out that the model does not know."""
PROBES = 16
"""Random probes by which `tensor.norm` is sketched."""

Found = dict[str, Any]
"""Of one item: `scores` and `seconds` by method, and `missing`, why a method has none."""


class Scorer:
    """The methods of one lens.

    Args:
        lens: The model.
        methods: Names as in `methods`.
    """

    def __init__(self, lens: Lens, methods: Sequence[str]) -> None:
        members = dict.fromkeys(split(name)[1] for name in methods)
        self.lenses = {member: member_lens(lens, member) for member in members}
        self.methods = {
            member: [name for name in methods if split(name)[1] == member and name != WORD_OVERLAP]
            for member in members
        }
        self.has_overlap = WORD_OVERLAP in methods

    def score(self, items: Sequence[Item], targets: Sequence[Target]) -> list[Found]:
        """What every method says of items of one length."""
        found: list[Found] = [{"scores": {}, "seconds": {}, "missing": {}} for _ in items]
        for member, names in self.methods.items():
            _score_member(self.lenses[member], items, targets, names, found)
        if self.has_overlap:
            for item, one in zip(items, found, strict=True):
                one["scores"][WORD_OVERLAP] = word_overlap(item)
        return found


def _score_member(
    lens: Lens, items: Sequence[Item], targets: Sequence[Target], names: Sequence[str], found: list[Found]
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
        began, base = now(), split(name)[0]
        try:
            if METHODS[base].takes_samples:
                maps = batch.maps(
                    base,
                    items[0].out_token,
                    targets=targets if METHODS[base].takes_target else None,
                    probes=PROBES if base == "tensor.norm" else None,
                )
            else:
                tensors = tensors or [batch[i] for i in range(len(items))]
                maps = [_single(tensors[i], base, items[i].out_token, targets[i]) for i in range(len(items))]
        except (TensorLensError, torch.OutOfMemoryError) as error:
            for one in found:
                one["missing"][name] = reason_of(error)
            continue
        seconds = (recorded + now() - began) / len(items)
        for item, one, made in zip(items, found, maps, strict=True):
            one["scores"][name] = unit_sums(item, made.scores[0].double().tolist())
            one["seconds"][name] = short(seconds)


def _single(tensor: Any, method: str, out_token: int, target: Target) -> Any:
    return tensor.map(method, out_token=out_token, target=target if method.startswith("gradient.") else None)


def unit_sums(item: Item, scores: Sequence[float]) -> list[float]:
    """The scores of the tokens of each unit, added up."""
    return [short(sum(scores[k] for k in unit)) for unit in item.units]


def word_overlap(item: Item) -> list[float]:
    """How many of the words that the item names stand in each unit."""
    wanted = set(_words(item.overlap))
    return [float(len(wanted & set(_words(label)))) for label in item.labels]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def last_logits(lens: Lens, ids: Sequence[Sequence[int]], out_token: int = -1) -> torch.Tensor:
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


def short(value: float) -> float:
    """Seven digits, as records hold them."""
    return float(f"{value:.7g}")
