"""Strangers put together so that a search may miss their state, its beginning or its end."""

from __future__ import annotations

from typing import Any

import torch
from strangers.cases import Stranger, plainly
from strangers.frozen import held
from strangers.models import DEPTH, LENGTH, Attention, Block, D, FeedForward, Plain
from strangers.oracle import Places
from torch import Tensor, nn
from torch.nn import functional as F

BEGIN = Places(start="begin")


class FromBegin(Plain):
    """With a module that gives X⁰."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.begin = nn.Identity()

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.begin(super().embedded(input_ids))


# Where the end is ----------------------------------------------------------------------------------------------------


class Universal(Plain):
    """One block, as often as a gate beside it says."""

    def __init__(self) -> None:
        super().__init__(depth=1)
        self.halt = nn.Linear(D, 1)

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for n in range(6):
            x = self.blocks[0](x)
            if n and float(torch.sigmoid(self.halt(x)).mean()) > 0.45:
                break
        return self.norm(x)


class Halting(FromBegin):
    """What all blocks gave, by weights of a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.halt = nn.Linear(D, 1)

    def body(self, input_ids: Tensor) -> Tensor:
        x, found, rest = self.embedded(input_ids), 0.0, 1.0
        for block in self.blocks:
            x = block(x)
            p = held(torch.sigmoid(self.halt(x)))
            found, rest = found + rest * p * x, rest * (1 - p)
        return self.norm(found + rest * x)


class NormInHead(Plain):
    """The last norm is the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()
        self.head = nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 5))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(input_ids))


# Where the beginning is ----------------------------------------------------------------------------------------------


class OuterResiduals(FromBegin):
    """Layers in pairs of a norm and a function, the residual added by the model."""

    def __init__(self) -> None:
        super().__init__(depth=0)
        parts = [Attention(), FeedForward(), Attention(), FeedForward()]
        self.layers = nn.ModuleList([nn.ModuleList([nn.LayerNorm(D), part]) for part in parts])

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for norm, function in self.layers:  # type: ignore[misc]
            x = x + function(norm(x))
        return self.norm(x)


class OuterGates(OuterResiduals):
    """The same with a recurrent cell for the residual."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.append(nn.GRUCell(D, D))  # type: ignore[operator]

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for norm, function, cell in self.layers:  # type: ignore[misc]
            x = cell(function(norm(x)).flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return self.norm(x)


class BothWays(FromBegin):
    """The blocks on the tokens, and again on the tokens turned round."""

    def body(self, input_ids: Tensor) -> Tensor:
        start = self.embedded(input_ids)
        a, b = start, start.flip(1)
        for block in self.blocks:
            a = block(a)
        for block in self.blocks:
            b = block(b)
        return self.norm(a + b.flip(1))


# Where the state is --------------------------------------------------------------------------------------------------


class MaskFirst(Block):
    def forward(self, mask: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.mlp(self.ln_2(x)) * mask.mean()


class PlainFeeding(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.ln_2(x))


class MaskedModel(Plain):
    """Every block takes a new mask before its state."""

    def __init__(self) -> None:
        super().__init__(MaskFirst)

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(torch.ones(1, LENGTH, D, dtype=x.dtype), x)
        return self.norm(x)


class PositionsFirst(Block):
    def forward(self, positions: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.attn(self.ln_1(x + positions))


class PositionsSecond(Block):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        return x + self.attn(self.ln_1(x + positions))


class PositionsInBlocks(Plain):
    """Positions are added in every block, which takes them before or behind its state."""

    def __init__(self, first: bool) -> None:
        super().__init__(PositionsFirst if first else PositionsSecond)
        self.first = first

    def body(self, input_ids: Tensor) -> Tensor:
        x, positions = self.embed(input_ids), self.positions(torch.arange(input_ids.shape[1]))[None]
        for block in self.blocks:
            x = block(positions, x) if self.first else block(x, positions)
        return self.norm(x)


# Steps ---------------------------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(D, D // 2, bidirectional=True, batch_first=True), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0])


class CoarseGate(nn.Module):
    """A gate of every other token, made as long as the text."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x[:, ::2])).transpose(1, 2)
        return self.value(x) * F.interpolate(gate, size=x.shape[1], mode="nearest").transpose(1, 2)


# Which modules are blocks ---------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """LoRA by hand: a layer of several weights, as two of them are alike in every block."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer, self.down = layer, nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + 2 * self.up(self.down(x))


def adapted(*names: str) -> Any:
    """Blocks with some of their layers adapted."""

    def build() -> nn.Module:
        block = Block()
        for name in names:
            path, _, own = name.rpartition(".")
            setattr(block.get_submodule(path), own, Adapted(getattr(block.get_submodule(path), own)))
        return block

    return lambda: Plain(build)


class FlatBlock(nn.Module):
    """Adapted layers and nothing around them, attention and feed-forward side by side or one after the other."""

    def __init__(self, side_by_side: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2, self.side_by_side = nn.LayerNorm(D), nn.LayerNorm(D), side_by_side
        self.qkv, self.proj = Adapted(nn.Linear(D, 3 * D)), Adapted(nn.Linear(D, D))
        self.up, self.down = Adapted(nn.Linear(D, 24)), Adapted(nn.Linear(24, D))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.ln_1(x)).chunk(3, -1)
        mixed = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return mixed + self.down(F.gelu(self.up(self.ln_2(x if self.side_by_side else mixed))))


class NormByFunction(Plain):
    """The final norm is a mere function, before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]
        self.head = nn.Linear(D, 29)

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(F.rms_norm(x, (D,))))


class SharedNorm(Plain):
    """The final norm is also the first of every block."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.ln_1 = self.norm


class Reading(nn.Module):
    """A decoder's block, which looks at a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.ln, self.cross = Block(), nn.LayerNorm(D), Attention(is_causal=False)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.block(x) + self.cross(torch.cat([memory, self.ln(x)], 1))[:, memory.shape[1] :]


class ListsOfTwo(Plain):
    """An encoder and a decoder without a module around either, the decoder with a little more weights."""

    def __init__(self) -> None:
        super().__init__(Reading, 2)
        self.encoder = nn.ModuleList([Block(Attention(is_causal=False)) for _ in range(2)])

    def body(self, input_ids: Tensor) -> Tensor:
        memory = self.embed(input_ids.flip(1))
        for block in self.encoder:
            memory = block(memory)
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x, memory)
        return self.norm(x)


def mixing(name: str, kind: type[nn.Module]) -> Stranger:
    return Stranger(name=f"mixing: {name}", build=lambda: Plain(lambda: Block(kind())))


def feeding(name: str, function: Any) -> Stranger:
    build = lambda: Plain(lambda: Block(mlp=FeedForward(function)))  # noqa: E731
    return Stranger(name=f"feed-forward: {name}", build=build)


STRANGERS = [
    Stranger(name="end: as often as a gate says", build=Universal, places=Places(blocks=("blocks.0",))),
    Stranger(name="end: by weights of a gate", build=Halting, has_ranges=False, places=BEGIN),
    Stranger(name="end: a norm in the head", build=NormInHead, places=Places(end="head.0")),
    Stranger(
        name="beginning: residuals outside of modules",
        build=OuterResiduals,
        has_ranges=False,
        places=Places(blocks=(), start="begin"),
    ),
    Stranger(
        name="beginning: recurrent cells outside of modules",
        build=OuterGates,
        has_ranges=False,
        places=Places(blocks=(), start="begin"),
    ),
    Stranger(name="beginning: both ways", build=BothWays, has_ranges=False, places=BEGIN),
    Stranger(name="state: behind a mask", build=MaskedModel, twin=plainly(lambda: Plain(PlainFeeding, DEPTH))),
    Stranger(
        name="state: behind positions",
        build=lambda: PositionsInBlocks(True),
        has_ranges=False,
        twin=plainly(lambda: PositionsInBlocks(False)),
    ),
    Stranger(name="layers: attention adapted", build=adapted("attn.qkv", "attn.proj")),
    Stranger(name="layers: all adapted", build=adapted("attn.qkv", "attn.proj", "mlp.up", "mlp.down")),
    Stranger(name="layers: adapted in flat blocks", build=lambda: Plain(lambda: FlatBlock(False))),
    Stranger(name="layers: adapted side by side", build=lambda: Plain(lambda: FlatBlock(True))),
    Stranger(name="end: a norm by a function", build=NormByFunction, places=Places(head="head")),
    Stranger(name="end: a norm that blocks share", build=SharedNorm),
    Stranger(name="lists: an encoder's and a decoder's", build=ListsOfTwo),
    mixing("an LSTM", Recurrent),
    mixing("a gate made longer", CoarseGate),
    feeding("a live bound", lambda x: x.clamp(max=x.mean())),
    feeding("a remainder", lambda x: x % 1.0),
    feeding("a fraction", lambda x: torch.fmod(x, 0.7)),
]
