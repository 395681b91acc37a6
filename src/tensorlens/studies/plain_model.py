"""The unmodified model: its states, read or replaced at the borders of its blocks, and its outputs in batches.

Studies compare the operator with the true model: F at other inputs, its Jacobian, its own head on a predicted state,
and its outputs for copies with some tokens replaced.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from tensorlens.errors import MethodError
from tensorlens.lens import Lens
from tensorlens.memory import is_out_of_memory
from tensorlens.models.anatomy import Anatomies, Anatomy
from tensorlens.models.inputs import forward_parameters
from tensorlens.models.layouts import state_of
from tensorlens.models.runner import AtModule, End, run
from tensorlens.recording.recording import Recording, Span

READ_CHUNK = 256
"""Predicted states read out at a time: a row of logits each, which may be a megabyte."""


@dataclass
class PlainStates:
    """The states of one pass.

    Attributes:
        entering: By block, the state that entered it, (batch, token, channel).
        embedded: The output of the token embedding, before positions and scale outside it.
        leaving: The state that left the last block, before any final norm.
        output: The result with which the pass ended.
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
            states.entering[n] = put.get(n, state).clone()  # the model may write to what it gets
            return states.entering[n].clone() if grad else put.get(n)  # derivatives are by what was read
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
    """Repeat everything that belongs to the one sample, once for each of several states of it."""
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


# Outputs in batches ---------------------------------------------------------------------------------------------------


NO_TOKEN = -1
"""An id that no token has."""
BATCH_SIZES = {"cuda": 256, "cpu": 64}
"""Inputs at a time: a GPU has to be launched for each batch, a CPU's cache holds few."""


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """The outputs of a model for a batch, read at one output token.

    Attributes:
        states: $F(X)_o$ after the final norm.
        logits: One row for each input, or None for a model without a head that has classes at that token.
    """

    states: Float[Tensor, "batch channel"]
    logits: Float[Tensor, "batch class"] | None

    def __getitem__(self, rows: Any) -> Outputs:
        return Outputs(states=self.states[rows], logits=None if self.logits is None else self.logits[rows])


class PlainModel:
    """A lens's model, run as it is: no rule, no interception, no gradient."""

    def __init__(self, lens: Lens, batch_size: int | None = None) -> None:
        self.lens = lens
        # Not the lens's own: a new kind of input found there must be compared with its recording first.
        self.anatomies = Anatomies(lens.model, lens.specimen.blocks, known=lens.specimen.anatomies)
        self.device = next(lens.model.parameters()).device
        self.batch_size = batch_size or BATCH_SIZES.get(self.device.type, 64)
        parameters = forward_parameters(lens.model)
        self.keeps_last = "logits_to_keep" in parameters
        self.options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}

    def run(self, inputs: dict[str, Tensor], watch: str = "last") -> Outputs:
        """The outputs for a batch of any size, read at the ``first`` or ``last`` token, or as the ``mean`` of all."""
        n_inputs = len(next(iter(inputs.values())))
        parts: list[Outputs] = []
        start = 0
        while start < n_inputs:
            batch = {name: value[start : start + self.batch_size] for name, value in inputs.items()}
            try:
                parts.append(self._run(batch, watch))
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or self.batch_size == 1:
                    raise
                self.batch_size //= 2
                continue
            start += self.batch_size
        logits = [part.logits for part in parts if part.logits is not None]
        return Outputs(states=torch.cat([part.states for part in parts]), logits=torch.cat(logits) if logits else None)

    def n_tokens(self, inputs: dict[str, Tensor]) -> int:
        """Number of tokens of an input."""
        return self._states(inputs, {})[0].shape[1]

    def _states(self, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[Tensor, Any]:
        """$X^N$, where the body of the model ends, and what the model returned."""
        states: list[Tensor] = []
        one = {name: value[:1] for name, value in inputs.items()}
        anatomy = self.anatomies.at(self.lens.specimen.arguments(one))
        arguments = inputs | self.options | options
        output = run(anatomy, arguments, ending=states.append, within=_without_padding(anatomy.model))
        return token_states(states[-1], anatomy), output if anatomy.has_head else None

    def _run(self, inputs: dict[str, Tensor], watch: str) -> Outputs:
        keep = {"logits_to_keep": 1} if self.keeps_last and watch == "last" else {}
        states, output = self._states(inputs, keep)
        logits = getattr(output, "logits", None)
        if logits is not None and logits.dim() == 3:
            # A masked language model has classes at the masked tokens, not at the token its states are read at.
            logits = logits[:, -1] if watch == "last" else None
        watched = states.mean(1) if watch == "mean" else states[:, -1 if watch == "last" else 0]
        return Outputs(states=watched.float(), logits=None if logits is None or logits.dim() != 2 else logits.float())


def token_states(state: Tensor, anatomy: Anatomy) -> Tensor:
    """A state as (sample, token, channel), whatever its layout."""
    if state.dim() == 3:
        return state
    axis = anatomy.channels[-1] if anatomy.channels and anatomy.channels[-1] is not None else state.dim() - 1
    return state.movedim(axis, -1).flatten(1, -2)


@contextmanager
def _without_padding(model: nn.Module) -> Iterator[None]:
    """Temporarily, no token counts as padding to a decoder that classifies.

    It reads its last token that is not padding, and takes no batch if none is named. Copies have no padding, but what
    takes a token's place may be the token that otherwise pads. Other models are left alone: some pad on their own.
    """
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if not hasattr(model, "score") or not hasattr(config, "pad_token_id"):  # `score`: the head of such a decoder
        yield
        return
    found, config.pad_token_id = config.pad_token_id, NO_TOKEN
    try:
        yield
    finally:
        config.pad_token_id = found
