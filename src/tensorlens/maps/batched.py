"""Maps of many samples at once: one recording of (sample, token, channel), one pull or push for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorlens.device_work import on_its_way
from tensorlens.errors import MethodError
from tensorlens.program.folding.push import push_each_token
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.record import record
from tensorlens.freezing.recording import Recording, RecordOptions
from tensorlens.freezing.replay import FactorReplay
from tensorlens.freezing.replayed import check_unchanged
from tensorlens.maps.batch_question import (
    BatchQuestion,
    Notes,
    Pending,
    reader,
    target_names,
    targets_of,
)
from tensorlens.maps.batched_baselines import BASELINES, baseline
from tensorlens.maps.batched_gradients import integrated
from tensorlens.maps.controls import position_scores, random_scores, recency_scores
from tensorlens.maps.gradients import jacobian_rules
from tensorlens.maps.methods import BY_COMPLETENESS, Answer, not_carried
from tensorlens.maps.targets import no_head
from tensorlens.models.anatomy import Anatomy
from tensorlens.operators.operator import FrozenOperator
from tensorlens.operators.norms import probe_vectors

GRAPH_SHARE = 0.7
"""Part of the free memory that the graph of a batch may take: unlike that of one input, it is what was asked for. More
than a batch is planned with, since less may be free by the time that it is recorded."""


def in_class(question: BatchQuestion) -> Pending:
    """`tensor.in_class` of every sample by one pull."""
    recording, classes = question.recording, question.classes
    if classes is None or recording.readout is None:
        raise no_head(recording.model)
    ids, weights = targets_of(question)
    read = reader(question, ids, weights)
    logits = read(recording.readout).detach()
    pulled = question.replay.pull(
        torch.ones(1, len(question.lengths), dtype=logits.dtype, device=logits.device), question.span, read=read,
        to_logits=True,
    )[0]  # fmt: skip
    scores = question.weigh(pulled)
    names, values = target_names(question, ids, weights), on_its_way(logits)

    def notes() -> list[Notes]:
        named = zip(names(), values().tolist(), strict=True)
        return [{"target": name, "logit": [value], "bias": BY_COMPLETENESS} for name, value in named]

    return question.answers(scores, not_carried(scores, logits), notes)


def in_out(question: BatchQuestion) -> Pending:
    """`tensor.in_out` of every sample by one pull."""
    return question.answers(_along_outputs(question), _bias_shares(question), question.alike(bias=BY_COMPLETENESS))


def _along_outputs(question: BatchQuestion) -> Tensor:
    r"""$⟨T^\top y, x⟩$ of each sample's own output y, by input token."""
    if "in_out" not in question.shared:
        ends = question.rows(question.recording.states[-1])
        pulled = question.replay.pull(ends[None], question.span, read=question.rows)[0]
        question.shared["in_out"] = question.weigh(pulled)
    return question.shared["in_out"]


def _bias_shares(question: BatchQuestion) -> Tensor:
    r"""The bias's share of each sample's output, $1 - ⟨T^\top y, x⟩/‖y‖^2$."""
    ends = question.rows(question.recording.states[-1])
    return not_carried(_along_outputs(question), ends.square().sum(-1))


def contribution(question: BatchQuestion) -> Pending:
    """`tensor.contribution` of every sample: one push for each token, of all samples together.

    Where the exact norm is asked too, the rows that it needs are there to be multiplied instead.
    """
    if "tensor.norm" in question.methods:
        scores, not_by_tokens = _by_rows(question)[1], _bias_shares(question)
    else:
        pushed, ends = _pushed(question), question.rows(question.recording.states[-1])
        scores = pushed.norm(dim=-1)
        not_by_tokens = not_carried((pushed * ends[:, None]).sum(-1), ends.square().sum(-1))
    return question.answers(scores, not_by_tokens, question.alike(bias=BY_COMPLETENESS))


def _pushed(question: BatchQuestion) -> Tensor:
    r"""$T_{ij} x_j$ (sample, token, channel) of each sample's output i: by matrix products, a graph, or replays."""
    first = FrozenOperator(FactorReplay(question.recording.sample(0)))
    if first.may_fold and first.folded is not None:
        return push_each_token(first.folded, question.recording, question.out_tokens)
    pushed = question.replay.push_each_token(question.recording.states[0], question.rows)
    return torch.stack(_pushed_by_factors(question) if pushed is None else pushed, 1)


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
    """`tensor.norm` of every sample; sketched by one pull for each probe, of all samples together."""
    if question.probes is None:
        notes = question.alike(norm="frobenius", probes=None, bias=BY_COMPLETENESS)
        return question.answers(_by_rows(question)[0], _bias_shares(question), notes)
    ends = question.rows(question.recording.states[-1])
    probes = probe_vectors(question.probes, ends.shape[-1], question.seed, ends.device, ends.dtype)
    x = question.recording.states[0]
    pulled = (question.replay.pull(probe.expand_as(ends)[None], question.span, read=question.rows) for probe in probes)
    squares = torch.stack([one[0].expand_as(x).square().sum(-1) for one in pulled])  # one sample has no axis of its own
    notes = question.alike(norm="frobenius", probes=question.probes, seed=question.seed, bias=BY_COMPLETENESS)
    return question.answers(squares.mean(0).sqrt(), _bias_shares(question), notes)


def _by_rows(question: BatchQuestion) -> tuple[Tensor, Tensor]:
    r"""$\lVert T_{ij} \rVert_F$ and $\lVert T_{ij} x_j \rVert$ (sample, token), from the dense rows of each sample.

    Raises:
        MethodError: the blocks cannot be folded, so that rows would take a backward pass for each channel.
    """
    if "rows" not in question.shared:
        first = FrozenOperator(FactorReplay(question.recording.sample(0)))
        if first.folded is None:
            raise MethodError("The blocks cannot be folded; the rows of each sample go by backward passes.")
        others = (first.beside(question.recording.sample(i)) for i in range(1, len(question.lengths)))
        places = question.out_tokens.tolist()
        found = [_of_sample(one, place) for one, place in zip((first, *others), places, strict=True)]
        norms, contributions = zip(*found, strict=True)
        question.shared["rows"] = torch.stack(norms), torch.stack(contributions)
    return question.shared["rows"]


def _of_sample(operator: FrozenOperator, out_token: int) -> tuple[Tensor, Tensor]:
    """Norms and contributions of one sample: its rows are a product with each channel's unit vector."""
    x = operator.input.to(operator.compute_type)
    squares, carried = x.new_zeros(len(x)), x.new_zeros(len(x))
    units = torch.eye(operator.shape[1], dtype=x.dtype, device=x.device)
    for piece in operator.pull_outputs((out_token,), units[None]):
        tokens = slice(*piece.tokens)
        squares[tokens] += torch.linalg.vector_norm(piece.rows, dim=-1).square().sum(-1)
        carried[tokens] += torch.einsum("tcd,td->tc", piece.rows, x[tokens].to(piece.rows)).square().sum(-1)
    return squares.sqrt(), carried.sqrt()


# Other members, and what is not of T ---------------------------------------------------------------------------------


def times_input(question: BatchQuestion) -> Pending:
    """`gradient.times_input` of every sample: In+Class, or In+Out without classes, of the member `Rules.jacobian`."""
    recording = question.recording
    rules = jacobian_rules(recording.rules)
    if rules != recording.rules:
        check_unchanged(recording)
        made = record_samples(recording.anatomy, recording.inputs, rules, len(question.lengths), keeps_factors=False)
        question = replace(question, replay=FactorReplay(made), shared={})
    if not question.has_classes:
        return question.answers_without_bias(_along_outputs(question), question.alike(explains="output state"))
    pending = in_class(question)

    def finish() -> list[Answer]:
        return [
            Answer(scores=one.scores, bias_share=one.bias_share * torch.nan, notes={"explains": one.notes["target"]})
            for one in pending()
        ]

    return finish


def record_samples(
    anatomy: Anatomy, arguments: dict[str, Any], rules: Rules, n_samples: int, *, keeps_factors: bool
) -> Recording:
    """One recording of several samples; without factors there must be a graph to ask.

    Raises:
        torch.OutOfMemoryError: The graph would take more memory than there is.
    """
    options = RecordOptions(n_samples=n_samples, graph_share=GRAPH_SHARE, keeps_factors=keeps_factors)
    made = record(anatomy, arguments, rules, options)
    if not keeps_factors and made.graph is None:
        raise torch.OutOfMemoryError("The graph of the batch would take more memory than there is.")
    return made


def _embedding_norm(question: BatchQuestion) -> Pending:
    return question.answers_without_bias(question.recording.states[0].norm(dim=-1))


def _by_place(scores: Callable[[int], Tensor]) -> Callable[[BatchQuestion], Pending]:
    """A control that knows the number of tokens alone."""

    def control(question: BatchQuestion) -> Pending:
        share, lengths = torch.full((1,), torch.nan), question.lengths
        return lambda: [Answer(scores=scores(n)[None], bias_share=share) for n in lengths]

    return control


BATCHED: dict[str, Callable[[BatchQuestion], Pending]] = {
    "tensor.in_class": in_class,
    "tensor.in_out": in_out,
    "tensor.contribution": contribution,
    "tensor.norm": norm,
    **{name: partial(baseline, name=name) for name in BASELINES},
    "gradient.times_input": times_input,
    "gradient.integrated": integrated,
    "control.random": _by_place(lambda n: random_scores(1, n)[0]),
    "control.recency": _by_place(recency_scores),
    "control.position": _by_place(position_scores),
    "control.embedding_norm": _embedding_norm,
}
"""How each method goes for all samples of a batch at once. One that raises goes one sample after the other."""

PULLS_ONLY = frozenset({"tensor.in_class", "tensor.in_out"})
"""Those of them that need the graph of the recording and no factors, as does `tensor.norm` where it is sketched."""
