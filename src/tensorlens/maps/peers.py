"""Methods to compare maps of T with: rankings that do not use the model, and gradients of the model.

A method that does not beat the controls says nothing. For decoders, recency is the important one: near tokens matter
most to a language model, whatever happens inside it.

Gradients explain the same numbers as the maps of the tensor: the logit of a class where the model has classes at the
output, its length along the output state otherwise. Both are taken at X⁰, the state entering the first block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorlens.axes import TokenMatrix
from tensorlens.errors import MethodError
from tensorlens.maps.methods import Question, Scored, method, unknown_bias
from tensorlens.maps.tensor_maps import in_class_map, in_out_map
from tensorlens.memory import in_parts
from tensorlens.models.runner import run
from tensorlens.operators.operator import FrozenOperator
from tensorlens.operators.plain import as_tokens, body_end
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Recording


def random_scores(n_out: int, n_in: int, seed: Sequence[int] | int = 0) -> TokenMatrix:
    """Uniform numbers, the same on every machine for the same seed."""
    return torch.from_numpy(np.random.default_rng(seed).random((n_out, n_in)))


def _by_place(question: Question, of: Callable[[int], Tensor]) -> Scored:
    """Scores of different lengths, padded with zeros to the longest sample."""
    lengths = question.lengths or (len(question.operator.input),) * (max(question.of) + 1)
    rows = [of(lengths[sample]) for sample in question.of]
    longest = max(map(len, rows))
    scores = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row))) for row in rows])
    return Scored(scores=scores, bias_share=unknown_bias(question))


@method("control.random", "Control: random numbers, the same for every input of this length", takes_samples=True)
def _random(question: Question) -> Scored:
    if question.is_batch:
        return _by_place(question, lambda n: random_scores(1, n)[0])
    scores = random_scores(len(question.out_tokens), len(question.operator.input))
    return Scored(scores=scores, bias_share=unknown_bias(question))


@method("control.recency", "Control: later tokens score higher", takes_samples=True)
def _recency(question: Question) -> Scored:
    return _by_place(question, lambda n: torch.arange(n, dtype=torch.float64))


@method("control.position", "Control: earlier tokens score higher", takes_samples=True)
def _position(question: Question) -> Scored:
    # Never negative, since a study may rank by magnitude.
    return _by_place(question, lambda n: torch.arange(n, dtype=torch.float64).flip(0))


@method("control.embedding_norm", "Control: norm of the state that enters the first block", takes_samples=True)
def _embedding_norm(question: Question) -> Scored:
    states = question.recording.states[question.operator.span.start]
    return Scored(scores=states.norm(dim=-1)[list(question.of)], bias_share=unknown_bias(question))


N_STEPS = 32
"""Points along the path of integrated gradients."""

MOST_STATES = {"cuda": 128, "cpu": 8}
"""Points of the paths of all samples at a time; each keeps its own autograd graph."""


# Gradients -----------------------------------------------------------------------------------------------------------


@method(
    "gradient.times_input",
    "Peer: gradient of the model itself times input; signed",
    takes_target=True,
    signed=True,
    takes_samples=True,
)
def times_input(question: Question) -> Scored:
    r"""$⟨\partial r / \partial x_j, x_j⟩$: In+Class, or In+Out without classes, under `Rules.jacobian`."""
    recording = _whole(question)
    rules = Rules.jacobian(include_final_norm=recording.rules.include_final_norm)
    if rules != recording.rules:
        origin = recording.from_model("The model's own gradient")
        made = record(origin.anatomy, origin.inputs, rules, n_samples=recording.n_samples)
        question = replace(question, operator=FrozenOperator(made, sample=question.operator.sample), shared={})
    if question.has_classes:
        found, notes = in_class_map(question), _EXPLAINS
    else:
        found, notes = in_out_map(question), {"explains": "output state"}
    by_row = {name: found.by_row[name] for name in ("kept", "noise")}
    return Scored(
        scores=found.scores, bias_share=unknown_bias(question), chosen=found.chosen, notes=notes, by_row=by_row
    )


@method(
    "gradient.integrated",
    "Peer: integrated gradients of the model itself, from zero; signed",
    takes_target=True,
    signed=True,
    takes_samples=True,
)
def integrated(question: Question) -> Scored:
    r"""$⟨\int_0^1 \nabla r(αx)\,dα,\; x_j⟩$ for each token, by Gauss-Legendre (Sundararajan et al. 2017)."""
    recording = _whole(question)
    rows: dict[int, Tensor] = {}
    for layer in question.layers():
        found = integrated_gradients(recording, question, layer)
        rows |= {row: found[question.of[row]] for row in layer}
    scores = torch.stack([rows[row] for row in range(len(question.out_tokens))])
    chosen = question.chosen if question.has_classes else None
    notes = {"explains": "output state"} if chosen is None else _EXPLAINS
    return Scored(scores=scores, bias_share=unknown_bias(question), chosen=chosen, notes=notes)


_EXPLAINS = {"explains": True}
"""The note of a map that explains its target."""


def integrated_gradients(recording: Recording, question: Question, layer: list[int], n_steps: int = N_STEPS) -> Tensor:
    """Integrated gradients (sample, token) of the rows of a layer.

    Args:
        recording: The recording of one sample or several; the path ends at their states.
        question: The question, with the targets of the rows.
        layer: Rows, at most one per sample.
        n_steps: Points of the path.
    """
    x = recording.states[0].detach()
    points, weights = np.polynomial.legendre.leggauss(n_steps)
    path = torch.tensor(np.stack([points + 1, weights], 1) / 2, dtype=x.dtype, device=x.device)  # (point, 2)

    def along(part: Tensor) -> Tensor:
        alphas, shares = part.T[:, :, None, None, None]
        states = (alphas * x).flatten(0, 1)  # (point · sample, token, channel)
        found = _gradient(recording, states, question, layer)
        return (shares * found.unflatten(0, (len(part), -1))).sum(0)  # over points: (sample, token, channel)

    most = max(1, MOST_STATES.get(x.device.type, 8) // len(x))
    total = torch.stack(in_parts(path, most, along)).sum(0)
    return (total * x).sum(-1)


def _whole(question: Question) -> Recording:
    operator = question.operator
    if not operator.is_whole:
        raise MethodError(
            "Gradients cover the whole model; got a range of blocks or chosen heads. Use a method of the tensor."
        )
    if not question.has_classes and question.target is not None:
        raise MethodError("A target needs a model with classes; leave it out to explain the output state.")
    return operator.recording


def _gradient(recording: Recording, x: Tensor, question: Question, layer: list[int]) -> Tensor:
    """The gradient of the rows' targets at each state of a batch (point · sample, token, channel)."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        ends = _run(recording, x).unflatten(0, (-1, recording.n_samples))  # (point, sample, …)
        total = torch.stack([question.explained(end, layer).sum() for end in ends]).sum()
        return torch.autograd.grad(total, x)[0]


def _run(recording: Recording, x: Tensor) -> Tensor:
    """The model from `x` on: to the input of its unembedding, to the logits of a different head, or to $X^N$."""
    origin = recording.from_model("The model's own gradient")
    anatomy, split = origin.anatomy, recording.split(0)
    inputs = {name: _repeat(value, len(x), recording.n_samples) for name, value in origin.inputs.items()}
    embedding = anatomy.embedding if recording.starts_at_embedding else None

    starts = {0: x[:, :split], recording.n_encoder_blocks: x[:, split:]} if split else {0: x}

    def enter(n: int, state: Tensor) -> Tensor | None:
        if n not in starts or embedding is not None:
            return None
        return origin.calls[n].layout.to_native(starts[n]).clone()  # it may be written to

    given = {} if embedding is None else {embedding: lambda _: x.clone()}
    to = "readout" if recording.has_head else body_end(recording)
    end = run(anatomy, inputs, to=to, n_blocks=recording.n_blocks, entering=enter, given=given, grad=True)
    return recording.laid_out(end, len(x)) if recording.has_head else as_tokens(origin, end, len(x))


def _repeat(value: Any, n: int, n_samples: int) -> Any:
    """The arguments of the samples, repeated for each of `n` points: all samples of one point, then of the next."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != n_samples:
        return value
    return value.repeat(n // n_samples, *(1 for _ in value.shape[1:]))
