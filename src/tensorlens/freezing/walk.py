"""`Walk`: a pass from one state of the model to another.

It skips the blocks before its start, puts its own state where the model's would have entered, and stops at its end.
Blocks are counted by call. A model with an encoder and a decoder has one state for both: the encoder's tokens, then
the decoder's, so that every range of blocks composes with the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError
from tensorlens.freezing.interception import running
from tensorlens.freezing.interpreter import Pass
from tensorlens.freezing.layouts import (
    Layout,
    constants,
    find_state,
    first_tensor,
    layout_of,
    put_state,
    replace_state,
    state_of,
)
from tensorlens.freezing.traced import Traced, constant, mark, plain, traced_in
from tensorlens.memory import free_bytes

if TYPE_CHECKING:
    from tensorlens.freezing.frozen_model import FrozenModel

GRAPH_SHARE = 0.02
"""Part of the free memory that the graph of a recording may take, by the estimate for a tape. It waits for a question
that may never come, beside the tapes and graphs of other inputs; each that is kept leaves less to the next."""

Heads = dict[int, Tensor]
"""For each block named, a multiplier for each head."""


class Reached(BaseException):
    """Ends a forward pass early with the state asked for. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


class Span(NamedTuple):
    """From the state entering block `start` to the state entering block `stop`; `stop` = number of blocks is $X^N$."""

    start: int
    stop: int


class Walk(Pass):
    """A pass from one state to another; without `span` and not `recording`, the model left to itself."""

    def __init__(
        self, frozen: FrozenModel, *, span: Span | None = None, x: Tensor | None = None, recording: bool = False,
        grad: bool = False, heads: Heads | None = None, to_logits: bool = False,
    ) -> None:  # fmt: skip
        modules = dict(frozen.anatomy.model.named_modules())
        names = {id(module): name for name, module in modules.items()}
        super().__init__(names=names, tape=frozen.tape, recording=recording, rules=frozen.rules, grad=grad, heads=heads)
        self.modules = list(modules.values())
        self.frozen, self.span, self.x, self.to_logits = frozen, span, x, to_logits
        self.n_entered = 0
        self.block_ids = {id(block) for block in frozen.anatomy.blocks}
        self.encoder_ids = {id(block) for block in frozen.anatomy.encoder_blocks}
        self.memory: Tensor | None = None
        self.embedded: Tensor | None = None
        self.leaves: list[Tensor] = []
        self.end: Tensor | None = None
        if span is not None and span.start > 0 and frozen.side_channels:
            raise AnatomyError(
                f"Block {span.start} cannot be the first of a range in `{type(frozen.anatomy.model).__name__}`: "
                f"`{frozen.side_channels[0]}` also reads what earlier blocks or the embeddings left for it. "
                "Take ranges that begin at block 0."
            )

    def go(self) -> Tensor:
        """Run the model until the state asked for is reached; (batch, token, channel)."""
        model, inputs = self.frozen.anatomy.model, dict(self.frozen.inputs)
        try:
            with running(self, model):
                if "inputs_embeds" in inputs and (self.recording or self.span):
                    inputs["inputs_embeds"] = self._embed(inputs["inputs_embeds"])
                output = model(**inputs)
        except Reached as reached:
            return reached.state
        finally:
            self.forget_entries()
        return self._as_tokens(state_of(output))

    def run_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Blocks, the encoder, the body, the embeddings and the unembedding are where a walk begins and ends."""
        anatomy = self.frozen.anatomy
        if id(module) in self.block_ids and self.block is None:
            return self._run_block(module, forward, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and self.block is None:
            if self.frozen.body == "":
                self._leave_body(args[0])
            if self.to_logits:
                raise Reached(args[0])
        output = forward(*args, **kwargs)
        if not (self.recording or self.span):
            return self._leave_alone(output)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(output)
        if self.encoder_ids and self.module == anatomy.encoder and self.block is None:
            return self._leave_encoder(output)
        return self._leave_alone(output)

    def _leave_alone(self, output: Any) -> Any:
        is_past = not self.frozen.body_unknown and self.n_entered > self.frozen.n_encoder_blocks
        if is_past and self.module == self.frozen.body and self.block is None:
            self._leave_body(state_of(output))
        return output

    # Blocks -----------------------------------------------------------------------------------------------------------

    def _run_block(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        n, self.n_entered = self.n_entered, self.n_entered + 1
        if not (self.recording or self.span):
            return self._leave_block(n, forward(*args, **kwargs))
        state = find_state(args, kwargs, self.module)
        if self.recording:
            self._record_entry(n, state, module)
        elif n == self._span.stop and not self.to_logits:
            raise Reached(self._joined(n, plain(state)))
        elif n < self._span.start:
            return self.frozen.block_outputs[n]
        if self._begins(n):
            live = self._substitute(n, state)
            self._find_twins(state, live, (*args, *kwargs.values()))
            args, kwargs = put_state(args, kwargs, live)
        elif self.recording:
            self._note_other_streams(state, (args, kwargs))
        self.block, self.place = n, f"block {n}"
        output = forward(*args, **kwargs)
        self.block, self.place = None, f"after block {n}"
        return self._leave_block(n, output)

    @property
    def _span(self) -> Span:
        assert self.span is not None, "a replay has a span"
        return self.span

    @property
    def _start(self) -> int:
        return 0 if self.recording else self._span.start

    def _begins(self, n: int) -> bool:
        """Whether a stream of the input enters at block n."""
        if n == self._start:
            return not (n == 0 and self.frozen.starts_at_embedding)
        return n == self.frozen.n_encoder_blocks > self._start

    def _substitute(self, n: int, state: Tensor) -> Tensor:
        """The walk's own state in place of the model's, which stays known: other code may read it again."""
        with torch.set_grad_enabled(self.grad):
            if self.x is None:
                x = self._own_state(state)
            else:
                split = self.frozen.splits[self._start]
                part = self.x[:, :split] if n < self.frozen.n_encoder_blocks else self.x[:, split:]
                layout = self.frozen.layouts[n] if n else self.frozen.first_layout
                x = layout.to_native(part).to(state.device)
                x = x.view_as(x)
        live = mark(x, live=True)
        self.remember_entry(state, live)
        return live

    def _own_state(self, state: Tensor) -> Tensor:
        """The model's own state, where a recording begins. With a graph it comes from one of `leaves`.

        How large the graph will be is known from here on, and one that is too large is given up.
        """
        layout = self.frozen.layouts[-1] if self.frozen.layouts else layout_of(state, None, None)
        tokens = layout.to_tokens(constant(state)).clone()
        if self.grad:
            n_tokens = sum(part.shape[1] for part in (*self.leaves, tokens))
            self.grad = n_tokens * self.frozen.anatomy.bytes_per_token <= GRAPH_SHARE * free_bytes(tokens.device)
        if self.grad:
            self.leaves.append(tokens.requires_grad_())
        x = layout.to_native(tokens)
        return x.view_as(x)  # the model may write into it, but into no leaf

    def _joined(self, n: int, state: Tensor) -> Tensor:
        """The state entering block n, with that of the other stream."""
        tokens = self.frozen.layouts[n].to_tokens(state)
        if n < self.frozen.n_encoder_blocks:
            return torch.cat([tokens, self._other_stream()], 1)
        return tokens if self.memory is None else torch.cat([plain(self.memory).to(tokens.device), tokens], 1)

    def _other_stream(self) -> Tensor:
        assert self.x is not None, "a replay has a state"
        return self.x[:, self.frozen.splits[self._start] :]

    # What a recording learns ----------------------------------------------------------------------------------------

    def _record_entry(self, n: int, state: Tensor, module: nn.Module) -> None:
        frozen = self.frozen
        layout = layout_of(state, module, frozen.n_text_tokens)
        tokens = layout.to_tokens(constant(state)).clone()
        in_encoder = id(module) in self.encoder_ids
        if n == 0 and not in_encoder:
            self._check_start(state, layout)
        if not in_encoder and frozen.body_unknown:
            frozen.body, frozen.body_unknown = self._find_body(), False
            frozen.n_encoder_blocks = n
            self.generation = n
            if n:
                self._join_streams(tokens)
        frozen.layouts.append(layout)
        frozen.splits.append(0 if self.memory is None else self.memory.shape[1])
        frozen.hidden.append(tokens if self.memory is None else torch.cat([constant(self.memory), tokens], 1))
        if n == 0 and frozen.starts_at_embedding:
            assert self.embedded is not None, "a walk that starts at the embeddings has met them"
            frozen.embedding_layout = layout_of(self.embedded, None, None)
            frozen.hidden[0] = frozen.embedding_layout.to_tokens(constant(self.embedded)).clone()

    def _check_start(self, state: Tensor, layout: Layout) -> None:
        """Start again at the embeddings if they are the state and also used elsewhere, or if the state has streams."""
        embedded = self.embedded
        if self.frozen.starts_at_embedding or embedded is None or embedded.dim() != 3:
            return
        same = embedded.shape == state.shape and torch.equal(constant(embedded), constant(state))
        if len(layout.channels) > 1 or same and self.n_reads:
            raise StartAtEmbedding

    def _join_streams(self, decoder_state: Tensor) -> None:
        """What entered the encoder's blocks, with what waits at the decoder."""
        if self.memory is None:
            raise AnatomyError(
                f"The encoder of `{type(self.frozen.anatomy.model).__name__}` gave no state to the decoder. "
                "Pass inputs for both, and no `encoder_outputs`."
            )
        for n, state in enumerate(self.frozen.hidden):
            if state.shape[-1] != decoder_state.shape[-1]:
                raise AnatomyError(
                    f"The encoder of `{type(self.frozen.anatomy.model).__name__}` has {state.shape[-1]} channels, its "
                    f"decoder {decoder_state.shape[-1]}; one operator from both needs equal numbers."
                )
            self.frozen.splits[n] = state.shape[1]
            self.frozen.hidden[n] = torch.cat([state, decoder_state.to(state)], 1)

    def _find_body(self) -> str:
        """The outermost module around the blocks that the head is not part of."""
        anatomy = self.frozen.anatomy
        if getattr(anatomy.model, "base_model", None) is anatomy.model and anatomy.unembedding is None:
            return self.path[0]
        for path in self.path[1:-1]:
            if all(part is not anatomy.unembedding for part in anatomy.model.get_submodule(path).modules()):
                return path
        return self.path[0]

    def _find_twins(self, state: Tensor, live: Tensor, arguments: tuple[Any, ...]) -> None:
        """Copies of the state that enter beside it (two residual streams begin alike) stand for the input too."""
        for value in arguments:
            is_like = isinstance(value, Tensor) and value is not state and value.shape == state.shape
            if is_like and torch.equal(constant(value), constant(state)):
                self.remember_entry(value, live)

    def _note_other_streams(self, state: Tensor, arguments: Any) -> None:
        """Live tensors beside the state, except what the encoder gave: no range can begin here with the state alone."""
        others = [t for t in traced_in(arguments) if t.live and t is not state and t.generation < math.inf]
        if others and self.module not in self.frozen.side_channels:
            self.frozen.side_channels.append(self.module)

    def note_ages(self, live: list[Traced]) -> None:
        """A live tensor from before the last block left, not through it, is a side channel."""
        for source in live:
            if source.generation < self.generation and self.module not in self.frozen.side_channels:
                self.frozen.side_channels.append(self.module)

    # The ends -------------------------------------------------------------------------------------------------------

    def _embed(self, output: Tensor) -> Tensor:
        """Token embeddings: where the walk begins in models that use them more than once."""
        if self.frozen.starts_at_embedding and self._start == 0 and self.embedded is None:
            live = self._substitute(0, output)
            self.embedded = live
            return live
        if self.recording and self.embedded is None and type(output) is Tensor:
            self.embedded = output
            self.watch_reads(output)
        return output

    def _leave_encoder(self, output: Any) -> Any:
        memory = state_of(output)
        n = self.frozen.n_encoder_blocks if self.span else self.n_entered
        if memory.dim() != 3:
            raise AnatomyError(
                f"The encoder gave a state of shape {tuple(memory.shape)}; expected (batch, token, channel)."
            )
        if self.span and self.span.start >= n:
            split = self.frozen.splits[self.span.start]
            with torch.set_grad_enabled(self.grad):
                assert self.x is not None, "a replay has a state"
                live = mark(self.x[:, :split].to(memory.device), live=True)
            output, memory = replace_state(output, memory, live), live
        self.memory = memory
        # Until the decoder begins, whatever is made of the encoder's output is part of the state of every block in it.
        self.generation = math.inf
        for traced in traced_in(output):
            traced.generation = math.inf
        if self.span and self.span.stop == n and not self.to_logits:
            raise Reached(torch.cat([plain(memory), self._other_stream()], 1))
        return output

    def _leave_block(self, n: int, output: Any) -> Any:
        if self.recording:
            self.frozen.block_outputs.append(constants(output))
            self.generation = n + 1
            for traced in traced_in(output):
                traced.generation = n + 1
        elif n == self.frozen.n_blocks - 1 and not (self.rules.include_final_norm or self.to_logits):
            raise Reached(self._as_tokens(first_tensor(output)))
        return output

    def _leave_body(self, state: Tensor) -> None:
        if self.recording:
            frozen = self.frozen
            frozen.layouts.append(layout_of(state, None, frozen.n_text_tokens, like=frozen.layouts[-1]))
            frozen.splits.append(0)
            with torch.set_grad_enabled(self.grad):
                self.end = frozen.layouts[-1].to_tokens(plain(state))
            frozen.hidden.append(constant(self.end))
        elif not self.to_logits:
            raise Reached(self._as_tokens(state))

    def _as_tokens(self, state: Tensor) -> Tensor:
        if self.to_logits or self.recording:
            return plain(state)
        return self.frozen.layouts[-1].to_tokens(plain(state))


class StartAtEmbedding(BaseException):
    """Asks for a new recording that starts at the embeddings."""
