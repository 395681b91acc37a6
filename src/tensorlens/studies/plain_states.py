"""States of the model left to itself, read or replaced at the borders of its blocks.

Studies compare the operator with the true model: F at other inputs, its Jacobian, its own head on a predicted state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorlens.errors import MethodError
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.layouts import state_of
from tensorlens.models.runner import AtModule, End, run
from tensorlens.recording.recording import Recording, Span

READ_CHUNK = 256
"""Predicted states read out at a time: a row of logits each, which may be a megabyte."""


@dataclass
class PlainStates:
    """What a pass met.

    Attributes:
        entering: By block, the state that entered it, (batch, token, channel).
        embedded: What the token embedding gave, before positions and scale outside it.
        leaving: The state that left the last block, before any final norm.
        output: What the pass ended with.
    """

    entering: dict[int, Tensor] = field(default_factory=dict)
    embedded: Tensor | None = None
    leaving: Tensor | None = None
    output: Any = None


def plain_states(
    anatomy: Anatomy,
    inputs: Mapping[str, Any],
    *,
    read: Collection[int] = (),
    put: Mapping[int, Tensor] | None = None,
    leave: Tensor | None = None,
    n_blocks: int | None = None,
    grad: bool = False,
    to: End = "output",
) -> PlainStates:
    """Run the model once.

    Args:
        anatomy: The model and its blocks.
        inputs: Keyword arguments of its forward.
        read: Blocks whose incoming state is wanted.
        put: By block, the state to enter it with instead of its own.
        leave: The state to leave the last block with instead of its own.
        n_blocks: Number of blocks counted by call; needed with `leave` where blocks share weights.
        grad: Whether to build an autograd graph, from the token embedding on.
        to: Where to stop.
    """
    states, put = PlainStates(), put or {}
    last = (n_blocks or len(anatomy.blocks)) - 1

    def enter(n: int, state: Tensor) -> Tensor | None:
        if n in read:
            states.entering[n] = put.get(n, state)
        return put.get(n)

    def depart(n: int, state: Tensor) -> Tensor | None:
        if n != last:
            return None
        states.leaving = state if leave is None else leave
        return leave

    def embed(output: Any) -> Any:
        states.embedded = output.detach().requires_grad_() if grad and not put else output
        return states.embedded

    embedding = getattr(anatomy.model, "get_input_embeddings", lambda: None)()
    given: dict[nn.Module, AtModule] = {embedding: embed} if isinstance(embedding, nn.Module) else {}
    # The fused kernels have neither a batched nor a second derivative.
    with sdpa_kernel(SDPBackend.MATH) if grad else nullcontext():
        states.output = run(
            anatomy, inputs, to=to, n_blocks=n_blocks, entering=enter, leaving=depart, given=given, grad=grad
        )
    return states


def true_function(
    recording: Recording, span: Span, x: Float[Tensor, "*state token channel"], *, grad: bool = False
) -> Float[Tensor, "*state token channel"]:
    """F over the blocks of `span` at another state `x`, or at several: the model itself, nothing held."""
    origin, many = recording.from_model("The true function"), x if x.dim() == 3 else x[None]
    is_inside = span.stop < recording.n_blocks
    states = plain_states(
        origin.anatomy,
        {name: _for_each(value, len(many)) for name, value in origin.inputs.items()},
        put={span.start: many},
        read=(span.stop,) if is_inside else (),
        n_blocks=recording.n_blocks,
        grad=grad,
        to="end" if recording.rules.include_final_norm else "last block",
    )
    found = states.entering[span.stop] if is_inside else states.output
    return found if x.dim() == 3 else found[0]


def _for_each(value: Any, n: int) -> Any:
    """What belongs to the one sample, for each of several states of it."""
    is_sample = isinstance(value, Tensor) and value.dim() and len(value) == 1
    return value.expand(n, *value.shape[1:]) if is_sample and n > 1 else value


def read_out(anatomy: Anatomy, states: Float[Tensor, "sample channel"]) -> Float[Tensor, "sample class"]:
    """Logits of a language model from states as they leave the last block: its own final norm and unembedding.

    The states go in as the tokens of one pass, since what follows the last block looks at each token alone.
    """
    if anatomy.unembedding is None:
        raise MethodError(
            f"`{type(anatomy.model).__name__}` has no unembedding, so a state does not predict a next token. "
            "Load it as a language model (AutoModelForCausalLM)."
        )
    device = anatomy.unembedding.weight.device
    one_token = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device), "use_cache": False}
    parts = (plain_states(anatomy, one_token, leave=part[None]).output for part in states.split(READ_CHUNK))
    # Not [0]: GPT-2 folds what comes after its blocks into the shape of its input, here one token per sample.
    return torch.cat([logits.reshape(-1, logits.shape[-1]) for logits in map(state_of, parts)])
