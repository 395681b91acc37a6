"""The number that is explained, a sum of logits or a feature of a dictionary, and its cotangents in every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.block import ByBlock, Finer, Part, StreamPass
from tensorlens.inside.dictionary import read_slot
from tensorlens.inside.stream import Component
from tensorlens.inside.walk import Joining, Read, Walk
from tensorlens.maps.targets import (
    Classes,
    Feature,
    Target,
    Weights,
    named,
    no_head,
    one_output,
    own_prediction,
    placed,
)
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.program.program import Cotangents
from tensorlens.progress import check_cancelled
from tensorlens.recording.recording import Span


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """A target at one output of an input.

    Attributes:
        operator: The operator of the input.
        classes: Names of the classes.
        out_token: Where the target is read.
        target: A token or class, a pair for a contrast, weights by class; the model's top prediction if None.
        tokens: A label for each token.
        meta: Model, versions, rules, blocks, output, as in records.
    """

    operator: FrozenOperator
    classes: Classes | None
    out_token: int
    target: Target | None
    tokens: tuple[str, ...]
    meta: dict[str, Any]

    @classmethod
    def of(cls, T: Any, out_token: int, target: Target | None) -> Explained:
        """The target at an output of an attention tensor; a head that reads the whole input at once has only one."""
        is_feature, context = isinstance(target, Feature), T.context
        i = check_token(out_token, T.operator.shape[0]) if is_feature else one_output(T.operator.recording, out_token)
        made = cls(
            operator=T.operator,
            classes=context.classes,
            out_token=i,
            target=target,
            tokens=context.tokens,
            meta=T.meta() | {"out_positions": [i]},
        )
        if is_feature:
            return made
        recording, weights = T.operator.recording, made.weights  # raises if there are no classes
        told = placed(recording, context, i, named(context.classes, weights), recording.logits_at(i))
        is_capped = recording.head is not None and not recording.gives_raw_logits  # its probabilities are others
        return replace(made, meta=made.meta | (replace(told, probability=None) if is_capped else told).meta)

    def run(self, finer: Finer | None = None) -> Pass:
        """The pass with the target's cotangents."""
        if isinstance(self.target, Feature):
            return FeaturePass(self.operator, self.target, self.out_token, finer)
        return Pass(self.operator, self.weights, self.out_token, finer)

    @cached_property
    def weights(self) -> Weights:
        """The target's weights on logits."""
        recording = self.operator.recording
        if self.classes is None or recording.readout is None:
            raise no_head(recording.name)
        if self.target is None:
            return self.classes.weights(int(own_prediction(recording.logits_at(self.out_token))))
        return self.classes.weights(self.target)

    @property
    def name(self) -> str:
        """The target in words."""
        if isinstance(self.target, Feature):
            return str(self.target)
        weights = self.weights  # raises if there are no classes
        assert self.classes is not None, "a target has classes"
        return self.classes.names(weights)


class Pass(StreamPass):
    r"""The blocks of an operator at X, with $λ = \partial t/\partial y$ of a target $t = \sum_c w_c\,\mathrm{logit}_c$.

    Args:
        operator: The operator; its blocks end at the last.
        weights: Weights of the target on logits.
        out_token: Where the logits are read.
        finer: Blocks whose feed-forwards are split.

    Raises:
        MethodError: the range of blocks does not end at the last, or the number of tokens changes on the way.
    """

    def __init__(self, operator: FrozenOperator, weights: Weights, out_token: int, finer: Finer | None = None) -> None:
        _check(operator)
        pieces = operator.recording.pieces(operator.span, operator.heads, to_logits=True)
        super().__init__(operator, pieces, finer)
        self.weights, self.out_token = weights, out_token
        self._waiting = {self.stop: self._at_last_state()}
        self._cotangents = ByBlock(self)

    @cached_property
    def value(self) -> float:
        """The target."""
        end = self.pieces.at_cuts[self.pieces.program.outputs[0]]
        return self.read(self.recording.logits(end, self.out_token)[0])

    def read(self, logits: Tensor) -> float:
        r"""The target from logits (class,) of this pass or of another: $Σ_c w_c\,\mathrm{logit}_c$."""
        return float(sum(weight * logits[index] for index, weight in self.weights.items()))

    def _at_last_state(self) -> Cotangents:
        """Cotangents at the state that leaves the last block, and at anything else that the head reads."""
        logits = self.recording.logits_at(self.out_token)
        weights = torch.zeros_like(logits)
        for index, weight in self.weights.items():
            weights[index] = weight
        waiting = {self.pieces.program.outputs[0]: self.recording.head_cotangent(weights, self.out_token)}
        return self.pieces.pull(self.stop - self.start, waiting)[1]

    def waiting(self, n: int) -> Cotangents:
        """Cotangents of what enters block n, and of what later blocks read of earlier ones; n may be the last state."""
        for block in reversed(range(n, min(self._waiting))):
            self.cotangents(block)
        return self._waiting[n]

    def cotangents(self, n: int) -> Cotangents:
        """λ at the marked slots of block n."""
        if n not in self._cotangents:
            waiting = self.waiting(n + 1)
            found, waiting = self.pieces.pull(n - self.start, waiting, self.block(n).marked)
            self._cotangents.keep(n, found)
            self._waiting[n] = waiting
        return self._cotangents[n]

    def reached(self) -> Tensor:
        """The part of the target that the state leaving the last block carries, by token."""
        block = self.block(self.stop - 1)
        return block.by_token((self.waiting(self.stop)[block.exit] * block.values[block.exit])[None])[0]

    def from_target(self) -> tuple[Walk, Tensor]:
        """A walk down the stream from the target, and the contribution of the head's constants at its token."""
        reached = self.reached()
        head = torch.zeros_like(reached)
        head[self.out_token] = self.value - reached.sum()
        return Walk(self, self.waiting(self.stop)[self.block(self.stop - 1).exit][None]), head

    def effects(
        self, parts: Iterable[Part], moved: Callable[[Part], Tensor], scaled: Mapping[int, Tensor] | None = None
    ) -> list[Tensor]:
        r"""$⟨λ_c, Δy_c⟩$ of some components: the change of the target if they move by Δy and everything else is held.

        Args:
            parts: The components.
            moved: Δy of each.
            scaled: Factors of slots that λ is multiplied by where it passes them; 0 cuts every path through them.
        """
        parts, found = list(parts), dict[Component, Tensor]()
        pieces, waiting = self.pieces if scaled is None else self.pieces.scaled(scaled), self.waiting(self.stop)
        for n in reversed(range(self.start, self.stop)):
            check_cancelled()
            here = [part for part in parts if part.block == n]
            if scaled is None:
                at = self.cotangents(n)
            else:
                at, waiting = pieces.pull(n - self.start, waiting, {part.slot for part in here})
            found |= {part.component: (part.of(at[part.slot]) * moved(part)).sum() for part in here}
        return [found[part.component] for part in parts]


class FeaturePass(Pass):
    """The blocks up to the one that a feature reads, with the cotangents of what it reads.

    Args:
        operator: The operator; its last blocks are left out.
        feature: The feature.
        out_token: Where it reads.
        finer: Blocks whose writes are split.
    """

    def __init__(self, operator: FrozenOperator, feature: Feature, out_token: int, finer: Finer | None = None) -> None:
        recording, (start, stop) = operator.recording, operator.span
        if not 0 <= feature.block < stop - start or recording.n_encoder_blocks:
            raise MethodError(
                f"Expected a feature of one of the blocks 0 to {stop - start - 1}, and no encoder; got {feature}."
            )
        span = Span(start, start + feature.block + 1)
        StreamPass.__init__(self, operator.but(span=span), recording.pieces(span, operator.heads), finer)
        self.weights, self.out_token = {}, out_token
        block = self.block(span.stop - 1)
        slot, place = read_slot(block, feature.component, feature.reads)
        held = block.values_of([slot])[slot]
        x, u = block.to_tokens(held), torch.zeros(block.shape, dtype=held.dtype, device=held.device)
        u[0, out_token] = feature.row.to(u)
        self.value = float((x * u).sum()) + feature.bias
        cotangent, end = block.from_tokens(u, held.shape), block.values[block.exit]
        self._waiting = {span.stop: {block.exit: torch.zeros_like(end), slot: cotangent}}
        self._cotangents = ByBlock(self)
        stream = (block.sums or [])[place].stream
        self._feature = feature
        self._read = Read(block.n, place), block.pulled(slot, cotangent[None], stream)[0], block.values[stream]

    def read(self, logits: Tensor) -> float:
        """Refuse a feature as the target: a run of the model ends with logits, and a feature is not a sum of them."""
        raise InputError(
            f"Expected a target on logits; got {self._feature}, which `T.components` and `T.graph` explain."
        )

    def from_target(self) -> tuple[Walk, Tensor]:
        """A walk down the stream from where the feature reads it, and the contribution of constants on the way."""
        (read, cotangent, held), joining = self._read, Joining()
        joining.add(0, read, cotangent, None)
        rest = torch.zeros(self.n_tokens, dtype=held.dtype, device=held.device)
        rest[self.out_token] = self.value - float((cotangent * held).sum())
        return Walk.from_zero(self, read.block, 1, joining), rest


def _check(operator: FrozenOperator) -> None:
    recording = operator.recording
    if operator.span.stop != recording.n_blocks:
        raise MethodError(
            f"Components of a target need a range of blocks that ends at the last one ({recording.n_blocks}); got "
            f"{operator.span.stop}."
        )
    sizes = {state.shape[1] for state in recording.states[operator.span.start : -1]}
    if len(sizes) > 1:
        raise MethodError(
            f"`{recording.name}` changes the number of tokens on its way ({sorted(sizes)}), so its components do not "
            "share one row of tokens. Use `tensor.in_class`."
        )
