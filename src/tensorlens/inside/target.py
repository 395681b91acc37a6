"""The number that is explained, and its cotangents in every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tensorlens import cancel
from tensorlens.errors import MethodError
from tensorlens.inside.block import ByBlock, Finer, Part, StreamPass
from tensorlens.inside.stream import Component
from tensorlens.maps.defaults import one_output, own_prediction
from tensorlens.maps.targets import Classes, Target, Weights, no_head
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.pieces import Cotangents


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
    target: Target | None
    tokens: tuple[str, ...]
    meta: dict[str, Any]

    @classmethod
    def of(cls, T: Any, out_token: int, target: Target | None) -> Explained:
        """The target at an output of an attention tensor; a head that reads the whole input at once has only one."""
        i, context = one_output(T.operator.recording, out_token), T.context
        return cls(
            operator=T.operator,
            classes=context.classes,
            out_token=i,
            target=target,
            tokens=context.tokens,
            meta=T.meta() | {"out_positions": [i]},
        )

    def run(self, finer: Finer | None = None) -> Pass:
        """The pass with the target's cotangents."""
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
        return self.read(self.recording.logits(end, self.out_token)[0])

    def read(self, logits: Tensor) -> float:
        r"""The target from logits (class,) of this pass or of another: $Σ_c w_c\,\mathrm{logit}_c$."""
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

    def effects(
        self, parts: Iterable[Part], moved: Callable[[Part], Tensor], scaled: Mapping[int, Tensor] | None = None
    ) -> list[Tensor]:
        r"""$⟨λ_c, Δy_c⟩$ of some components: what the target changes by if they move by Δy, everything else held.

        Args:
            parts: The components.
            moved: Δy of each.
            scaled: Factors of slots that λ is multiplied by where it passes them; 0 cuts every path through them.
        """
        parts, found = list(parts), dict[Component, Tensor]()
        pieces, waiting = self.pieces if scaled is None else self.pieces.scaled(scaled), self.waiting(self.stop)
        for n in reversed(range(self.start, self.stop)):
            cancel.check()
            here = [part for part in parts if part.block == n]
            if scaled is None:
                at = self.cotangents(n)
            else:
                at, waiting = pieces.pull(n - self.start, waiting, {part.slot for part in here})
            found |= {part.component: (part.of(at[part.slot]) * moved(part)).sum() for part in here}
        return [found[part.component] for part in parts]


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
