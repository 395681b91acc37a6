"""The perturbation study: replace the tokens a method calls relevant and see how far the output moves.

A method that ranks tokens by what they really carry makes the output move early. One recording of each sample serves
all methods; the replaced copies go through the plain model in batches, those of several samples together.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from tensorlens.errors import TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.modes import own_modes
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.options import checked_names, chosen_options
from tensorlens.studies.perturbation_study.measuring import RANDOM, GroupMaps, Measurement
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.report import each_result, perturbation_report, perturbation_summary
from tensorlens.studies.perturbation_study.samples import Images, Samples, Texts
from tensorlens.studies.runs import Run, StudyResult, model_settings

GROUP_SIZE = 16
MIN_GROUPS = 8
"""Groups into which even a small run is cut: several processes have to find work."""
N_EXAMPLES = 3
"""Samples whose maps stand in the report."""
OF_THE_SAMPLES = ("n_tokens", "min_tokens", "cut", "column", "label", "split", "batch_size", "group_size")
"""Options of which the samples speak themselves, or on which numbers depend by rounding alone."""


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
    r"""Run the perturbation study, or continue one.

    For each method the highest-ranked tokens are replaced first, a growing fraction f of them, and the change of the
    watched output is measured: HS-MSE, $\frac1D\lVert F(X)_o - F(X_f)_o\rVert^2$, and, where the model has classes
    there, the drop of probability of the class it chose (AOPC, and its absolute value, abs-AOPC). Where samples have
    labels, so is whether it is still right (accuracy). The least relevant first is measured too.

    Args:
        lens: The model, with its tokenizer or image processor.
        data: Texts or images; see `read_dataset`.
        out: The run's folder.
        options: Methods, replacements, lengths; see `PerturbationOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and where everything is. Started again with the same settings, a run continues where it stopped.
    """
    asked = chosen_options(PerturbationOptions, options, changes)
    dataset = data
    if not isinstance(data, Dataset):
        dataset = read_dataset(data, column=asked.column, label=asked.label, split=asked.split)
    samples = (Images if dataset.kind == "image" else Texts)(lens, dataset, asked)
    chosen = _settled(asked, samples)
    measurement = Measurement(lens, samples, chosen)
    watched = {"watched": measurement.watched()}
    run = Run(out, "perturbation", _describe(lens, dataset, samples, chosen) | watched)
    run.work(groups_of(samples, chosen), measurement.measure, progress)

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
    return structs.replace(options, replacements=replacements, presets=presets, watch=watch)


def groups_of(samples: Samples, options: PerturbationOptions) -> list[list[int]]:
    """Samples that are measured together: of like length, the longest first, so that memory runs out early if at all.

    They depend on data and options alone, not on how many processes there are or on what is done already.
    """
    size = options.group_size or max(1, min(GROUP_SIZE, len(samples) // MIN_GROUPS))
    order = sorted(range(len(samples)), key=lambda index: -samples.length(index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _describe(lens: Lens, dataset: Dataset, samples: Samples, options: PerturbationOptions) -> dict[str, Any]:
    data = {"kind": dataset.kind, "n": len(dataset), "fingerprint": dataset.fingerprint} | samples.settings()
    chosen = {name: value for name, value in structs.asdict(options).items() if name not in OF_THE_SAMPLES}
    return chosen | model_settings(lens) | {"data": data, "is_causal": samples.is_causal}


def _examples(lens: Lens, samples: Samples, summary: dict[str, Any], options: PerturbationOptions) -> list[TokenMap]:
    """Maps of the first samples, by the best method of each group."""
    first = next((result for *_, result in each_result(summary)), None)
    methods = [] if first is None else [name for name in first["best"].values() if name != RANDOM]
    maps = GroupMaps(lens, methods, options)
    made = []
    for index in range(min(N_EXAMPLES, len(samples)) if methods else 0):
        try:
            made += maps.of([samples.load(index)])
        except TensorLensError:  # skipped by the study too, which says why
            continue
    return [one for of in made if not isinstance(of, str) for one in of.values() if isinstance(one, TokenMap)]
