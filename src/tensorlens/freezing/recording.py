"""`record`: run a model once and keep what holds it still; `Recording`: what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, NotLinearError
from tensorlens.freezing.audit import LeakAudit
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.interception import current_fingerprint, own_precision, running
from tensorlens.freezing.interpreter import Forward, Interpreter
from tensorlens.freezing.layouts import (
    Layout,
    constants,
    find_state,
    first_tensor,
    layout_of,
    put_state,
    state_of,
)
from tensorlens.freezing.places import Place, Site
from tensorlens.freezing.prologue import Prologue
from tensorlens.freezing.traced import Traced, constant, mark, plain, traced_in
from tensorlens.memory import free_bytes
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.fingerprint import Fingerprint, fingerprint, moved

GRAPH_SHARE = 0.02
"""Part of the free memory that the graph of a recording may take, by the estimate for its factors. It may never be
used, and lies beside the factors and graphs of other inputs; each that is kept leaves less to the next."""


class Graph(NamedTuple):
    """The autograd graph that a recording was made with, in which every factor is a constant.

    Attributes:
        leaves: $X^0$, (sample, token, channel): the encoder's tokens, then the decoder's.
        end: $X^N$ with the graph; None where the rules make another state the output.
        readout: The same for what the model ended with.
    """

    leaves: tuple[Tensor, ...]
    end: Tensor | None
    readout: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    r"""What one pass left behind: states, held factors and where they belong.

    Holds no L·D·L·D tensor: the hidden states, the factors, and a reference to the model, whose weights it uses. Where
    it is small, it also keeps the graph of the pass, through which cotangents go without a replay.

    Attributes:
        anatomy: Where the model's parts are.
        inputs: What the model was called with.
        rules: The conventions in force.
        factors: The factors held, by site. They cost about as much memory as the activations of one forward pass.
        states: $X^0 … X^N$, each (sample, token, channel); `states[n]` enters block n, the last is the output. With an
            encoder, the encoder's tokens come first and the decoder's after them; the last is the decoder's alone.
        layouts: How the model's own code lays out each of them.
        splits: How many of the tokens of each belong to the encoder.
        block_outputs: What each block returned, for passes that start further up.
        body: Path of the part whose output is $X^N$.
        n_encoder_blocks: How many of the blocks are the encoder's.
        embedding_layout: How the model's own code lays out the embeddings, if $X^0$ is the token embeddings because the
            model uses them in other ways than as the state entering block 0; otherwise None, and it is that state.
        side_channels: Blocks that read something of $X^0$ or of earlier blocks beside the hidden state.
        readout: What the recording ended with: the input of the unembedding, or the logits of another head; None
            without a head.
        n_heads: Number of attention heads by block, where a head axis was recognised.
        rules_applied: How often each rule was applied, by (rule, module).
        fingerprint: What the model was, to notice a change; None where its weights come and go with off-loading.
        ignored: Attributes, by module, that a pass changes by itself, and which are no part of it.
        signature: A hash of the functions that met live tensors, in order: inputs with the same one took the same way.
        graph: The graph of the pass, if it is kept.
    """

    anatomy: Anatomy
    inputs: dict[str, Any]
    rules: Rules
    factors: Mapping[Site, Any] = field(repr=False)
    states: tuple[Tensor, ...] = field(repr=False)
    layouts: tuple[Layout, ...]
    splits: tuple[int, ...]
    block_outputs: tuple[Any, ...] = field(repr=False)
    body: str
    n_encoder_blocks: int = 0
    embedding_layout: Layout | None = None
    side_channels: tuple[str, ...] = ()
    readout: Tensor | None = field(default=None, repr=False)
    n_heads: Mapping[int, int] = field(default_factory=dict)
    rules_applied: Mapping[tuple[str, str], int] = field(default_factory=dict, repr=False)
    fingerprint: Fingerprint | None = field(default=None, repr=False)
    ignored: frozenset[tuple[int, str]] = field(default=frozenset(), repr=False)
    signature: int = 0
    graph: Graph | None = field(default=None, repr=False)

    @property
    def model(self) -> nn.Module:
        """The user's model."""
        return self.anatomy.model

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.block_outputs)

    @property
    def n_samples(self) -> int:
        """How many samples were recorded together."""
        return len(self.states[0])

    @property
    def starts_at_embedding(self) -> bool:
        """Whether $X^0$ is the token embeddings."""
        return self.embedding_layout is not None

    @property
    def first_layout(self) -> Layout:
        """How the model lays out $X^0$."""
        return self.embedding_layout or self.layouts[0]

    @property
    def has_head(self) -> bool:
        """Whether the model goes on after $X^N$, to logits."""
        return self.readout is not None

    @property
    def pools(self) -> bool:
        """Whether the head gives one set of logits for the whole input, and not one for each token."""
        return self.anatomy.unembedding is None and self.readout is not None and self.readout.dim() == 2


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


class KeptFactors(dict[Site, Any]):
    """Factors of a recording: computed once and kept."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site and keep it.

        Detached: a gradient through a factor would be no part of T, and the factor would keep its graph.
        """
        self[site] = factor = constants(compute())
        return factor


class StartAtEmbedding(BaseException):
    """Asks for a new recording that starts at the embeddings."""


def record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> Recording:
    """Run the model once on `inputs` and hold every factor.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward.
        rules: The conventions; the defaults of `Rules` if None.
    """
    with own_precision():
        inputs = {name: value.clone() if _is_inference(value) else value for name, value in inputs.items()}
    for candidate in (anatomy, *anatomy.alternatives()):
        recording = _record(candidate, inputs, rules or Rules())
        if recording is not None:
            return recording
    raise AnatomyError(
        f"The blocks in `{anatomy.stack}` of `{type(anatomy.model).__name__}` never ran on this input. "
        "Expected the forward pass to go through them; pass the path of the right list as `blocks=`."
    )


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules) -> Recording | None:
    """One anatomy tried: with gradients if they pass, from the embeddings if need be; None if no block ran."""
    grad, at_embedding = gradients_pass(anatomy.model), False
    while True:
        recorder = Recorder(anatomy, inputs, rules, grad=grad, at_embedding=at_embedding)
        try:
            return recorder.go()
        except StartAtEmbedding:
            at_embedding = True
        except Exception:
            # Code may fail for its gradients alone: a write in place, a custom derivative. Without them it is held.
            if not grad or recorder.has_leak:
                raise
            grad = False
        del recorder  # and the graph it began


def gradients_pass(model: nn.Module) -> bool:
    """Whether a graph can keep the weights: off-loaded ones come and go, and inference tensors are kept by none."""
    return not any(parameter.is_meta or parameter.is_inference() for parameter in model.parameters())


_audited: dict[tuple[Any, ...], None] = {}
"""States of models whose recording was audited, with the shapes of their inputs; the newest last."""

MAX_AUDITED = 256


class Recorder:
    """One recording under way: the route of its pass, and what it has learnt so far.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments of its forward.
        rules: The conventions.
        grad: Whether to build the graph while recording.
        at_embedding: Whether to start at the token embeddings.
        factors: Where held factors go; all are kept if None.
        blocks: Makes a graph for each block instead of one for all.
    """

    def __init__(
        self, anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, *, grad: bool, at_embedding: bool = False,
        factors: dict[Site, Any] | None = None, blocks: BlockGraphs | None = None,
    ) -> None:  # fmt: skip
        self.anatomy, self.inputs, self.rules, self.at_embedding = anatomy, inputs, rules, at_embedding
        self.factors, self.blocks = KeptFactors() if factors is None else factors, blocks
        self.states: list[Tensor] = []
        self.layouts: list[Layout] = []
        self.splits: list[int] = []
        self.block_outputs: list[Any] = []
        self.side_channels: list[str] = []
        self.body: str | None = None
        self.n_encoder_blocks = 0
        self.embedding_layout: Layout | None = None
        self.memory: Tensor | None = None
        self.embedded: Tensor | None = None
        self.leaves: list[Tensor] = []
        self.end: Tensor | None = None
        self.n_entered = 0
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
        audit_key = (self.found, self.rules, _shapes(self.inputs))
        if self.found is not None and audit_key not in _audited:
            self.run.audit = LeakAudit(lambda: f"`{self.run.module or 'the model'}` ({self.run.place})")
        readout = self._run()
        if self.block_outputs and len(self.states) <= len(self.block_outputs):
            raise AnatomyError(
                f"`{type(self.anatomy.model).__name__}` ended without a state after its last block in "
                f"`{self.anatomy.stack}`. Pass the path of the list of blocks that leads to the output as `blocks=`."
            )
        if not self.block_outputs:
            return None
        if self.run.audit is not None:
            refuse_custom_nodes(readout, self.end)
        _audited[audit_key] = None
        while len(_audited) > MAX_AUDITED:
            del _audited[next(iter(_audited))]
        return self._finished(readout)

    def _run(self) -> Tensor:
        """The readout: what enters the unembedding, or what the model gave."""
        model, inputs = self.anatomy.model, dict(self.inputs)
        try:
            with own_precision(), torch.set_grad_enabled(self.run.grad), running(self.run, model):
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
        return plain(state_of(output))

    def _finished(self, readout: Tensor) -> Recording:
        run, rules = self.run, self.rules
        if not rules.include_final_norm:
            self.states[-1] = self.layouts[-2].to_tokens(first_tensor(self.block_outputs[-1]))
            self.layouts[-1] = self.layouts[-2]
        now = current_fingerprint(self.anatomy.model)  # now, since a first pass may cast weights for good
        ignored = moved(self.found, now, self.anatomy.model)
        graph = None
        if run.grad and (self.leaves or self.blocks):
            graph = Graph(tuple(self.leaves), self.end if rules.include_final_norm else None, readout)
        return Recording(
            anatomy=self.anatomy, inputs=self.inputs, rules=rules, factors=self.factors, states=tuple(self.states),
            layouts=tuple(self.layouts), splits=tuple(self.splits), block_outputs=tuple(self.block_outputs),
            body=self.body or "", n_encoder_blocks=self.n_encoder_blocks, embedding_layout=self.embedding_layout,
            side_channels=tuple(self.side_channels), readout=constant(readout) if self.body else None,
            n_heads=run.n_heads, rules_applied=run.rules_applied, signature=run.signature, graph=graph,
            fingerprint=fingerprint(self.anatomy.model, ignored) if ignored else now, ignored=ignored,
        )  # fmt: skip

    # The route --------------------------------------------------------------------------------------------------------

    def run_module(
        self, run: Interpreter, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Blocks, the encoder, the body, the embeddings and the unembedding are where something is learnt."""
        anatomy = self.anatomy
        if id(module) in self._blocks and run.block is None:
            return self._run_block(module, forward, args, kwargs)
        if module is anatomy.unembedding and self.n_entered and run.block is None:
            if self.body == "":
                self._leave_body(args[0])
            raise Reached(args[0])
        output = forward(*args, **kwargs)
        if module is anatomy.embedding and not self.n_entered and isinstance(output, Tensor):
            return self._embed(output)
        if self._encoder and run.module == anatomy.encoder and run.block is None:
            return self._leave_encoder(output)
        is_past = self.body is not None and self.n_entered > self.n_encoder_blocks
        if is_past and run.module == self.body and run.block is None:
            self._leave_body(state_of(output))
        return output

    def note_sources(self, run: Interpreter, live: list[Traced]) -> None:
        """A live tensor from before the last block left, not through it, is a side channel."""
        if any(source.generation < run.generation for source in live):
            self._note_side_channel()

    def _note_side_channel(self) -> None:
        if self.run.module not in self.side_channels:
            self.side_channels.append(self.run.module)

    def _run_block(self, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run, n, call = self.run, self.n_entered, None
        self.n_entered += 1
        state = find_state(args, kwargs, run.module)
        with self._explained():
            self._learn_entry(n, state, module)
            if self.blocks is not None:
                live = self._noted(self.blocks.enter(self, n))
                call = Call(module, args, kwargs)
                args, kwargs = put_state(args, kwargs, live)
            elif n == self.n_encoder_blocks if n else not self.at_embedding:
                live = self._substitute(state)
                self._find_twins(state, live, (*args, *kwargs.values()))
                args, kwargs = put_state(args, kwargs, live)
                self.prologue.repeat(state, live, run.remember_entry)
            else:
                self._note_other_streams(state, (args, kwargs))
        run.place = Place(n, inside=True)
        output = forward(*args, **kwargs)
        run.place = Place(n)
        self.block_outputs.append(constants(output))
        run.generation = n + 1
        for traced in traced_in(output):
            traced.generation = n + 1
        if self.blocks is not None and call is not None:
            self.blocks.leave(self, n, call, output)
        return output

    def _noted(self, live: Tensor) -> Tensor:
        if self.run.audit is not None:
            self.run.audit.note_live(live)
        return live

    def _explained(self) -> Any:
        return nullcontext() if self.run.audit is None else self.run.audit.explained()

    # What it learns ---------------------------------------------------------------------------------------------------

    def _learn_entry(self, n: int, state: Tensor, module: nn.Module) -> None:
        layout = layout_of(state, module, self._n_text_tokens)
        tokens = layout.to_tokens(constant(state)).clone()
        in_encoder = id(module) in self._encoder
        if n == 0 and not in_encoder:
            self._check_start(state, layout)
        if not in_encoder and self.body is None:
            self.body, self.n_encoder_blocks, self.run.generation = self._find_body(), n, n
            if n:
                self._join_streams(tokens)
        self.layouts.append(layout)
        self.splits.append(0 if self.memory is None else self.memory.shape[1])
        self.states.append(tokens if self.memory is None else torch.cat([constant(self.memory), tokens], 1))
        if n == 0 and self.at_embedding:
            assert self.embedded is not None, "a recording that starts at the embeddings has met them"
            self.embedding_layout = layout_of(self.embedded, None, None)
            self.states[0] = self.embedding_layout.to_tokens(constant(self.embedded)).clone()

    @property
    def _n_text_tokens(self) -> int | None:
        """Number of tokens of a text, as far as the inputs say."""
        for name, axis in (("input_ids", -1), ("inputs_embeds", 1), ("decoder_input_ids", -1)):
            if isinstance(self.inputs.get(name), Tensor):
                return self.inputs[name].shape[axis]
        return None

    def _substitute(self, state: Tensor) -> Tensor:
        """The recorder's own copy of the state in place of the model's, which stays known: other code may read it.

        With a graph it comes from one of `leaves`. How large the graph will be is known from here on, and one that is
        too large is given up.
        """
        run = self.run
        with torch.set_grad_enabled(run.grad):
            layout = self.layouts[-1] if self.layouts else layout_of(state, None, None)
            tokens = layout.to_tokens(constant(state)).clone()
            if run.grad:
                n_tokens = sum(part.shape[0] * part.shape[1] for part in (*self.leaves, tokens))
                run.grad = n_tokens * self.anatomy.bytes_per_token <= GRAPH_SHARE * free_bytes(tokens.device)
            if run.grad:
                self.leaves.append(tokens.requires_grad_())
            x = layout.to_native(tokens)
            live = mark(x.view_as(x), live=True)  # the model may write into it, but into no leaf
        run.remember_entry(state, live)
        return self._noted(live)

    def _check_start(self, state: Tensor, layout: Layout) -> None:
        """Start again at the embeddings if they are the state and also used elsewhere, or if the state has streams."""
        embedded = self.embedded
        if self.at_embedding or embedded is None or embedded.dim() != 3:
            return
        same = embedded.shape == state.shape and torch.equal(constant(embedded), constant(state))
        if len(layout.channels) > 1 or same and self.run.n_reads:
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

    def _find_body(self) -> str:
        """The outermost module around the blocks that the head is not part of."""
        anatomy, path = self.anatomy, self.run.path
        if getattr(anatomy.model, "base_model", None) is anatomy.model and anatomy.unembedding is None:
            return path[0]
        for name in path[1:-1]:
            if all(part is not anatomy.unembedding for part in anatomy.model.get_submodule(name).modules()):
                return name
        return path[0]

    def _find_twins(self, state: Tensor, live: Tensor, arguments: tuple[Any, ...]) -> None:
        """Copies of the state that enter beside it (two residual streams begin alike) stand for the input too."""
        for value in arguments:
            is_like = isinstance(value, Tensor) and value is not state and value.shape == state.shape
            if is_like and torch.equal(constant(value), constant(state)):
                self.run.remember_entry(value, live)

    def _note_other_streams(self, state: Tensor, arguments: Any) -> None:
        """Live tensors beside the state, except what the encoder gave: no range can begin here with the state alone."""
        if any(t.live and t is not state and t.generation < math.inf for t in traced_in(arguments)):
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
        for traced in traced_in(output):
            traced.generation = math.inf
        return output

    def _leave_body(self, state: Tensor) -> None:
        with self._explained():
            self.layouts.append(layout_of(state, None, self._n_text_tokens, like=self.layouts[-1]))
            self.splits.append(0)
            with torch.set_grad_enabled(self.run.grad):
                self.end = self.layouts[-1].to_tokens(plain(state))
            self.states.append(constant(self.end))


def refuse_custom_nodes(*ends: Tensor | None) -> None:
    """Raise for a derivative that no rule has seen, anywhere in the graph of a recording."""
    waiting = [end.grad_fn for end in ends if end is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            raise NotLinearError(
                f"The custom autograd function `{type(node).__name__}` brings a derivative of its own, which no rule "
                "has seen. Switch to the model's plain implementation, or register an adapter for the module's class "
                "with `tensorlens.adapter`."
            )
        waiting += [parent for parent, _ in node.next_functions]


class Reached(BaseException):
    """Ends a forward pass early with the state asked for. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


def _shapes(inputs: dict[str, Any]) -> tuple[Any, ...]:
    """The kind of an input: which arguments, of which shape and type."""
    return tuple(
        (name, tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (name, repr(value))
        for name, value in sorted(inputs.items())
    )
