r"""LRE, the linear relational embedding of Hernandez et al. (2024): the baseline of relation decoding.

Per example, $W_i = \partial z/\partial h$ and $b_i = z_i - W_i h_i$, where h is the state of the subject's last token
and z the state that leaves the last block at the last token, before the final norm. A relation is the mean of both,
and predicts $\hat z = \beta \bar W h + \bar b$, read out by the model's own final norm and unembedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.models.anatomy import Anatomy
from tensorlens.studies.plain_states import plain_states

EMBEDDING = "embedding"
Start = int | str
"""Where the subject is read: entering that block, or, as `EMBEDDING`, what the token embedding gives."""

JACOBIAN_CHUNK = {"cuda": 320, "cpu": 64}
"""Cotangents that go back together."""


@dataclass(frozen=True, kw_only=True)
class LocalLinear:
    """The model's own first-order expansion at one example: z = W·h + b there.

    Attributes:
        weight: W, the Jacobian.
        bias: b, what makes the expansion exact at the example.
    """

    weight: Float[Tensor, "out_channel in_channel"]
    bias: Float[Tensor, "out_channel"]  # noqa: UP037


def expand_locally(
    anatomy: Anatomy, ids: Sequence[int], position: int, starts: Sequence[Start]
) -> tuple[dict[Start, LocalLinear], dict[Start, Tensor]]:
    """The expansion at one prompt, from each start, by one forward pass and D backward passes for all of them.

    Args:
        anatomy: The model.
        ids: The prompt.
        position: Where the subject's last token stands.
        starts: Where to read the subject.

    Returns:
        The expansions, and h itself, by start.
    """
    device = next(anatomy.model.parameters()).device
    inputs = {"input_ids": torch.tensor([list(ids)], device=device), "use_cache": False}
    blocks = [start for start in starts if not isinstance(start, str)]
    states = plain_states(anatomy, inputs, read=blocks, grad=True)
    assert states.leaving is not None and states.embedded is not None, "a pass over token ids meets both"
    z = states.leaving[0, -1]
    sources = {start: states.embedded if isinstance(start, str) else states.entering[start] for start in starts}
    jacobians = _jacobians(z, list(sources.values()), position)
    subjects = {start: source[0, position].detach() for start, source in sources.items()}
    expansions = {
        start: LocalLinear(weight=weight, bias=z.detach() - weight @ subjects[start])
        for start, weight in zip(starts, jacobians, strict=True)
    }
    return expansions, subjects


def _jacobians(z: Tensor, sources: list[Tensor], position: int) -> list[Tensor]:
    units = torch.eye(len(z), dtype=z.dtype, device=z.device)
    parts: list[list[Tensor]] = [[] for _ in sources]
    for chunk in units.split(JACOBIAN_CHUNK.get(z.device.type, 64)):
        gradients = torch.autograd.grad(z, sources, chunk, is_grads_batched=True, retain_graph=True)
        for part, gradient in zip(parts, gradients, strict=True):
            part.append(gradient[:, 0, position].clone())
    return [torch.cat(part) for part in parts]
