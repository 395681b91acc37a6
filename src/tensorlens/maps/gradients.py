"""Gradients of the model itself, nothing held: input times gradient, and integrated gradients.

They explain the same numbers as the maps of the tensor: the logit of a class where the model has classes at the output,
its length along the output state otherwise. Both are taken at X⁰, the state entering the first block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensorlens.errors import MethodError
from tensorlens.freezing.layouts import put_state, state_of
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import logits_at
from tensorlens.maps.methods import Answer, Question, method
from tensorlens.memory import in_parts
from tensorlens.models.plain_pass import evaluating, hooked

N_STEPS = 32
"""Points along the path of integrated gradients."""

MOST_POINTS = {"cuda": 32, "cpu": 8}
"""Points at a time, each with its graph."""


@method(
    "gradient.times_input", "Peer: gradient of the model itself times input; signed", takes_target=True, signed=True
)
def _times_input(question: Question) -> Answer:
    return _answer(question, lambda read: input_times_gradient(question.operator.recording, read))


@method(
    "gradient.integrated", "Peer: integrated gradients of the model itself, from zero; signed", takes_target=True,
    signed=True,
)  # fmt: skip
def _integrated(question: Question) -> Answer:
    return _answer(question, lambda read: integrated_gradients(question.operator.recording, read))


Read = Callable[[Tensor], Tensor]
"""From what a batch of passes ended with (see `_run`) to the numbers explained."""


def input_times_gradient(recording: Recording, read: Read) -> Tensor:
    r"""$⟨\partial r / \partial x_j, x_j⟩$ for each token."""
    x = recording.states[0].detach()
    return (_gradient(recording, x, read) * x).sum(-1)[0]


def integrated_gradients(recording: Recording, read: Read, n_steps: int = N_STEPS) -> Tensor:
    r"""$⟨\int_0^1 \nabla r(αx)\,dα,\; x_j⟩$ for each token, by Gauss-Legendre (Sundararajan et al. 2017)."""
    x = recording.states[0].detach()
    points, weights = np.polynomial.legendre.leggauss(n_steps)
    path = torch.tensor(np.stack([points + 1, weights], 1) / 2, dtype=x.dtype, device=x.device)

    def along(part: Tensor) -> Tensor:
        alphas, shares = part.T[:, :, None, None]
        return (shares * _gradient(recording, alphas * x, read)).sum(0)

    total = torch.stack(in_parts(path, MOST_POINTS.get(x.device.type, 8), along)).sum(0)
    return (total * x[0]).sum(-1)


def _answer(question: Question, explain: Callable[[Read], Tensor]) -> Answer:
    operator = question.operator
    if operator.span != (0, operator.recording.n_blocks) or operator.heads:
        raise MethodError(
            "Gradients are of the whole model; got a range of blocks or chosen heads. Use a method of the tensor."
        )
    readers = [_reader(question, token) for token in question.out_tokens]
    scores = torch.stack([explain(read) for read, _ in readers])
    names = [name for _, name in readers]
    return Answer(
        scores=scores,
        bias_share=torch.full((len(scores),), float("nan")),
        notes={"explains": names[0] if len(set(names)) == 1 else names},
    )


def _reader(question: Question, token: int) -> tuple[Read, str]:
    """The number to explain at one output, and what it is called."""
    recording, classes = question.operator.recording, question.classes
    if classes is None or recording.readout is None:
        if question.target is not None:
            raise MethodError("A target needs a model with classes; leave it out to explain the output state.")
        direction = recording.states[-1][0, token].detach()
        return lambda states: states[:, token] @ direction.to(states), "output state"
    weights = classes.weights(int(logits_at(recording, token).argmax()) if question.target is None else question.target)
    name = " − ".join(classes.name(index) for index in weights)
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
        return put_state(args, kwargs, x) if len(entered) == 1 else None

    def embed(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return x

    def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Done(args[0])

    inputs = {name: _repeat(value, len(x)) for name, value in recording.inputs.items()}
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


def _repeat(value: Any, n: int) -> Any:
    return value.expand(n, *value.shape[1:]) if isinstance(value, Tensor) and value.dim() and len(value) == 1 else value
