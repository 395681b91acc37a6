"""The affine function that remains: `push` and `pull` through a recording, from any state to any state.

A replay skips the blocks before its start, puts its own state where the model's would have entered, and stops at its
end. Blocks are counted by call. A model with an encoder and a decoder has one state for both: the encoder's tokens,
then the decoder's, so that every range of blocks composes with the next.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError
from tensorlens.freezing.audit import refuse_custom_nodes
from tensorlens.freezing.factors import RecalledFactors
from tensorlens.freezing.interception import current_fingerprint, own_precision, running
from tensorlens.freezing.interpreter import Forward, Heads, Interpreter, Observer
from tensorlens.freezing.layouts import find_state, put_state, replace_state, state_of
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.prologue import Prologue
from tensorlens.freezing.recording import Reached, Recording
from tensorlens.freezing.traced import Traced, constant, mark, plain
from tensorlens.memory import other_failures_passed_over
from tensorlens.models.fingerprint import what_changed

Read = Callable[[Tensor], Tensor]
"""From what a pass ended with to the numbers that are asked about."""


class Joined(NamedTuple):
    """A state, what the affine function makes of it, joined by an autograd graph, and the interpreter that made it."""

    x: Tensor
    y: Tensor
    run: Interpreter


class Replay(ABC):
    r"""The affine function $\tilde F_X$ of a recording. Abstract: one for kept factors, one for long inputs."""

    recording: Recording

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

    @contextmanager
    def graph(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Iterator[Joined]:
        """By one replay."""
        with own_precision(), torch.enable_grad():
            x = self.recording.states[span.start].detach().clone().requires_grad_()
            y, run = replayed(self.recording, x, span, heads, to_logits=to_logits, grad=True)
            if not self._is_searched:  # a recording without gradients could not tell
                refuse_custom_nodes(plain(y))
                self._is_searched = True
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


def check_unchanged(recording: Recording) -> None:
    """Raise if the model is no longer what was recorded: the factors belong to no other."""
    if recording.fingerprint is None:
        return
    now = current_fingerprint(recording.model, recording.ignored)
    if now is not None and now != recording.fingerprint:
        changed = what_changed(recording.fingerprint, now, recording.model)
        raise InputError(
            f"The model has changed since this pass was recorded: {changed}. What was held belongs to the model as it "
            "was. Ask the lens for the input again."
        )
    if recording.samples is not None and not recording.samples.same():
        raise InputError(
            "The weights of the model were written to through `.data` since this pass was recorded. What was held "
            "belongs to the weights as they were. Ask the lens for the input again."
        )


# What a pass ended with ----------------------------------------------------------------------------------------------


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


# One pass ------------------------------------------------------------------------------------------------------------


def replayed(
    recording: Recording, x: Tensor, span: Span, heads: Heads | None = None, *, to_logits: bool = False,
    grad: bool = False, observers: Sequence[Observer] = (),
) -> tuple[Tensor, Interpreter]:  # fmt: skip
    """What the model makes of `x` with every factor put back, from one state to another, and the interpreter."""
    check_unchanged(recording)
    route = _ReplayRoute(recording, x, span, to_logits)
    run = Interpreter(
        recording.model, rules=recording.rules, factors=RecalledFactors(recording.factors), route=route, grad=grad,
        heads=heads, observers=observers,
    )  # fmt: skip
    return route.go(run), run


class _ReplayRoute:
    """The route of a replay: from the state entering `span.start` to the one entering `span.stop`."""

    def __init__(self, recording: Recording, x: Tensor, span: Span, to_logits: bool) -> None:
        if span.start > 0 and recording.side_channels:
            raise AnatomyError(
                f"Block {span.start} cannot be the first of a range in `{type(recording.model).__name__}`: "
                f"`{recording.side_channels[0]}` also reads what earlier blocks or the embeddings left for it. "
                "Take ranges that begin at block 0."
            )
        self.recording, self.x, self.span, self.to_logits = recording, x, span, to_logits
        self.n_entered = 0
        self.memory: Tensor | None = None
        self.has_embedded = False
        self._blocks = {id(block) for block in recording.anatomy.blocks}
        self._n_encoder = recording.n_encoder_blocks
        self.prologue = Prologue()

    def go(self, run: Interpreter) -> Tensor:
        """Run the model until the state asked for is reached."""
        model, inputs = self.recording.model, dict(self.recording.inputs)
        try:
            with running(run, model, None if self.recording.ignored else self.recording.fingerprint):
                if self.span.start == 0 and not self.recording.starts_at_embedding:
                    self.prologue.start()
                if "inputs_embeds" in inputs:
                    inputs["inputs_embeds"] = self._embed(run, inputs["inputs_embeds"])
                output = model(**inputs)
        except Reached as reached:
            return reached.state
        finally:
            self.prologue.stop()
            run.forget_entries()
        return self._as_tokens(state_of(output))

    def note_sources(self, run: Interpreter, live: list[Traced]) -> None:
        """Nothing to learn."""

    def run_module(
        self, run: Interpreter, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Blocks, the encoder, the body, the embeddings and the unembedding are where a replay begins and ends."""
        recording = self.recording
        anatomy = recording.anatomy
        if id(module) in self._blocks and run.block is None:
            return self._run_block(run, forward, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and run.block is None:
            if anatomy.body_end == "":
                self._leave_body(args[0])
            if self.to_logits:
                raise Reached(args[0])
        output = forward(*args, **kwargs)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(run, output)
        if self._n_encoder and run.module == anatomy.encoder and run.block is None:
            return self._leave_encoder(run, output)
        if self.n_entered == recording.n_blocks and run.block is None:
            if anatomy.body_end and run.module == anatomy.body_end:
                self._leave_body(state_of(output))
            if self.to_logits and anatomy.readout is not None and run.module == anatomy.readout:
                raise Reached(state_of(output))
        return output

    def _run_block(self, run: Interpreter, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        n, self.n_entered = self.n_entered, self.n_entered + 1
        state = find_state(args, kwargs, run.module)
        if n == self.span.stop and not self.to_logits:
            with torch.set_grad_enabled(run.grad):  # a block may begin where the model switches gradients off
                raise Reached(self._joined(n, plain(state)))
        if n < self.span.start:
            return self.recording.block_outputs[n]
        if self._begins(n):
            self.prologue.pause()
            live = self._substitute(run, n, state)
            for value in (*args, *kwargs.values()):  # two residual streams may begin alike
                is_like = isinstance(value, Tensor) and value is not state and value.shape == state.shape
                if is_like and torch.equal(constant(value), constant(state)):
                    run.remember_entry(value, live)
            args, kwargs = put_state(args, kwargs, live)
            self.prologue.repeat(state, live, run.remember_entry)
        run.place = Place(n, inside=True)
        output = forward(*args, **kwargs)
        run.place = Place(n)
        recording = self.recording
        is_end = recording.anatomy.body_end is None or not recording.rules.include_final_norm
        if n == recording.n_blocks - 1 and is_end:
            self._leave_body(state_of(output, recording.anatomy.state_place))
        return output

    def _begins(self, n: int) -> bool:
        """Whether a stream of the input enters at block n."""
        if n == self.span.start:
            return not (n == 0 and self.recording.starts_at_embedding)
        return n == self._n_encoder > self.span.start

    def _substitute(self, run: Interpreter, n: int, state: Tensor) -> Tensor:
        """The replay's own state in place of the model's, which stays known: other code may read it again."""
        recording = self.recording
        with torch.set_grad_enabled(run.grad):
            split = recording.splits[self.span.start]
            part = self.x[:, :split] if n < self._n_encoder else self.x[:, split:]
            layout = recording.layouts[n] if n else recording.first_layout
            x = layout.to_native(part).to(state.device)
            live = mark(x.clone(), live=True)
        run.remember_entry(state, live)
        return live

    def _joined(self, n: int, state: Tensor) -> Tensor:
        """The state entering block n, with that of the other stream."""
        tokens = self.recording.layouts[n].to_tokens(state)
        if n < self._n_encoder:
            return torch.cat([tokens, self._other_stream()], 1)
        return tokens if self.memory is None else torch.cat([plain(self.memory).to(tokens.device), tokens], 1)

    def _other_stream(self) -> Tensor:
        return self.x[:, self.recording.splits[self.span.start] :]

    def _embed(self, run: Interpreter, output: Tensor) -> Tensor:
        if not self.recording.starts_at_embedding or self.span.start or self.has_embedded:
            return output
        self.has_embedded = True
        return self._substitute(run, 0, output)

    def _leave_encoder(self, run: Interpreter, output: Any) -> Any:
        memory = state_of(output)
        if self.span.start >= self._n_encoder:
            split = self.recording.splits[self.span.start]
            with torch.set_grad_enabled(run.grad):
                live = mark(self.x[:, :split].to(memory.device), live=True)
            output, memory = replace_state(output, memory, live), live
        self.memory = memory
        if self.span.stop == self._n_encoder and not self.to_logits:
            raise Reached(torch.cat([plain(memory), self._other_stream()], 1))
        return output

    def _leave_body(self, state: Tensor) -> None:
        if not self.to_logits:
            raise Reached(self._as_tokens(state))

    def _as_tokens(self, state: Tensor) -> Tensor:
        return plain(state) if self.to_logits else self.recording.layouts[-1].to_tokens(plain(state))
