r"""Fidelity: how far T, and the true Jacobian, are from the model when the input moves, and what Proposition 1 allows.

For a move ε of the input: $\Vert T(X+\epsilon) + B - F(X+\epsilon)\Vert$ beside the same for $J$, and beside
$\Vert F(X+\epsilon) - F(X)\Vert$, the error of predicting no change ($T = 0$), which the proposition covers too. One
sample of the run is one input, with the tensor's own properties; the summary pools directions and inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from msgspec import structs
from torch import Tensor

from tensorlens.axes import Hidden
from tensorlens.errors import AnatomyError, InputError, MethodError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.baselines import HAS_RESIDUAL, average, block_matrices, rollout
from tensorlens.memory import in_parts
from tensorlens.models.runner import own_modes
from tensorlens.models.texts import IMAGE_SUFFIXES, tokenizer_of
from tensorlens.operators.bounds import Reading, product_bound
from tensorlens.operators.spectrum import spectral_norm
from tensorlens.studies.fidelity_report import fidelity_report, fidelity_summary
from tensorlens.studies.options import FidelityOptions, chosen_options
from tensorlens.studies.plain_model import plain_states, true_function
from tensorlens.studies.properties import block_ranges, tensor_properties
from tensorlens.studies.runs import Run, StudyResult, digest_of, model_settings, tensor_digest
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64

MOST_STATES = {"cuda": 64, "cpu": 8}
"""Moved inputs that go through the model at a time."""
READINGS: tuple[Reading, ...] = ("weights", "measured", "printed")


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
    is_list = isinstance(inputs, Sequence) and not isinstance(inputs, str) and inputs and isinstance(inputs[0], str)
    several = list(inputs) if is_list else [inputs]
    described = [_described(lens, one) for one in several]
    run = Run(out, "fidelity", model_settings(lens) | {"inputs": described, "options": structs.asdict(chosen)})
    groups = [[i] for i in range(len(several))]
    run.work(groups, lambda group: [measure(lens, several[i], chosen) for i in group], progress)
    return run.finish(len(several), fidelity_summary, fidelity_report)


def _described(lens: Lens, value: Any) -> str:
    """A text itself; for anything else, its kind and a digest of the model's arguments."""
    if isinstance(value, str) and Path(value).suffix.lower() not in IMAGE_SUFFIXES:
        return value
    arguments = lens.prepare(value).arguments
    parts = [f"{name} {tensor_digest(one)}" for name, one in sorted(arguments.items()) if isinstance(one, Tensor)]
    return f"{type(value).__name__} {digest_of(parts)}"


def measure(lens: Lens, value: Any, options: FidelityOptions) -> dict[str, Any]:
    """The record of one input."""
    T = lens(value)
    if not bool(T.output.isfinite().all()):
        raise InputError(f"Expected finite outputs; at {value!r:.80} the model gives NaN or infinity. Leave it out.")
    special = getattr(tokenizer_of(lens.processor), "all_special_ids", None) or ()
    directions = random_directions(T, options.n_random, options.seed)
    directions += token_directions(T, options.n_token or 0, options.seed, special)  # settled: never None
    ranges = block_ranges(T.n_blocks, stride=options.stride) if options.stride else []
    properties = tensor_properties(T, options.out_token, ranges)
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
    for reading in READINGS:
        try:
            found[f"log10_{reading}"] = product_bound(T.operator.recording, T.operator.span, reading).log10
        except (AnatomyError, MethodError) as error:
            found[f"log10_{reading}"] = None
            found[f"why_not_{reading}"] = str(error)
    return found | {"alternatives": alternative_bounds(T)}


# Directions -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Direction:
    """Where to move the input.

    Attributes:
        kind: ``"random"`` for a normal move of every token, ``"token"`` towards another token's embedding.
        name: For people.
        unit: The move, scaled to length one.
        natural_size: For ``"token"``: the length at which the token has become the other one, relative to the input.
    """

    kind: str
    name: str
    unit: Hidden
    natural_size: float | None = None


def random_directions(T: AttentionTensor, n: int, seed: int) -> list[Direction]:
    """Normal directions over all tokens and channels."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(n, *T.input.shape, generator=generator, dtype=torch.float64)
    return [
        Direction(kind="random", name=f"random {i}", unit=(one / one.norm()).to(T.input)) for i, one in enumerate(noise)
    ]


def token_directions(T: AttentionTensor, n: int, seed: int, special: Sequence[int] = ()) -> list[Direction]:
    """Directions towards other tokens: one position per direction, its token replaced by another of the vocabulary."""
    origin, start = T.operator.recording.from_model("A fidelity study"), T.operator.span.start
    ids = origin.inputs.get("input_ids")
    embedding = getattr(origin.model, "get_input_embeddings", lambda: None)()
    if ids is None or embedding is None:
        return []
    generator = torch.Generator().manual_seed(seed)
    places = [i for i, token in enumerate(ids[0].tolist()) if token not in special] or [0]
    found = []
    for _ in range(n):
        place = places[int(torch.randint(len(places), (), generator=generator))]
        other = int(torch.randint(embedding.weight.shape[0], (), generator=generator))
        changed = ids.clone()
        changed[0, place] = other
        states = plain_states(origin.anatomy, origin.inputs | {"input_ids": changed}, read=(start,))
        moved = states.entering[start][0] - T.input
        if float(moved.norm()) > 0:
            size, unit = float(moved.norm() / T.input.norm()), moved / moved.norm()
            found.append(Direction(kind="token", name=f"{place} → {other}", unit=unit, natural_size=size))
    return found


# Errors ---------------------------------------------------------------------------------------------------------------


def jacobian_times(
    T: AttentionTensor, directions: Float[Tensor, "n token channel"]
) -> Float[Tensor, "n token channel"]:
    r"""$J·u$ of the model itself for each direction, by the derivative of $J^\top v$ with respect to v."""
    operator = T.operator
    with torch.enable_grad():
        x = operator.input.detach().clone().requires_grad_()
        y = true_function(operator.recording, operator.span, x, grad=True)
        v = torch.zeros_like(y, requires_grad=True)
        pulled = torch.autograd.grad(y, x, v, create_graph=True)[0]
        return torch.stack([torch.autograd.grad(pulled, v, u, retain_graph=True)[0] for u in directions])


def errors_along(T: AttentionTensor, direction: Direction, sizes: Sequence[float]) -> dict[str, Any]:
    r"""Errors along one direction, by size of the move; all but `sizes` relative to the size of F(X).

    `tensor` is the error of T(X+ε) + B, `jacobian` that of F(X) + J·ε, `nothing` that of F(X): the change itself.
    """
    operator = T.operator
    sizes = sorted({*sizes, *([] if direction.natural_size is None else [direction.natural_size])})
    scale, at_x = float(T.output.norm()), in_float64(T.output)
    slope = in_float64(jacobian_times(T, direction.unit[None])[0])
    lengths = torch.tensor(sizes, dtype=torch.float64)[:, None, None] * float(T.input.norm())
    moved = T.input + lengths.to(T.input) * direction.unit
    # Many inputs in one pass where the model keeps samples apart.
    together = 1 if operator.recording.is_streamed else MOST_STATES.get(operator.device.type, 8)
    outputs = in_parts(moved, together, lambda x: true_function(operator.recording, operator.span, x))
    changes = in_float64(torch.cat(outputs)) - at_x
    pushed = in_float64(operator.push(moved)) - at_x

    def relative(errors: Tensor) -> list[float]:
        return (errors.flatten(1).norm(dim=1) / scale).tolist()

    return {
        **{name: getattr(direction, name) for name in ("kind", "name", "natural_size")},
        "sizes": sizes,
        "tensor": relative(pushed - changes),
        "jacobian": relative(lengths.to(slope) * slope - changes),
        "nothing": relative(changes),
    }


def distance_to_jacobian(T: AttentionTensor, n_probes: int, seed: int) -> dict[str, float]:
    r"""$\Vert T - J\Vert_F / \Vert J\Vert_F$ and $\Vert T\Vert_F$, $\Vert J\Vert_F$, from normal probes."""
    generator = torch.Generator().manual_seed(seed)
    probes = torch.randn(n_probes, *T.input.shape, generator=generator, dtype=torch.float64).to(T.input)
    by_tensor, by_jacobian = in_float64(T.apply(probes)), in_float64(jacobian_times(T, probes))
    sizes = {"tensor": by_tensor, "jacobian": by_jacobian, "difference": by_tensor - by_jacobian}
    norms = {name: float(image.square().sum((1, 2)).mean().sqrt()) for name, image in sizes.items()}
    return norms | {"relative": norms["difference"] / max(norms["jacobian"], 1e-300)}


def alternative_bounds(T: AttentionTensor) -> dict[str, dict[str, float]]:
    r"""The bound of Proposition 1 for the eight baselines, with $R\otimes I$ in place of T.

    The proposition needs $T·X + B = F(X)$. A baseline has no B, and $\Vert RX - F(X)\Vert/\Vert F(X)\Vert$ (`at_x`) is
    the error that it begins with. With $B := F(X) - RX$ the bound holds for any R with $\Vert R\Vert_2$ (`norm`),
    itself at most the product, or the mean, of the blocks' norms (`log10_blocks`); so does T = 0, with norm 0.
    """
    found: dict[str, dict[str, float]] = {}
    x, output = in_float64(T.input), in_float64(T.output)
    for measure, has_residual in HAS_RESIDUAL.items():
        try:
            blocks = [in_float64(one if one.dim() == 2 else one[0]) for one in block_matrices(T.operator, measure)]
        except TensorLensError:  # it does not apply to these blocks
            continue
        for join in ("rollout", "mean") if measure != "alti" else ():
            steps = [rollout([one], has_residual=has_residual or join == "mean") for one in blocks]
            R = rollout(blocks, has_residual=has_residual) if join == "rollout" else average(blocks)
            norms = torch.stack([torch.linalg.matrix_norm(step, 2) for step in steps])
            log10 = norms.log10().sum() if join == "rollout" else norms.mean().log10()
            found[f"{join}.{measure}"] = {
                "norm": float(torch.linalg.matrix_norm(R, 2)),
                "log10_blocks": float(log10),
                "at_x": float((R @ x - output).norm() / output.norm()) if x.shape == output.shape else float("inf"),
            }
    return found
