r"""Proof where it is used: the first answer of a fast way is compared with an independent slow one.

Of the cotangents that were pulled, one random combination is pulled again by a backward pass through the replay:
$\sum_k w_k T^\top u_k = T^\top \sum_k w_k u_k$. So the proof covers the very numbers that are given out, and costs one
pull. It holds for everything that the answer's structure depends on; what changed is proved again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensorlens.models.precision import in_float64

TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
"""Relative difference accepted by the coarser of the two types of numbers; a wrong structure differs by more."""

TOLERANCE_TF32 = 1e-2

MOST_PROOFS = 256
"""Proofs remembered of a model."""


class Proof(NamedTuple):
    """What a comparison found.

    Attributes:
        error: The relative difference of the two answers.
        tolerance: What was accepted.
    """

    error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the answers agree."""
        return self.error <= self.tolerance


_proofs: WeakKeyDictionary[nn.Module, dict[Hashable, Proof]] = WeakKeyDictionary()


def known_proof(model: nn.Module, key: Hashable) -> Proof | None:
    """The proof of an answer of this kind, if one was made."""
    return _proofs.get(model, {}).get(key)


def remember_proof(model: nn.Module, key: Hashable, proof: Proof) -> Proof:
    """Keep a proof, in place of the oldest where there are many."""
    proofs = _proofs.setdefault(model, {})
    if len(proofs) >= MOST_PROOFS:
        proofs.pop(next(iter(proofs)), None)
    proofs[key] = proof
    return proof


def compare(
    pulled: Tensor, cotangents: Tensor, slow: Callable[[Tensor], Tensor], tolerance: float, seed: int = 0
) -> Proof:
    """One random combination of cotangents, as they were pulled and pulled again.

    Args:
        pulled: (cotangent, token, channel), by the fast way.
        cotangents: (cotangent, out_token, out_channel), what was pulled.
        slow: Pulls (1, out_token, out_channel) in another way.
        tolerance: The relative difference to accept.
        seed: Of the combination.
    """
    weights = torch.randn(len(pulled), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = in_float64(slow(_combined(weights, cotangents)[None])[0])
    difference = in_float64(_combined(weights, pulled)) - expected
    size = expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return Proof(float(difference.norm() / size), tolerance)


def _combined(weights: Tensor, tensors: Tensor) -> Tensor:
    wide = tensors.dtype if tensors.dtype.itemsize >= 4 else torch.float32
    return torch.tensordot(weights.to(wide).to(tensors.device), tensors.to(wide), 1)


def tolerance_of(model_type: torch.dtype, fast_type: torch.dtype, *, is_tf32: bool) -> float:
    """What two answers may differ by: the coarser of the types that they were computed in."""
    coarser = max(TOLERANCES[model_type], TOLERANCES[fast_type])
    return max(coarser, TOLERANCE_TF32) if is_tf32 else coarser
