"""The perturbation study: replace the tokens a method calls relevant and see how far the output moves.

A method that ranks tokens by what they really carry makes the output move early. One recording of each sample serves
all methods; the replaced copies go through the plain model in batches, those of several samples together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tensorlens.lens import Lens
from tensorlens.models.modes import own_modes
from tensorlens.models.precision import matmul_precision
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.identity import model_settings
from tensorlens.studies.options import checked_names, chosen_options
from tensorlens.studies.perturbation_study.measuring import Measurement
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.report import write_report
from tensorlens.studies.perturbation_study.subjects import Images, Subject, Texts
from tensorlens.studies.perturbation_study.summary import summarise
from tensorlens.studies.results import StudyResult
from tensorlens.studies.runs import Run

GROUP_SIZE = 16
MIN_GROUPS = 8
"""Groups into which even a small run is cut: several processes have to find work."""
SETTINGS = ("methods", "presets", "replacements", "grid", "absolute", "seed", "n_random", "norm_probes", "limit")
"""Options that the numbers depend on. Those about lengths and cuts are among the subject's own settings."""


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
    r"""Run the perturbation study, or go on with one.

    For each method the highest-ranked tokens are replaced first, a growing fraction f of them, and the change of the
    watched output is measured: HS-MSE, $\frac1D\lVert F(X)_o - F(X_f)_o\rVert^2$, and, where the model has classes
    there, the change of probability of the class it chose (abs-AOPC). The least relevant first is measured too.

    Args:
        lens: The model, with its tokenizer or image processor.
        data: Texts or images; see `read_dataset`.
        out: The run's folder.
        options: Methods, replacements, lengths; see `PerturbationOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and where everything is. Started again with the same settings, a run goes on where it stopped.
    """
    asked = chosen_options(PerturbationOptions, options, changes)
    dataset = data if isinstance(data, Dataset) else read_dataset(data, column=asked.column, split=asked.split)
    subject = _subject(lens, dataset, asked)
    chosen = _settled(asked, subject)
    run = Run(out, "perturbation", _describe(lens, dataset, subject, chosen))
    run.work_in_groups(_groups(subject, chosen), Measurement(lens, subject, chosen, run.folder).measure, progress)
    return run.finish(len(subject), partial(summarise, settings=run.settings), write_report)


def _subject(lens: Lens, dataset: Dataset, options: PerturbationOptions) -> Subject:
    if dataset.kind == "image":
        return Images(lens, dataset, limit=options.limit)
    return Texts(
        lens, dataset, n_tokens=options.n_tokens, min_tokens=options.min_tokens, cut=options.cut, limit=options.limit
    )


def _settled(options: PerturbationOptions, subject: Subject) -> PerturbationOptions:
    """The options with what depends on the model and the data: presets of decoders only, replacements by kind."""
    replacements = subject.replacements[:1] if options.replacements is None else options.replacements
    replacements = checked_names(replacements, subject.replacements, "replacements")
    subject.check(replacements)
    return replace(options, replacements=replacements, presets=options.presets if subject.is_causal else ("strict",))


def _groups(subject: Subject, options: PerturbationOptions) -> Sequence[Sequence[int]]:
    """Samples that are measured together: of like length, the longest first, so that memory runs out early if at all.

    They depend on data and options alone, not on how many processes there are or on what is done already.
    """
    size = options.group_size or max(1, min(GROUP_SIZE, len(subject) // MIN_GROUPS))
    order = sorted(range(len(subject)), key=lambda index: -subject.length(index))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _describe(lens: Lens, dataset: Dataset, subject: Subject, options: PerturbationOptions) -> dict[str, Any]:
    return (
        {name: getattr(options, name) for name in SETTINGS}
        | model_settings(lens)
        | {
            "matmul_precision": matmul_precision(),
            "data": {"kind": dataset.kind, "n": len(dataset), "fingerprint": dataset.fingerprint} | subject.settings(),
            "is_causal": subject.is_causal,
        }
    )
