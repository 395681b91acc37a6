"""The user's model left to itself, with hidden states read or replaced at the borders of its blocks.

Studies compare the operator with the true model: F at other inputs, its Jacobian, its own head on a predicted state.
Nothing here knows about freezing. Hooks are put on for one pass and taken off again, whatever happens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorlens.errors import MethodError
from tensorlens.freezing.layouts import find_state, put_state, replace_state, state_of
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.plain_pass import evaluating, hooked

READ_CHUNK = 256
"""Predicted states read out at a time: a row of logits each, which may be a megabyte."""


@dataclass
class PlainStates:
    """What a pass met.

    Attributes:
        entering: By block, the state that entered it, (batch, token, channel).
        leaving: The state that left the last block, before any final norm.
        embedded: What the token embedding gave, before positions and scale outside it.
        final: The state after the model's body, final norm included.
        output: What the model returned.
    """

    entering: dict[int, Tensor] = field(default_factory=dict)
    leaving: Tensor | None = None
    embedded: Tensor | None = None
    final: Tensor | None = None
    output: Any = None


def plain_pass(
    anatomy: Anatomy, inputs: Mapping[str, Any], *, read: Collection[int] = (),
    put: Mapping[int, Tensor] | None = None, leave: Tensor | None = None, n_blocks: int | None = None,
    grad: bool = False, body: nn.Module | None = None,
) -> PlainStates:  # fmt: skip
    """Run the model once.

    Args:
        anatomy: The model and its blocks.
        inputs: Keyword arguments of its forward.
        read: Blocks whose incoming state is wanted.
        put: By block, the state to enter it with instead of its own.
        leave: The state to leave the last block with instead of its own.
        n_blocks: Number of blocks counted by call; needed with `leave` where blocks share weights.
        grad: Whether to build an autograd graph, from the token embedding on.
        body: The module whose output is the final state; the anatomy's by default.
    """
    watch = _Watch(PlainStates(), frozenset(read), put or {}, leave, n_blocks or len(anatomy.blocks), grad)
    with ExitStack() as stack:
        stack.enter_context(evaluating(anatomy.model))
        stack.enter_context(torch.set_grad_enabled(grad))
        if grad:  # the fused kernels have neither a batched nor a second derivative
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(watch.hooks(anatomy, body or anatomy.body))
        watch.states.output = anatomy.model(**inputs)
    return watch.states


def true_function(
    recording: Recording, span: Span, x: Float[Tensor, "*state token channel"], *, grad: bool = False
) -> Float[Tensor, "*state token channel"]:
    """F over the blocks of `span` at another state `x`, or at several: the model itself, nothing held."""
    inside, many = span.stop < recording.n_blocks, x if x.dim() == 3 else x[None]
    states = plain_pass(
        recording.anatomy,
        {name: _for_each(value, len(many)) for name, value in recording.inputs.items()},
        put={span.start: many},
        read=(span.stop,) if inside else (),
        n_blocks=recording.n_blocks,
        grad=grad,
        body=recording.model.get_submodule(recording.anatomy.body_end or ""),
    )
    found = states.entering.get(span.stop) if inside else states.final
    if not inside and (recording.anatomy.body_end is None or not recording.rules.include_final_norm):
        found = states.leaving
    assert found is not None, "a pass through the blocks meets these states"
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
            f"`{type(anatomy.model).__name__}` has no unembedding, so that a state has no next token. "
            "Load it as a language model (AutoModelForCausalLM)."
        )
    device = anatomy.unembedding.weight.device
    one_token = {"input_ids": torch.zeros(1, 1, dtype=torch.long, device=device), "use_cache": False}
    logits = (plain_pass(anatomy, one_token, leave=part[None]).output.logits for part in states.split(READ_CHUNK))
    # Not [0]: GPT-2 folds what comes after its blocks into the shape of its input, here one token per sample.
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in logits])


class _Watch:
    """The hooks of one pass and what they share: which block is being called."""

    def __init__(
        self, states: PlainStates, read: frozenset[int], put: Mapping[int, Tensor], leave: Tensor | None,
        n_blocks: int, grad: bool,
    ) -> None:  # fmt: skip
        self.states, self.read, self.put, self.leave, self.n_blocks = states, read, put, leave, n_blocks
        self.grad, self.n_entered = grad, 0

    def hooks(self, anatomy: Anatomy, body: nn.Module) -> AbstractContextManager[None]:
        blocks = list(dict.fromkeys(anatomy.blocks))
        after: list[tuple[nn.Module, Any]] = [(block, self.depart) for block in blocks]
        embedding = getattr(anatomy.model, "get_input_embeddings", lambda: None)()
        if isinstance(embedding, nn.Module):
            after.append((embedding, self.embed))
        before: list[tuple[nn.Module, Any]] = [(block, self.enter) for block in blocks]
        if body is anatomy.model and anatomy.unembedding is not None:
            before.append((anatomy.unembedding, self.read_out))
        else:
            after.append((body, self.finish))
        return hooked(before, after)

    def embed(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        if self.grad and not self.put:
            output = output.detach().requires_grad_()
        self.states.embedded = output
        return output

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        n, self.n_entered = self.n_entered, self.n_entered + 1
        if n in self.put:
            args, kwargs = put_state(args, kwargs, self.put[n])
        if n in self.read:
            self.states.entering[n] = find_state(args, kwargs)
        return args, kwargs

    def depart(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self.n_entered < self.n_blocks:
            return None
        own = state_of(output)
        self.states.leaving = own if self.leave is None else self.leave
        return None if self.leave is None else replace_state(output, own, self.leave)

    def read_out(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.states.final = args[0]

    def finish(self, module: nn.Module, args: Any, output: Any) -> None:
        self.states.final = state_of(output)
