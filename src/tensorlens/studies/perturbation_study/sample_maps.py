"""The maps of many samples by many methods: the one place where the study asks for maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tensorlens.errors import TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.studies.perturbation_study.subjects import Sample
from tensorlens.tensor import AttentionTensor

Missing = str
"""Why there is no map."""


def maps_of(
    lens: Lens, samples: Sequence[Sample], methods: Sequence[str], *, out_token: int, norm_probes: int | None = None,
    seed: int = 0,
) -> list[dict[str, TokenMap | Missing] | Missing]:  # fmt: skip
    """For each sample the map of each method at one output token; one recording serves all methods of a sample.

    Args:
        lens: The model.
        samples: Inputs of any lengths.
        methods: Names in `METHODS`.
        out_token: The output that is explained.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        seed: For the probes.

    Returns:
        In the order of the samples, maps by method. A method that fails on a sample has the reason in its place, and
        so has a sample that cannot be recorded.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in methods}
    if norm_probes and "tensor.norm" in options:
        options["tensor.norm"] = {"probes": norm_probes, "seed": seed}
    return [_maps_of_one(lens, sample, options, out_token) for sample in samples]


def _maps_of_one(
    lens: Lens, sample: Sample, options: dict[str, dict[str, Any]], out_token: int
) -> dict[str, TokenMap | Missing] | Missing:
    try:
        tensor = lens(sample.value)
    except TensorLensError as error:
        return str(error)
    return {method: _map(tensor, method, out_token, chosen) for method, chosen in options.items()}


def _map(tensor: AttentionTensor, method: str, out_token: int, options: dict[str, Any]) -> TokenMap | Missing:
    pooled = method == "tensor.in_class" and tensor.operator.recording.pools
    try:
        return tensor.map(method, out_token=None if pooled else out_token, **options)
    except (TensorLensError, torch.OutOfMemoryError) as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
