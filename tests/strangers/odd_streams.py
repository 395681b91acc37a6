"""Strangers that carry, drop, merge or overwrite states on the way: streams, tokens, memory, writes in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from strangers.cases import Stranger, plainly
from strangers.frozen import held
from strangers.models import LENGTH, Attention, Block, D, FeedForward, H, Plain, WithHead
from strangers.oracle import Places
from torch import Tensor, nn
from torch.nn import functional as F

HEAD = Places(head="head")
FROM_START = Places(blocks=(), start="begin")


# Tokens that come and go ---------------------------------------------------------------------------------------------


class Registers(WithHead):
    """Learned tokens in front, dropped before the final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.zeros(1, 2, D))

    def body(self, input_ids: Tensor) -> Tensor:
        x = torch.cat([self.registers, self.embedded(input_ids)], 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, 2:])


class Merging(Block):
    """The token most like another becomes one with it."""

    def __init__(self) -> None:
        super().__init__(Attention(False))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        unit = F.normalize(x.detach(), dim=-1)
        best, place = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).max(-1)
        order = best.argsort(-1, descending=True)
        a, b = x[:, ::2], x[:, 1::2]
        into = place.gather(1, order[:, :1])[..., None].expand(-1, -1, D)
        moved, kept = (a.gather(1, some[..., None].expand(-1, -1, D)) for some in (order[:, :1], order[:, 1:]))
        return torch.cat([kept, b.scatter_reduce(1, into, moved, reduce="mean")], 1)


class Routed(Block):
    """Only some tokens go through the block."""

    def __init__(self) -> None:
        super().__init__(Attention(False))
        self.router = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        score = self.router(x)[..., 0]
        some = score.topk(4, 1).indices.sort(1).values
        index = some[..., None].expand(-1, -1, D)
        taken = x.gather(1, index)
        return x.scatter_add(
            1, index, (super().forward(taken) - taken) * held(score.gather(1, some).sigmoid())[..., None]
        )


# Streams -------------------------------------------------------------------------------------------------------------


class TwoStreams(Block):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.read, self.write = (nn.Parameter(torch.zeros(*shape)) for shape in ((2, 2), (2,), (2,)))

    def forward(self, streams: Tensor) -> Tensor:
        y = super().forward(torch.einsum("s,bsld->bld", self.read, streams))
        return torch.einsum("st,btld->bsld", self.mix, streams) + self.write[:, None, None] * y[:, None]


class HyperConnections(Plain):
    """Several residual streams in an axis of their own, and ids by another name."""

    def __init__(self) -> None:
        super().__init__(TwoStreams)
        self.begin = nn.Identity()

    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        x = self.begin(self.embedded(words))[:, None].repeat(1, 2, 1, 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x.sum(1))


class Reading(WithHead):
    """Attention to a memory after each block: one that was learned, or the embedding."""

    def __init__(self, *, of_embedding: bool) -> None:
        super().__init__()
        self.begin, self.of_embedding = nn.Identity(), of_embedding
        self.memory = nn.Parameter(torch.zeros(1, 4, D))
        self.reading = nn.ModuleList([nn.MultiheadAttention(D, H, batch_first=True) for _ in self.blocks])

    def body(self, input_ids: Tensor) -> Tensor:
        x = first = self.begin(self.embedded(input_ids))
        memory = first if self.of_embedding else self.memory
        for block, read in zip(self.blocks, self.reading, strict=True):
            x = block(x)
            x = x + read(x, memory, memory)[0]
        return self.norm(x)


class Recurrent(Attention):
    """Linear attention as a recurrence; keys and values are both live, and each is held in one half."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        state, out = torch.zeros(len(x), H, D // H, D // H, dtype=x.dtype), []
        for n in range(x.shape[1]):
            state = 0.8 * state + k[..., n, :, None] * v[..., n, None, :]
            out.append((q[..., n, None, :] @ state)[..., 0, :])
        return self.proj(torch.stack(out, -2).transpose(-3, -2).flatten(-2))


# Writes in place -----------------------------------------------------------------------------------------------------


class WritingHead(WithHead):
    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.body(input_ids)
        x.mul_(0.5)
        x[:, 0] = 0
        return self.head(x)


class PlainHead(WithHead):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(0.5 * self.body(input_ids) * (torch.arange(LENGTH) != 0)[:, None])


class WritingBlock(Block):
    """Residuals are added to what came in."""

    def forward(self, x: Tensor) -> Tensor:
        x += self.attn(self.ln_1(x))
        x += self.mlp(self.ln_2(x))
        return x


class WritingBetween(Plain):
    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)
            x += 0.3
            x[:, 1] *= 0.5
        return self.norm(x)


class PlainBetween(Plain):
    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = (block(x) + 0.3) * (1 - 0.5 * (torch.arange(LENGTH) == 1))[:, None]
        return self.norm(x)


class StridedBatchNorm(nn.Module):
    """A picture whose channels come last in memory, in a norm of which torch's own derivative is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.proj = nn.Conv2d(D, D, 3, padding=1, groups=D), nn.BatchNorm2d(D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        picture = self.norm(self.conv(x.unflatten(1, (2, -1)).permute(0, 3, 1, 2)))
        return self.proj(picture.flatten(2).transpose(1, 2))


class Halves(nn.Module):
    """A reversible block: each half of the state is changed by the other."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = nn.LayerNorm(D), Attention(), nn.LayerNorm(D), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2)
        first = first + self.attn(self.ln_1(second))
        return torch.cat([first, second + self.mlp(self.ln_2(first))])


class StreamsAsSamples(WithHead):
    """Two streams in the place of samples, joined before the final norm."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.blocks = nn.Identity(), nn.ModuleList([Halves() for _ in range(3)])

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.begin(self.embedded(input_ids)).repeat(2, 1, 1)
        for block in self.blocks:
            x = block(x)
        return self.norm(sum(x.chunk(2)))


def of_blocks(name: str, kind: Callable[[], nn.Module], twin: Any = None, **more: Any) -> Stranger:
    return Stranger(name=name, build=lambda: Plain(kind), twin=twin, **more)


STRANGERS = [
    Stranger(name="tokens: registers dropped before the norm", build=Registers, places=HEAD),
    of_blocks("tokens: merged", Merging),
    of_blocks("tokens: some go through", Routed),
    Stranger(
        name="streams: hyper-connections",
        build=HyperConnections,
        places=FROM_START,
        other_places=(Places(blocks=(), start="embed"),),
        has_ranges=False,
    ),
    Stranger(
        name="streams: in the place of samples",
        build=StreamsAsSamples,
        places=Places(blocks=(), start="begin", head="head"),
        other_places=(Places(blocks=(), start="embed", head="head"),),
        has_ranges=False,
    ),
    Stranger(name="memory: learned", build=lambda: Reading(of_embedding=False), places=HEAD),
    Stranger(
        name="memory: the embedding",
        build=lambda: Reading(of_embedding=True),
        places=Places(start="begin", head="head"),
        has_ranges=False,
    ),
    of_blocks("mixing: a recurrence of keys and values", lambda: Block(Recurrent())),
    of_blocks("mixing: a convolution and a norm of odd strides", lambda: Block(StridedBatchNorm())),
    Stranger(name="writes: the head into the state", build=WritingHead, twin=plainly(PlainHead), places=HEAD),
    of_blocks("writes: blocks into their input", WritingBlock, plainly(Plain)),
    Stranger(name="writes: between blocks", build=WritingBetween, twin=plainly(PlainBetween)),
]
