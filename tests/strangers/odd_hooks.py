"""Strangers whose hooks and heads do more than they seem to: both are part of what a module gives."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from strangers.cases import Stranger
from strangers.models import DEPTH, WORDS, D, WithHead, randomised
from strangers.oracle import Places
from torch import Tensor, nn

HEAD = Places(head="head")


class Prepared(Stranger):
    """A model whose weights are already drawn: hooks come after them."""

    def model(self) -> nn.Module:
        return self.build()


def hooked(name: str, change: Callable[[Any], Any], places: Places = HEAD, **more: Any) -> Stranger:
    def build() -> nn.Module:
        model = randomised(WithHead())
        change(model)
        return model

    return Prepared(name=f"hooks: {name}", build=build, places=places, **more)


def scaled(x: Tensor) -> Tensor:
    return x * torch.linspace(0.2, 2, x.shape[-1], dtype=x.dtype)


def on_block_with_its_input(model: Any) -> None:
    model.blocks[0].register_forward_hook(lambda m, args, kwargs, y: y - 0.3 * args[0], with_kwargs=True)


def before_block_with_names(model: Any) -> None:
    model.blocks[1].register_forward_pre_hook(lambda m, args, kwargs: ((scaled(args[0]),), kwargs), with_kwargs=True)


def on_last_block(model: Any) -> None:
    model.norm = nn.Identity()
    model.blocks[-1].register_forward_hook(lambda m, args, y: 2 * y - args[0])


def as_tuple(model: Any) -> None:
    """A hook wraps what a block returns, and the model unpacks it."""

    def body(self: Any, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)
            x = x[0] if isinstance(x, tuple) else x
        return self.norm(x)

    model.body = types.MethodType(body, model)
    model.blocks[1].register_forward_hook(lambda m, args, y: (1.4 * y, None))


def in_place(model: Any) -> None:
    def write(m: nn.Module, args: Any, y: Tensor) -> None:
        y[:, 2] = 0
        y.mul_(1.2)

    model.blocks[1].register_forward_hook(write)


def from_block_to_block(model: Any) -> None:
    """One hook keeps a state, another adds it later."""
    kept: dict[str, Tensor] = {}
    model.blocks[0].register_forward_hook(lambda m, args, y: kept.update(x=y))
    model.blocks[2].register_forward_hook(lambda m, args, y: y + 0.4 * kept["x"])


def partial_forward(model: Any) -> None:
    forward = model.blocks[1].forward
    model.blocks[1].forward = partial(lambda scale, x: x + scale * (forward(x) - x), 0.3)


class ScaledHead(WithHead):
    """The head is a kind of linear layer that does something more."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 0.25 * super().forward(x)

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Scaled(D, WORDS)


class SummedHeads(WithHead):
    """Two heads, of which the sum are the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.head = nn.Linear(D, WORDS), nn.Linear(D, WORDS), nn.Identity()  # type: ignore[assignment]

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.body(input_ids)
        return self.head(self.one(x) + 0.5 * self.other(x))


STRANGERS = [
    hooked("on a block, reading its input", on_block_with_its_input),
    hooked("before a block, with names", before_block_with_names),
    hooked("on the last block, no norm behind", on_last_block, Places(end=f"blocks.{DEPTH - 1}", head="head")),
    hooked("on the final norm", lambda m: m.norm.register_forward_hook(lambda n, args, y: 2 * y + 1)),
    hooked("before the final norm", lambda m: m.norm.register_forward_pre_hook(lambda n, args: (scaled(args[0]),))),
    hooked("on the head", lambda m: m.head.register_forward_hook(lambda n, args, y: 3 * y + 1)),
    hooked("before the head", lambda m: m.head.register_forward_pre_hook(lambda n, args: (scaled(args[0]),))),
    hooked("a tuple is returned", as_tuple),
    hooked("writing in place", in_place),
    hooked("from block to block", from_block_to_block, has_ranges=False),
    hooked("a forward by functools.partial", partial_forward),
    Stranger(name="head: a linear layer that scales", build=ScaledHead, places=HEAD),
    Stranger(name="head: the sum of two", build=SummedHeads, places=HEAD),
]
