r"""Fidelity as a run: error against the size of a move, the bounds of Proposition 1, and the tensor's properties.

One sample of the run is one input. The summary pools directions and inputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from torch import Tensor

from tensorlens.errors import AnatomyError, InputError, MethodError
from tensorlens.lens import Lens
from tensorlens.models.inputs import make_input
from tensorlens.models.runner import own_modes
from tensorlens.models.texts import IMAGE_SUFFIXES, tokenizer_of
from tensorlens.operators.bounds import Reading, product_bound
from tensorlens.operators.spectrum import spectral_norm
from tensorlens.studies.fidelity_study.measures import (
    alternative_bounds,
    distance_to_jacobian,
    errors_along,
    random_directions,
    token_directions,
)
from tensorlens.studies.fidelity_study.properties import LINES, block_ranges, mean_properties, tensor_properties
from tensorlens.studies.options import Options, chosen_options
from tensorlens.studies.report import Section, Table, write_page
from tensorlens.studies.runs import Run, StudyResult, digest_of, model_settings, tensor_digest
from tensorlens.tensor import AttentionTensor
from tensorlens.views.study_figures import error_curves, property_panels

SIZES = tuple(float(f"{10 ** (k / 4):.6g}") for k in range(-12, 3))
"""Lengths of a move relative to the input's, from 0.001 to about 3."""


class FidelityOptions(Options, frozen=True, kw_only=True):
    """Everything a fidelity run depends on besides model and inputs.

    Attributes:
        sizes: Lengths of ε relative to X.
        n_random: Random directions per input.
        n_token: Directions towards another token per input, if the input has tokens.
        n_probes: Probes for the distance to the Jacobian.
        seed: Random seed for directions and probes.
        stride: Measure properties at every n-th block; 0 leaves them out.
        out_token: The output whose slice is measured; if None, the last of a language model and the first of other
            models.
    """

    sizes: tuple[float, ...] = SIZES
    n_random: int = 4
    n_token: int = 4
    n_probes: int = 16
    seed: int = 0
    stride: int = 1
    out_token: int | None = None

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) <= 0:
            raise InputError(f"`sizes` must be positive numbers, at least one; got {self.sizes}.")
        if self.n_random + self.n_token < 1:
            raise InputError("Expected at least one direction; got `n_random` = `n_token` = 0.")


@own_modes
def fidelity(
    lens: Lens,
    inputs: Any,
    out: str | Path,
    *,
    options: FidelityOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    """Measure the errors of T and the Jacobian around inputs, compare them with the bounds, and write a run.

    Args:
        lens: Any model.
        inputs: A text, or a list of texts; or one input of any other kind that the lens takes.
        out: Folder of the run: config, samples, summary, figures, report. An interrupted run is resumed.
        options: Sizes, directions, properties; see `FidelityOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``stride=2``, instead of a record or over it.

    Returns:
        The summary, with curves by kind of direction, norms and bounds, and properties by range of blocks, and where
        everything is.
    """
    chosen = chosen_options(FidelityOptions, options, changes)
    several = list(inputs) if _is_list_of_texts(inputs) else [inputs]
    described = [_described(lens, one) for one in several]
    run = Run(out, "fidelity", model_settings(lens) | {"inputs": described, "options": structs.asdict(chosen)})
    run.work(
        [[i] for i in range(len(several))], lambda group: [measure(lens, several[i], chosen) for i in group], progress
    )
    return run.finish(len(several), fidelity_summary, fidelity_report)


def _is_list_of_texts(inputs: Any) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str) and bool(inputs) and isinstance(inputs[0], str)


def _described(lens: Lens, value: Any) -> str:
    """A text itself; for anything else, its kind and a digest of the model's arguments."""
    if isinstance(value, str) and Path(value).suffix.lower() not in IMAGE_SUFFIXES:
        return value
    arguments = make_input(value, lens.model, lens.processor).arguments
    parts = [f"{name} {tensor_digest(one)}" for name, one in sorted(arguments.items()) if isinstance(one, Tensor)]
    return f"{type(value).__name__} {digest_of(parts)}"


# One input -----------------------------------------------------------------------------------------------------------


def measure(lens: Lens, value: Any, options: FidelityOptions) -> dict[str, Any]:
    """The record of one input."""
    T = lens(value)
    if not bool(T.output.isfinite().all()):
        raise InputError(f"Expected finite outputs; at {value!r:.80} the model gives NaN or infinity. Leave it out.")
    special = getattr(tokenizer_of(lens.processor), "all_special_ids", None) or ()
    directions = random_directions(T, options.n_random, options.seed)
    directions += token_directions(T, options.n_token, options.seed, special)
    properties = []
    if options.stride:
        properties = tensor_properties(T, options.out_token, block_ranges(T.n_blocks, stride=options.stride))
    return {
        "n_tokens": T.n_tokens,
        "input_size": float(T.input.norm()),
        "output_size": float(T.output.norm()),
        "norms": measure_norms(T, options),
        "directions": [errors_along(T, one, options.sizes) for one in directions],
        "properties": properties,
    }


def measure_norms(T: AttentionTensor, options: FidelityOptions) -> dict[str, Any]:
    """The measured norm of T, the product bounds as logarithms, and the distance to the Jacobian."""
    measured = spectral_norm(T, seed=options.seed)
    frobenius = distance_to_jacobian(T, options.n_probes, options.seed)
    found: dict[str, Any] = {"measured": {"value": measured}, "frobenius": frobenius}
    found["stable_rank"] = (frobenius["tensor"] / measured) ** 2 if measured else 0.0
    readings: tuple[Reading, ...] = ("weights", "measured", "printed")
    for reading in readings:
        try:
            found[f"log10_{reading}"] = product_bound(T.operator.recording, T.operator.span, reading).log10
        except (AnatomyError, MethodError) as error:
            found[f"log10_{reading}"] = None
            found[f"why_not_{reading}"] = str(error)
    return found | {"alternatives": alternative_bounds(T)}


# What the inputs say together -----------------------------------------------------------------------------------------


ERRORS = ("tensor", "jacobian", "nothing")


def fidelity_summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Curves by kind of direction, bounds and properties, pooled over inputs."""
    kinds = sorted({direction["kind"] for record in records for direction in record["directions"]})
    norms = [record["norms"] for record in records]
    return {
        "n_inputs": len(records),
        "kinds": {kind: _kind(records, kind) for kind in kinds},
        "norms": {
            "measured": _middle([norm["measured"]["value"] for norm in norms]),
            "relative_distance_to_jacobian": _middle([norm["frobenius"]["relative"] for norm in norms]),
            "stable_rank": _middle([norm["stable_rank"] for norm in norms]),
            "alternatives": _alternatives([norm.get("alternatives", {}) for norm in norms]),
            **{name: _middle([norm[name] for norm in norms]) for name in norms[0] if name.startswith("log10_")},
        },
        "holds": all(_holds(record) for record in records),
        "properties": mean_properties([record["properties"] for record in records]),
    }


def _alternatives(every: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float | None]]:
    """For each baseline, medians over inputs."""
    return {
        name: {what: _middle([one[name][what] for one in every if name in one]) for what in numbers}
        for name, numbers in (every[0] if every else {}).items()
    }


def _kind(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Curves over the common sizes."""
    rows: dict[str, list[list[float]]] = {}
    sizes: list[float] = []
    for record in records:
        for one in record["directions"]:
            if one["kind"] == kind:
                kept = [i for i, size in enumerate(one["sizes"]) if size != one["natural_size"]]
                sizes = [one["sizes"][i] for i in kept]
                for name, curve in ({name: one[name] for name in ERRORS} | bound_curves(record, one)).items():
                    rows.setdefault(name, []).append([curve[i] for i in kept])
    return {"sizes": sizes, "curves": {name: _band(curves) for name, curves in rows.items()}}


def bound_curves(record: dict[str, Any], direction: dict[str, Any]) -> dict[str, list[float]]:
    r"""The right-hand side of Proposition 1 along a direction, for each value of $\Vert T\Vert_2$ at hand."""
    norms = record["norms"]
    values = {"bound_norm": math.log10(max(norms["measured"]["value"], 1e-300))}
    values |= {f"bound_{name}": norms[f"log10_{name}"] for name in ("weights", "measured")}
    ratio = math.log10(record["input_size"] / record["output_size"])
    return {
        # Above what a float holds the line stays at its edge.
        name: [
            10 ** min(log10 + math.log10(size) + ratio, 300) + change
            for size, change in zip(direction["sizes"], direction["nothing"], strict=True)
        ]
        for name, log10 in values.items()
        if log10 is not None
    }


def _holds(record: dict[str, Any]) -> bool:
    """Whether no error exceeds any right-hand side, up to rounding."""
    return all(
        error <= bound * (1 + 1e-3) + 1e-5
        for direction in record["directions"]
        for curve in bound_curves(record, direction).values()
        for error, bound in zip(direction["tensor"], curve, strict=True)
    )


def _band(curves: list[list[float]]) -> dict[str, list[float]]:
    low, median, high = np.quantile(np.array(curves), (0.1, 0.5, 0.9), axis=0)
    return {"median": median.tolist(), "low": low.tolist(), "high": high.tolist()}


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


# Tables and report ----------------------------------------------------------------------------------------------------


BOUNDS = {
    "log10_measured": "product, measured gates and attention",
    "log10_weights": "product, from weights",
    "log10_printed": "product as printed",
}


def norm_table(summary: dict[str, Any]) -> Table:
    """The norm, its bounds, and how many times too large each bound is."""
    norms = summary["norms"]
    true = math.log10(max(norms["measured"], 1e-300))
    first = {"what": "measured ‖T‖₂", "log10": f"{true:.2f}", "times the measured": "1"}
    return [first] + [
        {"what": label, "log10": f"{norms[name]:.2f}", "times the measured": f"1e{norms[name] - true:.1f}"}
        for name, label in BOUNDS.items()
        if norms[name] is not None
    ]


def alternative_table(summary: dict[str, Any]) -> Table:
    """The baselines in place of T: their norm, the bound from their blocks, and the error at the input itself."""
    return [
        {
            "in place of T": name,
            "‖R‖₂": f"{one['norm']:.3g}",
            "from its blocks": f"1e{one['log10_blocks']:.2f}",
            "‖RX − F(X)‖/‖F(X)‖": f"{one['at_x']:.3g}",
        }
        for name, one in summary["norms"].get("alternatives", {}).items()
    ]


def error_table(summary: dict[str, Any]) -> Table:
    """Median errors relative to F(X) at some sizes."""
    rows = []
    for kind, found in summary["kinds"].items():
        n = len(found["sizes"])
        for i in sorted({0, n // 3, 2 * n // 3, n - 1}):
            errors = {name: f"{found['curves'][name]['median'][i]:.2e}" for name in found["curves"]}
            rows.append({"direction": kind, "‖ε‖/‖X‖": f"{found['sizes'][i]:.3g}", **errors})
    return rows


def property_table(summary: dict[str, Any]) -> Table:
    """The properties, whole model and each range."""
    return [
        {"range": f"{record['kind']} {record['start']}:{record['stop']}"}
        | {line: f"{record[line]:.3g}" for line in LINES}
        for record in summary["properties"]
    ]


def dynamics(summary: dict[str, Any]) -> dict[str, str]:
    """One line of a run, for comparing the checkpoints of a training run."""
    norms, whole = summary["norms"], [one for one in summary["properties"] if one["kind"] == "suffix"][:1]
    found = {
        "‖T‖₂": f"{norms['measured']:.4g}",
        "‖T − J‖/‖J‖": f"{norms['relative_distance_to_jacobian']:.3g}",
        "stable rank": f"{norms['stable_rank']:.3g}",
    }
    return found | {line: f"{one[line]:.3g}" for one in whole for line in LINES[1:]}


def fidelity_report(run: Run, summary: dict[str, Any]) -> None:
    """Write `report.html` into a run's folder."""
    none = " Baselines do not give F(X) at X, so the proposition does not apply to them: their error starts above zero."
    held = "Every error is below every right-hand side." + none if summary["holds"] else "A BOUND IS VIOLATED."
    sections = [
        Section(title="Bounds", text=held, tables=[norm_table(summary), alternative_table(summary)]),
        Section(title="Errors", figures=[partial(error_curves, summary)], tables=[error_table(summary)]),
    ]
    if summary["properties"]:
        drawn = [partial(property_panels, summary["properties"])]
        tables = [property_table(summary)]
        sections.append(Section(title="Properties by range of blocks", figures=drawn, tables=tables))
    write_page(run, f"Fidelity: {run.settings['model']}", sections)
