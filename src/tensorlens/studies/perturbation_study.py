"""The perturbation study (the paper's section 4.1): rank the tokens by a map, replace the first of them, run, measure.

If a method ranks the tokens that matter first, the output moves early. One recording of a group of samples serves all
methods; their replaced copies go through the plain model in shared batches. Definitions are those of the paper, with
what it leaves open marked as a convention.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from msgspec import structs
from torch import Tensor

from tensorlens.batches import Asked, DatasetMaps
from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.methods import METHODS, joins_norms
from tensorlens.maps.peers import random_scores
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput
from tensorlens.models.runner import own_modes
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.options import PerturbationOptions, checked_names, chosen_options, member_lens, split
from tensorlens.studies.perturbation_report import (
    ORDERS,
    Order,
    best_methods,
    perturbation_report,
    perturbation_summary,
)
from tensorlens.studies.perturbation_samples import Images, Sample, SamplePiece, Samples, Texts, maskable
from tensorlens.studies.plain_model import Outputs
from tensorlens.studies.report import short
from tensorlens.studies.runs import Run, StudyResult, model_settings, reason_of
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64

RANDOM = "control.random"
GROUP_SIZE = 16
MIN_GROUPS = 8
"""Groups into which even a small run is cut: several processes have to find work."""
N_EXAMPLES = 3
"""Samples whose maps are in the report."""
OF_THE_SAMPLES = ("n_tokens", "min_tokens", "cut", "column", "label", "split", "batch_size", "group_size")
"""Options that the samples themselves show, or that change numbers by rounding alone."""


# The run --------------------------------------------------------------------------------------------------------------


@own_modes
def perturbation(
    lens: Lens,
    data: Any,
    out: str | Path,
    *,
    options: PerturbationOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    r"""Run the perturbation study, or resume one.

    For each method, a growing fraction f of the tokens is replaced, the highest-ranked first, and the change of the
    watched output is measured: HS-MSE, $\frac1D\lVert F(X)_o - F(X_f)_o\rVert^2$, and, where the model has classes
    there, the drop in probability of the class it chose (AOPC, and its absolute value, abs-AOPC). If samples have
    labels, the accuracy is measured too. The reverse order, least relevant first, is measured as well.

    Args:
        lens: The model, with its tokenizer or image processor.
        data: Texts or images; see `read_dataset`.
        out: The run's folder.
        options: Methods, replacements, lengths; see `PerturbationOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and the folder. To resume an interrupted run, call this again with the same settings.
    """
    asked = chosen_options(PerturbationOptions, options, changes)
    dataset = data
    if not isinstance(data, Dataset):
        dataset = read_dataset(data, column=asked.column, label=asked.label, split=asked.split)
    samples = (Images if dataset.kind == "image" else Texts)(lens, dataset, asked)
    chosen = _settled(asked, samples)
    run = Run(out, "perturbation", _settings(lens, dataset, samples, chosen))
    run.work(groups_of(samples, chosen), Measurement(lens, samples, chosen).measure, progress)

    def report(run: Run, summary: dict[str, Any]) -> None:
        perturbation_report(run, summary, _examples(lens, samples, summary, chosen))

    return run.finish(len(samples), partial(perturbation_summary, settings=run.settings), report)


def _settled(options: PerturbationOptions, samples: Samples) -> PerturbationOptions:
    """The options with what depends on the model and the data: presets of decoders only, replacements by kind."""
    replacements = samples.replacements[:1] if options.replacements is None else options.replacements
    replacements = checked_names(replacements, samples.replacements, "replacements")
    samples.check(replacements)
    presets = options.presets if samples.is_causal else ("strict",)
    watch = ("last" if samples.is_causal else "first") if options.watch == "auto" else options.watch
    methods = tuple(METHODS) if options.methods is None else options.methods
    return structs.replace(options, methods=methods, replacements=replacements, presets=presets, watch=watch)


def groups_of(samples: Samples, options: PerturbationOptions) -> list[list[int]]:
    """Samples that are measured together, of similar length, the longest first, to run out of memory early if at all.

    They depend on data and options alone, not on how many processes there are or on what is done already.
    """
    size = options.group_size or max(1, min(GROUP_SIZE, len(samples) // MIN_GROUPS))
    order = sorted(range(len(samples)), key=lambda index: -samples.length(index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _settings(lens: Lens, dataset: Dataset, samples: Samples, options: PerturbationOptions) -> dict[str, Any]:
    data = {"kind": dataset.kind, "n": len(dataset), "fingerprint": dataset.fingerprint} | samples.settings()
    chosen = {name: value for name, value in structs.asdict(options).items() if name not in OF_THE_SAMPLES}
    about = {"data": data, "is_causal": samples.is_causal, "watched": _watched(samples, options.watch)}
    return chosen | model_settings(lens) | about


def _watched(samples: Samples, watch: str) -> str:
    """The watched output in words; they tell whether its state is made of logits, one channel per class."""
    where = {"first": "the first token", "last": "the last token", "mean": "the mean of all tokens"}[watch]
    for index in range(len(samples)):
        try:
            found = samples.plain.run(samples.load(index).inputs, watch)
        except TensorLensError:  # it is skipped later, and says why
            continue
        is_logits = found.logits is not None and torch.equal(found.logits, found.states)
        return f"{'logits' if is_logits else 'the state'} of {where}"
    return f"the state of {where}"


def _examples(lens: Lens, samples: Samples, summary: dict[str, Any], options: PerturbationOptions) -> list[TokenMap]:
    """Maps of the first samples, by the best method of each group."""
    methods = [name for name in best_methods(summary) if name != RANDOM]
    maps, made = GroupMaps(lens, methods, options), list[Maps | Missing]()
    for index in range(min(N_EXAMPLES, len(samples)) if methods else 0):
        try:
            made += maps.of([samples.load(index)])
        except TensorLensError:  # skipped by the study too, which says why
            continue
    return [one for of in made if not isinstance(of, str) for one in of.values() if isinstance(one, TokenMap)]


# A group of samples ---------------------------------------------------------------------------------------------------


Missing = str
"""Why there is no map, or no number."""
Maps = dict[str, TokenMap | Missing]
"""The maps of one sample by method."""
Scores = list[Tensor] | Missing
"""One score vector of a method, or several of the random control."""
Plan = dict[tuple[str, str], Tensor | Missing]
"""By preset and method, which tokens go: (order, score vector, step, token)."""
Changes = dict[str, Tensor]
"""By metric, one number for each set of replaced tokens."""


class Measurement:
    """Measures groups of samples."""

    def __init__(self, lens: Lens, samples: Samples, options: PerturbationOptions) -> None:
        self.samples, self.options = samples, options
        self.maps = GroupMaps(lens, [name for name in options.methods or () if name != RANDOM], options)

    def measure(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The records of a group of samples; one that cannot be measured is skipped and says why."""
        skipped: dict[int, str] = {}
        loaded = dict(self._loaded(indices, skipped))
        scores = dict(self._scored(loaded, skipped))
        clean = dict(self._clean({index: loaded[index] for index in scores}, skipped))
        samples = {index: loaded[index] for index in clean}
        plans = {index: self._plan(sample, scores[index]) for index, sample in samples.items()}
        steps = {index: _Steps(plans[index], sample.n_tokens) for index, sample in samples.items()}
        masks = {index: one.masks for index, one in steps.items()}
        changes = {
            how: changes_of(self.samples, samples, clean, masks, how, self.options.watch)
            for how in self.options.replacements or ()
        }

        def record(index: int) -> dict[str, Any]:
            if index in skipped:
                return {"skipped": skipped[index]}
            sample, of = samples[index], clean[index]
            cells = {how: steps[index].cells(found[index], _start(sample, of)) for how, found in changes.items()}
            conditions = {
                f"{preset}, {how}" if self.samples.is_causal else how: {
                    method: cell for (of_preset, method), cell in found.items() if of_preset == preset
                }
                for preset in self.options.presets
                for how, found in cells.items()
            }
            power = short(of.states[0].square().mean())
            return {"n_tokens": sample.n_tokens, "state_power": power, "conditions": conditions}

        return [_about(self.samples.pieces[index]) | record(index) for index in indices]

    def _loaded(self, indices: Sequence[int], skipped: dict[int, str]) -> Iterator[tuple[int, Sample]]:
        for index in indices:
            try:
                sample = self.samples.load(index)
            except TensorLensError as error:
                skipped[index] = str(error)
                continue
            bare = next((preset for preset in self.options.presets if not self._maskable(sample, preset)), None)
            if bare is None:
                yield index, sample
            else:
                skipped[index] = f"None of its {sample.n_tokens} tokens may be replaced under `{bare}`."

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

    def _plan(self, sample: Sample, scores: dict[str, Scores]) -> Plan:
        absolute, grid = self.options.absolute, self.options.grid

        def plan(found: Scores, chosen: list[int]) -> Tensor | Missing:
            if isinstance(found, str):
                return found
            try:
                ranked = [[ranking(one, chosen, order, absolute=absolute) for one in found] for order in ORDERS]
            except InputError as error:
                return str(error)
            return torch.stack(
                [torch.stack([masks_along(tokens, sample.n_tokens, grid) for tokens in of]) for of in ranked]
            )

        return {
            (preset, method): plan(found, self._maskable(sample, preset))
            for preset in self.options.presets
            for method, found in scores.items()
        }


class _Steps:
    """The sets of tokens that are replaced in one sample, each once, and where a plan's steps are among them."""

    def __init__(self, plan: Plan, n_tokens: int) -> None:
        self.plan = plan
        wanted = {cell: masks for cell, masks in plan.items() if isinstance(masks, Tensor)}
        flat = [masks.flatten(0, 2) for masks in wanted.values()]
        empty = torch.zeros(0, n_tokens, dtype=torch.bool)
        self.masks, places = torch.cat([empty, *flat]).unique(dim=0, return_inverse=True)
        parts = zip(wanted, places.split([len(one) for one in flat]), strict=True)
        self.places = {cell: part.view(wanted[cell].shape[:3]) for cell, part in parts}

    def cells(self, changes: Changes | Missing, start: Mapping[str, float]) -> dict[tuple[str, str], dict[str, Any]]:
        """By preset and method, curves averaged over the score vectors of an order, from nothing replaced on."""
        return {
            cell: {"missing": masks} if isinstance(masks, str) else self._curves(cell, changes, start)
            for cell, masks in self.plan.items()
        }

    def _curves(self, cell: tuple[str, str], changes: Changes | Missing, start: Mapping[str, float]) -> dict[str, Any]:
        if isinstance(changes, str):
            return {"missing": changes}
        return {
            order: {
                metric: [start.get(metric, 0.0), *map(short, values[places].mean(0))]
                for metric, values in changes.items()
            }
            for order, places in zip(ORDERS, self.places[cell], strict=True)
        }


def _start(sample: Sample, clean: Outputs) -> dict[str, float]:
    """Where curves begin that do not begin at 0: whether the model is right with nothing replaced."""
    if sample.label is None or clean.logits is None:
        return {}
    return {"accuracy": float(is_right(clean.logits, sample.label)[0])}


def _about(piece: SamplePiece) -> dict[str, Any]:
    """The fields of a record that describe its sample."""
    more = {"label": piece.label, "unit": piece.unit, "columns": piece.columns}
    return {"name": piece.name} | {name: value for name, value in more.items() if value not in (None, {})}


# Rank -----------------------------------------------------------------------------------------------------------------


class GroupMaps:
    """The scores of groups of samples at one output: one recording of a group for each rule set asked for."""

    def __init__(self, lens: Lens, methods: Sequence[str], options: PerturbationOptions) -> None:
        self.methods, self.watch = tuple(methods), options.watch
        by_member: dict[tuple[str | None, bool], list[str]] = {}
        for name in methods:
            base, member = split(name)
            # The study's probes are for norms alone.
            is_exact = options.norm_probes is not None and base != "tensor.norm" and METHODS[base].takes_probes
            by_member.setdefault((member if "@" in name else None, is_exact), []).append(name)
        self._works: list[tuple[list[str], DatasetMaps]] = []
        for (member, _), names in by_member.items():
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
        make = _pooled if self.watch == "mean" else _made
        for names, work in self._works:
            work.batch_size = work.batch_size or len(samples)  # not what memory is free: a run must repeat itself
            for i, maps in enumerate(make(work, [sample.prepared for sample in samples])):
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
    """The same for the mean of all outputs, sample by sample."""
    made: list[list[TokenMap | Missing] | Missing] = []
    for one in prepared:
        try:
            tensor = work.specimen.look(one)
        except TensorLensError as error:
            made.append(str(error))
            continue
        rows: list[TokenMap | Missing] = []
        for name in work.asked.methods:
            try:
                rows.append(_mean_row(tensor, name, work.asked.options(name)))
            except TensorLensError as error:
                rows.append(reason_of(error))
        made.append(rows)
    return made


def _mean_row(tensor: AttentionTensor, name: str, options: Mapping[str, Any]) -> TokenMap:
    r"""The map of the mean output, $m = \frac1L\sum_i X^N_i$.

    In+Out is $\langle m, \frac1L\sum_i T_{ij} x_j\rangle$ by one pull. Convention: of other methods the mean of
    the rows is taken.
    """
    of_one = name in ("tensor.in_out", "tensor.in_class") or name.startswith("control.")
    found = tensor.map(name, -1 if of_one else None, **options)
    if of_one and name != "tensor.in_out":
        return found
    scores, bias_share = found.scores.mean(0, keepdim=True), found.bias_share.mean(0, keepdim=True)
    if name == "tensor.in_out":
        mean = in_float64(tensor.output).mean(0)
        pulled = tensor.T @ (mean / len(tensor.output)).to(tensor.output).expand_as(tensor.output)
        scores = (in_float64(pulled) * in_float64(tensor.input)).sum(-1)[None]
        bias_share = 1 - scores.sum(1) / mean.square().sum()
    return structs.replace(found, scores=scores, out_tokens=("mean",), bias_share=bias_share)


def ranking(scores: Float[Tensor, " token"], maskable: Sequence[int], order: Order, *, absolute: bool) -> list[int]:
    """The maskable tokens in the order in which they are replaced; of equal scores the earlier token goes first.

    Convention: by signed score, since the paper replaces the highest first; `absolute` goes by magnitude.
    """
    kept = in_float64(scores[list(maskable)])
    if not bool(torch.isfinite(kept).all()):
        raise InputError("The scores contain NaN or infinity, which cannot be ranked.")
    kept = kept.abs() if absolute else kept
    return [maskable[i] for i in kept.argsort(descending=order == "most", stable=True).tolist()]


# Replace, run, measure ------------------------------------------------------------------------------------------------


def masks_along(ranked: Sequence[int], n_tokens: int, grid: Sequence[float]) -> Bool[Tensor, "step token"]:
    """Which tokens are replaced at each fraction f above zero: the first ⌈f·M⌉ of the M maskable ones."""
    places = torch.full((n_tokens,), len(ranked))
    places[list(ranked)] = torch.arange(len(ranked))
    # Rounded first: 0.15 · 20 is a little more than 3 in floating point.
    counts = torch.tensor([math.ceil(round(fraction * len(ranked), 9)) for fraction in grid[1:]])
    return places < counts[:, None]


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
    plain, found, reasons = samples.plain, dict[int, Changes](), dict[int, Missing]()
    waiting: dict[Hashable, list[tuple[int, int]]] = {}
    for index, sample in loaded.items():
        try:
            shapes = samples.shapes(sample, masks[index], replacement)
        except InputError as error:
            reasons[index] = str(error)
            continue
        found[index] = {}
        for row, shape in enumerate(shapes):
            waiting.setdefault(shape, []).append((index, row))
    for of_one_shape in waiting.values():
        while of_one_shape:
            batch = of_one_shape[: plain.batch_size]
            del of_one_shape[: len(batch)]
            parts = [(index, [row for _, row in rows]) for index, rows in groupby(batch, key=lambda place: place[0])]
            copies = [samples.copies(loaded[index], masks[index][rows], replacement) for index, rows in parts]
            outputs, start = plain.run(_joined(copies), watch), 0
            for index, rows in parts:
                moved = _moved(loaded[index], clean[index], outputs[start : start + len(rows)])
                start += len(rows)
                for metric, values in moved.items():
                    every = found[index].setdefault(metric, torch.zeros(len(masks[index]), dtype=torch.float64))
                    every[rows] = values.cpu()
    none = f"With tokens replaced by `{replacement}`, the model's output holds NaN or infinity."
    for index, changes in found.items():
        if not all(bool(values.isfinite().all()) for values in changes.values()):
            reasons[index] = none
    return {index: reasons.get(index) or found[index] for index in loaded}


def _joined(inputs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([one[name] for one in inputs]) for name in inputs[0]}


def _moved(sample: Sample, clean: Outputs, copies: Outputs) -> Changes:
    found = {"hs_mse": hidden_state_mse(clean.states[0], copies.states)}
    if clean.logits is not None and copies.logits is not None:
        drop = probability_drop(clean.logits[0], copies.logits)
        found |= {"abs_aopc": drop.abs(), "aopc": drop}
        if sample.label is not None:
            found["accuracy"] = is_right(copies.logits, sample.label)
    return found


def hidden_state_mse(
    clean: Float[Tensor, " channel"], perturbed: Float[Tensor, "copy channel"]
) -> Float[Tensor, " copy"]:
    r"""HS-MSE: $\frac1D \lVert F(X)_o - F(X_f)_o \rVert^2$."""
    return (in_float64(perturbed) - in_float64(clean)).square().mean(-1)


def probability_drop(clean: Float[Tensor, " class"], perturbed: Float[Tensor, "copy class"]) -> Float[Tensor, " copy"]:
    r"""AOPC: $p_X(c) - p_{X_f}(c)$ for the class c that wins on the clean input.

    Paper: its AOPC is the absolute value of this, here abs-AOPC.
    """
    winner = int(clean.argmax())
    probability = in_float64(clean).softmax(-1)[winner]
    return probability - in_float64(perturbed).softmax(-1)[:, winner]


def is_right(logits: Float[Tensor, "copy class"], label: int) -> Float[Tensor, " copy"]:
    """1 where the label wins: the accuracy of one sample, as the paper's text defines its curve."""
    return in_float64((logits.argmax(-1) == label).float())
