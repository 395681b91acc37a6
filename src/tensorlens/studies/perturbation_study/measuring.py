"""What happens to a group of samples: maps, rankings, replaced copies, curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.controls import random_scores
from tensorlens.maps.token_map import TokenMap
from tensorlens.studies.perturbation_study.changes import Changes, Wanted, changes_of
from tensorlens.studies.perturbation_study.forward import Outputs, PlainModel
from tensorlens.studies.perturbation_study.measures import ORDERS, masks_along, ranking
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.sample_maps import Missing, SampleMaps
from tensorlens.studies.perturbation_study.subjects import Sample, Subject, maskable
from tensorlens.studies.resampling import short

N_EXAMPLES = 3
"""Samples whose maps are kept for the report."""
RANDOM = "control.random"

Scores = list[Tensor] | Missing
"""One score vector of a method, several of the random control, or why there is none."""
Plan = list[tuple[str, Tensor]] | Missing
"""For each order and score vector, which tokens go at each step; or why there is none."""


@dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A sample with what the model makes of it and what is to be replaced, by preset and method."""

    index: int
    sample: Sample
    clean: Outputs
    plans: dict[str, dict[str, Plan]]


class Measurement:
    """Measures groups of samples.

    Args:
        lens: Gives the maps.
        subject: The samples and their copies.
        options: The run's, with methods, presets and replacements settled.
        folder: The run's; maps of the first samples go into it.
    """

    def __init__(self, lens: Lens, subject: Subject, options: PerturbationOptions, folder: Path) -> None:
        self.lens, self.subject, self.options, self.folder = lens, subject, options, folder
        self.plain = PlainModel(lens, options.batch_size)
        self.out_token = -1 if subject.is_causal else 0
        self.maps = SampleMaps(
            lens,
            [name for name in options.methods or () if name != RANDOM],
            out_token=self.out_token,
            norm_probes=options.norm_probes,
            seed=options.seed,
        )

    def measure(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records of a group of samples; one that cannot be measured is skipped and says why."""
        skipped: dict[int, str] = {}
        samples = dict(self._loaded(indices, skipped))
        scores = dict(self._scored(samples, skipped))
        prepared = list(self._prepared({index: samples[index] for index in scores}, scores, skipped))
        cells = [self._cells(prepared, replacement) for replacement in self.options.replacements or ()]
        records = {one.index: self._record(one, [of[number] for of in cells]) for number, one in enumerate(prepared)}
        return [
            {"name": self.subject.name(index)} | ({"skipped": skipped[index]} if index in skipped else records[index])
            for index in indices
        ]

    # Before anything is replaced ----------------------------------------------------------------------------------

    def _loaded(self, indices: Sequence[int], skipped: dict[int, str]) -> Iterator[tuple[int, Sample]]:
        for index in indices:
            try:
                sample = self.subject.load(index)
            except TensorLensError as error:
                skipped[index] = str(error)
                continue
            for preset in self.options.presets:
                if not maskable(sample, self.subject.is_causal, preset):
                    reason = f"None of its tokens, {sample.n_tokens} in all, may be replaced under `{preset}`."
                    skipped[index] = reason
                    break
            else:
                yield index, sample

    def _scored(
        self, samples: Mapping[int, Sample], skipped: dict[int, str]
    ) -> Iterator[tuple[int, dict[str, Scores]]]:
        options = self.options
        for (index, sample), maps in zip(samples.items(), self.maps.of(list(samples.values())), strict=True):
            if isinstance(maps, str):
                skipped[index] = maps
                continue
            if index < N_EXAMPLES:
                self._keep(index, maps)
            scores: dict[str, Scores] = {
                name: found if isinstance(found, str) else [found.scores[0]] for name, found in maps.items()
            }
            scores[RANDOM] = [
                random_scores(1, sample.n_tokens, (options.seed, index, k))[0] for k in range(options.n_random)
            ]
            yield index, {name: scores[name] for name in options.methods or ()}

    def _keep(self, index: int, maps: Mapping[str, TokenMap | Missing]) -> None:
        (self.folder / "maps").mkdir(exist_ok=True)
        for name, found in maps.items():
            if not isinstance(found, str):
                found.save(self.folder / "maps" / f"{index}.{name}.json")

    def _prepared(
        self, samples: Mapping[int, Sample], scores: Mapping[int, dict[str, Scores]], skipped: dict[int, str]
    ) -> Iterator[_Prepared]:
        clean = self.plain.run_together([sample.inputs for sample in samples.values()], self.out_token)
        for (index, sample), outputs in zip(samples.items(), clean, strict=True):
            if not bool(outputs.states.isfinite().all()):
                skipped[index] = "The model's output holds NaN or infinity."
                continue
            plans = {preset: self._plans(sample, scores[index], preset) for preset in self.options.presets}
            yield _Prepared(index=index, sample=sample, clean=outputs, plans=plans)

    def _plans(self, sample: Sample, scores: dict[str, Scores], preset: str) -> dict[str, Plan]:
        chosen = maskable(sample, self.subject.is_causal, preset)
        return {method: self._plan(found, chosen, sample.n_tokens) for method, found in scores.items()}

    def _plan(self, found: Scores, chosen: list[int], n_tokens: int) -> Plan:
        if isinstance(found, str):
            return found
        try:
            ranked = [
                (order, ranking(scores, chosen, order, absolute=self.options.absolute))
                for order in ORDERS
                for scores in found
            ]
        except InputError as error:
            return str(error)
        return [(order, masks_along(tokens, n_tokens, self.options.grid)) for order, tokens in ranked]

    # What replacing does ------------------------------------------------------------------------------------------

    def _cells(self, prepared: Sequence[_Prepared], replacement: str) -> list[dict[str, dict[str, Any]]]:
        """For each sample, by preset and method, the curves. No set of tokens is replaced twice in a sample."""
        wanted, places = [], []
        for one in prepared:
            masks = [masks for _, masks in _every_plan(one.plans)]
            empty = torch.zeros(0, one.sample.n_tokens, dtype=torch.bool)
            unique, inverse = torch.cat([empty, *masks]).unique(dim=0, return_inverse=True)
            wanted.append(Wanted(sample=one.sample, clean=one.clean, masks=unique))
            places.append(inverse.split([len(part) for part in masks]))
        changes = changes_of(self.plain, self.subject, wanted, replacement, self.out_token)
        return [
            _sample_cells(one.plans, list(rows), found)
            for one, rows, found in zip(prepared, places, changes, strict=True)
        ]

    def _record(self, one: _Prepared, cells: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
        conditions = {
            f"{preset}, {replacement}" if self.subject.is_causal else replacement: of_replacement[preset]
            for preset in self.options.presets
            for replacement, of_replacement in zip(self.options.replacements or (), cells, strict=True)
        }
        power = short(one.clean.states[0].square().mean())
        return {"n_tokens": one.sample.n_tokens, "state_power": power, "conditions": conditions}


def _every_plan(plans: dict[str, dict[str, Plan]]) -> Iterator[tuple[str, Tensor]]:
    for of_preset in plans.values():
        for plan in of_preset.values():
            yield from () if isinstance(plan, str) else plan


def _sample_cells(
    plans: dict[str, dict[str, Plan]], rows: list[Tensor], changes: Changes | Missing
) -> dict[str, dict[str, Any]]:
    left = iter(rows)

    def cell(plan: Plan) -> dict[str, Any]:
        if isinstance(plan, str):
            return {"missing": plan}
        places = torch.stack([next(left) for _ in plan])
        return (
            {"missing": changes} if isinstance(changes, str) else _cell([order for order, _ in plan], places, changes)
        )

    return {preset: {method: cell(plan) for method, plan in of_preset.items()} for preset, of_preset in plans.items()}


def _cell(orders: Sequence[str], rows: Tensor, changes: Changes) -> dict[str, Any]:
    """Curves from 0 on, averaged over the score vectors of an order."""
    cell: dict[str, Any] = {}
    for order in ORDERS:
        chosen = rows[[i for i, one in enumerate(orders) if one == order]]
        cell[order] = {
            metric: [0.0, *(short(value) for value in values[chosen].mean(0))] for metric, values in changes.items()
        }
    return cell
