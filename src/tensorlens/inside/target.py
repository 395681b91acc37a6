"""A replay with its graph, and the number at its end that is explained."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.nn.functional import pad

from tensorlens.errors import InputError, MethodError
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import logits_at, read_logits
from tensorlens.freezing.replayed import replayed
from tensorlens.freezing.traced import plain
from tensorlens.inside.experts import ExpertObserver, ExpertPart
from tensorlens.inside.stream import Stream, StreamObserver, Sum, edge_of
from tensorlens.maps.context import Context
from tensorlens.maps.targets import Classes, Target, no_head
from tensorlens.operators.base import check_token
from tensorlens.operators.operator import FrozenOperator

Weights = dict[int, float]


class Finer(NamedTuple):
    """Blocks whose feed-forwards are taken apart: into neurons, or into experts."""

    neurons: frozenset[int] = frozenset()
    experts: frozenset[int] = frozenset()


def weights_of(operator: FrozenOperator, classes: Classes | None, target: Target | Weights | None, i: int) -> Weights:
    """Weights on logits: of the target, or of the model's own first choice at output i."""
    recording = operator.recording
    if classes is None or recording.readout is None:
        raise no_head(recording.anatomy.model)
    if isinstance(target, dict):
        if not target or not all(isinstance(weight, Real) and math.isfinite(weight) for weight in target.values()):
            raise InputError(f"Weights must be {{id: number}} with at least one, none of them NaN; got {target!r:.80}.")
        return {classes.index(index): float(weight) for index, weight in target.items()}
    return classes.weights(int(logits_at(recording, i).argmax()) if target is None else target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """What is explained: a target at one output of an input.

    Attributes:
        operator: Of the input.
        classes: Names of the classes.
        out_token: Where the target is read.
        target: A token or class, a pair for a contrast, weights by class; the model's own first choice if None.
        tokens: A label for each token.
        meta: Model, versions, rules, blocks, output, as records say them.
    """

    operator: FrozenOperator
    classes: Classes | None
    out_token: int
    target: Target | Weights | None
    tokens: tuple[str, ...]
    meta: dict[str, Any]

    @classmethod
    def at(
        cls, operator: FrozenOperator, context: Context, meta: dict[str, Any], out_token: int,
        target: Target | Weights | None,
    ) -> Explained:  # fmt: skip
        """The target at an output; a head that reads the whole input at once has only one."""
        i = 0 if operator.recording.pools else check_token(out_token, operator.shape[0])
        return cls(
            operator=operator, classes=context.classes, out_token=i, target=target, tokens=context.tokens,
            meta=meta | {"out_positions": [i]},
        )  # fmt: skip

    @cached_property
    def weights(self) -> Weights:
        """Of the target on logits."""
        return weights_of(self.operator, self.classes, self.target, self.out_token)

    @property
    def name(self) -> str:
        """Of the target."""
        weights = self.weights  # raises where there are no classes
        assert self.classes is not None, "a target has classes"
        return self.classes.names(weights)


@dataclass(frozen=True, kw_only=True, eq=False)
class StreamPass:
    r"""One replay at X with its graph, and what wrote to the stream.

    Attributes:
        operator: What was replayed.
        x: The state it began with, (1, token, channel).
        seen: What observed it.
        sums: For each block the writes to the stream, the last first; None where they cannot be told apart.
        experts: What each expert wrote, in blocks where that was asked for.
    """

    operator: FrozenOperator
    x: Tensor
    seen: StreamObserver
    sums: dict[int, list[Sum] | None]
    experts: dict[int, list[ExpertPart]] = field(default_factory=dict)

    @property
    def recording(self) -> Recording:
        """What was replayed."""
        return self.operator.recording

    def entry(self, block: int) -> tuple[GradientEdge, Tensor]:
        """The state that enters a block, in the graph and as numbers."""
        return _entry(self.operator, self.seen, self.x, block)

    def begins(self, block: int) -> bool:
        """Whether a stream begins at a block."""
        return block in (self.operator.span.start, self.recording.n_encoder_blocks)

    def by_token(self, block: int, numbers: Tensor) -> Tensor:
        """Numbers in the layout of the states of a block, summed over channels, as (in_token,) of X⁰."""
        if numbers.shape == self.x.shape and self.begins(block):  # of the leaf itself
            return numbers[0].sum(-1)
        layout = self.recording.layouts[block]
        return self.placed(block, layout.to_tokens(numbers.reshape(layout.shape))[0].sum(-1))

    def n_tokens(self, block: int) -> int:
        """How many tokens the stream of a block has: the encoder's or the decoder's, where there are two."""
        split, n_in = self.recording.splits[self.operator.span.start], self.x.shape[1]
        if not self.recording.n_encoder_blocks:
            return n_in
        return split if block < self.recording.n_encoder_blocks else n_in - split

    def offset(self, block: int) -> int:
        """Where the tokens of a block's stream begin among all tokens."""
        return 0 if block < self.recording.n_encoder_blocks else self.x.shape[1] - self.n_tokens(block)

    def at_token(self, block: int, numbers: Tensor, token: int) -> Tensor:
        """Numbers in the layout of the states of a block, zero but for one of all tokens."""
        layout = self.recording.layouts[block]
        states = layout.to_tokens(numbers.reshape(layout.shape))
        chosen = torch.zeros_like(states)
        chosen[:, token - self.offset(block)] = states[:, token - self.offset(block)]
        return layout.to_native(chosen).reshape(numbers.shape)

    def placed(self, block: int, scores: Tensor) -> Tensor:
        """Scores (…, token) of a block's stream among all tokens: the encoder's, then the decoder's."""
        n_others = self.x.shape[1] - self.n_tokens(block)
        if not n_others:
            return scores
        return pad(scores, (0, n_others) if block < self.recording.n_encoder_blocks else (n_others, 0))


@dataclass(frozen=True, kw_only=True, eq=False)
class Pass(StreamPass):
    r"""One replay at X to a target $t = \sum_c w_c \,\mathrm{logit}_c$.

    Attributes:
        t: The target, a number with a graph behind it.
        weights: Its weights on logits.
        out_token: Where the logits are read.
    """

    t: Tensor
    weights: Weights
    out_token: int


def _entry(operator: FrozenOperator, seen: StreamObserver, x: Tensor, block: int) -> tuple[GradientEdge, Tensor]:
    if block in (operator.span.start, operator.recording.n_encoder_blocks):
        return edge_of(x), x.detach()
    return seen.outputs[block - 1]


@contextmanager
def pass_to(operator: FrozenOperator, weights: Weights, i: int, finer: Finer | None = None) -> Iterator[Pass]:
    """Replay the operator's blocks at X and find what wrote to the stream; in some blocks, down to neurons or experts.

    Raises:
        MethodError: no factors are kept, the range of blocks does not end at the last, or the number of tokens
            changes on the way.
    """
    recording, (start, stop), finer = operator.recording, operator.span, finer or Finer()
    _check(operator)
    classes = torch.tensor(list(weights), device=operator.device)
    with own_precision(), torch.enable_grad():
        x = recording.states[start].detach().clone().requires_grad_()
        seen, experts = StreamObserver(recording, finer.neurons), ExpertObserver(finer.experts)
        watching = (seen, experts) if finer.experts else (seen,)
        end, _ = replayed(recording, x, operator.span, operator.heads, to_logits=True, grad=True, observers=watching)
        logits = read_logits(recording, plain(end), i, classes)[0]
        t = (logits * torch.tensor(list(weights.values())).to(logits)).sum()
        assert t.grad_fn is not None, "the state is part of the graph"
        sums = sums_of(operator, seen, x, t.grad_fn, range(start, stop))
        yield Pass(
            operator=operator, x=x, t=t, weights=weights, out_token=i, seen=seen, sums=sums, experts=experts.parts
        )  # fmt: skip


def sums_of(
    operator: FrozenOperator, seen: StreamObserver, x: Tensor, end: Node, blocks: Iterable[int]
) -> dict[int, list[Sum] | None]:
    """The writes of some blocks, the last first, in the graph that ends at a node; None: not to be told apart."""
    stream = Stream(seen, end, edge_of(x).node)
    return {n: stream.sums(n, seen.outputs[n][0], _entry(operator, seen, x, n)[0].node) for n in blocks}


def _check(operator: FrozenOperator) -> None:
    recording = operator.recording
    if operator.is_streamed:
        raise MethodError(
            f"The input has {operator.n_tokens} tokens, for which no factors are kept; components need them. Expected "
            "a shorter input."
        )
    if operator.span.stop != recording.n_blocks:
        raise MethodError(
            f"Components of a target need a range of blocks that ends at the last one ({recording.n_blocks}); got "
            f"{operator.span.stop}."
        )
    sizes = {state.shape[1] for state in recording.states[operator.span.start : -1]}
    if len(sizes) > 1:
        raise MethodError(
            f"`{type(recording.model).__name__}` changes the number of tokens on its way ({sorted(sizes)}), so its "
            "components do not share one row of tokens. Use `tensor.in_class`."
        )
