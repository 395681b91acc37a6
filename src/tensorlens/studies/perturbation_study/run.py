"""The perturbation study: replace the tokens a method calls relevant and see how far the output moves.

A method that ranks tokens by what they really carry makes the output move early. One recording of each sample serves
all methods; the replaced copies go through the plain model in batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import InputError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.controls import random_scores
from tensorlens.maps.methods import METHODS
from tensorlens.models.precision import matmul_precision
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.identity import model_settings
from tensorlens.studies.perturbation_study.forward import PlainModel
from tensorlens.studies.perturbation_study.measures import (
    GRID,
    METRICS,
    ORDERS,
    absolute_aopc,
    check_grid,
    hidden_state_mse,
    masks_along,
    ranking,
)  # fmt: skip
from tensorlens.studies.perturbation_study.report import write_report
from tensorlens.studies.perturbation_study.subjects import Cut, Images, Preset, Sample, Subject, Texts, maskable
from tensorlens.studies.perturbation_study.summary import summarise
from tensorlens.studies.runs import Run
from tensorlens.tensor import AttentionTensor

N_EXAMPLES = 3
"""Samples whose maps are kept for the report."""


@dataclass(frozen=True, kw_only=True)
class PerturbationResult:
    """A finished run.

    Attributes:
        folder: Where it is.
        summary: What `summary.json` holds.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page with curves, table and example maps."""
        return self.folder / "report.html"

    def areas(self, condition: str | None = None, metric: str = "hs_mse", order: str = "most") -> dict[str, float]:
        """Area under the curve of each method, best first; of the first condition if none is named.

        Raises:
            InputError: no sample could be measured.
        """
        conditions = self.summary["conditions"]
        if not conditions:
            raise InputError(f"No sample could be measured; the first: {self.summary['skipped'][0]['reason']}")
        chosen = conditions[next(iter(conditions)) if condition is None else condition]
        methods = chosen.get(order, {}).get(metric, {"methods": {}})["methods"]  # none where every method has a gap
        best_first = sorted(methods, key=lambda name: methods[name]["auc"], reverse=order == "most")
        return {name: methods[name]["auc"] for name in best_first}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a run's numbers depend on, apart from the model and the data."""

    methods: tuple[str, ...]
    presets: tuple[Preset, ...]
    replacements: tuple[str, ...]
    grid: tuple[float, ...]
    absolute: bool
    seed: int
    n_random: int
    norm_probes: int | None


def perturbation(
    lens: Lens, data: Any, out: str | Path, *, methods: Sequence[str] | None = None, limit: int | None = None,
    presets: Sequence[str] = ("strict",), replacements: Sequence[str] | None = None,
    grid: Sequence[float] = GRID, n_tokens: int = 128, min_tokens: int = 1, cut: Cut = "each",
    column: str | None = None, split: str = "test", absolute: bool = False, seed: int = 0, n_random: int = 5,
    norm_probes: int | None = None, batch_size: int = 64, progress: bool | None = None,
) -> PerturbationResult:  # fmt: skip
    r"""Run the perturbation study, or go on with one.

    For each method the highest-ranked tokens are replaced first, a growing fraction f of them, and the change of the
    watched output is measured: HS-MSE, $\frac1D\lVert F(X)_o - F(X_f)_o\rVert^2$, and, where the model has classes
    there, the change of probability of the class it chose (abs-AOPC). The least relevant first is measured too.

    Args:
        lens: The model, with its tokenizer or image processor.
        data: Texts or images; see `read_dataset`.
        out: The run's folder.
        methods: Names in `METHODS`; all of them if None. One that does not apply to the model is reported as missing.
        limit: How many samples at most.
        presets: For decoders, one or both of ``strict`` (the last token stays) and ``paper-like`` (it may go).
        replacements: What takes a token's place. Texts: ``token`` (mask, unknown, padding or end token), ``zero``,
            ``mean`` (embeddings), ``attention`` (masked out), ``delete``. Images: ``black``, ``mean``, ``blur``.
            The first of these if None.
        grid: Fractions of tokens replaced, from 0.
        n_tokens: Texts are cut to this many tokens.
        min_tokens: Shorter texts are left out.
        cut: ``each`` text a sample, or all of them joined and cut into ``windows``.
        column: Column or field with the text.
        split: For a data set by id: which part.
        absolute: Rank by magnitude; by signed score otherwise.
        seed: For the random control and the bootstrap.
        n_random: Random orders that the random control averages over.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        batch_size: Replaced copies run at a time.
        progress: Whether to show a bar; None shows it in a terminal.

    Returns:
        The summary and where everything is. Started again with the same settings, a run goes on where it stopped.
    """
    for name, number in (("limit", limit), ("n_random", n_random), ("norm_probes", norm_probes)):
        if number is not None and number < 1:
            raise InputError(f"Expected `{name}` of at least 1; got {number}.")
    dataset = data if isinstance(data, Dataset) else read_dataset(data, column=column, split=split)
    subject: Subject = (
        Images(lens, dataset, limit=limit)
        if dataset.kind == "image"
        else Texts(lens, dataset, n_tokens=n_tokens, min_tokens=min_tokens, cut=cut, limit=limit)
    )
    chosen = _checked(presets, ("strict", "paper-like"), "presets")
    settings = Settings(
        methods=_checked(METHODS if methods is None else methods, METHODS, "methods"),
        presets=chosen if subject.is_causal else ("strict",),
        replacements=_checked(
            subject.replacements[:1] if replacements is None else replacements, subject.replacements, "replacements"
        ),
        grid=check_grid(grid), absolute=absolute, seed=seed, n_random=n_random, norm_probes=norm_probes,
    )  # fmt: skip
    subject.check(settings.replacements)
    run = Run(out, "perturbation", _describe(lens, dataset, subject, settings, limit))
    study = _Study(lens, subject, settings, run.folder, PlainModel(lens, batch_size))
    run.work(len(subject), study.measure, progress)
    summary = run.complete(len(subject), partial(summarise, settings=run.settings))
    if run.processes.is_first:
        write_report(run)
    return PerturbationResult(folder=run.folder, summary=summary)


def _checked(chosen: Iterable[Any], known: Iterable[str], name: str) -> tuple[Any, ...]:
    """The names chosen, each once; one name by itself will do."""
    known = tuple(known)
    chosen = (chosen,) if isinstance(chosen, str) else tuple(dict.fromkeys(chosen))
    wrong = next((one for one in chosen if one not in known), None)
    if wrong is not None or not chosen:
        near = get_close_matches(str(wrong), known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"Expected `{name}` among {', '.join(known)}; got {wrong if chosen else 'none'!r}.{hint}")
    return chosen


def _describe(lens: Lens, dataset: Dataset, subject: Subject, settings: Settings, limit: int | None) -> dict[str, Any]:
    return (
        asdict(settings)
        | model_settings(lens)
        | {
            "matmul_precision": matmul_precision(),
            "data": {"kind": dataset.kind, "n": len(dataset), "fingerprint": dataset.fingerprint} | subject.settings(),
            "limit": limit,
            "is_causal": subject.is_causal,
        }
    )


Plan = list[tuple[str, Tensor]] | str
"""For each order and score vector, which tokens go at each step; or why there is none."""


class _Study:
    """What happens to one sample."""

    def __init__(self, lens: Lens, subject: Subject, settings: Settings, folder: Path, plain: PlainModel) -> None:
        self.lens, self.subject, self.settings, self.folder, self.plain = lens, subject, settings, folder, plain

    def measure(self, index: int) -> dict[str, Any]:
        """The record of one sample; one that cannot be read is skipped and says why."""
        name = self.subject.name(index)
        try:
            sample = self.subject.load(index)
        except TensorLensError as error:
            return {"name": name, "skipped": str(error)}
        for preset in self.settings.presets:
            if not maskable(sample, self.subject.is_causal, preset):
                reason = f"None of its tokens, {sample.n_tokens} in all, may be replaced under `{preset}`."
                return {"name": name, "skipped": reason}
        out_token = -1 if self.subject.is_causal else 0
        try:
            tensor = self.lens(sample.value)
        except TensorLensError as error:
            return {"name": name, "skipped": str(error)}
        scores = {method: self._scores(tensor, method, out_token, index) for method in self.settings.methods}
        clean = self.plain.run(sample.inputs, out_token)
        if not bool(clean.states.isfinite().all()):
            return {"name": name, "skipped": "The model's output holds NaN or infinity."}
        record = {"name": name, "n_tokens": sample.n_tokens, "state_power": _short(clean.states[0].square().mean())}
        plans = {preset: self._plans(sample, scores, preset) for preset in self.settings.presets}
        by_replacement = {
            replacement: self._cells(sample, plans, replacement, out_token, clean)
            for replacement in self.settings.replacements
        }
        conditions = {
            _condition_name(self.subject.is_causal, preset, replacement): by_replacement[replacement][preset]
            for preset in self.settings.presets
            for replacement in self.settings.replacements
        }
        return record | {"conditions": conditions}

    def _scores(self, tensor: AttentionTensor, method: str, out_token: int, index: int) -> list[Tensor] | str:
        """One score vector, several for the random control, or why there is none."""
        if method == "control.random":
            seeds = range(self.settings.n_random)
            return [random_scores(1, tensor.n_tokens, (self.settings.seed, index, k))[0] for k in seeds]
        try:
            found = _map(tensor, method, out_token, self.settings)
        except (TensorLensError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        if index < N_EXAMPLES:
            (self.folder / "maps").mkdir(exist_ok=True)
            found.save(self.folder / "maps" / f"{index}.{method}.json")
        return [found.scores[0]]

    def _plans(self, sample: Sample, scores: dict[str, list[Tensor] | str], preset: Preset) -> dict[str, Plan]:
        chosen = maskable(sample, self.subject.is_causal, preset)
        return {method: self._plan(found, chosen, sample.n_tokens) for method, found in scores.items()}

    def _cells(
        self, sample: Sample, plans: dict[str, dict[str, Plan]], replacement: str, out_token: int, clean: Any
    ) -> dict[str, dict[str, Any]]:
        """By preset, the cell of each method: curves by order and metric. No set of tokens is replaced twice."""
        every = [plan for of_preset in plans.values() for plan in of_preset.values() if not isinstance(plan, str)]
        wanted = [masks for plan in every for _, masks in plan]
        changes, rows = {}, iter(())
        if wanted:
            unique, places = torch.cat(wanted).unique(dim=0, return_inverse=True)
            try:
                changes = self._changes(sample, unique, replacement, out_token, clean)
            except InputError as error:
                return {
                    preset: dict.fromkeys(of_preset, {"missing": str(error)}) for preset, of_preset in plans.items()
                }
            rows = iter(places.split([len(masks) for masks in wanted]))

        def cell(plan: Plan) -> dict[str, Any]:
            if isinstance(plan, str):
                return {"missing": plan}
            return _cell([order for order, _ in plan], torch.stack([next(rows) for _ in plan]), changes)

        return {
            preset: {method: cell(plan) for method, plan in of_preset.items()} for preset, of_preset in plans.items()
        }

    def _plan(self, found: list[Tensor] | str, chosen: list[int], n_tokens: int) -> Plan:
        if isinstance(found, str):
            return found
        try:
            ranked = [
                (order, ranking(scores, chosen, order, absolute=self.settings.absolute))
                for order in ORDERS
                for scores in found
            ]
        except InputError as error:
            return str(error)
        return [(order, masks_along(tokens, n_tokens, self.settings.grid)) for order, tokens in ranked]

    def _changes(
        self, sample: Sample, masks: Tensor, replacement: str, out_token: int, clean: Any
    ) -> dict[str, Tensor]:
        """How far each distinct set of replaced tokens moves the output, by metric."""
        changes = {metric: torch.zeros(len(masks), dtype=torch.float64) for metric in METRICS}
        for places, inputs in self.subject.copies(sample, masks, replacement):
            perturbed = self.plain.run(inputs, out_token)
            changes["hs_mse"][places] = hidden_state_mse(clean.states[0], perturbed.states).cpu()
            if clean.logits is not None and perturbed.logits is not None:
                changes["abs_aopc"][places] = absolute_aopc(clean.logits[0], perturbed.logits).cpu()
        if clean.logits is None:
            del changes["abs_aopc"]
        if not all(bool(values.isfinite().all()) for values in changes.values()):
            raise InputError(f"With `{replacement}` in the place of tokens the model's output holds NaN or infinity.")
        return changes


def _map(tensor: AttentionTensor, method: str, out_token: int, settings: Settings) -> Any:
    pooled = method == "tensor.in_class" and tensor.operator.recording.pools
    options: dict[str, Any] = (
        {"probes": settings.norm_probes, "seed": settings.seed}
        if settings.norm_probes and method == "tensor.norm"
        else {}
    )
    return tensor.map(method, out_token=None if pooled else out_token, **options)


def _cell(orders: Sequence[str], rows: Tensor, changes: dict[str, Tensor]) -> dict[str, Any]:
    """Curves from 0 on, averaged over the score vectors of an order."""
    cell: dict[str, Any] = {}
    for order in ORDERS:
        chosen = rows[[i for i, one in enumerate(orders) if one == order]]
        cell[order] = {
            metric: [0.0, *(_short(value) for value in values[chosen].mean(0))] for metric, values in changes.items()
        }
    return cell


def _condition_name(is_causal: bool, preset: str, replacement: str) -> str:
    return f"{preset}, {replacement}" if is_causal else replacement


def _short(value: Any) -> float:
    return float(f"{float(value):.9g}")
