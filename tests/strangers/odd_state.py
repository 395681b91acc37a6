"""Blocks whose gradients lie, or that keep something from one call to the next."""

from __future__ import annotations

from typing import Any

import torch
from strangers.cases import ids
from strangers.models import Block, D, Plain
from torch import Tensor, nn
from torch.nn import functional as F

# Gradients that lie --------------------------------------------------------------------------------------------------


class HookedGradient(Block):
    """The gradient is changed on its way back."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 2 * gradient)
        return y


def backward_hooks() -> nn.Module:
    model = Plain()
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, taken, given: tuple(2 * one for one in taken))
    return model


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


# State that stays, and branches --------------------------------------------------------------------------------------


def without_trace(model: nn.Module) -> Any:
    """Call a model and leave it as it was."""
    kept = [
        (m, dict(m.__dict__), {k: v.clone() for k, v in m._buffers.items() if v is not None}) for m in model.modules()
    ]
    try:
        return model(ids())
    finally:
        for module, attributes, buffers in kept:
            for name in {"n_calls", "last"} & module.__dict__.keys():
                module.__dict__.pop(name)
            module.__dict__.update({k: v for k, v in attributes.items() if k in ("n_calls", "last")})
            for name, value in buffers.items():
                module._buffers[name] = value


class Counting(Block):
    """Every call scales a little more."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.n_calls += 1
        return super().forward(x) * (1 + 0.1 * self.n_calls)


class Remembering(Block):
    """Mixes with what it saw in the call before."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y if self.last is None else y + 0.5 * self.last
        self.last = y.detach()
        return y


class Averaging(Block):
    """A buffer follows the mean of what it sees, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(D))
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.mean((0, 1))
        return super().forward(x - self.mean)


class Branching(Block):
    """Two ways, by the sign of a mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.mean() > -5 else x.flip(-1)


class Looping(Block):
    """As many rounds as the state says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 + int(x[0, 0].argmax()) % 3):
            x = super().forward(x)
        return x


class Noisy(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.randn_like(x))


class DroppingOut(Block):
    """Dropout that is never switched off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.3, training=True))
