"""Gradients of the model itself, nothing held: input times gradient, and integrated gradients.

They explain the same numbers as the maps of the tensor: the logit of a class where the model has classes at the output,
its length along the output state otherwise. Both are taken at X⁰, the state entering the first block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens.errors import MethodError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.layouts import put_state, state_of
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import logits_at
from tensorlens.freezing.replay_of import replay_of
from tensorlens.freezing.replayed import check_unchanged
from tensorlens.maps.methods import METHODS, Answer, Question, method
from tensorlens.memory import in_parts
from tensorlens.models.plain_pass import evaluating, hooked
from tensorlens.operators.operator import FrozenOperator

N_STEPS = 32
"""Points along the path of integrated gradients."""

MOST_STATES = {"cuda": 128, "cpu": 8}
"""Points of the paths of all samples at a time, each with its graph."""


@method(
    "gradient.times_input", "Peer: gradient of the model itself times input; signed", takes_target=True, signed=True
)
def _times_input(question: Question) -> Answer:
    r"""$⟨\partial r / \partial x_j, x_j⟩$: In+Class, or In+Out without classes, of the member `Rules.jacobian`."""
    operator = _whole(question)
    recording, rules = operator.recording, jacobian_rules(operator.recording.rules)
    if rules != recording.rules:
        check_unchanged(recording)
        operator = FrozenOperator(replay_of(recording.anatomy, recording.inputs, rules))
    explains = "tensor.in_class" if _has_classes(question) else "tensor.in_out"
    found = METHODS[explains].compute(replace(question, operator=operator))
    rows = found.scores.expand(len(question.out_tokens), -1)  # a head that pools has one row, whatever the token
    return _answered(rows, found.notes.get("target", "output state"))


@method(
    "gradient.integrated", "Peer: integrated gradients of the model itself, from zero; signed", takes_target=True,
    signed=True,
)  # fmt: skip
def _integrated(question: Question) -> Answer:
    recording = _whole(question).recording
    readers = [_reader(question, token) for token in question.out_tokens]
    names = [name for _, name in readers]
    scores = torch.cat([integrated_gradients(recording, read) for read, _ in readers])
    return _answered(scores, names[0] if len(set(names)) == 1 else names)


Read = Callable[[Tensor], Tensor]
"""From what a batch of passes ended with (see `_run`) to the numbers explained."""


def jacobian_rules(like: Rules) -> Rules:
    """The member whose operator is the model's own derivative, with the user's choice of the output."""
    return Rules.jacobian(include_final_norm=like.include_final_norm)


def integrated_gradients(
    recording: Recording, read: Read, n_steps: int = N_STEPS
) -> Float[Tensor, "sample token"]:  # fmt: skip
    r"""$⟨\int_0^1 \nabla r(αx)\,dα,\; x_j⟩$ for each token, by Gauss-Legendre (Sundararajan et al. 2017).

    Args:
        recording: Of one sample or several, at whose states the path ends.
        read: The numbers explained, from what several points of the path of all samples ended with, a point after the
            other.
        n_steps: Points of the path.
    """
    check_unchanged(recording)  # the path ends at the states of the model as it was
    x = recording.states[0].detach()
    points, weights = np.polynomial.legendre.leggauss(n_steps)
    path = torch.tensor(np.stack([points + 1, weights], 1) / 2, dtype=x.dtype, device=x.device)

    def along(part: Tensor) -> Tensor:
        alphas, shares = part.T[:, :, None, None, None]
        states = (alphas * x).flatten(0, 1)
        return (shares * _gradient(recording, states, read).unflatten(0, (len(part), -1))).sum(0)

    most = max(1, MOST_STATES.get(x.device.type, 8) // len(x))
    total = torch.stack(in_parts(path, most, along)).sum(0)
    return (total * x).sum(-1)


def _whole(question: Question) -> FrozenOperator:
    operator = question.operator
    if operator.span != (0, operator.recording.n_blocks) or operator.heads:
        raise MethodError(
            "Gradients are of the whole model; got a range of blocks or chosen heads. Use a method of the tensor."
        )
    if not _has_classes(question) and question.target is not None:
        raise MethodError("A target needs a model with classes; leave it out to explain the output state.")
    return operator


def _has_classes(question: Question) -> bool:
    return question.classes is not None and question.operator.recording.readout is not None


def _answered(scores: Tensor, explains: str | list[str]) -> Answer:
    share = torch.full((len(scores),), float("nan"))
    return Answer(scores=scores, bias_share=share, notes={"explains": explains})


def _reader(question: Question, token: int) -> tuple[Read, str]:
    """The number to explain at one output, and what it is called."""
    recording, classes = question.operator.recording, question.classes
    if classes is None or recording.readout is None:
        direction = recording.states[-1][0, token].detach()
        return lambda states: states[:, token] @ direction.to(states), "output state"
    weights = classes.weights(int(logits_at(recording, token).argmax()) if question.target is None else question.target)
    name = classes.names(weights)
    unembedding = recording.anatomy.unembedding
    if unembedding is not None:
        column = torch.stack([weight * unembedding.weight[index].detach() for index, weight in weights.items()]).sum(0)
        return lambda states: states[:, token] @ column, name
    return lambda logits: _weighted(logits, token, weights), name


def _weighted(logits: Tensor, token: int, weights: dict[int, float]) -> Tensor:
    logits = logits if logits.dim() == 2 else logits[:, token]
    return torch.stack([weight * logits[:, index] for index, weight in weights.items()]).sum(0)


# The model itself, from X⁰ on ----------------------------------------------------------------------------------------


class _Done(BaseException):
    """Ends a pass with the state that was asked for. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


def _gradient(recording: Recording, x: Tensor, read: Read) -> Tensor:
    """The gradient at each state of a batch (batch, token, channel)."""
    with torch.enable_grad():
        x = x.detach().clone().requires_grad_()
        return torch.autograd.grad(read(_run(recording, x)).sum(), x)[0]


def _run(recording: Recording, x: Tensor) -> Tensor:
    """The model from `x` on: to the input of its unembedding, to the logits of another head, or to $X^N$."""
    anatomy = recording.anatomy
    entered: list[nn.Module] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        entered.append(module)
        return put_state(args, kwargs, x, anatomy.entry_place) if len(entered) == 1 else None

    def embed(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return x

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Done(args[0])

    inputs = {name: _repeat(value, len(x), recording.n_samples) for name, value in recording.inputs.items()}
    before: list[tuple[nn.Module, Any]] = [] if anatomy.unembedding is None else [(anatomy.unembedding, stop)]
    at_embedding = recording.starts_at_embedding and anatomy.embedding is not None
    after = [(anatomy.embedding, embed)] if at_embedding else []
    before += [] if after else [(anatomy.blocks[0], enter)]
    with hooked(before, after), evaluating(anatomy.model):  # type: ignore[arg-type]
        try:
            output = anatomy.model(**inputs)
        except _Done as done:
            return done.state
    return state_of(output)


def _repeat(value: Any, n: int, n_samples: int) -> Any:
    """What belongs to the samples, once for each of `n` states: a point of all samples after the other."""
    if not isinstance(value, Tensor) or not value.dim() or len(value) != n_samples:
        return value
    return (
        value.repeat(n // n_samples, *(1 for _ in value.shape[1:]))
        if n_samples > 1
        else value.expand(n, *value.shape[1:])
    )
