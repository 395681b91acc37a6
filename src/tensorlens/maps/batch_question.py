r"""What is asked of several samples that share a recording, one output for each, and what their logits are.

The affine function of a batch is block-diagonal, $\tilde F(X_1, …, X_b) = (T_1 X_1 + B_1, …, T_b X_b + B_b)$, so that
the gradient of a sum over samples holds every sample's own row. Columns of padding are exactly zero and are cut off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlens.device_work import on_its_way
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay
from tensorlens.maps.methods import Answer
from tensorlens.maps.targets import Classes, Target

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
        probes: For `tensor.norm`: how many random probes to sketch it with; None for the exact norm.
        seed: Seed for the probes.
        methods: All that are asked of this batch, `tensor.norm` if it is exact: what several need is computed once.
        shared: What was computed for several methods.
    """

    replay: FactorReplay
    lengths: tuple[int, ...]
    out_tokens: Tensor
    target: Target | None = None
    targets: Sequence[Target] | None = None
    classes: Classes | None = None
    probes: int | None = None
    seed: int = 0
    methods: Collection[str] = ()
    shared: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def recording(self) -> Recording:
        """The recording of the batch."""
        return self.replay.recording

    @property
    def span(self) -> Span:
        """All blocks."""
        return Span(0, self.recording.n_blocks)

    @property
    def has_classes(self) -> bool:
        """Whether the outputs have logits."""
        return self.classes is not None and self.recording.readout is not None

    def rows(self, state: Tensor) -> Tensor:
        """(sample, channel): each sample's own output of a state (sample, token, channel)."""
        return state[torch.arange(len(state), device=state.device), self.out_tokens.to(state.device)]

    def weigh(self, pulled: Tensor) -> Tensor:
        r"""$⟨(T^\top u)_j, x_j⟩$ for each sample and input token."""
        return (pulled * self.recording.states[0]).sum(-1)

    def answers(self, scores: Tensor, shares: Tensor, notes: Callable[[], Sequence[Notes]]) -> Pending:
        """One answer per sample from (sample, token) scores, padding cut off."""
        found, of_bias, lengths = on_its_way(scores), on_its_way(shares), self.lengths

        def finish() -> list[Answer]:  # which holds nothing of the question: with it would stay the graph
            rows = zip(found(), of_bias(), lengths, notes(), strict=True)
            return [
                Answer(scores=row[None, :length], bias_share=share[None], notes=note)
                for row, share, length, note in rows
            ]

        return finish

    def answers_without_bias(self, scores: Tensor, notes: Callable[[], Sequence[Notes]] | None = None) -> Pending:
        """The same of a method that knows no bias."""
        return self.answers(scores, torch.full((len(self.lengths),), torch.nan), notes or self.alike())

    def alike(self, **notes: Any) -> Callable[[], list[Notes]]:
        """The same notes for each sample."""
        each = [notes] * len(self.lengths)
        return lambda: each


# Logits --------------------------------------------------------------------------------------------------------------


def all_logits(question: BatchQuestion) -> Tensor:
    """(sample, class) at each sample's output."""
    if "logits" not in question.shared:
        readout, unembedding = question.recording.readout, question.recording.anatomy.unembedding
        assert readout is not None, "asked of a model with a head"
        if unembedding is not None:
            found = F.linear(question.rows(readout), unembedding.weight, unembedding.bias)
        else:
            found = readout if readout.dim() == 2 else question.rows(readout)
        question.shared["logits"] = found.detach()
    return question.shared["logits"]


def predictions(question: BatchQuestion) -> Callable[[], list[Notes]]:
    """What the model ranks first at each sample's output; nothing for a model without a head."""
    classes = question.classes
    if not question.has_classes or classes is None:
        return question.alike()
    best = on_its_way(all_logits(question).argmax(-1))
    return lambda: [{"prediction": classes.name(index)} for index in best().tolist()]


def targets_of(question: BatchQuestion) -> tuple[Tensor, Tensor]:
    """Classes (sample, k) of each sample's target with their weights."""
    recording, classes = question.recording, question.classes
    assert classes is not None and recording.readout is not None, "asked of a model with a head"
    device = recording.readout.device
    if question.target is None and question.targets is None:
        best = all_logits(question).argmax(-1)
        return best[:, None], torch.ones(len(best), 1, device=device)
    asked = [question.target] * len(question.lengths) if question.targets is None else question.targets
    chosen = [list(classes.weights(one).items()) for one in asked]  # type: ignore[arg-type]  # None was answered above
    longest = max(map(len, chosen))
    filled = [some + [(0, 0.0)] * (longest - len(some)) for some in chosen]
    ids = torch.tensor([[index for index, _ in some] for some in filled], device=device)
    return ids, torch.tensor([[weight for _, weight in some] for some in filled], device=device)


def target_names(question: BatchQuestion, ids: Tensor, weights: Tensor) -> Callable[[], list[str]]:
    """What each sample's target is called."""
    classes, chosen, by = question.classes, on_its_way(ids), on_its_way(weights)
    assert classes is not None, "asked of a model with a head"
    return lambda: [
        classes.names({index: weight for index, weight in zip(some, of_some, strict=True) if weight})
        for some, of_some in zip(chosen().tolist(), by().tolist(), strict=True)
    ]


def reader(question: BatchQuestion, ids: Tensor, weights: Tensor) -> Callable[[Tensor], Tensor]:
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
