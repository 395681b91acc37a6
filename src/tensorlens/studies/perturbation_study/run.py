"""The perturbation study: replace the tokens a method calls relevant and see how far the output moves.

If a method ranks the tokens that matter first, the output moves early. One recording of each sample serves
all methods; the replaced copies go through the plain model in batches, those of several samples together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from tensorlens.errors import InputError, MethodError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.methods import METHODS
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.runner import own_modes
from tensorlens.studies.datasets import Dataset, read_dataset
from tensorlens.studies.options import Options, check_member, checked_names, chosen_options, split
from tensorlens.studies.perturbation_study.curves import RANDOM, GroupMaps, Measurement
from tensorlens.studies.perturbation_study.measures import GRID, check_grid
from tensorlens.studies.perturbation_study.report import each_result, perturbation_report, perturbation_summary
from tensorlens.studies.perturbation_study.samples import Images, Samples, Texts
from tensorlens.studies.runs import Run, StudyResult, model_settings

PRESETS = ("strict", "paper-like")
CUTS = ("each", "windows")
DRAWS = ("file", "random")
WATCHES = ("auto", "first", "last", "mean")


class PerturbationOptions(Options, frozen=True, kw_only=True):
    """Everything a perturbation run depends on besides model and data.

    Attributes:
        methods: Names in `METHODS`; all of them if None. Those of T may have a rule set
            after an @: ``tensor.in_class@attn_lrp``. A method that does not apply to the model is reported as missing.
        limit: Largest number of samples.
        draw: Samples in the order of the ``file``, or drawn at ``random``: in turn from each label, class or article.
        watch: The output whose state is watched and explained: ``first``, ``last``, the ``mean`` of all, or with
            ``auto`` the last of a decoder and the first of any other model.
        presets: For decoders, ``strict`` (the last token is never replaced), ``paper-like`` (it may be), or both.
        keep_first: Number of tokens at the beginning that are never replaced, besides special ones.
        replacements: How a token is replaced. Texts: ``token`` (mask, unknown, padding or end token), ``zero``,
            ``mean`` (embeddings), ``attention`` (masked out), ``delete``. Images: ``black``, ``mean``, ``blur``.
            The first of these if None.
        grid: Fractions of tokens replaced, from 0.
        n_tokens: Texts are cut to this many tokens.
        min_tokens: Shorter texts are left out.
        cut: ``each`` text is a sample, or all of them are joined and cut into ``windows``. Windows that are drawn lie
            within one article.
        column: Column or field with the text.
        label: Column or field with the label.
        split: For data with several parts, the part to use.
        absolute: Rank by magnitude; by signed score otherwise.
        raw_norms: Join matrices of norms over blocks as they are; otherwise rows are divided by their sums first.
        seed: Random seed for the draw, the random control and the bootstrap.
        n_random: Random orders that the random control averages over.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        batch_size: Replaced copies run at a time; 256 on a GPU and 64 elsewhere if None. Numbers depend on it by
            rounding alone.
        group_size: Samples measured together, so that copies of several share a batch; an interruption loses at most
            as many. None: 16, or fewer if a run has few samples. Numbers depend on it only by rounding.
    """

    methods: tuple[str, ...] | None = None
    limit: int | None = None
    draw: Literal["file", "random"] = "file"
    watch: Literal["auto", "first", "last", "mean"] = "auto"
    presets: tuple[str, ...] = ("strict",)
    keep_first: int = 0
    replacements: tuple[str, ...] | None = None
    grid: tuple[float, ...] = GRID
    n_tokens: int = 128
    min_tokens: int = 1
    cut: Literal["each", "windows"] = "each"
    column: str | None = None
    label: str | None = None
    split: str = "test"
    absolute: bool = False
    raw_norms: bool = False
    seed: int = 0
    n_random: int = 5
    norm_probes: int | None = None
    batch_size: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        self.check_positive("limit", "n_random", "norm_probes", "batch_size", "group_size")
        self.check_positive("seed", "keep_first", least=0)
        for name, known in (("cut", CUTS), ("draw", DRAWS), ("watch", WATCHES)):
            if getattr(self, name) not in known:
                raise InputError(f"Expected `{name}` among {', '.join(known)}; got {getattr(self, name)!r}.")
        methods = METHODS if self.methods is None else self.methods
        presets = checked_names(self.presets, PRESETS, "presets")
        self.settle(methods=_checked_methods(methods), presets=presets, grid=check_grid(self.grid))


def _checked_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Names of maps, each once, with the rule set after an @."""
    names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    checked_names([split(name)[0] if isinstance(name, str) else name for name in names], METHODS, "methods")
    for name in names:
        try:
            check_member(name)
        except MethodError as error:
            raise InputError(f"Expected `methods` that exist. {error}") from None
    return names


# The run -------------------------------------------------------------------------------------------------------------


GROUP_SIZE = 16
MIN_GROUPS = 8
"""Groups into which even a small run is cut: several processes have to find work."""
N_EXAMPLES = 3
"""Samples whose maps are in the report."""
OF_THE_SAMPLES = ("n_tokens", "min_tokens", "cut", "column", "label", "split", "batch_size", "group_size")
"""Options that the samples themselves show, or that change numbers by rounding alone."""


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
    """Samples that are measured together, of similar length, the longest first, to run out of memory early if at all.

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
