r"""Long inputs: a recording that keeps no factors of its blocks.

The recording itself builds the autograd graph, block by block, with every factor detached where it is made. What a
graph of a frozen block saves is exactly what its adjoint needs: weights, held factors, queries and keys of a fused
kernel, and no activation besides. Graphs are kept while memory lasts; of the other blocks only the state that entered
stays, and their graph is made again when it is needed. Nothing of size L × L exists unless the model makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorlens import cancel
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.factors import RecalledFactors, SomeFactors
from tensorlens.freezing.interception import own_precision, running
from tensorlens.freezing.interpreter import Factors, Forward, Heads, Interpreter
from tensorlens.freezing.layouts import constants, find_state, put_state, replace_state, state_of
from tensorlens.freezing.places import Place, Span
from tensorlens.freezing.proof import Proof
from tensorlens.freezing.recorder import Call, Recorder
from tensorlens.freezing.recording import OtherParts, Recording, RecordOptions, StartAtEmbedding, Unaudited
from tensorlens.freezing.replay import FactorReplay, Joined, Read, Replay
from tensorlens.freezing.replayed import check_unchanged
from tensorlens.freezing.traced import Traced, mark, plain
from tensorlens.memory import clear_memory, free_bytes
from tensorlens.models.anatomy import Anatomy

RESERVE = 0.2
"""Part of the memory free at the start that graphs leave free, if a block at work needs no more."""

WORKING_BYTES = 24
"""What a block takes at the peak for each token and channel of its widest layer: gates in float32, and copies."""

COTANGENT_SHARE = 0.1
"""Part of the free memory that cotangents may take that go through the blocks together."""


class LongInput(Replay):
    """The affine function of a recording whose blocks are recomputed, or kept as graphs.

    Costs the hidden states, and as many blocks' graphs as memory allows.

    Attributes:
        calls: How each block was called.
        leaves: The state entering each block, as the leaf of its graph.
        edges: Where the graph of each block ends, for blocks whose graph is kept.
        end: $X^N$ with the graph from the last block on.
        end_logits: The same for what the model ends with.
        kept: Blocks whose factors stay in memory since a push needed them.
    """

    def __init__(
        self, recording: Recording, factors: SomeFactors, calls: list[Call], leaves: list[Tensor],
        edges: dict[int, GradientEdge], end: Tensor, end_logits: Tensor, reserve: float = 0,
    ) -> None:  # fmt: skip
        self.recording, self.factors, self.calls, self.leaves, self.edges = recording, factors, calls, leaves, edges
        self.end, self.end_logits, self._reserve = end, end_logits, reserve
        self.kept: set[int] = set()
        self._by_factors = FactorReplay(recording)
        self._paths = {id(module): name for name, module in recording.model.named_modules()}

    @property
    def keeps_factors(self) -> bool:
        """No."""
        return False

    def distrust(self, proof: Proof) -> None:
        """Let every block go by its factors from now on, which takes longer."""
        found = f"differed from a replay by {proof.error:.1e} (accepted: {proof.tolerance:.0e})"
        if math.isinf(proof.error):
            found = "could not be compared with a replay, since the model does not run on the first few tokens alone"
        self.fallback = f"blocks by themselves {found}; each block's factors are made again instead"
        self.edges.clear()

    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        """The affine function, a block at a time: its factors are made again, and stay while memory lasts."""
        check_unchanged(self.recording)
        samples = list(x.split(1))
        for n in range(*span):
            cancel.check()
            with self.opened(n), own_precision(), torch.no_grad():
                for i, sample in enumerate(samples):
                    samples[i] = self._push_block(n, sample, heads)
        return samples[0] if len(samples) == 1 else torch.cat(samples)

    def _push_block(self, n: int, x: Tensor, heads: Heads | None) -> Tensor:
        if n == self.recording.n_blocks - 1 or self.fallback:  # what follows the last is not in any block
            return self._by_factors.push(x, Span(n, n + 1), heads)
        return self._run_block(n, x, RecalledFactors(self.factors), heads=heads)

    def push_to_head(self, x: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """As `push`, on through the head."""
        last = self.recording.n_blocks - 1
        x = self.push(x, Span(start, last), heads)
        with self.opened(last):
            return torch.cat([self._by_factors.push_to_head(sample, last, heads) for sample in x.split(1)])

    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *, read: Read | None = None,
        to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        """The adjoint, one block at a time, for as many cotangents as go into memory beside it."""
        check_unchanged(self.recording)
        n_bytes = max(1, self.recording.states[span.start].nbytes)
        size = max(1, min(chunk, int(COTANGENT_SHARE * free_bytes(cotangents.device) / n_bytes)))
        parts = [
            self._pull_some(part, span, heads or {}, read or (lambda y: y[0]), to_logits)
            for part in cotangents.split(size)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @contextmanager
    def graph(self, span: Span, heads: Heads | None = None, *, to_logits: bool = False) -> Iterator[Joined]:
        """As by factors; for as long as it lasts, those of all blocks of the range are in memory."""
        with self.opened(*range(*span)), self._by_factors.graph(span, heads, to_logits=to_logits) as joined:
            yield joined

    def _pull_some(self, us: Tensor, span: Span, heads: Heads, read: Read, to_logits: bool) -> Tensor:
        n, n_blocks = span.stop, self.recording.n_blocks
        if n < n_blocks:
            x = self.recording.states[n].detach().requires_grad_()
            cs = _gradients(read(x), x, us)
        elif n_blocks - 1 in heads or self.fallback:
            n -= 1
            with self.opened(n):
                cs = self._by_factors.pull(us, Span(n, n + 1), heads, read=read, to_logits=to_logits, chunk=1)
        else:
            n -= 1
            with own_precision(), torch.enable_grad():
                cs = _gradients(read(self.end_logits if to_logits else self.end), self.leaves[n], us)
        for block in range(n - 1, span.start - 1, -1):
            cs = self._pull_block(block, cs, heads)
        return cs

    def _pull_block(self, n: int, cs: Tensor, heads: Heads) -> Tensor:
        if n in heads or self.fallback:  # what the block holds comes from all of its heads
            with self.opened(n):
                return self._by_factors.pull(cs, Span(n, n + 1), heads, chunk=1)
        if n in self.edges:
            return _gradients(self.edges[n], self.leaves[n], cs[:, None])
        try:
            return self._pull_again(n, cs)
        except torch.OutOfMemoryError:
            if not self.edges and not self.kept:
                raise
        self.edges.clear()  # graphs and factors were kept for speed alone
        self._forget(self.kept)
        clear_memory()
        return self._pull_again(n, cs)

    def _pull_again(self, n: int, cs: Tensor) -> Tensor:
        """Through a block whose graph was not kept: it is made again, once for all cotangents."""
        with own_precision(), without_weight_gradients(self.recording.model):
            leaf = self.recording.states[n].detach().requires_grad_()
            return _gradients(self._run_block(n, leaf, self.factors, grad=True), leaf, cs[:, None])

    @contextmanager
    def opened(self, *blocks: int) -> Iterator[None]:
        """Keep the factors of some blocks for as long as it lasts, and afterwards while memory lasts."""
        new = set(blocks) - self.kept
        self.factors.open |= new
        try:
            for n in sorted(new):
                self._run_block(n, self.recording.states[n], self.factors)
                self.kept.add(n)
            yield
        finally:
            self.factors.open -= new
            if self.kept != new | self.kept or free_bytes(self.recording.states[0].device) < self._reserve:
                self._forget(new)

    def _forget(self, blocks: set[int]) -> None:
        for site in [site for site in self.factors if site.place.inside and site.place.block in blocks]:
            del self.factors[site]
        self.kept = self.kept - blocks

    def _run_block(
        self, n: int, x: Tensor, factors: Factors, *, grad: bool = False, heads: Heads | None = None
    ) -> Tensor:
        """One block at a state (sample, token, channel), by itself: its factors are held as it goes, or put back."""
        recording, (module, args, kwargs) = self.recording, self.calls[n]
        run = Interpreter(
            module, rules=recording.rules, factors=factors, route=_Straight(), recording=factors is self.factors,
            grad=grad, heads=heads, prefix=self._paths[id(module)],
        )  # fmt: skip
        run.place = Place(n, inside=True)
        layout = recording.layouts[n]
        with running(run, module), torch.set_grad_enabled(grad):
            native = layout.to_native(x)
            live, place = mark(native.view_as(native), live=True), recording.anatomy.entry_place
            args, kwargs = put_state(args, kwargs, live, place)
            output = plain(state_of(module(*args, **kwargs), recording.anatomy.state_place))
            return recording.layouts[n + 1].to_tokens(output)


class _Straight:
    """The route of a pass through one block: every module as it is."""

    def run_module(
        self, run: Interpreter, module: nn.Module, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run it."""
        return forward(*args, **kwargs)

    def note_sources(self, run: Interpreter, live: list[Traced]) -> None:
        """Nothing to learn."""


def _gradients(y: Tensor | GradientEdge, x: Tensor, cotangents: Tensor) -> Tensor:
    """The gradient at x for each cotangent of y: one backward pass each, since a batch of them takes so much more."""
    found = [torch.autograd.grad(y, x, u, retain_graph=True)[0] for u in cotangents]
    return found[0] if len(found) == 1 else torch.cat(found)


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


def record_long(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> LongInput | None:
    """Run the model once and keep no factors of its blocks; None for a model whose blocks are no plain chain."""
    if rules is not None and not rules.include_final_norm:
        return None
    try:
        return _record_long(anatomy, inputs, rules or Rules(), keeps_graphs=True)
    except torch.OutOfMemoryError:
        pass
    clear_memory()
    return _record_long(anatomy, inputs, rules or Rules(), keeps_graphs=False)


def _record_long(
    anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, *, keeps_graphs: bool, audits: bool = False
) -> LongInput | None:
    blocks, factors = _BlockGraphs(anatomy, keeps_graphs=keeps_graphs), SomeFactors()
    recorder = Recorder(
        anatomy, inputs, rules, RecordOptions(), grad=True, factors=factors, blocks=blocks, audits=audits
    )
    with own_precision(), without_weight_gradients(anatomy.model), torch.enable_grad():
        try:
            recording = recorder.go()
        except (StartAtEmbedding, OtherParts):
            return None
        except Unaudited:
            del blocks, factors, recorder  # and the graphs
            return _record_long(anatomy, inputs, rules, keeps_graphs=keeps_graphs, audits=True)
    if recording is None or recording.side_channels or recording.n_encoder_blocks or recording.graph is None:
        return None
    graph, recording = recording.graph, replace(recording, graph=None)
    assert graph.end is not None, "the rules leave the final norm inside"
    reserve = RESERVE * blocks.free_at_start
    return LongInput(recording, factors, blocks.calls, blocks.leaves, blocks.edges, graph.end, graph.readout, reserve)


class _BlockGraphs:
    """Lets every block of a recording begin at a leaf of its own, and keeps its graph while memory lasts."""

    def __init__(self, anatomy: Anatomy, *, keeps_graphs: bool) -> None:
        self.keeps_graphs, self.n_blocks = keeps_graphs, len(anatomy.blocks)
        self.calls: list[Call] = []
        self.leaves: list[Tensor] = []
        self.edges: dict[int, GradientEdge] = {}
        self.free_at_start = free_bytes(next(anatomy.model.parameters()).device)
        weights = [p for p in anatomy.blocks[0].parameters() if p.dim() == 2]
        self.widest = max((max(weight.shape) for weight in weights), default=0)

    def enter(self, recorder: Recorder, n: int) -> Tensor:
        """The leaf that stands for the state entering block n."""
        state = recorder.states[n] = recorder.states[n].detach()
        if n:
            self._close(recorder, n - 1, state)
        leaf = state.detach().requires_grad_()
        self.leaves.append(leaf)
        x = recorder.layouts[n].to_native(leaf)
        return mark(x.clone(), live=True)

    def leave(self, recorder: Recorder, n: int, call: Call, output: Any) -> None:
        """Keep how block n was called, with the recorded state, and where its graph ends."""
        place = recorder.anatomy.entry_place
        old, state = find_state(call.args, call.kwargs, place=place), recorder.states[n]
        args = tuple(state if value is old else value for value in call.args)
        kwargs = {name: state if value is old else value for name, value in call.kwargs.items()}
        self.calls.append(Call(call.module, constants(args), constants(kwargs)))
        self.edges[n] = get_gradient_edge(plain(state_of(output)))

    def _close(self, recorder: Recorder, n: int, state: Tensor) -> None:
        """The block before is over: its output is the state that entered here, and its graph stays if memory lasts."""
        output = recorder.block_outputs[n]
        recorder.block_outputs[n] = replace_state(output, state_of(output), state)
        to_come = (self.n_blocks - n) * state.nbytes + self.widest * state.shape[1] * WORKING_BYTES
        if not self.keeps_graphs or free_bytes(state.device) < max(RESERVE * self.free_at_start, to_come):
            self.edges.pop(n, None)
