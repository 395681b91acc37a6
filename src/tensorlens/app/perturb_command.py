"""`tensorlens perturb`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tensorlens.app.method_names import check_name_with_member
from tensorlens.app.options import Json, Model, ModelOptions, NumberOfProcesses, RunFolder, check_data, listed, numbers
from tensorlens.app.printing import print_json
from tensorlens.studies.processes import Processes, hand_over

if TYPE_CHECKING:
    from tensorlens.studies.runs import StudyResult

DATA = "A .csv, .jsonl, .parquet or .txt file, a folder of images, or a data set's id."
METHODS = (
    "Methods, separated by commas (default: all). tensor.* methods accept a rule set after @, e.g. "
    "tensor.in_class@attn_lrp."
)
PRESETS = "For decoders: strict, or paper-like (the last token may be replaced). Repeatable."
REPLACEMENTS = "Texts: token, zero, mean, attention, delete. Images: black, mean, blur. Repeatable."


@dataclass(frozen=True, kw_only=True)
class PerturbChoices:
    """The options of the study as they are written on the command line; see `PerturbationOptions`."""

    methods: Annotated[str | None, typer.Option(help=METHODS)] = None
    limit: Annotated[int | None, typer.Option(help="Largest number of samples.", min=1)] = None
    preset: Annotated[list[str] | None, typer.Option(help=PRESETS)] = None
    replacement: Annotated[list[str] | None, typer.Option(help=REPLACEMENTS)] = None
    tokens: Annotated[int, typer.Option(help="Texts are cut to this many tokens.", min=3)] = 128
    min_tokens: Annotated[int, typer.Option(help="Shorter texts are left out.", min=1)] = 1
    windows: Annotated[bool, typer.Option(help="Join all texts, then cut them into windows.")] = False
    column: Annotated[str | None, typer.Option(help="Column or field with the text.")] = None
    split: Annotated[str, typer.Option(help="Split of a data set given by id.")] = "test"
    grid: Annotated[
        str | None, typer.Option(help="Fractions replaced, such as 0,0.1,0.2.", show_default="0 to 0.3 by 0.05")
    ] = None
    absolute: Annotated[bool, typer.Option(help="Rank by magnitude.")] = False
    norm_probes: Annotated[
        int | None, typer.Option(help="Probes for estimating tensor.norm (default: exact).", min=1)
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed for the random control and the bootstrap.")] = 0
    batch_size: Annotated[
        int | None, typer.Option(help="Perturbed copies per batch (default: chosen for the device).", min=1)
    ] = None

    def named(self) -> dict[str, Any]:
        """The same by the names of `PerturbationOptions`; typos are refused before torch is imported."""
        methods = None if self.methods is None else listed(self.methods)
        for name in methods or ():
            check_name_with_member(name)
        grid = None if self.grid is None else numbers(self.grid, float, "grid", "fractions such as 0,0.1,0.2")
        same = ("limit", "min_tokens", "column", "split", "absolute", "seed", "norm_probes", "batch_size")
        return {name: getattr(self, name) for name in same} | {
            "methods": methods,
            "presets": self.preset or ("strict",),
            "replacements": self.replacement or None,
            "n_tokens": self.tokens,
            "cut": "windows" if self.windows else "each",
            **({} if grid is None else {"grid": grid}),
        }


def perturb(
    model: Model,
    data: Annotated[str, typer.Option(help=DATA, show_default=False)],
    out: RunFolder,
    asked: PerturbChoices = PerturbChoices(),  # noqa: B008  # a frozen record
    processes: NumberOfProcesses = 1,
    json: Json = False,
    reading: ModelOptions = ModelOptions(),  # noqa: B008  # a frozen record
) -> None:
    """Which method finds what matters? Replaces the tokens each method ranks highest; measures how the output moves.

    Example: tensorlens perturb minilm --data reviews.csv --out run --limit 50

    To share a run between processes, use --processes on one machine, accelerate launch or torchrun on several.
    """
    reading.check(model)
    check_data(data, suffixes=(".csv", ".tsv", ".jsonl", ".txt", ".parquet"))
    chosen = asked.named()
    if hand_over(processes):
        return
    from tensorlens.studies.perturbation_study.options import PerturbationOptions
    from tensorlens.studies.perturbation_study.run import perturbation as run_perturbation

    options = PerturbationOptions(**chosen)
    result = run_perturbation(reading.lens(model, device=Processes.device()), data, out, options=options)
    result.areas()  # says why if nothing could be measured
    if Processes.from_environment().is_first:
        print_json(result.summary) if json else typer.echo(_table(result))


def _table(result: StudyResult) -> str:
    """The areas of the first condition, best first, and where the rest is."""
    from tensorlens.studies.perturbation_study.report import FEW

    condition, found = next(iter(result.summary["conditions"].items()))
    n_measured, n_skipped = (result.summary[f"n_{what}"] for what in ("measured", "skipped"))
    few = "; with so few samples, the intervals mean little" if n_measured < FEW else ""
    lines = [f"{n_measured} samples measured, {n_skipped} skipped{few}; {condition}"]
    for name, area in result.areas().items():
        low, high = found["most"]["hs_mse"]["methods"][name]["interval"]
        lines.append(f"{name:28} {area:.5g}  [{low:.5g}, {high:.5g}]")
    lines += [f"{name:28} missing: {gap['reason']}" for name, gap in found["missing"].items()]
    lines += [f"skipped {one['name']}: {one['reason']}" for one in result.summary["skipped"][:3]]
    return "\n".join([*lines, f"Report: {result.report}"])
