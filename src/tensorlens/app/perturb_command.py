"""`tensorlens perturb`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorlens.app import options
from tensorlens.app.options import AttentionBackend, Device, Dtype, Gate, Json, Model, TrustRemoteCode
from tensorlens.app.processes import NumberOfProcesses
from tensorlens.errors import InputError
from tensorlens.strict_json import to_json
from tensorlens.studies.perturbation_study.measures import GRID
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.report import FEW
from tensorlens.studies.perturbation_study.run import perturbation as run_perturbation
from tensorlens.studies.processes import Processes, hand_over, one_voice
from tensorlens.studies.results import StudyResult


def perturb(
    model: Model,
    data: Annotated[
        str,
        typer.Option(help="A .csv, .jsonl or .txt file, a folder of images, or a data set's id.", show_default=False),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the run; one that is there is continued.", show_default=False)],
    methods: Annotated[str | None, typer.Option(help="Methods, separated by commas; all if not given.")] = None,
    limit: Annotated[int | None, typer.Option(help="How many samples at most.", min=1)] = None,
    preset: Annotated[list[str] | None, typer.Option(help="For decoders: strict, paper-like. Repeatable.")] = None,
    replacement: Annotated[
        list[str] | None,
        typer.Option(help="Texts: token, zero, mean, attention, delete. Images: black, mean, blur. Repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Texts are cut to this many tokens.", min=3)] = 128,
    min_tokens: Annotated[int, typer.Option(help="Shorter texts are left out.", min=1)] = 1,
    windows: Annotated[bool, typer.Option(help="Join all texts and cut windows.")] = False,
    column: Annotated[str | None, typer.Option(help="Column or field with the text.")] = None,
    split: Annotated[str, typer.Option(help="Of a data set by id: which part.")] = "test",
    grid: Annotated[str, typer.Option(help="Fractions replaced.")] = ",".join(map(str, GRID)),
    absolute: Annotated[bool, typer.Option(help="Rank by magnitude.")] = False,
    norm_probes: Annotated[int | None, typer.Option(help="Estimate tensor.norm by so many probes.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="For the random control and the bootstrap.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Replaced copies at a time.", min=1)] = 64,
    processes: NumberOfProcesses = 1,
    json: Json = False,
    device: Device = None,
    dtype: Dtype = None,
    attention: AttentionBackend = None,
    gate: Gate = "freeze_gate",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Is it better? Replace what each method calls relevant and see how far the output moves.

    Example: tensorlens perturb minilm --data reviews.csv --out runs/minilm --limit 50

    Several processes share a run: on one machine with --processes, on several with accelerate launch or torchrun.
    """
    chosen = PerturbationOptions(
        methods=_names(methods), limit=limit, presets=preset or ("strict",), replacements=replacement or None,
        grid=_fractions(grid), n_tokens=tokens, min_tokens=min_tokens, cut="windows" if windows else "each",
        column=column, split=split, absolute=absolute, seed=seed, norm_probes=norm_probes, batch_size=batch_size,
    )  # fmt: skip
    if hand_over(processes):
        return
    with one_voice():
        lens = options.load_lens(
            model, device=device or Processes.device(), dtype=dtype, attention=attention, gate=gate, final_norm=True,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        result = run_perturbation(lens, data, out, options=chosen)
        result.areas()  # says why if nothing could be measured
    if Processes.from_environment().is_first:
        typer.echo(to_json(result.summary) if json else _table(result))


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _fractions(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"`--grid` must be fractions such as 0,0.1,0.2; got {text!r}.") from None


def _table(result: StudyResult) -> str:
    """The areas of the first condition, best first, and where the rest is."""
    condition, found = next(iter(result.summary["conditions"].items()))
    n_measured, n_skipped = (result.summary[f"n_{what}"] for what in ("measured", "skipped"))
    few = "; of so few, intervals say little" if n_measured < FEW else ""
    lines = [f"{n_measured} samples measured, {n_skipped} skipped{few}; {condition}"]
    for name, area in result.areas().items():
        low, high = found["most"]["hs_mse"]["methods"][name]["interval"]
        lines.append(f"{name:28} {area:.5g}  [{low:.5g}, {high:.5g}]")
    lines += [f"{name:28} missing: {gap['reason']}" for name, gap in found["missing"].items()]
    lines += [f"skipped {one['name']}: {one['reason']}" for one in result.summary["skipped"][:3]]
    return "\n".join([*lines, f"Report: {result.report}"])
