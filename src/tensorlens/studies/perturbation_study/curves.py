"""The curves of a group of samples: maps, rankings, replaced copies, and the effect of replacing them at each step.

The samples of a group share recordings, and their copies share batches of the plain model.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool
from msgspec.structs import replace
from torch import Tensor

from tensorlens.batches import Asked, DatasetMaps
from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.methods import joins_norms
from tensorlens.maps.peers import random_scores
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput
from tensorlens.studies.options import member_lens, split
from tensorlens.studies.perturbation_study.measures import (
    ORDERS,
    hidden_state_mse,
    is_right,
    masks_along,
    probability_drop,
    ranking,
)
from tensorlens.studies.perturbation_study.samples import Sample, SamplePiece, Samples, maskable
from tensorlens.studies.plain_model import Outputs
from tensorlens.studies.report import short
from tensorlens.studies.runs import reason_of
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64

if TYPE_CHECKING:
    from tensorlens.studies.perturbation_study.run import PerturbationOptions

RANDOM = "control.random"
Missing = str
"""Why there is no map, or no number."""
Maps = dict[str, TokenMap | Missing]
"""The maps of one sample by method."""
Scores = list[Tensor] | Missing
"""One score vector of a method, or several of the random control."""
Plan = list[tuple[str, Tensor]] | Missing
"""For each order and score vector, which tokens go at each step."""
Plans = dict[str, dict[str, Plan]]
"""By preset and method."""
Changes = dict[str, Tensor]
"""By metric, one number for each set of replaced tokens."""


class Measurement:
    """Measures groups of samples."""

    def __init__(self, lens: Lens, samples: Samples, options: PerturbationOptions) -> None:
        self.samples, self.options = samples, options
        self.maps = GroupMaps(lens, [name for name in options.methods or () if name != RANDOM], options)

    def watched(self) -> str:
        """The watched output in words, with a note if its state consists of logits, one channel per class."""
        where = {"first": "the first token", "last": "the last token", "mean": "the mean of all tokens"}
        for index in range(len(self.samples)):
            try:
                found = self.samples.plain.run(self.samples.load(index).inputs, self.options.watch)
            except TensorLensError:  # it is skipped later, and says why
                continue
            is_logits = found.logits is not None and torch.equal(found.logits, found.states)
            return f"{'logits' if is_logits else 'the state'} of {where[self.options.watch]}"
        return f"the state of {where[self.options.watch]}"

    def measure(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records of a group of samples; one that cannot be measured is skipped and says why."""
        skipped: dict[int, str] = {}
        loaded = dict(self._loaded(indices, skipped))
        scores = dict(self._scored(loaded, skipped))
        clean = dict(self._clean({index: loaded[index] for index in scores}, skipped))
        chosen = {index: loaded[index] for index in clean}
        plans = {index: self._plans(sample, scores[index]) for index, sample in chosen.items()}
        cells = {how: self._cells(chosen, clean, plans, how) for how in self.options.replacements or ()}
        return [
            _about(self.samples.pieces[index])
            | (
                {"skipped": skipped[index]}
                if index in skipped
                else self._record(loaded[index], clean[index], {how: found[index] for how, found in cells.items()})
            )
            for index in indices
        ]

    # Before anything is replaced ----------------------------------------------------------------------------------

    def _loaded(self, indices: Sequence[int], skipped: dict[int, str]) -> Iterator[tuple[int, Sample]]:
        for index in indices:
            try:
                sample = self.samples.load(index)
            except TensorLensError as error:
                skipped[index] = str(error)
                continue
            presets = self.options.presets
            bare = [preset for preset in presets if not self._maskable(sample, preset)]
            if bare:
                skipped[index] = f"None of its {sample.n_tokens} tokens may be replaced under `{bare[0]}`."
            else:
                yield index, sample

    def _maskable(self, sample: Sample, preset: str) -> list[int]:
        return maskable(sample, self.samples.is_causal, preset, self.options.keep_first)

    def _scored(
        self, samples: Mapping[int, Sample], skipped: dict[int, str]
    ) -> Iterator[tuple[int, dict[str, Scores]]]:
        seed, n_random = self.options.seed, self.options.n_random
        for (index, sample), maps in zip(samples.items(), self.maps.of(list(samples.values())), strict=True):
            if isinstance(maps, str):
                skipped[index] = maps
                continue
            scores: dict[str, Scores] = {
                name: found if isinstance(found, str) else [found.scores[0]] for name, found in maps.items()
            }
            scores[RANDOM] = [random_scores(1, sample.n_tokens, (seed, index, k))[0] for k in range(n_random)]
            yield index, {name: scores[name] for name in self.options.methods or ()}

    def _clean(self, samples: Mapping[int, Sample], skipped: dict[int, str]) -> Iterator[tuple[int, Outputs]]:
        """The model's outputs for the samples as they are; samples of one shape run together."""
        by_shape: dict[Hashable, list[int]] = {}
        for index, sample in samples.items():
            by_shape.setdefault(tuple(value.shape for value in sample.inputs.values()), []).append(index)
        found: dict[int, Outputs] = {}
        for some in by_shape.values():
            outputs = self.samples.plain.run(_joined([samples[index].inputs for index in some]), self.options.watch)
            found |= {index: outputs[place : place + 1] for place, index in enumerate(some)}
        for index in samples:
            if bool(found[index].states.isfinite().all()):
                yield index, found[index]
            else:
                skipped[index] = "The model's output holds NaN or infinity."

    def _plans(self, sample: Sample, scores: dict[str, Scores]) -> Plans:
        def plan(found: Scores, chosen: list[int]) -> Plan:
            if isinstance(found, str):
                return found
            try:
                ranked = [
                    (order, ranking(one, chosen, order, absolute=self.options.absolute))
                    for order in ORDERS
                    for one in found
                ]
            except InputError as error:
                return str(error)
            return [(order, masks_along(tokens, sample.n_tokens, self.options.grid)) for order, tokens in ranked]

        return {
            preset: {method: plan(found, self._maskable(sample, preset)) for method, found in scores.items()}
            for preset in self.options.presets
        }

    # What replacing does ------------------------------------------------------------------------------------------

    def _cells(
        self,
        samples: Mapping[int, Sample],
        clean: Mapping[int, Outputs],
        plans: Mapping[int, Plans],
        replacement: str,
    ) -> dict[int, dict[str, dict[str, Any]]]:
        """For each sample, by preset and method, the curves. No set of tokens is replaced twice in a sample."""
        masks, places = {}, {}
        for index, sample in samples.items():
            wanted = [
                masks
                for of_preset in plans[index].values()
                for plan in of_preset.values()
                if not isinstance(plan, str)
                for _, masks in plan
            ]
            empty = torch.zeros(0, sample.n_tokens, dtype=torch.bool)
            masks[index], inverse = torch.cat([empty, *wanted]).unique(dim=0, return_inverse=True)
            places[index] = iter(inverse.split([len(part) for part in wanted]))
        changes = changes_of(self.samples, samples, clean, masks, replacement, self.options.watch)
        return {
            index: {
                preset: {
                    method: _cell(plan, places[index], changes[index], self._start(samples[index], clean[index]))
                    for method, plan in of_preset.items()
                }
                for preset, of_preset in plans[index].items()
            }
            for index in samples
        }

    def _start(self, sample: Sample, clean: Outputs) -> dict[str, float]:
        """The first value of curves that do not begin at 0: whether the model is right with nothing replaced."""
        if sample.label is None or clean.logits is None:
            return {}
        return {"accuracy": float(is_right(clean.logits, sample.label)[0])}

    def _record(self, sample: Sample, clean: Outputs, cells: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        conditions = {
            f"{preset}, {replacement}" if self.samples.is_causal else replacement: found[preset]
            for preset in self.options.presets
            for replacement, found in cells.items()
        }
        power = short(clean.states[0].square().mean())
        return {"n_tokens": sample.n_tokens, "state_power": power, "conditions": conditions}


def _about(piece: SamplePiece) -> dict[str, Any]:
    """The fields of a record that describe its sample."""
    more = {"label": piece.label, "unit": piece.unit, "columns": piece.columns}
    return {"name": piece.name} | {name: value for name, value in more.items() if value not in (None, {})}


def _cell(
    plan: Plan, places: Iterator[Tensor], changes: Changes | Missing, start: Mapping[str, float]
) -> dict[str, Any]:
    """Curves averaged over the score vectors of an order, from nothing replaced on.

    `places` of the plan's masks come in turn.
    """
    if isinstance(plan, str):
        return {"missing": plan}
    rows = torch.stack([next(places) for _ in plan])  # (order and score vector, step)
    if isinstance(changes, str):
        return {"missing": changes}
    return {
        order: {
            metric: [
                start.get(metric, 0.0),
                *(short(value) for value in values[rows[[one == order for one, _ in plan]]].mean(0)),
            ]
            for metric, values in changes.items()
        }
        for order in ORDERS
    }


# Maps -----------------------------------------------------------------------------------------------------------------


class GroupMaps:
    """The scores of groups of samples at one output: one recording of a group for each rule set asked for."""

    def __init__(self, lens: Lens, methods: Sequence[str], options: PerturbationOptions) -> None:
        self.lens, self.methods, self.watch = lens, tuple(methods), options.watch
        by_member: dict[str | None, list[str]] = {}
        for name in methods:
            by_member.setdefault(split(name)[1] if "@" in name else None, []).append(name)
        self._works: list[tuple[list[str], DatasetMaps]] = []
        for member, names in by_member.items():
            bases = tuple(split(name)[0] for name in names)
            probes = options.norm_probes if "tensor.norm" in bases else None
            raw = options.raw_norms and any(map(joins_norms, bases))
            out_token = 0 if options.watch == "first" else -1
            asked = Asked(methods=bases, out_token=out_token, probes=probes, seed=options.seed, raw=raw)
            self._works.append((names, DatasetMaps((member_lens(lens, member) if member else lens).specimen, asked)))

    def of(self, samples: Sequence[Sample]) -> list[Maps | Missing]:
        """In the order of the samples, maps by method.

        A method that fails on a sample has the reason in its place, and so has a sample that cannot be recorded.
        """
        found: list[Maps | Missing] = [{} for _ in samples]
        for names, work in self._works:
            work.batch_size = work.batch_size or len(samples)  # not what memory is free: a run must repeat itself
            prepared: dict[int, ModelInput] = {}
            for i, sample in enumerate(samples):
                try:
                    prepared[i] = self.lens.prepare(sample.value)
                except TensorLensError as error:
                    found[i] = str(error)
            make = _pooled if self.watch == "mean" else _made
            for i, maps in zip(prepared, make(work, list(prepared.values())), strict=True):
                so_far = found[i]
                if not isinstance(so_far, str):
                    found[i] = maps if isinstance(maps, str) else so_far | dict(zip(names, maps, strict=True))
        return [maps if isinstance(maps, str) else {name: maps[name] for name in self.methods} for maps in found]


def _made(work: DatasetMaps, prepared: list[ModelInput]) -> list[list[TokenMap | Missing] | Missing]:
    """For each sample its maps, an error as its first line; samples that fail together are tried alone."""
    try:
        made = work.window(prepared)
    except TensorLensError as error:
        return [str(error)] if len(prepared) == 1 else [_made(work, [one])[0] for one in prepared]
    return [[one if isinstance(one, TokenMap) else reason_of(one) for one in maps.values()] for maps in made]


def _pooled(work: DatasetMaps, prepared: list[ModelInput]) -> list[list[TokenMap | Missing] | Missing]:
    r"""The same for the mean of all outputs, $m = \frac1L\sum_i X^N_i$, sample by sample.

    In+Out is $\langle m, \frac1L\sum_i T_{ij} x_j\rangle$ by one pull. Convention: of other methods the mean of
    the rows is taken.
    """

    def row(tensor: AttentionTensor, name: str) -> TokenMap | Missing:
        of_one = name in ("tensor.in_out", "tensor.in_class") or name.startswith("control.")
        try:
            found = tensor.map(name, -1 if of_one else None, **work.asked.options(name))
        except TensorLensError as error:
            return reason_of(error)
        if of_one and name != "tensor.in_out":
            return found
        scores, bias_share = found.scores.mean(0, keepdim=True), found.bias_share.mean(0, keepdim=True)
        if name == "tensor.in_out":
            mean = in_float64(tensor.output).mean(0)
            pulled = tensor.T @ (mean / len(tensor.output)).to(tensor.output).expand_as(tensor.output)
            scores = (in_float64(pulled) * in_float64(tensor.input)).sum(-1)[None]
            bias_share = 1 - scores.sum(1) / mean.square().sum()
        return replace(found, scores=scores, out_tokens=("mean",), bias_share=bias_share)

    made: list[list[TokenMap | Missing] | Missing] = []
    for one in prepared:
        try:
            tensor = work.specimen.look(one)
            made.append([row(tensor, name) for name in work.asked.methods])
        except TensorLensError as error:
            made.append(str(error))
    return made


# Replaced copies ------------------------------------------------------------------------------------------------------


def changes_of(
    samples: Samples,
    loaded: Mapping[int, Sample],
    clean: Mapping[int, Outputs],
    masks: Mapping[int, Bool[Tensor, "copy token"]],
    replacement: str,
    watch: str = "last",
) -> dict[int, Changes | Missing]:
    """For each sample how far each of its copies moves the output, by metric; or why that cannot be measured.

    Copies of one shape share batches, whatever samples they are of. A batch is made when it is run, so that no more
    than one is in memory.
    """
    plain = samples.plain
    found: dict[int, Changes | Missing] = {}
    places: dict[Hashable, list[tuple[int, int]]] = {}
    for index, sample in loaded.items():
        metrics = ["hs_mse"]
        if clean[index].logits is not None:
            metrics += ["abs_aopc", "aopc", *(["accuracy"] if sample.label is not None else [])]
        try:
            shapes = samples.shapes(sample, masks[index], replacement)
        except InputError as error:
            found[index] = str(error)
            continue
        found[index] = {metric: torch.zeros(len(masks[index]), dtype=torch.float64) for metric in metrics}
        for row, shape in enumerate(shapes):
            places.setdefault(shape, []).append((index, row))
    for of_one_shape in places.values():
        while of_one_shape:
            batch = of_one_shape[: plain.batch_size]
            del of_one_shape[: plain.batch_size]
            parts = [(index, [row for _, row in rows]) for index, rows in groupby(batch, key=lambda place: place[0])]
            copies = [samples.copies(loaded[index], masks[index][rows], replacement) for index, rows in parts]
            outputs, start = plain.run(_joined(copies), watch), 0
            for index, rows in parts:
                _put(found[index], rows, loaded[index].label, clean[index], outputs[start : start + len(rows)])
                start += len(rows)
    return {index: _finite(changes, replacement) for index, changes in found.items()}


def _joined(inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}


def _put(changes: Changes | Missing, rows: list[int], label: int | None, clean: Outputs, perturbed: Outputs) -> None:
    assert not isinstance(changes, str), "only samples that can be copied are in a batch"
    changes["hs_mse"][rows] = hidden_state_mse(clean.states[0], perturbed.states).cpu()
    if clean.logits is not None and perturbed.logits is not None:
        changes["aopc"][rows] = probability_drop(clean.logits[0], perturbed.logits).cpu()
        changes["abs_aopc"][rows] = changes["aopc"][rows].abs()
        if label is not None:
            changes["accuracy"][rows] = is_right(perturbed.logits, label).cpu()


def _finite(changes: Changes | Missing, replacement: str) -> Changes | Missing:
    if isinstance(changes, str) or all(bool(values.isfinite().all()) for values in changes.values()):
        return changes
    return f"With tokens replaced by `{replacement}`, the model's output holds NaN or infinity."
