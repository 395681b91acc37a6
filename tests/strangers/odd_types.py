"""Strangers that round on the way: casts to whole numbers and 8-bit floats, grids, signs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from strangers.cases import Stranger, plainly
from strangers.frozen import Frozen
from strangers.models import HIDDEN, Block, D, FeedForward, Plain
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[[Tensor], Tensor]
LEVELS = torch.linspace(-1, 1, 63, dtype=torch.float64)


def by_ratio(function: Function) -> Function:
    """φ(z) as z ⊙ φ(z)/z with the ratio held; φ(0) = 0."""

    def twin(z: Tensor) -> Tensor:
        if not Frozen.active:
            return function(z)
        value = function(z.detach())
        return z * torch.where(z == 0, 0.0, value / z).detach()

    return twin


# Rounded to a grid ---------------------------------------------------------------------------------------------------


def step_of(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True) / 127


def by_largest(x: Tensor) -> Tensor:
    step = step_of(x)
    return (x / step).round().clamp(-128, 127) * step


def by_largest_in_int8(x: Tensor) -> Tensor:
    step = step_of(x)
    return (x / step).round().to(torch.int8) * step


def on_held_grid(x: Tensor) -> Tensor:
    step = step_of(x.detach())
    return by_ratio(lambda v: (v / step).round().clamp(-128, 127) * step)(x)


def between_extremes(x: Tensor) -> Tensor:
    low, high = x.amin(), x.amax()
    step = (high - low) / 255
    origin = (-low / step).round()
    return (((x / step).round() + origin).clamp(0, 255) - origin) * step


def straight_through(x: Tensor) -> Tensor:
    return x + ((4 * x).int().to(x.dtype) / 4 - x).detach()


def written_whole(x: Tensor) -> Tensor:
    whole = (4 * x).to(torch.int32)
    whole.add_(3)
    whole[..., 0] = 3
    return (whole - 3).to(x.dtype) / 4


def in_float8(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def fake_by_channel(x: Tensor) -> Tensor:
    steps, zeros = torch.linspace(0.05, 0.2, x.shape[-1]), torch.zeros(x.shape[-1], dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(x, steps, zeros, 2, -128, 127)


# What cannot be told, or is a decision -------------------------------------------------------------------------------


def by_place(x: Tensor) -> Tensor:
    return x * LEVELS[(4 * x).round().long().clamp(-31, 31) + 31]


def by_held_place(x: Tensor) -> Tensor:
    return x * LEVELS[(4 * x.detach()).round().long().clamp(-31, 31) + 31]


def into_whole(x: Tensor) -> Tensor:
    room = torch.empty(x.shape, dtype=torch.int8)
    room.copy_((4 * x).round())
    return room.to(x.dtype) / 4


def by_list(x: Tensor) -> Tensor:
    return torch.tensor((4 * x).int().tolist()).to(x.dtype) / 4


def by_bits(x: Tensor) -> Tensor:
    return ((4 * x).int() & 7).to(x.dtype)


# Layers --------------------------------------------------------------------------------------------------------------


class WholeLinear(nn.Module):
    """Input and weight in int8, multiplied as whole numbers."""

    def __init__(self, n_in: int, n_out: int, is_plain: bool) -> None:
        super().__init__()
        self.weight, self.is_plain = nn.Parameter(torch.zeros(n_out, n_in)), is_plain

    def forward(self, x: Tensor) -> Tensor:
        of_rows = self.weight.detach().abs().amax(1) / 127
        weight = (self.weight.detach() / of_rows[:, None]).round()
        if self.is_plain:
            step = step_of(x).detach()
            return by_ratio(lambda v: (v / step).round())(x) @ weight.T * step * of_rows
        step = step_of(x)
        whole = (x / step).round().to(torch.int8)
        return torch._int_mm(whole[0], weight.to(torch.int8).T)[None] * step * of_rows


class WholeFeedForward(nn.Module):
    def __init__(self, is_plain: bool) -> None:
        super().__init__()
        self.up, self.down = WholeLinear(D, HIDDEN, is_plain), WholeLinear(HIDDEN, D, is_plain)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def rounding(name: str, function: Function, plain: Function | None = None, **more: Any) -> Stranger:
    def model(one: Function) -> Callable[[], nn.Module]:
        return lambda: Plain(lambda: Block(mlp=FeedForward(one)))

    twin = plainly(model(plain or by_ratio(function)))
    return Stranger(name=f"rounded: {name}", build=model(function), twin=twin, **more)


def whole_layers(is_plain: bool) -> Callable[[], nn.Module]:
    return lambda: Plain(lambda: Block(mlp=WholeFeedForward(is_plain)))


STRANGERS = [
    rounding("to whole numbers and back", lambda x: (4 * x).to(torch.int32).to(x.dtype) / 4),
    rounding("to whole numbers, multiplied", lambda x: (4 * x).int() * LEVELS[0]),
    rounding("floor", lambda x: torch.floor(4 * x) / 4),
    rounding("ceil", lambda x: torch.ceil(4 * x) / 4),
    rounding("sign", torch.sign),
    rounding("a whole quotient", lambda x: x // 0.25),
    rounding("a quotient rounded", lambda x: torch.div(x, 0.25, rounding_mode="floor")),
    rounding("straight through", straight_through, by_ratio(lambda x: (4 * x).trunc() / 4)),
    rounding("to 8-bit floats", in_float8, expect="refused"),
    rounding("by the largest", by_largest, on_held_grid),
    rounding("by the largest, in int8", by_largest_in_int8, on_held_grid),
    rounding("between the extremes", between_extremes),
    rounding("written while whole", written_whole, expect="refused"),
    rounding("fake quantisation", lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -128, 127)),
    rounding("fake quantisation by channel", fake_by_channel),
    rounding("a place in a table", by_place, by_held_place),
    rounding("written into whole numbers", into_whole, expect="refused"),
    rounding("through a list", by_list, expect="refused"),
    rounding("by its bits", by_bits, expect="refused"),
    rounding("its bits looked at", lambda x: x.contiguous().view(torch.int64).to(x.dtype) * 1e-18, expect="refused"),
    Stranger(name="rounded: whole layers", build=whole_layers(False), twin=plainly(whole_layers(True))),
]
