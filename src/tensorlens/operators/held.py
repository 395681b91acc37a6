r"""How much of the input passes on and how much is held: block by block, and module by module.

An operator that holds too much is exact all the same: $T = 0$ with $B = F(X)$ obeys every law. So what passes on is
measured at random states, where the share of X itself in $F(X)$ says nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.layouts import state_of
from tensorlens.freezing.places import Span
from tensorlens.freezing.replayed import replayed
from tensorlens.freezing.traced import Traced, constant, raw
from tensorlens.models.evidence import main_tensor
from tensorlens.models.precision import in_float64
from tensorlens.operators.matrix_free import FrozenOperator

NOTHING = 1e-6
"""A block or an operator that makes less of a random state than this part of what it gave passes nothing on."""


def passing(operator: FrozenOperator, generator: torch.Generator) -> tuple[float, ...]:
    r"""For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.

    By the size of what the block gave: a norm at its end makes any state small. Where ranges are refused, because
    blocks read more than the state, it is $\lVert T_n^\top u \rVert / \lVert u \rVert$ by the graph of one replay, in
    the same units.
    """
    if operator.recording.side_channels:
        return _pulled_through_blocks(operator, generator)
    found = []
    for n in range(*operator.span):
        state = operator.recording.states[n][0]
        v = state.square().mean().sqrt() * _normal(state, generator)
        # One by one: code between blocks may have counted its samples before the range begins.
        at_v, at_zero = (
            operator.replay.push(x[None], Span(n, n + 1), operator.heads) for x in (v, torch.zeros_like(v))
        )
        given = operator.recording.states[n + 1].norm()
        found.append(float((at_v - at_zero).norm() / given.clamp_min(torch.finfo(given.dtype).tiny)))
    return tuple(found)


def held_by_module(operator: FrozenOperator) -> dict[str, float]:
    r"""For each module $\lVert Y(0) \rVert / \lVert Y(X) \rVert$, with Y what it gives in a replay.

    Zero is a module whose output is all carried by T, one a module whose output is all in B. Empty for a long input,
    whose factors are not kept.
    """
    if operator.is_streamed:
        return {}
    x = operator.recording.states[operator.span.start]
    at_x, at_zero = (_sizes(operator, state) for state in (x, torch.zeros_like(x)))
    return {path: at_zero.get(path, 0.0) / size for path, size in at_x.items() if size > 0}


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like)


def _sizes(operator: FrozenOperator, x: Tensor) -> dict[str, float]:
    """The norm of what each module gives at a state."""
    seen = _Squares()
    with own_precision(), torch.no_grad():
        replayed(operator.recording, x, operator.span, operator.heads, observers=(seen,))
    return {path: float(square) ** 0.5 for path, square in seen.squares.items()}


class _Squares:
    """Adds up the squares of what each module gives, of all its calls."""

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Nothing to learn."""

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Of what was made of the input, live or held."""
        state = main_tensor(output)
        if isinstance(state, Traced) and run.place.block >= 0:
            square = in_float64(constant(state).abs()).square().sum()
            self.squares[run.module] = self.squares.get(run.module, 0.0) + square  # type: ignore[operator]


class _Border(NamedTuple):
    """A state at one side of a block as it was at that moment: later code may write into it."""

    edge: GradientEdge | None
    like: Tensor
    size: float

    @classmethod
    def at(cls, state: Tensor) -> _Border:
        is_joined = raw(getattr, state, "requires_grad")
        values = constant(state)
        return cls(raw(get_gradient_edge, state) if is_joined else None, values, float(values.norm()))


def _pulled_through_blocks(operator: FrozenOperator, generator: torch.Generator) -> tuple[float, ...]:
    recording, (start, stop) = operator.recording, operator.span
    borders = _Borders({id(block) for block in recording.anatomy.blocks}, recording.anatomy.state_place)
    with own_precision(), torch.enable_grad():
        x = recording.states[start].detach().clone().requires_grad_()
        end, _ = replayed(recording, x, operator.span, operator.heads, grad=True, observers=(borders,))
        left = [*borders.left, _Border.at(end)][: stop - start]
        pairs = zip(borders.entered, left, strict=True)
        return tuple(_pulled(a, b, generator) * a.size / max(b.size, NOTHING) for a, b in pairs)


def _pulled(before: _Border, after: _Border, generator: torch.Generator) -> float:
    if before.edge is None or after.edge is None:
        return 0.0
    u = _normal(after.like, generator)
    pulled = torch.autograd.grad(after.edge, before.edge, u, retain_graph=True, allow_unused=True)[0]
    return 0.0 if pulled is None else float(pulled.norm() / u.norm())


class _Borders:
    """Keeps what enters and what leaves each block.

    What enters one may have come around the block before, by a shortcut, so that a block is not measured from there.
    """

    def __init__(self, blocks: set[int], place: int) -> None:
        self.blocks, self.place = blocks, place
        self.entered: list[_Border] = []
        self.left: list[_Border] = []

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Nothing to learn."""

    def saw_entry(self, run: Interpreter, state: Tensor) -> None:
        """Keep what a block begins with."""
        self.entered.append(_Border.at(state))

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what a block gives."""
        if id(module) in self.blocks and run.block is None:
            self.left.append(_Border.at(state_of(output, self.place)))
