"""The residual stream by dataflow: which sums of a replay are writes to it, and what wrote.

No module is known by name. In the autograd graph of a replay, a sum whose terms are $x, f(x), g(x), …$ is a write to
the stream: the stream is the term that all the others were computed from. So pre-norm, post-norm, parallel and sandwich
blocks come out alike; a block in which no way down such sums leads from its output to its input is one piece.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.layouts import state_of
from tensorlens.freezing.observe import meeting
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.traced import Traced, constant, is_live, raw

PASSES_ON = frozenset(
    f"{name}Backward0" for name in ("ToCopy", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Expand")
)
"""Nodes after which a state is still the same state."""

TELLING = frozenset(["add", "add_", "scaled_dot_product_attention", "matmul", "bmm"])
"""Functions that may write to the stream, or mix values by attention; the others need not be looked at."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """What the heads of one attention mixed, (head, token, channel), and where in the graph."""

    edge: GradientEdge
    value: Tensor


@dataclass(frozen=True, eq=False)
class Write:
    """Something added to the stream: where in the graph, its value, and the attention behind it, if any."""

    edge: GradientEdge
    value: Tensor
    mixtures: tuple[Mixture, ...]


class Sum(NamedTuple):
    """A sum that writes to the stream: where its result is, what was written, and the stream that it was added to."""

    edge: GradientEdge
    writes: tuple[Write, ...]
    stream: GradientEdge
    stream_value: Tensor
    value: Tensor


class MapStep(NamedTuple):
    """A matrix that was applied: where what it took is in the graph, that value, and the node of what it gave."""

    edge: GradientEdge
    value: Tensor
    node: Node


class StreamObserver:
    """Watches a replay build its graph: the sums, what attention mixed, and the state after each block."""

    def __init__(self, recording: Recording, neurons: frozenset[int] = frozenset()) -> None:
        self.neurons = neurons
        self.steps: dict[Node, MapStep] = {}
        self._blocks = {id(block) for block in recording.anatomy.blocks}
        self._place = recording.anatomy.state_place
        self._encoder = recording.anatomy.encoder if recording.n_encoder_blocks else None
        self.memory: tuple[GradientEdge, Tensor] | None = None
        self.values: dict[tuple[Node, int], Tensor] = {}
        self.sums: dict[Node, tuple[GradientEdge, GradientEdge]] = {}
        self.mixtures: dict[int, list[Mixture]] = {}
        self.outputs: dict[int, tuple[GradientEdge, Tensor]] = {}
        self.first_nodes: dict[int, int] = {}
        self.modules: dict[tuple[int, Node], list[str]] = {}
        self.takers: dict[Node, str] = {}
        self.n_calls: Counter[str] = Counter()

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep a sum of two live tensors, or what attention mixed."""
        if run.block is None or name not in TELLING and run.block in self.first_nodes or not is_live(result):
            return
        if not raw(getattr, result, "requires_grad"):
            return
        edge = edge_of(result)
        self.first_nodes.setdefault(run.block, order(edge.node))
        if name in ("add", "add_"):
            self._keep_sum(edge, args, kwargs, result, is_in_place=name == "add_")
        met = meeting(run, name, args, kwargs, result)
        if met is not None:
            self.mixtures.setdefault(run.block, []).append(Mixture(edge, met.mixture))

    def _keep_sum(
        self, edge: GradientEdge, args: tuple[Any, ...], kwargs: dict[str, Any], result: Traced, *, is_in_place: bool
    ) -> None:
        terms = (*args, *(kwargs[name] for name in ("other",) if name in kwargs))
        parents = [GradientEdge(node, place) for node, place in edge.node.next_functions if node is not None]
        is_sum = len(terms) == len(parents) == 2 and all(map(is_live, terms)) and kwargs.get("alpha", 1) == 1
        if not is_sum or edge.node.name() != "AddBackward0" or terms[0].shape != terms[1].shape:
            return
        # Copies: the model may write over its states later.
        self.sums[edge.node] = parents[0], parents[1]
        value = self.values[_key(edge)] = constant(result).clone()
        first, second = map(_key, parents)
        if second not in self.values:
            self.values[second] = constant(terms[1]).clone()
        if first not in self.values:
            self.values[first] = value - self.values[second] if is_in_place else constant(terms[0]).clone()

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep the state that a block leaves, and what the encoder hands to the decoder."""
        if run.block is None and self._encoder is not None and run.module == self._encoder:
            state = state_of(output)
            self.memory = edge_of(state), constant(state).clone()
        self.n_calls[run.module] += 1
        self._keep_taker(run, args)
        first: Any = output[0] if isinstance(output, tuple) and output else output
        node = raw(getattr, first, "grad_fn") if run.block is not None and is_live(first) else None
        if run.block is not None and node is not None:
            self.modules.setdefault((run.block, node), []).append(run.module)  # the outermost last
            self._keep_step(run.block, module, args, node)
        if id(module) in self._blocks and run.block is None:
            state = state_of(output, self._place)
            if raw(getattr, state, "requires_grad"):
                self.outputs[run.place.block] = edge_of(state), constant(state).clone()

    def _keep_step(self, block: int, module: nn.Module, args: tuple[Any, ...], node: Node) -> None:
        if block not in self.neurons:
            return
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, Tensor) and weight.dim() == 2 and not any(True for _ in module.children())
        if is_matrix and args and is_live(args[0]):
            self.steps[node] = MapStep(edge_of(args[0]), constant(args[0]).clone(), node)

    def last_matrix(self, write: Write) -> MapStep | None:
        """The last matrix that a write went through, by whose input its neurons can be told apart."""
        ahead, met = [(-order(write.edge.node), 0, write.edge.node)], {write.edge.node}
        while ahead and self.steps:
            _, _, node = heapq.heappop(ahead)
            if node in self.steps:
                return self.steps[node]
            for parent, _ in node.next_functions:
                if parent is not None and parent not in met:
                    met.add(parent)
                    heapq.heappush(ahead, (-order(parent), len(met), parent))
        return None

    def _keep_taker(self, run: Interpreter, args: tuple[Any, ...]) -> None:
        """Notice the module that takes in what heads mixed, side by side: the output projection."""
        mixtures = [] if run.block is None else self.mixtures.get(run.block, [])
        open_ones = [mixture for mixture in mixtures if mixture.edge.node not in self.takers]
        if not open_ones or not args or not is_live(args[0]):
            return
        for mixture in open_ones:
            value = mixture.value[0] if mixture.value.dim() == 4 and len(mixture.value) == 1 else mixture.value
            if value.dim() != 3 or value.numel() != args[0].numel():
                continue
            beside = value.transpose(0, 1).flatten(1)
            if torch.equal(constant(args[0]).reshape(beside.shape), beside):
                self.takers[mixture.edge.node] = run.module


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where a tensor is in the graph."""
    return raw(get_gradient_edge, tensor)


def by_head(x: Tensor) -> Tensor:
    """(…, head, token, channel) as (head, token, channel)."""
    return x.flatten(0, -3)


def _key(edge: GradientEdge) -> tuple[Node, int]:
    return edge.node, edge.output_nr


def order(node: Node) -> int:
    """When a node was made; leaves come before everything."""
    return -1 if node.name() == "torch::autograd::AccumulateGrad" else node._sequence_nr()  # type: ignore[attr-defined]


@dataclass
class Stream:
    """The stream in the graph of one replay.

    Args:
        seen: What observed the replay.
        target: Where the graph ends.
        leaf: The node of the state it begins with.
    """

    seen: StreamObserver
    target: Node
    leaf: Node
    _live: dict[Node, int] = field(init=False, repr=False)
    _known: dict[Node, list[Node]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Find the nodes that the state reaches; the others are parameters' alone."""
        self._live = _reached_from(self.leaf, self.target)

    def sums(self, block: int, start: GradientEdge, entry: Node) -> list[Sum] | None:
        """The writes of one block, the last first; None where its parts cannot be told apart.

        Args:
            block: Which one.
            start: The state that it leaves.
            entry: The node of the state that enters it.
        """
        found: list[Sum] = []
        node = start.node
        while True:
            node = self._next_sum(block, node, entry)
            if node is entry:
                return found
            one = None if node is None else self._sum(block, node, entry)
            if one is None:
                return None
            found.append(one)
            node = one.stream.node

    def _next_sum(self, block: int, node: Node, entry: Node) -> Node | None:
        """The nearest sum that all of the stream goes through on its way back, or the block's entry."""
        mixtures = {mixture.edge.node for mixture in self.seen.mixtures.get(block, ())}
        ahead, met = [(-order(node), 0, node)], {node}
        while ahead:
            _, _, node = heapq.heappop(ahead)
            if node is entry or not ahead and node in self.seen.sums:
                return node if not ahead else None
            if node in mixtures:
                return None
            for parent in self._parents(node):
                if parent not in met:
                    met.add(parent)
                    heapq.heappush(ahead, (-order(parent), len(met), parent))
        return None

    def _sum(self, block: int, root: Node, entry: Node) -> Sum | None:
        """Take a sum apart: the stream is the nearest term that every other one was computed from.

        In $(x + f(x)) + g(x + f(x))$ that is $x + f(x)$, a sum itself; in $(f(x) + g(x)) + x$ it is $x$.
        """
        aside = {entry} if self.seen.memory is None else {entry, self.seen.memory[0].node}
        # With attention held, what a decoder reads of the encoder comes from no stream of its own.
        terms = [
            (way, term)
            for way, term in self._terms(root, entry, ())
            if entry in self._ancestors(term.node, order(entry), aside)
        ]
        ways = dict.fromkeys(
            way[:n] for n in range(1, max((len(way) for way, _ in terms), default=0) + 1, 2) for way, _ in terms
        )
        for way in ways:
            term = self.seen.sums[(root, *way)[-2]][way[-1]]
            others = [other.node for place, other in terms if place[: len(way)] != way]
            for origin in (term.node, self._same_state(term.node)):
                if all(self._comes_from(other, origin) for other in others):
                    return self._split(block, (root, *way), term, {origin, term.node})
        return None

    def _terms(self, node: Node, entry: Node, way: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], GradientEdge]]:
        """What a sum of sums adds up, each with the way to it: turns, and sums between them."""
        for i, parent in enumerate(self.seen.sums[node]):
            further = (*way, i)
            if parent.node in self.seen.sums and parent.node is not entry:
                yield from self._terms(parent.node, entry, (*further, parent.node))
            else:
                yield further, parent

    def _split(self, block: int, way: tuple[Any, ...], stream: GradientEdge, stops: set[Node]) -> Sum:
        """The siblings along the way from a sum to its stream are what was written."""
        passed, turns = way[::2], way[1::2]
        stops = stops | set(passed)
        others = [self.seen.sums[node][1 - turn] for node, turn in zip(passed, turns, strict=True)]
        writes = [part for other in others for part in self._parts(block, other, stops)]
        edge, values = GradientEdge(passed[0], 0), self.seen.values
        return Sum(edge, tuple(writes), stream, values[_key(stream)], values[_key(edge)])

    def _parts(self, block: int, edge: GradientEdge, stops: set[Node]) -> Iterator[Write]:
        """One write, or two where attention and feed-forward were added up before they were written (parallel)."""
        if edge.node in self.seen.sums:
            parts = self.seen.sums[edge.node]
            if len([part for part in parts if self._mixed(block, part.node, stops)]) == 1:
                for part in parts:
                    yield from self._parts(block, part, stops)
                return
        yield Write(edge, self.seen.values[_key(edge)], self._mixed(block, edge.node, stops))

    def _mixed(self, block: int, node: Node, stops: set[Node]) -> tuple[Mixture, ...]:
        """The attention that a write was computed from since it left the stream."""
        reached = self._ancestors(node, self.seen.first_nodes.get(block, 0), stops)
        return tuple(mixture for mixture in self.seen.mixtures.get(block, ()) if mixture.edge.node in reached)

    def _same_state(self, node: Node) -> Node:
        while node.name() in PASSES_ON and self._parents(node):
            node = self._parents(node)[0]
        return node

    def _comes_from(self, node: Node, origin: Node) -> bool:
        return origin in self._ancestors(node, order(origin), {origin})

    def _ancestors(self, node: Node, since: int, stops: set[Node]) -> set[Node]:
        ahead, met = [node], {node}
        while ahead:
            node = ahead.pop()
            if node in stops:
                continue
            for parent in self._parents(node):
                if parent not in met and self._live[parent] >= since:
                    met.add(parent)
                    ahead.append(parent)
        return met

    def _parents(self, node: Node) -> list[Node]:
        found = self._known.get(node)
        if found is None:
            found = self._known[node] = [parent for parent, _ in node.next_functions if parent in self._live]
        return found


def _reached_from(leaf: Node, target: Node) -> dict[Node, int]:
    """The nodes between a leaf and the target, and when each was made."""
    nodes, ahead = {target}, [target]
    children: dict[Node, list[Node]] = {}
    while ahead:
        node = ahead.pop()
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            children.setdefault(parent, []).append(node)
            if parent not in nodes:
                nodes.add(parent)
                ahead.append(parent)
    live, ahead = {leaf: order(leaf)}, [leaf]
    while ahead:
        for child in children.get(ahead.pop(), ()):
            if child not in live:
                live[child] = order(child)
                ahead.append(child)
    return live


def pulled(edge: GradientEdge, cotangents: Tensor, back_to: GradientEdge) -> Tensor:
    """Cotangents (row, …) of one place in the graph at an earlier one that it was computed from."""
    if edge.node is back_to.node:
        return cotangents
    is_one = len(cotangents) == 1
    found = torch.autograd.grad(
        [edge], [back_to], [cotangents[0] if is_one else cotangents], retain_graph=True, allow_unused=True,
        is_grads_batched=not is_one,
    )[0]  # fmt: skip
    assert found is not None, "asked of places that are connected"
    return found[None] if is_one else found
