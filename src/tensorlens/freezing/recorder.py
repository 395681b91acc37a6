"""`Recorder`: one recording under way, the route of its pass and what it has learnt so far."""

from __future__ import annotations

import math
import weakref
from contextlib import nullcontext
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, NotLinearError
from tensorlens.freezing.audit import AuditLog, LeakAudit, refuse_custom_nodes, refuse_scripts
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.interception import current_fingerprint, own_precision, running
from tensorlens.freezing.interpreter import Forward, Interpreter
from tensorlens.freezing.layouts import AxisLayout, axis_layout, constants, find_state, put_state, state_of
from tensorlens.freezing.observe import refuse_other_numbers
from tensorlens.freezing.places import Place, Site
from tensorlens.freezing.prologue import Prologue
from tensorlens.freezing.recording import (
    Graph,
    OtherParts,
    Reached,
    Recording,
    RecordOptions,
    StartAtEmbedding,
    Unaudited,
)
from tensorlens.freezing.traced import Traced, constant, mark, plain, traced_in
from tensorlens.memory import free_bytes
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.evidence import tensors_in
from tensorlens.models.fingerprint import fingerprint, moved, samples_of


class Call(NamedTuple):
    """How a block was called."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@runtime_checkable
class BlockGraphs(Protocol):
    """Gives every block of a recording a graph of its own, for inputs too long for one graph."""

    def enter(self, recorder: Recorder, n: int) -> Tensor:
        """The live state that enters block n in place of the model's."""
        ...

    def leave(self, recorder: Recorder, n: int, call: Call, output: Any) -> None:
        """Block n returned."""


class Recorder:
    """One recording under way: the route of its pass, and what it has learnt so far.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        rules: The conventions.
        options: How to record.
        grad: Whether to build the graph while recording.
        at_embedding: Whether to start at the token embeddings.
        audits: Whether to look, below the rules, for live values that leave unseen, though other ways through the
            model were looked at.
        factors: Where held factors go.
        blocks: Makes a graph for each block instead of one for all.
    """

    def __init__(
        self, anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, options: RecordOptions, *, grad: bool,
        factors: dict[Site, Any], at_embedding: bool = False, audits: bool = False, blocks: BlockGraphs | None = None,
    ) -> None:  # fmt: skip
        self.anatomy, self.inputs, self.rules, self.at_embedding = anatomy, inputs, rules, at_embedding
        self.options, self.factors, self.blocks, self.audits = options, factors, blocks, audits
        self.states: list[Tensor] = []
        self.layouts: list[AxisLayout] = []
        self.splits: list[int] = []
        self.block_outputs: list[Any] = []
        self.side_channels: list[str] = []
        self.n_encoder_blocks: int | None = None
        self.embedding_layout: AxisLayout | None = None
        self.memory: Tensor | None = None
        self.embedded: Tensor | None = None
        self.leaves: list[Tensor] = []
        self.end: Tensor | None = None
        self.is_refused = self.is_apart = False
        self.n_calls = len(anatomy.channels) - 1 if anatomy.channels else len(anatomy.blocks)
        self.n_entered, self.n_most = 0, self.n_calls if anatomy.runs_again else math.inf
        self.n_alike, self._kinds = 0, {type(block) for block in anatomy.blocks}
        self._blocks = {id(block) for block in anatomy.blocks}
        self._encoder = {id(block) for block in anatomy.encoder_blocks}
        self.prologue = Prologue()
        self.run = Interpreter(anatomy.model, rules=rules, factors=self.factors, route=self, recording=True, grad=grad)  # type: ignore[arg-type]

    @property
    def has_leak(self) -> bool:
        """Whether a live value was seen to leave, which it would without gradients too."""
        return self.run.refused is not None or self.run.audit is not None and self.run.audit.leak is not None

    def go(self) -> Recording | None:
        """Run the model and give what was learnt; None if no block ran."""
        self.found = current_fingerprint(self.anatomy.model)
        log = self.log = AuditLog(self.found, self.rules, self.inputs)
        if self.found is None or self.audits or log.is_due:
            refuse_scripts(self.anatomy.model)
        if self.audits or log.is_due:
            run = weakref.proxy(self.run)  # a cycle would keep the graph until the collector comes by
            self.run.audit = LeakAudit(lambda: f"`{run.module or 'the model'}` ({run.place})")
        readout = self._run()
        if self.anatomy.n_alike not in (None, self.n_alike):
            raise OtherParts
        if self.block_outputs and len(self.states) <= len(self.block_outputs):
            raise AnatomyError(
                f"`{type(self.anatomy.model).__name__}` ended without a state after its last block in "
                f"`{self.anatomy.stack}`. Pass the path of the list of blocks that leads to the output as `blocks=`."
            )
        if not self.block_outputs:
            return None
        if self.run.audit is None:
            if not log.has_seen(self.run.signature):
                raise Unaudited
            return self._finished(readout)
        self.is_refused = True  # unless it passes what follows
        refuse_custom_nodes(readout, self.end)
        recording = self._finished(readout)
        if self.options.n_samples == 1 and not log.knows(self.run.signature):  # a sample of a batch is tried alone
            refuse_other_numbers(recording)
        self.is_refused = False
        log.note(self.run.signature, is_apart=self.is_apart, left_trace=bool(recording.ignored))
        return recording

    def _run(self) -> Tensor:
        """The readout: what enters the unembedding, or what the model gave."""
        model, inputs = self.anatomy.model, dict(self.inputs)
        try:
            with own_precision(), torch.set_grad_enabled(self.run.grad), running(self.run, model, self.found):
                if not self.at_embedding:
                    self.prologue.start()
                if "inputs_embeds" in inputs:
                    inputs["inputs_embeds"] = self._embed(inputs["inputs_embeds"])
                output = model(**inputs)
        except Reached as reached:
            return plain(reached.state)
        except Exception as error:
            if self.run.audit is not None and self.run.audit.leak and not isinstance(error, NotLinearError):
                raise NotLinearError(self.run.audit.leak) from error
            raise
        finally:
            self.prologue.stop()
            self.run.forget_entries()
            del self.run.route  # which is this recorder: another cycle
        state = state_of(output)
        if self.anatomy.body_end == "" and self.end is None and self.n_entered:
            self._leave_body(state)
        return plain(state)

    def _finished(self, readout: Tensor) -> Recording:
        run, rules = self.run, self.rules
        if not rules.include_final_norm:
            last = state_of(self.block_outputs[-1], self.anatomy.state_place)
            self.layouts[-1] = self._layout(last, -2)
            self.states[-1] = self.layouts[-1].to_tokens(last)
        is_quiet = run.audit is None and self.log.leaves_no_trace  # while a first pass may cast weights for good
        now = self.found if is_quiet else current_fingerprint(self.anatomy.model)
        ignored = moved(self.found, now, self.anatomy.model) | run.written
        graph = None
        if run.grad and (self.leaves or self.blocks):
            graph = Graph(tuple(self.leaves), self.end if rules.include_final_norm else None, readout)
        return Recording(
            anatomy=self.anatomy, inputs=self.inputs, rules=rules, factors=self.factors, states=tuple(self.states),
            layouts=tuple(self.layouts), splits=tuple(self.splits), block_outputs=tuple(self.block_outputs),
            n_encoder_blocks=self.n_encoder_blocks or 0, embedding_layout=self.embedding_layout,
            side_channels=tuple(self.side_channels), readout=constant(readout) if self.anatomy.has_head else None,
            n_heads=run.n_heads, rules_applied=run.rules_applied, signature=run.signature, graph=graph,
            fingerprint=fingerprint(self.anatomy.model, ignored) if ignored else now, ignored=ignored,
            samples=samples_of(self.anatomy.model, ignored)
            if self.options.keeps_factors and self.found is not None else None,
        )  # fmt: skip

    # The route --------------------------------------------------------------------------------------------------------

    def run_module(
        self, run: Interpreter, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Blocks, the encoder, the body, the embeddings and the unembedding are where something is learnt."""
        anatomy = self.anatomy
        self.n_alike += run.block is None and type(module) in self._kinds
        if id(module) in self._blocks and run.block is None and self.n_entered < self.n_most:
            return self._run_block(module, forward, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and run.block is None:
            if self.end is None and anatomy.body_end == "":
                self._leave_body(args[0])
            raise Reached(args[0])
        output = forward(*args, **kwargs)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(output)
        if self._encoder and run.module == anatomy.encoder and run.block is None:
            return self._leave_encoder(output)
        if self.n_entered >= self.n_calls and run.block is None:
            if self.end is None and anatomy.body_end and run.module == anatomy.body_end:
                self._leave_body(state_of(output))
            if anatomy.readout is not None and run.module == anatomy.readout:
                raise Reached(state_of(output))
        return output

    def note_sources(self, run: Interpreter, live: list[Traced]) -> None:
        """A live tensor from before the last block left, not through it, is a side channel."""
        generation = run.generation
        for source in live:
            if source.generation < generation:
                self._note_side_channel()
                return

    def _note_side_channel(self) -> None:
        if self.run.module not in self.side_channels:
            self.side_channels.append(self.run.module)

    def _run_block(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, n, call = self.run, self.n_entered, None
        self.n_entered += 1
        state = find_state(args, kwargs, run.module, self.anatomy.entry_place)
        self.prologue.pause()
        with self._explained():
            self._learn_entry(n, state, module)
            if self.blocks is not None:
                live = self._noted(self.blocks.enter(self, n))
                call = Call(module, args, kwargs)
                args, kwargs = put_state(args, kwargs, live, self.anatomy.entry_place)
            elif n == self.n_encoder_blocks if n else not self.at_embedding:  # a stream of the input enters here
                live = self._substitute(state)
                self._find_twins(state, live, (*args, *kwargs.values()))
                args, kwargs = put_state(args, kwargs, live, self.anatomy.entry_place)
                self.prologue.repeat(state, live, run.remember_entry)
            else:
                self._note_other_streams(state, (args, kwargs))
        run.place = Place(n, inside=True)
        output = forward(*args, **kwargs)
        run.place = Place(n)
        self.block_outputs.append(constants(output))
        run.generation = n + 1
        for traced in traced_in(list(tensors_in(output))):
            traced.generation = n + 1
        if self.blocks is not None and call is not None:
            self.blocks.leave(self, n, call, output)
        if self.n_entered == self.n_calls and self.anatomy.body_end is None:
            self._leave_body(state_of(output, self.anatomy.state_place))
        return output

    def _noted(self, live: Tensor) -> Tensor:
        if self.run.audit is not None:
            self.run.audit.note_live(live)
        return live

    def _explained(self) -> Any:
        return nullcontext() if self.run.audit is None else self.run.audit.explained()

    # What it learns ---------------------------------------------------------------------------------------------------

    def _learn_entry(self, n: int, state: Tensor, module: nn.Module) -> None:
        layout = self._layout(state, n)
        tokens = layout.to_tokens(constant(state)).clone()
        in_encoder = id(module) in self._encoder
        if n == 0 and not in_encoder:
            self._check_start(state, layout)
        if not in_encoder and self.n_encoder_blocks is None:
            self.n_encoder_blocks = self.run.generation = n
            if n:
                self._join_streams(tokens)
        self.layouts.append(layout)
        self.splits.append(0 if self.memory is None else self.memory.shape[1])
        self.states.append(tokens if self.memory is None else torch.cat([constant(self.memory), tokens], 1))
        if n == 0 and self.at_embedding:
            assert self.embedded is not None, "a recording that starts at the embeddings has met them"
            self.embedding_layout = self._embedded_layout(self.embedded)
            self.states[0] = self.embedding_layout.to_tokens(constant(self.embedded)).clone()

    def _layout(self, state: Tensor, n: int) -> AxisLayout:
        """How the state entering block n is laid out, or the last one."""
        channels = self.anatomy.channels
        channel = channels[n] if channels and n < len(channels) else None
        return axis_layout(state, channel, self._n_text_tokens, self.options.n_samples)

    def _embedded_layout(self, state: Tensor) -> AxisLayout:
        return axis_layout(state, None, None, self.options.n_samples)

    @property
    def _n_text_tokens(self) -> int | None:
        """Number of tokens of a text, as far as the inputs say."""
        for name, axis in (("input_ids", -1), ("inputs_embeds", 1), ("decoder_input_ids", -1)):
            if isinstance(self.inputs.get(name), Tensor):
                return self.inputs[name].shape[axis]
        ids = [v for v in self.inputs.values() if isinstance(v, Tensor) and v.dtype in (torch.int32, torch.int64)]
        return next((tensor.shape[-1] for tensor in ids if tensor.dim() == 2), None)  # by whatever name

    def _substitute(self, state: Tensor) -> Tensor:
        """The recorder's own copy of the state in place of the model's, which stays known: other code may read it.

        With a graph it comes from one of `leaves`. How large the graph will be is known from here on, and one that is
        too large is given up.
        """
        run = self.run
        with torch.set_grad_enabled(run.grad):
            layout = self.layouts[-1] if self.layouts else self._embedded_layout(state)
            tokens = layout.to_tokens(constant(state)).clone()
            if run.grad:
                n_tokens = sum(part.shape[0] * part.shape[1] for part in (*self.leaves, tokens))
                free = free_bytes(tokens.device)
                run.grad = n_tokens * self.anatomy.bytes_per_token <= self.options.graph_share * free
            if run.grad:
                self.leaves.append(tokens.requires_grad_())
            x = layout.to_native(tokens)
            live = mark(x.clone(), live=True)  # the model may write into it, but into no leaf
        run.remember_entry(state, live)
        return self._noted(live)

    def _check_start(self, state: Tensor, layout: AxisLayout) -> None:
        """Start again at the embeddings if they are the state and also used elsewhere, or if the state has streams."""
        embedded = self.embedded
        if self.at_embedding or embedded is None or embedded.dim() != 3:
            return
        if self.anatomy.starts_early or len(layout.channels) > 1:
            raise StartAtEmbedding
        if self.run.n_reads and embedded.shape == state.shape:
            self.is_apart = self.log.is_apart or not torch.equal(constant(embedded), constant(state))  # waits for a GPU
            if not self.is_apart:
                raise StartAtEmbedding

    def _join_streams(self, decoder_state: Tensor) -> None:
        """What entered the encoder's blocks, with what waits at the decoder."""
        if self.memory is None:
            raise AnatomyError(
                f"The encoder of `{type(self.anatomy.model).__name__}` gave no state to the decoder. "
                "Pass inputs for both, and no `encoder_outputs`."
            )
        for n, state in enumerate(self.states):
            if state.shape[-1] != decoder_state.shape[-1]:
                raise AnatomyError(
                    f"The encoder of `{type(self.anatomy.model).__name__}` has {state.shape[-1]} channels, its "
                    f"decoder {decoder_state.shape[-1]}; one operator from both needs equal numbers."
                )
            self.splits[n] = state.shape[1]
            self.states[n] = torch.cat([state, decoder_state.to(state)], 1)

    def _find_twins(self, state: Tensor, live: Tensor, arguments: tuple[Any, ...]) -> None:
        """Copies of the state that enter beside it (two residual streams begin alike) stand for the input too."""
        for value in arguments:
            is_like = isinstance(value, Tensor) and value is not state and value.shape == state.shape
            if is_like and torch.equal(constant(value), constant(state)):
                self.run.remember_entry(value, live)

    def _note_other_streams(self, state: Tensor, arguments: Any) -> None:
        """Live tensors beside the state, except what the encoder gave: no range can begin here with the state alone."""
        if any(t.live and t is not state and t.generation < math.inf for t in traced_in(list(tensors_in(arguments)))):
            self._note_side_channel()

    # The ends ---------------------------------------------------------------------------------------------------------

    def _embed(self, output: Tensor) -> Tensor:
        """Token embeddings: where the recording begins in models that use them more than once."""
        if self.embedded is not None:
            return output
        if self.at_embedding:
            self.embedded = self._substitute(output)
            return self.embedded
        if type(output) is Tensor:
            self.embedded = output
            self.run.watch_reads(output)
        return output

    def _leave_encoder(self, output: Any) -> Any:
        memory = state_of(output)
        if memory.dim() != 3:
            raise AnatomyError(
                f"The encoder gave a state of shape {tuple(memory.shape)}; expected (batch, token, channel)."
            )
        self.memory = memory
        # Until the decoder begins, whatever is made of the encoder's output is part of the state of every block in it.
        self.run.generation = math.inf
        for traced in traced_in(list(tensors_in(output))):
            traced.generation = math.inf
        return output

    def _leave_body(self, state: Tensor) -> None:
        with self._explained():
            self.layouts.append(self._layout(state, -1))
            self.splits.append(0)
            with torch.set_grad_enabled(self.run.grad):
                self.end = self.layouts[-1].to_tokens(plain(state)).clone()  # the head may write into it
            self.states.append(constant(self.end))
