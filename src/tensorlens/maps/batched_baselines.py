"""Baselines of many samples at once: one replay shows the attention of all, and one set of vectors serves all measures.

Of one output of each sample a rollout is a row, which goes through the blocks backwards: no L×L product is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.freezing.observe import Mixing, mixings
from tensorlens.maps.baselines import HAS_RESIDUAL, SUMMARIES, attn, measured, rows_to_one, without_sink_row
from tensorlens.maps.batch_question import BatchQuestion, Pending
from tensorlens.maps.decomposition import decompose

BASELINES: dict[str, str] = {
    **{f"{join}.{measure}": measure for measure in SUMMARIES for join in ("rollout", "mean")},
    "alti": "alti",
    "rollout.attn_without_sink": "attn",
}
"""The measure of each baseline."""


@dataclass(frozen=True, kw_only=True)
class Joined:
    """A measure joined over all blocks, at each sample's output."""

    rollout: Float[Tensor, "sample token"]
    mean: Float[Tensor, "sample token"]


def baseline(question: BatchQuestion, name: str) -> Pending:
    """One baseline of every sample.

    Raises:
        MethodError: it does not apply to the model.
    """
    asked = {BASELINES[other] for other in question.methods if other in BASELINES}
    measure = BASELINES[name]
    joined = _joined(question, measure, frozenset(asked))
    if name == "rollout.attn_without_sink":
        return question.answers_without_bias(without_sink_row(joined.rollout, question.out_tokens))
    return question.answers_without_bias(joined.mean if name.startswith("mean.") else joined.rollout)


def _joined(question: BatchQuestion, measure: str, asked: frozenset[str]) -> Joined:
    """By one walk through the blocks for all measures asked; by one of its own where one of them does not apply."""
    known = question.shared.setdefault("baselines", {})
    if measure not in known:
        others = frozenset() if measure == "attn" else asked - frozenset(known) - {"attn"}
        try:
            known |= _walk(question, others | {measure})
        except MethodError:
            if others <= {measure}:
                raise
            known |= _walk(question, frozenset({measure}))
    return known[measure]


@torch.no_grad()
def _walk(question: BatchQuestion, measures: frozenset[str]) -> dict[str, Joined]:
    recording = question.recording
    if "mixings" not in question.shared:
        question.shared["mixings"] = mixings(recording)
    every: list[Mixing] = question.shared["mixings"]
    n_samples, n_tokens = recording.states[0].shape[:2]
    places = question.out_tokens.to(recording.states[0].device)
    rollouts: dict[str, Tensor] = {}
    sums: dict[str, Tensor] = {}
    for block in reversed(range(recording.n_blocks)):
        for measure, matrix in _matrices(question, block, every[block], measures).items():
            step = rows_to_one(matrix.reshape(n_samples, *matrix.shape[-2:]))  # one sample comes without its axis
            at_output = step[torch.arange(n_samples, device=step.device), places]
            sums[measure] = sums.get(measure, 0) + at_output
            row = rollouts.get(measure)
            if row is None:
                row = torch.nn.functional.one_hot(places, n_tokens).to(step)
            through = (row[:, None] @ step)[:, 0]
            rollouts[measure] = through if HAS_RESIDUAL[measure] else 0.5 * through + 0.5 * row
    return {name: Joined(rollout=rollouts[name], mean=sums[name] / recording.n_blocks) for name in measures}


def _matrices(question: BatchQuestion, block: int, mixing: Mixing, measures: frozenset[str]) -> dict[str, Tensor]:
    """(sample, out_token, in_token) of each measure within a block."""
    found = {"attn": attn(mixing.attention)} if "attn" in measures else {}
    vectors = measures - {"attn"}
    return found | (measured(decompose(question.recording, block, mixing), vectors) if vectors else {})
