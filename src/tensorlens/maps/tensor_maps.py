"""The maps of T itself: its norm, In+Out, In+Class, contribution."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from tensorlens.errors import AnatomyError, InputError, MethodError
from tensorlens.maps.methods import METHODS, Question, Scored, Weighed, method
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import in_parts
from tensorlens.models.runner import run
from tensorlens.operators.spectrum import frobenius_norms, probe_vectors, sketched_norms, spectral_norms
from tensorlens.recording.recording import Recording, Span
from tensorlens.tolerances import TINY, in_float64, repeated

BY_COMPLETENESS = "by completeness"
"""The note of a map whose bias share was inferred from completeness instead of measured."""

TOKENS_TOGETHER = {"cuda": 2**14, "cpu": 2**12}
"""Tokens of all the inputs that are pushed together: on a CPU, more no longer fit its caches."""


def not_carried(scores: Tensor, total: Tensor) -> Tensor:
    """The bias share of each row: the part of its total that the inputs do not carry."""
    return (1 - in_float64(scores).sum(1) / in_float64(total)).to(scores)


def _rounding(found: Weighed, before: Tensor | float = 1.0) -> dict[str, Any]:
    """The share of the summed magnitudes that remains in the scores; warn if rounding may be as large.

    Args:
        found: The scores.
        before: The part that was left before the sum.
    """
    kept = found.kept * before
    noise = torch.finfo(found.scores.dtype).eps / kept.clamp_min(TINY)
    return {"kept": kept, "noise": noise}


def _bias_share(question: Question) -> Tensor:
    r"""$⟨X^N_i, B_i⟩ / \lVert X^N_i \rVert^2$: how much of each output the bias carries."""
    operator, rows = question.operator, list(question.out_tokens)
    if question.is_batch:
        return not_carried(_along_outputs(question).scores, _sizes(question))
    x_out, bias = operator.output[rows], operator.bias[rows]
    return (x_out * bias).sum(-1) / x_out.square().sum(-1)


def _from_sink(question: Question, *, to_logits: bool) -> dict[str, Tensor]:
    """The contribution of a held attention sink to each row; empty if none is held."""
    operator = question.operator
    end = question.recording.bias_of_sinks(operator.span, operator.heads, to_logits=to_logits)
    if end is None:
        return {}
    if to_logits:
        rows = range(len(question.out_tokens))
        return {"sink_gives": question.explained(end, rows) - question.explained(torch.zeros_like(end), rows)}
    outputs = question.at_outputs(question.recording.states[operator.span.stop])
    return {"sink_gives": (question.at_outputs(end) * outputs).sum(-1)}


def _along_outputs(question: Question) -> Weighed:
    r"""$⟨T^\top y, x⟩$ of each row's own output y, by input token."""
    if "in_out" not in question.shared:
        ends = question.recording.states[question.operator.span.stop]
        question.shared["in_out"] = question.weigh(question.at_outputs(ends))
    return question.shared["in_out"]


def _left_along_outputs(question: Question) -> Tensor | float:
    """(row,): how much of each row's own output is left behind the last block, beside one of the same sizes.

    The derivative of a norm removes what lies along its own output, so that little more than rounding may be left.
    """
    operator, recording = question.operator, question.recording
    if recording.rules.norm != "taylor":
        return 1.0
    span, rows = Span(operator.span.stop - 1, operator.span.stop), range(len(question.out_tokens))
    ends = recording.states[span.stop]
    u = question.placed(ends, list(rows), question.at_outputs(ends))
    signs = torch.randint(2, u.shape, generator=torch.Generator().manual_seed(0)).to(u) * 2 - 1
    try:
        pulled = recording.pull_each([u, u * signs], span, operator.heads)
    except AnatomyError:  # the last block reads more than its state
        pulled = recording.pull_each([u, u * signs], operator.span, operator.heads)
    sizes = [in_float64(one).square().sum(-1) for one in pulled]
    if pulled[0].shape[1] == ends.shape[1]:
        left, expected = (question.at_outputs(size) for size in sizes)
    else:
        left, expected = (size.sum(1)[list(question.of)] for size in sizes)
    return (left / expected.clamp_min(TINY)).sqrt().clamp_max(1)


def _sizes(question: Question) -> Tensor:
    ends = question.recording.states[question.operator.span.stop]
    return in_float64(question.at_outputs(ends)).square().sum(-1)


@method(
    "tensor.in_out",
    "Contribution of each input along the actual output; signed",
    signed=True,
    takes_samples=True,
)
def in_out_map(question: Question) -> Scored:
    r"""$T^{IO}_{i←j} = X^N_{[i]} · T_{[i,:,j,:]} · X^0_{[j]}$ (Eq. 22): one pull for each output.

    Rows sum to $⟨X^N_i, X^N_i - B_i⟩$.
    """
    operator = question.operator
    found, size = _along_outputs(question), _sizes(question)
    by_row = _rounding(found, _left_along_outputs(question)) | _from_sink(question, to_logits=False)
    if not operator.heads:  # a run at zero would cost as much as the map, and round as much
        share, notes = not_carried(found.scores, size), {"bias": BY_COMPLETENESS}
        return Scored(scores=found.scores, bias_share=share, notes=notes, by_row=by_row)
    return Scored(scores=found.scores, bias_share=_bias_share(question), by_row=by_row)


@method(
    "tensor.in_class",
    "What each input contributes to a logit, or to the difference of two; signed",
    takes_target=True,
    signed=True,
    takes_samples=True,
)
def in_class_map(question: Question) -> Scored:
    r"""$T^{CLS}_{(c,i)←j} = E_{out,c} · T_{[i,:,j,:]} · X^0_{[j]}$ (Eq. 24).

    Rows sum to the logit minus the biases' part.
    """
    operator, recording = question.operator, question.recording
    chosen = question.chosen
    if operator.span.stop != recording.n_blocks:
        raise MethodError(
            f"`tensor.in_class` needs a range of blocks that ends at the last one ({recording.n_blocks}); got "
            f"{operator.span.stop}."
        )
    found, logits = question.weigh_logits(), question.chosen_logits
    by_row = {"logit": logits} | _rounding(found) | _from_sink(question, to_logits=True)
    if not operator.heads:  # a run at zero would cost as much as the map, and round as much
        share, notes = not_carried(found.scores, logits), {"bias": BY_COMPLETENESS}
        return Scored(scores=found.scores, bias_share=share, notes=notes, by_row=by_row, chosen=chosen)
    # With heads left out, the model's logits would be different.
    at_zero = torch.stack([operator.logits_at_zero(i) for i in question.out_tokens])
    share = chosen.of(at_zero.gather(1, chosen.ids)) / logits
    return Scored(scores=found.scores, bias_share=share, by_row=by_row, chosen=chosen)


@method("tensor.contribution", "Norm of each input's contribution to the output", takes_samples=True, takes_probes=True)
def contribution_map(question: Question) -> Scored:
    r"""$\lVert T_{[i,:,j,:]} · X^0_{[j]} \rVert_2$: unlike the norm, it depends on the token at j.

    One push per input, whatever the number of outputs. Probes take one pull each and output.
    """
    if question.probes is not None:
        return _sketched(question, at=question.recording.states[question.operator.span.start])
    if question.is_batch:
        pushed = question.operator.push_each_token(question.out_tokens)
        ends = question.at_outputs(question.recording.states[-1])
        share = not_carried((pushed * ends[:, None]).sum(-1), _sizes(question))  # (row, in_token) before its sum
        return Scored(scores=pushed.norm(dim=-1), bias_share=share, notes={"bias": BY_COMPLETENESS})
    operator, x = question.operator, question.operator.input

    def push(some: Tensor) -> Tensor:
        alone = x.new_zeros(len(some), *x.shape)  # each token on its own
        alone[torch.arange(len(some)), some] = x[some]
        return operator.apply(alone)[:, list(question.out_tokens)].norm(dim=-1)

    together = TOKENS_TOGETHER.get(x.device.type, TOKENS_TOGETHER["cpu"])
    parts = in_parts(torch.arange(len(x), device=x.device), max(1, together // len(x)), push)
    return Scored(scores=torch.cat(parts).T, bias_share=_bias_share(question))


@method(
    "tensor.norm",
    "Norm of each D×D block of T: how strongly an input can move an output",
    takes_samples=True,
    takes_probes=True,
)
def norm_map(question: Question) -> Scored:
    r"""$T^{Norm}_{i←j} = \lVert T_{[i,:,j,:]} \rVert$ (Eq. 21), exact or sketched by random probes.

    Convention: the paper writes $\lVert·\rVert_2$ of a D×D block, which may mean either norm. Frobenius is the default;
    Proposition 1 is about the spectral norm.
    """
    if question.probes is None:
        notes = {"norm": question.norm, "probes": None}
        return Scored(scores=_exact_norms(question), bias_share=_bias_share(question), notes=notes)
    if question.norm != "frobenius":
        raise MethodError("`probes` sketches the Frobenius norm; for the spectral norm leave `probes` out.")
    return _sketched(question, norm="frobenius")


def _exact_norms(question: Question) -> Tensor:
    norms = frobenius_norms if question.norm == "frobenius" else spectral_norms
    if question.is_batch:
        if question.operator.folded is None:  # each pull would run for all samples
            raise MethodError("The blocks cannot be folded; the rows of each sample are pulled separately.")
        return torch.cat([norms(question.operator.but(sample=k), (i,)) for k, i in enumerate(question.out_tokens)])
    return norms(question.operator, question.out_tokens)


def _sketched(question: Question, at: Tensor | None = None, **notes: Any) -> Scored:
    """Norms by random probes, of the blocks of T or of their products with an input (sample, token, channel)."""
    n_probes, share = question.probes or 1, _bias_share(question)
    notes |= {"probes": n_probes, "seed": question.seed}
    if question.is_batch:
        return Scored(scores=_sketched_together(question, n_probes, at), bias_share=share, notes=notes)
    x = None if at is None else at[question.operator.sample]
    sketch = sketched_norms(question.operator, question.out_tokens, n_probes, question.seed, x)
    return Scored(
        scores=sketch.norms, bias_share=share, notes=notes | {"standard_error": sketch.standard_error.tolist()}
    )


def _sketched_together(question: Question, n_probes: int, at: Tensor | None) -> Tensor:
    """One pull per probe, of all samples together."""
    end, x = question.recording.states[-1], question.recording.states[0]
    probes = probe_vectors(n_probes, end.shape[-1], question.seed, end.device, end.dtype)
    squares = []
    for probe in probes:
        u = torch.zeros_like(end)
        for sample, i in zip(question.of, question.out_tokens, strict=True):
            u[sample, i] = probe
        pulled = question.operator.pull_samples(u).expand_as(x)
        squares.append(pulled.square().sum(-1) if at is None else (pulled * at).sum(-1).square())
    return torch.stack(squares).mean(0).sqrt()  # over probes: (sample, in_token)


# Positions as inputs of their own -------------------------------------------------------------------------------------


SPLITS = ("tensor.in_class", "tensor.in_out")
"""Maps that are linear in each column of the input."""


def added_positions(recording: Recording) -> Tensor:
    """P (token, channel) of $X^0 = E + P$: the part of $X^0$ beside the word embeddings.

    A pass with the words in a different order must leave the same P; otherwise P depends on more than positions.

    Raises:
        MethodError: the model adds no positions to its words before the first block, or does more than add.
    """
    name, states = recording.name, recording.states[0]
    own, other = _beside_words(recording, shift=0), _beside_words(recording, shift=1)
    if own is None or other is None or own.shape != states.shape[1:]:
        raise MethodError(f"`{name}` has no word embeddings to which positions are added; leave `positions` out.")
    size = float(states.norm()) * repeated(states.dtype)
    if float((own - other).norm()) > size:
        raise MethodError(
            f"`{name}` does more than add positions to its words before the first block (a norm, a projection, a "
            "sum with other embeddings), so a column has no part that is the position's alone; leave `positions` out."
        )
    if float(own.norm()) <= size:
        raise MethodError(
            f"`{name}` does not add positions to its word embeddings: they enter inside its blocks, or not at all."
        )
    return own


def check_split(method: str, groups: Any) -> None:
    """Refuse questions whose columns cannot be split into words and positions."""
    if method not in SPLITS or groups is not None:
        raise InputError(f"`positions` is an option of {', '.join(SPLITS)}, without groups.")


def with_positions(made: TokenMap, question: Question) -> TokenMap:
    """The same map with the position's part of each column as a column of its own, after the words."""
    alone = replace(question, weighed=added_positions(question.recording), shared={})
    places = METHODS[made.method].compute(alone).scores.to(made.scores)
    labels = tuple(f"position {j}" for j in range(len(made.in_tokens)))
    return structs.replace(
        made,
        scores=torch.cat([made.scores - places, places], 1),
        in_tokens=(*made.in_tokens, *labels),
        meta={key: value for key, value in made.meta.items() if key not in ("text", "offsets")},
    )


def _beside_words(recording: Recording, shift: int) -> Tensor | None:
    """X⁰ minus the word embeddings, in a pass with the words shifted by `shift`; None if this does not exist."""
    origin = recording.from_model("Finding positions")
    anatomy, layout, seen = origin.anatomy, origin.calls[0].layout, dict[str, Tensor]()
    if anatomy.embedding is None:
        return None

    def moved(ids: Any) -> Any:
        return ids.roll(shift, -1)

    def embedded(words: Any) -> None:
        seen["words"] = words.clone()  # the model may write to both

    def entering(n: int, state: Tensor) -> None:
        if n == 0:
            seen["state"] = layout.to_tokens(state).clone()

    given = {anatomy.embedding: embedded}
    run(anatomy, origin.inputs, entering=entering, taken={anatomy.embedding: moved}, given=given)
    words, state = seen.get("words"), seen.get("state")
    if words is None or state is None or words.shape != state.shape or not isinstance(words, torch.Tensor):
        return None
    return (state - words.to(state))[0]
