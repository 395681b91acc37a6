"""The affine function that remains: `push` and `pull` through a recording."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import NotLinearError
from tensorlens.freezing.audit import refuse_custom_nodes
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.interpreter import Heads, Interpreter
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replayed import check_unchanged, replayed
from tensorlens.freezing.traced import plain
from tensorlens.memory import other_failures_passed_over

Read = Callable[[Tensor], Tensor]
"""From what a pass ended with to the numbers that are asked about."""


class Joined(NamedTuple):
    """A state, what the affine function makes of it, joined by an autograd graph, and the interpreter that made it."""

    x: Tensor
    y: Tensor
    run: Interpreter


class Replay(ABC):
    r"""The affine function $\tilde F_X$ of a recording. Abstract: one for kept factors, one for long inputs.

    Attributes:
        recording: What it replays.
        fallback: Why a faster way does not answer, or None.
    """

    recording: Recording
    fallback: str | None = None

    @abstractmethod
    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        r"""$\tilde F_X(x)$ over the blocks of `span`: (sample, token, channel) to (sample, token, channel)."""

    @abstractmethod
    def push_to_head(self, x: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """What the affine function and its head end with on `x`: the unembedding's input, or logits."""

    @abstractmethod
    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *, read: Read | None = None,
        to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        r"""$T^\top u$ for cotangents (cotangent, …) of what `read` takes from the output, by default all of it.

        Gives (cotangent, token, channel); of a recording of several samples (cotangent, sample, token, channel).
        """

    @abstractmethod
    def graph(
        self, span: Span, heads: Heads | None = None, *, to_logits: bool = False
    ) -> AbstractContextManager[Joined]:
        """The recorded state entering `span` and what the affine function makes of it, with the graph between them."""

    @property
    @abstractmethod
    def keeps_factors(self) -> bool:
        """Whether all factors are in memory."""

    def push_logits(self, x: Tensor, out_token: int, start: int = 0, heads: Heads | None = None) -> Tensor:
        """Logits (sample, class) of the affine function and its head on `x`, read at `out_token`.

        For a language model they are the numbers straight out of the unembedding, before any soft cap or scale.
        """
        with torch.no_grad():
            return read_logits(self.recording, self.push_to_head(x, start, heads), out_token)

    def pull_logits(self, weights: Tensor, out_tokens: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """Gradients (row, token, channel) of weighted sums of logits, one backward pass for each.

        Args:
            weights: (row, class), sparse in practice: only the classes with a weight are read.
            out_tokens: The output each row is read at.
            start: The block whose input the gradient is taken at.
            heads: Multipliers of heads.
        """
        classes = weights.abs().sum(0).nonzero()[:, 0]
        span = Span(start, self.recording.n_blocks)

        def read(state: Tensor) -> Tensor:
            logits = torch.stack([read_logits(self.recording, state, int(i), classes)[0] for i in out_tokens])
            return (logits * weights[:, classes].to(logits)).sum(1)

        units = torch.eye(len(weights), device=weights.device, dtype=self.recording.states[0].dtype)
        return self.pull(units, span, heads, read=read, to_logits=True)


class FactorReplay(Replay):
    """By factors that are all in memory; pulls through all blocks go by the recording's own graph where it is kept."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._is_searched = recording.graph is not None

    @property
    def keeps_factors(self) -> bool:
        """Yes."""
        return True

    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        r"""$\tilde F_X(x)$, by one replay."""
        with own_precision(), torch.no_grad():
            return plain(replayed(self.recording, x, span, heads)[0])

    def push_to_head(self, x: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """As `push`, on through the head, by one replay."""
        span = Span(start, self.recording.n_blocks)
        with own_precision(), torch.no_grad():
            return plain(replayed(self.recording, x, span, heads, to_logits=True)[0])

    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *, read: Read | None = None,
        to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        """One backward pass for each cotangent, `chunk` of them at a time, through the kept graph or a replay's."""
        read = read or self._read_state
        kept = None if heads else self._kept_graph(span, to_logits)
        if kept is not None:
            check_unchanged(self.recording)
            # On failure, such as a saved tensor written over since, replay.
            with other_failures_passed_over(), own_precision(), torch.enable_grad():
                return self._shaped(gradients(read(kept[1]), kept[0], cotangents, chunk))
        with self.graph(span, heads, to_logits=to_logits) as (x, y, _):
            return self._shaped(gradients(read(y), (x,), cotangents, chunk))

    def push_each_token(self, x: Tensor, read: Read) -> list[Tensor] | None:
        r"""What `read` takes of $T_{\cdot j} x_j$ for each token j of `x`, without a replay.

        $T v = ∂⟨T^\top u, v⟩/∂u$: the gradient of a pull through the kept graph is a push. None where no graph is
        kept, or a fused kernel in it has no second derivative.
        """
        kept = self._kept_graph(Span(0, self.recording.n_blocks), to_logits=False)
        if kept is None:
            return None
        with other_failures_passed_over(), own_precision(), torch.enable_grad():
            end = read(kept[1])
            u = torch.zeros_like(end, requires_grad=True)
            tokens = torch.cat(torch.autograd.grad(end, kept[0], u, create_graph=True), 1).unbind(1)
            return [torch.autograd.grad(token, u, x[:, j], retain_graph=True)[0] for j, token in enumerate(tokens)]
        return None

    @contextmanager
    def graph(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Iterator[Joined]:
        """By one replay."""
        with own_precision(), torch.enable_grad():
            x = self.recording.states[span.start].detach().clone().requires_grad_()
            y, run = replayed(self.recording, x, span, heads, to_logits=to_logits, grad=True)
            if not self._is_searched:  # a recording without gradients could not tell
                refuse_custom_nodes(plain(y))
                self._is_searched = True
            with own_writes_named():
                yield Joined(x, plain(y), run)

    def _kept_graph(self, span: Span, to_logits: bool) -> tuple[tuple[Tensor, ...], Tensor] | None:
        graph = self.recording.graph
        end = None if graph is None else graph.readout if to_logits else graph.end
        if graph is None or end is None or span != (0, self.recording.n_blocks):
            return None
        return graph.leaves, end

    def _read_state(self, y: Tensor) -> Tensor:
        return y[0] if self.recording.n_samples == 1 else y

    def _shaped(self, pulled: Tensor) -> Tensor:
        return pulled[:, 0] if self.recording.n_samples == 1 else pulled


@contextmanager
def own_writes_named() -> Iterator[None]:
    """What torch says of a tensor that was written over before its derivative was taken, in words of ours."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise NotLinearError(
            "The model writes in place over a tensor that a derivative still needs, so that nothing can be pulled "
            f"through it; `T @ x` works. Expected the step out of place: write to a `.clone()`. torch says: {error}"
        ) from error


def gradients(y: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, chunk: int) -> Tensor:
    """The gradients (cotangent, sample, token, channel) at the leaves, one after the other; the graph is kept."""
    unused_are_zero = len(leaves) > 1  # as parts of one leaf would be
    if len(cotangents) == 1:
        found = torch.autograd.grad(y, leaves, cotangents[0], retain_graph=True, materialize_grads=unused_are_zero)
        return torch.cat([part.to(found[0].device) for part in found], 1)[None]
    parts = []
    for some in cotangents.split(chunk):
        try:
            found = torch.autograd.grad(
                y, leaves, some, is_grads_batched=True, retain_graph=True, materialize_grads=unused_are_zero
            )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a kernel that takes no batch of gradients: of sparse tensors, or a custom one
            if len(some) == 1:
                raise
            parts += [gradients(y, leaves, one[None], 1) for one in some]
            continue
        parts.append(torch.cat([part.to(found[0].device) for part in found], 2))
    return torch.cat(parts)


def read_logits(recording: Recording, state: Tensor, out_token: int, classes: Tensor | None = None) -> Tensor:
    """Logits of one output from what a pass to the logits ended with."""
    unembedding = recording.anatomy.unembedding
    if unembedding is not None:
        weight, bias = head_weights(unembedding, state)
        if classes is not None:
            weight, bias = weight[classes], None if bias is None else bias[classes]
        return torch.nn.functional.linear(state[:, recording.place_read(out_token)], weight, bias)
    logits = state if state.dim() == 2 else state[:, out_token]
    return logits if classes is None else logits[:, classes]


def logits_at(recording: Recording, out_token: int, classes: Tensor | None = None) -> Tensor:
    """Logits (class,) at the input of the recording, read at one output; of all classes if None are named."""
    assert recording.readout is not None, "asked of a model with a head"
    return read_logits(recording, recording.readout, out_token, classes)[0].detach()


def head_weights(layer: nn.Linear, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer, fetched if accelerate has put them off the device."""
    if not layer.weight.is_meta:
        return layer.weight, layer.bias
    hook: Any = layer._hf_hook
    stored = next(part.weights_map for part in getattr(hook, "hooks", (hook,)) if getattr(part, "weights_map", None))
    return stored["weight"].to(state), None if layer.bias is None else stored["bias"].to(state)
