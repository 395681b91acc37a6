"""Watching a replay of one block: what each of its modules took and gave, and where attention met values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.freezing.frozen_model import FrozenModel, Reached, Span, Walk
from tensorlens.freezing.rules.table import name_of
from tensorlens.freezing.traced import Traced, constant, is_live


class Step(NamedTuple):
    """A module that ran: what came in first, and what came out."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor


class Mixed(NamedTuple):
    """Attention meeting values: after how many steps, in which module, and what it made of them."""

    after: int
    path: str
    values: Tensor
    mixture: Tensor


@dataclass
class Sighting:
    """One block, watched."""

    x: Tensor
    y: Tensor | None = None
    steps: list[Step] = field(default_factory=list)
    mixed: list[Mixed] = field(default_factory=list)
    tail: list[Step] = field(default_factory=list)
    end: Tensor | None = None


class Watch(Walk):
    """A replay of one block away from X that keeps what its modules took and gave."""

    def __init__(self, frozen: FrozenModel, n: int) -> None:
        generator = torch.Generator().manual_seed(n)
        x = frozen.hidden[n]
        noise = torch.randn(x.shape, generator=generator).to(x)
        self.seen = Sighting(x * (1 + 0.5 * noise))
        super().__init__(frozen, span=Span(n, n + 1), x=self.seen.x)

    def run_module(self, module: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the first tensor in and out of every module of the block."""
        is_block = id(module) in self.block_ids and self.block is None
        steps = self.seen.steps if self.block is not None else self.seen.tail
        try:
            result = super().run_module(module, forward, args, kwargs)
        except Reached as reached:
            if is_block and self.n_entered == self._span.stop:
                self.seen.y = constant(reached.state)
            raise
        output = result[0] if isinstance(result, tuple) else result
        if is_block:
            if self.n_entered == self._span.stop:
                self.seen.y = constant(output)
        elif args and is_live(args[0]) and isinstance(output, Tensor):
            steps.append(Step(self.module, module, by_token(args[0]), by_token(output)))
        return result

    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep what attention mixed."""
        result = super().call(function, args, kwargs)
        name = name_of(function)
        if self.block is None or torch.is_grad_enabled() != self.grad or not is_live(result):
            return result
        values = None
        if name == "scaled_dot_product_attention":
            values = args[2] if len(args) > 2 else kwargs["value"]
        elif name in ("matmul", "bmm") and getattr(args[0], "role", None) == "attention" and is_live(args[1]):
            values = args[1]
        if isinstance(values, Traced):
            mixed = Mixed(len(self.seen.steps), self.module, constant(values), constant(result))
            self.seen.mixed.append(mixed)
        return result


def by_token(x: Tensor) -> Tensor:
    """The values of (…, channel) as (token, channel)."""
    return constant(x).reshape(-1, x.shape[-1])
