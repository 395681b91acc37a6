"""Strangers with code where nobody looks for it: between blocks, beside them, after them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from strangers.cases import Stranger, ids
from strangers.frozen import held
from strangers.models import HIDDEN, WORDS, Attention, Block, D, Plain, WithHead
from strangers.oracle import Places
from torch import Tensor, nn
from torch.nn import functional as F


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * 1.7


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(D, 5), nn.Linear(5, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(F.relu(self.down(x)))


class TokenShift(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x + 0.8 * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / math.sqrt(2)


class Between(Plain):
    """Something after each block, or before it."""

    def __init__(self, kind: Callable[[], nn.Module], *, before_first: bool = False) -> None:
        super().__init__()
        self.between = nn.ModuleDict({str(n): kind() for n in range(len(self.blocks))})
        self.before_first = before_first

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for n, block in enumerate(self.blocks):
            x = block(self.between[str(n)](x)) if self.before_first else self.between[str(n)](block(x))
        return self.norm(x)


class BareBetween(Plain):
    """A learned weight for each block, in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.lambdas = nn.Parameter(torch.ones(len(self.blocks)))

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for n, block in enumerate(self.blocks):
            x = self.lambdas[n] * block(x)
        return self.norm(x)


class EmbeddingSkip(Plain):
    """The embedding comes back after every block."""

    def __init__(self, keep: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.drop, self.keep = nn.Dropout(0.1), keep

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.embedded(input_ids))
        x0 = self.keep(x)
        for block in self.blocks:
            x = block(x) + 0.7 * x0
        return self.norm(x)


class LateSkip(EmbeddingSkip):
    """The embedding comes back once, after the last block."""

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.drop(self.embedded(input_ids))
        x0 = self.keep(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x + x0)


class UNet(Plain):
    """The first block's output comes back before the last block."""

    def body(self, input_ids: Tensor) -> Tensor:
        first = self.blocks[0](self.embedded(input_ids))
        return self.norm(self.blocks[2](self.blocks[1](first) + 0.5 * first.clone()))


class Ending(WithHead):
    """Ends in something that is no logit."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def forward(self, input_ids: Tensor) -> Any:
        return self.end(super().forward(input_ids))


class PooledEnding(Ending):
    """A classifier on the mean that gives probabilities."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__(end)
        self.head = nn.Linear(D, 7)

    def forward(self, input_ids: Tensor) -> Any:
        return self.end(self.head(self.body(input_ids).mean(1)))


class Labelled(WithHead):
    """Takes labels, and returns a loss with the logits, in one of two ways."""

    def __init__(self, *, as_dict: bool) -> None:
        super().__init__()
        self.as_dict = as_dict

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        logits = super().forward(input_ids)
        targets = input_ids if labels is None else labels
        loss = F.cross_entropy(logits[:, :-1].reshape(-1, WORDS), targets[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits} if self.as_dict else (loss, logits)


class GRUGate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_y, self.of_x, self.of_reset = nn.Linear(D, 3 * D), nn.Linear(D, 2 * D), nn.Linear(D, D)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        (r_y, z_y, h_y), (r_x, z_x) = self.of_y(y).chunk(3, -1), self.of_x(x).chunk(2, -1)
        reset, update = held(torch.sigmoid(r_y + r_x)), held(torch.sigmoid(z_y + z_x))
        return (1 - update) * x + update * torch.tanh(h_y + self.of_reset(reset * x))


class GRUBlock(Block):
    """As in GTrXL: gates where others have residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_1, self.gate_2 = GRUGate(), GRUGate()

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate_1(x, self.attn(self.ln_1(x)))
        return self.gate_2(x, self.mlp(self.ln_2(x)))


class OverTokens(nn.Module):
    """A norm over the tokens of each channel."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.inner = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class NormedBlock(Block):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(Attention(False))
        self.ln_1, self.ln_2 = OverTokens(norm()), OverTokens(norm())


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        x += self.attn(self.ln_1(x))
        return x.add_(self.mlp(self.ln_2(x)))


class PooledFeedForward(nn.Module):
    """Hidden channels as a picture, the largest of each four kept."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 4 * HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.up(x).view(x.shape[0], x.shape[1], HIDDEN // 2, 8)
        return self.down(F.max_pool2d(picture, 2).flatten(2))


HEAD = Places(head="head")
SKIP = Places(start="drop")
SKIP_FROM_WORDS = Places(start="embed")


def skip(name: str, build: Callable[[], nn.Module], **more: Any) -> Stranger:
    return Stranger(name=name, build=build, places=SKIP, other_places=(SKIP_FROM_WORDS,), has_ranges=False, **more)


def between(name: str, kind: Callable[[], nn.Module], **more: Any) -> Stranger:
    return Stranger(name=f"between blocks: {name}", build=lambda: Between(kind), **more)


def labelled(name: str, *, as_dict: bool, **more: Any) -> Stranger:
    return Stranger(name=name, build=lambda: Labelled(as_dict=as_dict), places=HEAD, **more)


STRANGERS = [
    Stranger(name="plain, to begin with"),
    Stranger(name="plain with a head", build=WithHead, places=HEAD),
    between("a learned scalar", Scalar),
    between("a norm", lambda: nn.LayerNorm(D)),
    between("an adapter", Adapter),
    between("a token shift", TokenShift),
    between("a division", Halved),
    between("a linear layer", lambda: nn.Linear(D, D)),
    Stranger(name="between blocks: a weight in the model's forward", build=BareBetween),
    Stranger(
        name="before blocks: a norm",
        build=lambda: Between(lambda: nn.LayerNorm(D), before_first=True),
    ),
    skip("skip from the embedding, itself", lambda: EmbeddingSkip(lambda x: x)),
    skip("skip from the embedding, cloned", lambda: EmbeddingSkip(torch.clone)),
    skip("skip from the embedding, a view", lambda: EmbeddingSkip(lambda x: x.view(x.shape))),
    skip("skip from the embedding, scaled", lambda: EmbeddingSkip(lambda x: 1.5 * x)),
    skip("skip to the end, cloned", lambda: LateSkip(torch.clone)),
    Stranger(name="skip between blocks, cloned", build=UNet, has_ranges=False),
    Stranger(name="ends in softmax", build=lambda: Ending(lambda x: x.softmax(-1))),
    Stranger(name="ends in log_softmax", build=lambda: Ending(lambda x: F.log_softmax(x, -1))),
    Stranger(name="ends in sigmoid", build=lambda: Ending(torch.sigmoid)),
    Stranger(name="ends in argmax", build=lambda: Ending(lambda x: x.argmax(-1))),
    Stranger(name="ends in softmax of a mean", build=lambda: PooledEnding(lambda x: x.softmax(-1))),
    Stranger(
        name="ends in softmax, In+Class", build=lambda: Ending(lambda x: x.softmax(-1)), places=HEAD, expect="either"
    ),
    labelled("returns (loss, logits)", as_dict=False),
    labelled("returns a dict of loss and logits", as_dict=True),
    labelled(
        "returns (loss, logits), labels given",
        as_dict=False,
        given=lambda: {"input_ids": ids(), "labels": ids()},
        call=lambda m: m(ids(), ids()),
    ),
    Stranger(name="GRU gates", build=lambda: Plain(GRUBlock)),
    Stranger(name="InstanceNorm", build=lambda: Plain(lambda: NormedBlock(lambda: nn.InstanceNorm1d(D, affine=True)))),
    Stranger(
        name="BatchNorm1d without running statistics",
        build=lambda: Plain(lambda: NormedBlock(lambda: nn.BatchNorm1d(D, track_running_stats=False))),
    ),
    Stranger(
        name="BatchNorm1d with running statistics",
        build=lambda: Plain(lambda: NormedBlock(lambda: nn.BatchNorm1d(D))),
    ),
    Stranger(name="residuals added in place", build=lambda: Plain(InPlaceBlock)),
    Stranger(name="max_pool2d", build=lambda: Plain(lambda: Block(mlp=PooledFeedForward()))),
]
