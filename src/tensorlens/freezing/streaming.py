r"""Long inputs: a frozen model that keeps no tape.

The recording itself builds the autograd graph, block by block, with every factor detached where it is made. What a
graph of a frozen block saves is exactly what its adjoint needs: weights, held factors, queries and keys of a fused
kernel, and no activation besides. Graphs are kept while memory lasts; of the other blocks only the state that entered
stays, and their graph is made again when it is needed. Nothing of size L × L exists unless the model makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.frozen_model import FrozenModel, fingerprint, freeze
from tensorlens.freezing.interception import own_precision, running
from tensorlens.freezing.interpreter import Pass
from tensorlens.freezing.layouts import constants, find_state, first_tensor, put_state, replace_state
from tensorlens.freezing.tape import Site, Tape
from tensorlens.freezing.traced import mark, plain
from tensorlens.freezing.walk import Heads, Span, StartAtEmbedding, Walk
from tensorlens.memory import clear_memory, free_bytes
from tensorlens.models.anatomy import Anatomy

TAPE_SHARE = 0.3
"""Part of the free memory that a tape may take; beyond it the input is streamed."""

RESERVE = 0.2
"""Part of the memory free at the start that graphs leave free, if a block at work needs no more."""

WORKING_BYTES = 24
"""What a block takes at the peak for each token and channel of its widest layer: gates in float32, and copies."""

COTANGENT_SHARE = 0.1
"""Part of the free memory that cotangents may take that go through the blocks together."""


def hold(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> FrozenModel:
    """Freeze a model at an input, with a tape if memory allows and streamed if not."""
    if tape_bytes(anatomy, inputs) > TAPE_SHARE * free_bytes(next(anatomy.model.parameters()).device):
        streamed = stream(anatomy, inputs, rules)
        if streamed is not None:
            return streamed
    return freeze(anatomy, inputs, rules)


def tape_bytes(anatomy: Anatomy, inputs: dict[str, Any]) -> int:
    """About how much a tape would take; 0 where the inputs do not say how many tokens there are."""
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor):
        return 0
    return anatomy.bytes_per_token * tokens.shape[1]


class Call(NamedTuple):
    """How a block was called; the hidden state among the arguments is the recorded one."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class OpenTape(Tape):
    """A tape that keeps what is held outside of blocks, and of blocks only what is opened."""

    opened: set[str] = field(default_factory=set)

    def put(self, site: Site, factor: Any) -> Any:
        """Keep `factor`, unless it belongs to a closed block, and give it back."""
        if not site.place.startswith("block ") or site.place in self.opened:
            self.factors[site] = factor
        return factor


@dataclass
class StreamedModel(FrozenModel):
    """A frozen model whose blocks are recomputed, or kept as graphs, instead of held on a tape.

    Costs the hidden states, and as many blocks' graphs as memory allows.

    Attributes:
        calls: How each block was called.
        leaves: The state entering each block, as the leaf of its graph.
        edges: Where the graph of each block ends, for blocks whose graph is kept.
        end: $X^N$ with the graph from the last block on.
        end_logits: The same for what the model ends with.
        keeps_graphs: Whether graphs are kept at all.
    """

    tape: OpenTape = field(default_factory=OpenTape)  # type: ignore[assignment]
    calls: list[Call] = field(default_factory=list)
    leaves: list[Tensor] = field(default_factory=list)
    edges: dict[int, GradientEdge] = field(default_factory=dict)
    end: Tensor | None = None
    end_logits: Tensor | None = None
    keeps_graphs: bool = True

    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        """The affine function, a block at a time: its factors are made again, used and let go."""
        for n in range(*span):
            with self.opened(n):
                x = FrozenModel.push(self, x, Span(n, n + 1), heads)
        return x

    def push_logits(self, x: Tensor, out_token: int, start: int = 0, heads: Heads | None = None) -> Tensor:
        """As `push`, to the logits."""
        last = self.n_blocks - 1
        x = self.push(x, Span(start, last), heads)
        with self.opened(last):
            return FrozenModel.push_logits(self, x, out_token, last, heads)

    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *,
        read: Callable[[Tensor], Tensor] | None = None, to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        """The adjoint, one block at a time, for as many cotangents as go into memory beside it."""
        self.check_weights()
        n_bytes = max(1, self.hidden[span.start].nbytes)
        size = max(1, min(chunk, int(COTANGENT_SHARE * free_bytes(cotangents.device) / n_bytes)))
        parts = [
            self._pull_some(part, span, heads or {}, read or (lambda y: y[0]), to_logits)
            for part in cotangents.split(size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @contextmanager
    def graph(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Iterator[Any]:
        """As for any frozen model; for as long as it lasts, all blocks of the range are on the tape."""
        with self.opened(*range(*span)), FrozenModel.graph(self, span, heads, to_logits=to_logits) as joined:
            yield joined

    def _pull_some(
        self, us: Tensor, span: Span, heads: Heads, read: Callable[[Tensor], Tensor], to_logits: bool
    ) -> Tensor:
        n = span.stop
        if n < self.n_blocks:
            x = self.hidden[n].detach().requires_grad_()
            cs = _gradients(read(x), x, us)
        elif self.n_blocks - 1 in heads:
            n -= 1
            with self.opened(n):
                cs = FrozenModel.pull(self, us, Span(n, n + 1), heads, read=read, to_logits=to_logits, chunk=1)
        else:
            n -= 1
            end = self.end_logits if to_logits else self.end
            assert end is not None, "a recording ends with a state"
            with own_precision(), torch.enable_grad():
                cs = _gradients(read(end), self.leaves[n], us)
        for block in range(n - 1, span.start - 1, -1):
            cs = self._pull_block(block, cs, heads)
        return cs

    def _pull_block(self, n: int, cs: Tensor, heads: Heads) -> Tensor:
        if n in heads:  # what the block holds comes from all of its heads
            with self.opened(n):
                return FrozenModel.pull(self, cs, Span(n, n + 1), heads, chunk=1)
        if n in self.edges:
            return _gradients(self.edges[n], self.leaves[n], cs[:, None])
        try:
            return self._pull_again(n, cs)
        except torch.OutOfMemoryError:
            if not self.edges:
                raise
        self.edges.clear()  # graphs were kept for speed alone
        clear_memory()
        return self._pull_again(n, cs)

    def _pull_again(self, n: int, cs: Tensor) -> Tensor:
        """Through a block whose graph was not kept: it is made again, once for all cotangents."""
        with without_weight_gradients(self.anatomy.model):
            leaf = self.hidden[n].detach().requires_grad_()
            return _gradients(plain(self._run_block(n, leaf, grad=True)), leaf, cs[:, None])

    @contextmanager
    def opened(self, *blocks: int) -> Iterator[None]:
        """Put the factors of some blocks on the tape, for as long as it lasts."""
        places = {f"block {n}" for n in blocks}
        self.tape.opened |= places
        try:
            for n in blocks:
                self._run_block(n, self.hidden[n], grad=False)
            yield
        finally:
            self.tape.opened -= places
            self.tape.factors = {s: f for s, f in self.tape.factors.items() if s.place not in places}

    def _run_block(self, n: int, x: Tensor, *, grad: bool) -> Tensor:
        """One block at the recorded state, freezing as it goes."""
        model = self.anatomy.model
        names = {id(module): name for name, module in model.named_modules()}
        run = Pass(names=names, tape=self.tape, recording=True, rules=self.rules, grad=grad)
        run.block, run.place = n, f"block {n}"
        module, args, kwargs = self.calls[n]
        with running(run, model), torch.set_grad_enabled(grad):
            args, kwargs = put_state(args, kwargs, mark(x.view_as(x), live=True))
            return first_tensor(module(*args, **kwargs))


def _gradients(y: Tensor | GradientEdge, x: Tensor, cotangents: Tensor) -> Tensor:
    """The gradient at x for each cotangent of y: one backward pass each, since a batch of them takes so much more."""
    gradients = [torch.autograd.grad(y, x, u, retain_graph=True)[0] for u in cotangents]
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def stream(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> StreamedModel | None:
    """Run the model once and hold it without a tape; None for a model whose blocks are no plain chain."""
    try:
        return _streamed(StreamedModel(anatomy=anatomy, inputs=inputs, rules=rules or Rules()))
    except torch.OutOfMemoryError:
        pass
    clear_memory()
    return _streamed(StreamedModel(anatomy=anatomy, inputs=inputs, rules=rules or Rules(), keeps_graphs=False))


def _streamed(frozen: StreamedModel) -> StreamedModel | None:
    anatomy = frozen.anatomy
    with own_precision(), without_weight_gradients(anatomy.model):
        try:
            readout = _Recording(frozen).go()
        except StartAtEmbedding:
            return None
    if frozen.side_channels or frozen.n_encoder_blocks or len(frozen.hidden) <= frozen.n_blocks:
        return None
    if not frozen.rules.include_final_norm:
        return None
    frozen.weights = fingerprint(anatomy.model)
    if frozen.has_head:
        frozen.readout, frozen.end_logits = readout.detach(), readout
    return frozen


@contextmanager
def without_weight_gradients(model: nn.Module) -> Iterator[None]:
    """No gradient for weights while this lasts: a graph then saves no activations for them."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


class _Recording(Walk):
    """The recording of a streamed model: every block begins at a leaf of its own."""

    frozen: StreamedModel

    def __init__(self, frozen: StreamedModel) -> None:
        super().__init__(frozen, recording=True, grad=True, to_logits=True)
        self.free_at_start = free_bytes(next(frozen.anatomy.model.parameters()).device)
        weights = [p for p in frozen.anatomy.blocks[0].parameters() if p.dim() == 2]
        self.widest = max((max(weight.shape) for weight in weights), default=0)

    def go(self) -> Tensor:
        """Run with gradients on: the graph is the record."""
        with torch.enable_grad():
            return plain(super().go())

    def _begins(self, n: int) -> bool:
        return True

    def _substitute(self, n: int, state: Tensor) -> Tensor:
        frozen = self.frozen
        frozen.hidden[n] = frozen.hidden[n].detach()
        if n:
            self._close(n - 1, frozen.hidden[n])
        frozen.leaves.append(frozen.hidden[n].detach().requires_grad_())
        return mark(frozen.leaves[n].view_as(frozen.leaves[n]), live=True)

    def _close(self, n: int, state: Tensor) -> None:
        """The block before is over: its output is the state that entered here, and its graph stays if memory lasts."""
        frozen = self.frozen
        output = frozen.block_outputs[n]
        frozen.block_outputs[n] = replace_state(output, first_tensor(output), state)
        to_come = (len(frozen.anatomy.blocks) - n) * state.nbytes + self.widest * state.shape[1] * WORKING_BYTES
        if not frozen.keeps_graphs or free_bytes(state.device) < max(RESERVE * self.free_at_start, to_come):
            frozen.edges.pop(n, None)

    def _run_block(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        n = self.n_entered
        output = super()._run_block(module, forward, args, kwargs)
        old = find_state(args, kwargs)
        kept = (constants(tuple(self.frozen.hidden[n] if value is old else value for value in args)),
                {k: self.frozen.hidden[n] if value is old else value for k, value in kwargs.items()})  # fmt: skip
        self.frozen.calls.append(Call(module, kept[0], constants(kept[1])))
        self.frozen.edges[n] = get_gradient_edge(plain(first_tensor(output)))
        return output

    def _leave_body(self, state: Tensor) -> None:
        super()._leave_body(state)
        self.frozen.end = self.frozen.layouts[-1].to_tokens(plain(state))
