"""How far replaced copies of many samples move the output, with the copies of several samples in one batch."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from jaxtyping import Bool
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.studies.perturbation_study.forward import Outputs, PlainModel
from tensorlens.studies.perturbation_study.measures import absolute_aopc, hidden_state_mse
from tensorlens.studies.perturbation_study.subjects import Sample, Subject

Changes = dict[str, Tensor]
"""By metric, one number for each set of replaced tokens."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Copies of one sample.

    Attributes:
        sample: What is copied.
        clean: What the model makes of it as it is.
        masks: Which tokens each copy has replaced.
    """

    sample: Sample
    clean: Outputs
    masks: Bool[Tensor, "copy token"]


def changes_of(
    plain: PlainModel, subject: Subject, wanted: Sequence[Wanted], replacement: str, out_token: int
) -> list[Changes | str]:
    """For each sample how far each copy moves the output, by metric; or why that cannot be measured.

    Copies of one shape share batches of `plain.batch_size` rows, whatever samples they are of. A batch is made when it
    is run, so that no more than one is in memory.
    """
    found: list[Changes | str] = [_empty(one) for one in wanted]
    for batch in _batches(plain, subject, wanted, replacement, found):
        parts = [(number, [row for _, row in rows]) for number, rows in groupby(batch, key=lambda place: place[0])]
        copies = [subject.copies(wanted[n].sample, wanted[n].masks[rows], replacement) for n, rows in parts]
        inputs = [inputs for (_, inputs), *_ in copies]  # of one shape, hence one group for each sample
        outputs = plain.run({name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}, out_token)
        start = 0
        for number, rows in parts:
            _put(found[number], rows, wanted[number].clean, outputs[start : start + len(rows)])
            start += len(rows)
    return [_finite(changes, replacement) for changes in found]


def _batches(
    plain: PlainModel, subject: Subject, wanted: Sequence[Wanted], replacement: str, found: list[Changes | str]
) -> Iterator[list[tuple[int, int]]]:
    """Numbers of samples and of their copies, those of one shape together; a sample without copies says why."""
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for number, one in enumerate(wanted):
        try:
            shapes = subject.shapes(one.sample, one.masks, replacement)
        except InputError as error:
            found[number] = str(error)
        else:
            for row, shape in enumerate(shapes):
                places.setdefault(shape, []).append((number, row))
    for of_one_shape in places.values():
        while of_one_shape:
            batch = of_one_shape[: plain.batch_size]
            del of_one_shape[: plain.batch_size]
            yield batch


def _empty(wanted: Wanted) -> Changes:
    metrics = ["hs_mse", *(["abs_aopc"] if wanted.clean.logits is not None else [])]
    return {metric: torch.zeros(len(wanted.masks), dtype=torch.float64) for metric in metrics}


def _put(changes: Changes | str, rows: list[int], clean: Outputs, perturbed: Outputs) -> None:
    assert not isinstance(changes, str), "only samples that can be copied are in a batch"
    changes["hs_mse"][rows] = hidden_state_mse(clean.states[0], perturbed.states).cpu()
    if clean.logits is not None and perturbed.logits is not None:
        changes["abs_aopc"][rows] = absolute_aopc(clean.logits[0], perturbed.logits).cpu()


def _finite(changes: Changes | str, replacement: str) -> Changes | str:
    if isinstance(changes, str) or all(bool(values.isfinite().all()) for values in changes.values()):
        return changes
    return f"With `{replacement}` in the place of tokens the model's output holds NaN or infinity."
