"""Fidelity as a run: error against the size of a move, the bounds of Proposition 1, and the tensor's properties.

One sample of the run is one input. The summary pools directions and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from msgspec import structs
from torch import Tensor

from tensorlens.errors import AnatomyError, InputError, MethodError
from tensorlens.lens import Lens
from tensorlens.models.inputs import make_input
from tensorlens.models.modes import own_modes
from tensorlens.models.texts import IMAGE_SUFFIXES, tokenizer_of
from tensorlens.operators.bounds import Reading, product_bound
from tensorlens.operators.spectrum import operator_norm
from tensorlens.studies.fidelity_study.measures import (
    alternative_bounds,
    distance_to_jacobian,
    errors_along,
    random_directions,
    token_directions,
)
from tensorlens.studies.fidelity_study.properties import block_ranges, tensor_properties
from tensorlens.studies.fidelity_study.report import fidelity_report, fidelity_summary
from tensorlens.studies.options import Options, chosen_options
from tensorlens.studies.runs import Run, StudyResult, digest_of, model_settings, tensor_digest
from tensorlens.tensor import AttentionTensor

SIZES = tuple(float(f"{10 ** (k / 4):.6g}") for k in range(-12, 3))
"""Lengths of a move relative to the input's, from 0.001 to about 3."""


class FidelityOptions(Options, frozen=True, kw_only=True):
    """Everything a fidelity run depends on besides model and inputs.

    Attributes:
        sizes: Lengths of ε relative to X.
        n_random: Random directions per input.
        n_token: Directions towards another token per input, where the input has tokens.
        n_probes: Probes of the distance to the Jacobian.
        seed: Seed of everything drawn.
        stride: Properties at every `stride` blocks; 0 leaves them out.
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
    """Measure the errors of tensor and Jacobian around inputs, beside what the bounds allow; write a run.

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
    """A text itself; of anything else its kind and a digest of what the model is given for it."""
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
    measured = operator_norm(T, seed=options.seed)
    frobenius = distance_to_jacobian(T, options.n_probes, options.seed)
    found: dict[str, Any] = {"measured": asdict(measured), "frobenius": frobenius}
    found["stable_rank"] = (frobenius["tensor"] / measured.value) ** 2 if measured.value else 0.0
    readings: tuple[Reading, ...] = ("weights", "measured", "printed")
    for reading in readings:
        try:
            found[f"log10_{reading}"] = product_bound(T.operator.recording, T.operator.span, reading).log10
        except (AnatomyError, MethodError) as error:
            found[f"log10_{reading}"] = None
            found[f"why_not_{reading}"] = str(error)
    return found | {"alternatives": alternative_bounds(T)}
