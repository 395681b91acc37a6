"""One replay: what the model makes of a state with every factor put back, from any state to any state.

A replay skips the blocks before its start, puts its own state where the model's would have entered, and stops at its
end. Blocks are counted by call. A model with an encoder and a decoder has one state for both: the encoder's tokens,
then the decoder's, so that every range of blocks composes with the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError
from tensorlens.freezing.factors import RecalledFactors
from tensorlens.freezing.interception import current_fingerprint, running
from tensorlens.freezing.interpreter import EntryObserver, Forward, Heads, Interpreter, Observer
from tensorlens.freezing.layouts import find_state, put_state, replace_state, state_of
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.prologue import Prologue
from tensorlens.freezing.recording import Reached, Recording
from tensorlens.freezing.traced import Traced, constant, mark, plain
from tensorlens.models.fingerprint import what_changed


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
                f"`{recording.side_channels[0] or 'the model'}` also reads what earlier blocks or "
                "the embeddings left for it. Take ranges that begin at block 0."
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
        is_over = self.n_entered >= recording.n_blocks
        if id(module) in self._blocks and run.block is None and not is_over:
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
        state = find_state(args, kwargs, run.module, self.recording.anatomy.entry_place)
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
            args, kwargs = put_state(args, kwargs, live, self.recording.anatomy.entry_place)
            self.prologue.repeat(state, live, run.remember_entry)
            state = live
        for observer in run.observers:
            if isinstance(observer, EntryObserver):
                observer.saw_entry(run, run.live_of(state))
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
            "Weights, buffers or other tensors of the model were written to through `.data` since this pass was "
            "recorded. What was held belongs to them as they were. Ask the lens for the input again."
        )
