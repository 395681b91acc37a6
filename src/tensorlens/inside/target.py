"""The number that is explained, and its cotangents in every block."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.block import ByBlock, Finer, StreamPass
from tensorlens.maps.context import Context
from tensorlens.maps.targets import Classes, Target, no_head
from tensorlens.operators.base import check_token
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.pieces import Cotangents

Weights = dict[int, float]


def weights_of(operator: FrozenOperator, classes: Classes | None, target: Target | Weights | None, i: int) -> Weights:
    """Weights on logits: of the target, or of the model's own first choice at output i."""
    recording = operator.recording
    if classes is None or recording.readout is None:
        raise no_head(recording.name)
    if isinstance(target, dict):
        if not target or not all(isinstance(weight, Real) and math.isfinite(weight) for weight in target.values()):
            raise InputError(f"Weights must be {{id: number}} with at least one, none of them NaN; got {target!r:.80}.")
        return {classes.index(index): float(weight) for index, weight in target.items()}
    return classes.weights(int(recording.logits_at(i).argmax()) if target is None else target)


@dataclass(frozen=True, kw_only=True, eq=False)
class Explained:
    """What is explained: a target at one output of an input.

    Attributes:
        operator: The operator of the input.
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
        cls,
        operator: FrozenOperator,
        context: Context,
        meta: dict[str, Any],
        out_token: int,
        target: Target | Weights | None,
    ) -> Explained:
        """The target at an output; a head that reads the whole input at once has only one."""
        i = 0 if operator.recording.pools else check_token(out_token, operator.shape[0])
        return cls(
            operator=operator,
            classes=context.classes,
            out_token=i,
            target=target,
            tokens=context.tokens,
            meta=meta | {"out_positions": [i]},
        )

    @cached_property
    def weights(self) -> Weights:
        """The target's weights on logits."""
        return weights_of(self.operator, self.classes, self.target, self.out_token)

    @property
    def name(self) -> str:
        """The target in words."""
        weights = self.weights  # raises where there are no classes
        assert self.classes is not None, "a target has classes"
        return self.classes.names(weights)


class Pass(StreamPass):
    r"""The blocks of an operator at X, with $λ = \partial t/\partial y$ of a target $t = \sum_c w_c\,\mathrm{logit}_c$.

    Args:
        operator: The operator; its blocks end at the last.
        weights: Weights of the target on logits.
        out_token: Where the logits are read.
        finer: Blocks whose feed-forwards are taken apart.

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
        logits = self.recording.logits(end, self.out_token)[0]
        return float(sum(weight * logits[index] for index, weight in self.weights.items()))

    def _at_last_state(self) -> Cotangents:
        """What waits at the state that leaves the last block, and at whatever else the head reads."""
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
