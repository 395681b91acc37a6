r"""Maps of many samples at once: one recording of (sample, token, channel), one pull or push for all of them.

The affine function of a batch is block-diagonal, $\tilde F(X_1, …, X_b) = (T_1 X_1 + B_1, …, T_b X_b + B_b)$, so that
the gradient of a sum over samples holds every sample's own row. Columns of padding are exactly zero and are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.errors import MethodError
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay
from tensorlens.maps.methods import BY_COMPLETENESS, Answer, not_carried
from tensorlens.maps.targets import Classes, Target, no_head
from tensorlens.operators.norms import probe_vectors

Notes = dict[str, Any]
Pending = Callable[[], list[Answer]]
"""Answers whose work is under way on the device: a call waits for it. Until then the next batch can be begun."""


@dataclass(frozen=True, kw_only=True)
class BatchQuestion:
    """What is asked of a batch, one output for each sample.

    Attributes:
        replay: The affine function of the batch.
        lengths: Tokens of each sample without padding.
        out_tokens: (sample,) the output asked for.
        target: What In+Class explains; None for the model's own prediction.
        targets: The same, one for each sample, instead of one for all.
        classes: Names of the classes, or None for a model without a head.
        probes: For `tensor.norm`: how many random probes to sketch it with.
        seed: Seed for the probes.
    """

    replay: FactorReplay
    lengths: tuple[int, ...]
    out_tokens: Tensor
    target: Target | None = None
    targets: Sequence[Target] | None = None
    classes: Classes | None = None
    probes: int | None = None
    seed: int = 0

    @property
    def recording(self) -> Recording:
        """The recording of the batch."""
        return self.replay.recording

    @property
    def span(self) -> Span:
        """All blocks."""
        return Span(0, self.recording.n_blocks)

    def rows(self, state: Tensor) -> Tensor:
        """(sample, channel): each sample's own output of a state (sample, token, channel)."""
        return state[torch.arange(len(state), device=state.device), self.out_tokens.to(state.device)]

    def weigh(self, pulled: Tensor) -> Tensor:
        r"""$⟨(T^\top u)_j, x_j⟩$ for each sample and input token."""
        return (pulled * self.recording.states[0]).sum(-1)

    def answers(self, scores: Tensor, shares: Tensor, notes: Callable[[], Sequence[Notes]]) -> Pending:
        """One answer per sample from (sample, token) scores, padding cut off."""

        def finish() -> list[Answer]:
            rows = zip(scores.cpu(), shares.cpu(), self.lengths, notes(), strict=True)  # one copy for all of them
            return [
                Answer(scores=row[None, :length], bias_share=share[None], notes=note)
                for row, share, length, note in rows
            ]

        return finish

    def alike(self, **notes: Any) -> Callable[[], list[Notes]]:
        """The same notes for each sample."""
        return lambda: [notes] * len(self.lengths)


def in_class(question: BatchQuestion) -> Pending:
    """`tensor.in_class` of every sample by one pull."""
    recording, classes = question.recording, question.classes
    if classes is None or recording.readout is None:
        raise no_head(recording.model)
    ids, weights = _targets(question)
    read = _reader(question, ids, weights)
    logits = read(recording.readout).detach()
    pulled = question.replay.pull(
        torch.ones(1, len(question.lengths), dtype=logits.dtype, device=logits.device), question.span, read=read,
        to_logits=True,
    )[0]  # fmt: skip
    scores = question.weigh(pulled)

    def notes() -> list[Notes]:
        return [
            {"target": _name(classes, some, of_some), "logit": [value], "bias": BY_COMPLETENESS}
            for some, of_some, value in zip(ids.tolist(), weights.tolist(), logits.tolist(), strict=True)
        ]

    return question.answers(scores, not_carried(scores, logits), notes)


def _targets(question: BatchQuestion) -> tuple[Tensor, Tensor]:
    """Classes (sample, k) of each sample's target with their weights."""
    recording, classes = question.recording, question.classes
    assert classes is not None and recording.readout is not None
    device = recording.readout.device
    n = len(question.lengths)
    if question.target is None and question.targets is None:
        best = _all_logits(question, recording.readout).argmax(-1)
        return best[:, None], torch.ones(len(best), 1, device=device)
    asked = [question.target] * n if question.targets is None else question.targets
    chosen = [list(classes.weights(one).items()) for one in asked]  # type: ignore[arg-type]  # None was answered above
    longest = max(map(len, chosen))
    filled = [some + [(0, 0.0)] * (longest - len(some)) for some in chosen]
    ids = torch.tensor([[index for index, _ in some] for some in filled], device=device)
    return ids, torch.tensor([[weight for _, weight in some] for some in filled], device=device)


def _name(classes: Classes, ids: list[int], weights: list[float]) -> str:
    return " − ".join(classes.name(index) for index, weight in zip(ids, weights, strict=True) if weight)


def predictions(question: BatchQuestion) -> Callable[[], list[Notes]]:
    """What the model ranks first at each sample's output; nothing for a model without a head."""
    readout, classes = question.recording.readout, question.classes
    if readout is None or classes is None:
        return question.alike()
    best = _all_logits(question, readout).argmax(-1)
    return lambda: [{"prediction": classes.name(index)} for index in best.tolist()]


def _all_logits(question: BatchQuestion, readout: Tensor) -> Tensor:
    """(sample, class) at each sample's output."""
    unembedding = question.recording.anatomy.unembedding
    if unembedding is not None:
        return F.linear(question.rows(readout), unembedding.weight, unembedding.bias)
    return readout if readout.dim() == 2 else question.rows(readout)


def _reader(question: BatchQuestion, ids: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
    """From what the batch ended with to each sample's weighted logits; only classes with a weight are read."""
    unembedding = question.recording.anatomy.unembedding

    def read(readout: Tensor) -> Tensor:
        scale = weights.to(readout)
        if unembedding is None:
            logits = readout if readout.dim() == 2 else question.rows(readout)
            return (logits.gather(1, ids) * scale).sum(1)
        columns = (unembedding.weight[ids].detach() * scale[..., None]).sum(1)
        value = (question.rows(readout) * columns).sum(-1)
        return value if unembedding.bias is None else value + (unembedding.bias[ids].detach() * scale).sum(1)

    return read


def in_out(question: BatchQuestion) -> Pending:
    """`tensor.in_out` of every sample by one pull."""
    ends = question.rows(question.recording.states[-1])
    pulled = question.replay.pull(ends[None], question.span, read=question.rows)[0]
    scores = question.weigh(pulled)
    return question.answers(scores, not_carried(scores, ends.square().sum(-1)), question.alike(bias=BY_COMPLETENESS))


def contribution(question: BatchQuestion) -> Pending:
    """`tensor.contribution` of every sample: one push for each token, of all samples together."""
    pushed = question.replay.push_each_token(question.recording.states[0], question.rows)
    rows = _pushed_by_factors(question) if pushed is None else pushed
    scores = torch.stack([row.norm(dim=-1) for row in rows], 1)
    return question.answers(scores, _bias_shares(question), question.alike(bias=BY_COMPLETENESS))


def _pushed_by_factors(question: BatchQuestion) -> list[Tensor]:
    r"""$T_{ij} x_j$ (sample, channel) for each input token j, one replay each."""
    x, span = question.recording.states[0], question.span
    at_zero, found = question.rows(question.replay.push(torch.zeros_like(x), span)), []
    for j in range(max(question.lengths)):
        alone = torch.zeros_like(x)
        alone[:, j] = x[:, j]
        found.append(question.rows(question.replay.push(alone, span)) - at_zero)
    return found


def norm(question: BatchQuestion) -> Pending:
    """`tensor.norm` of every sample, sketched: one pull for each probe, of all samples together."""
    if question.probes is None:
        raise MethodError("In a batch `tensor.norm` is sketched: pass `probes`, of which 16 are a good start.")
    ends = question.rows(question.recording.states[-1])
    probes = probe_vectors(question.probes, ends.shape[-1], question.seed, ends.device, ends.dtype)
    x = question.recording.states[0]
    pulled = (question.replay.pull(probe.expand_as(ends)[None], question.span, read=question.rows) for probe in probes)
    squares = torch.stack([one[0].expand_as(x).square().sum(-1) for one in pulled])  # one sample has no axis of its own
    notes = question.alike(norm="frobenius", probes=question.probes, seed=question.seed, bias=BY_COMPLETENESS)
    return question.answers(squares.mean(0).sqrt(), _bias_shares(question), notes)


def _bias_shares(question: BatchQuestion) -> Tensor:
    r"""The bias's share of each sample's output, $1 - ⟨T^\top y, x⟩/‖y‖^2$."""
    ends = question.rows(question.recording.states[-1])
    pulled = question.replay.pull(ends[None], question.span, read=question.rows)[0]
    return not_carried(question.weigh(pulled), ends.square().sum(-1))


BATCHED: dict[str, Callable[[BatchQuestion], Pending]] = {
    "tensor.in_class": in_class,
    "tensor.in_out": in_out,
    "tensor.contribution": contribution,
    "tensor.norm": norm,
}
"""Methods that go for all samples of a batch at once; the others go one sample after the other through its factors."""

PULLS_ONLY = frozenset({"tensor.in_class", "tensor.in_out", "tensor.norm"})
"""Those of them that need the graph of the recording and no factors."""
