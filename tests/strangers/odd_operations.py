"""Strangers whose feed-forward or attention does something unusual, or does it where no one watches."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from strangers.cases import Stranger, plainly
from strangers.models import HIDDEN, Attention, Block, D, FeedForward, H, Plain
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def with_activation(activation: Callable[[Tensor], Tensor], width: int | None = None) -> Callable[[], nn.Module]:
    return lambda: Plain(lambda: Block(mlp=FeedForward(activation, width=width)))


def feed_forward(
    name: str, activation: Callable[[Tensor], Tensor], plain: Any = None, width: Any = None, **more: Any
) -> Stranger:
    """A model with this activation; its witness has `plain` instead, if that is given."""
    twin = None if plain is None else plainly(with_activation(plain, width))
    return Stranger(name=f"feed-forward: {name}", build=with_activation(activation, width), twin=twin, **more)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 1.0).tanh()


def scripted(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have no new scripts, but libraries are full of old ones
        return torch.jit.script(function)


@scripted
def scripted_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


@scripted
def scripted_sum(x: Tensor) -> Tensor:
    return x + 0.5 * x.flip(-1)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        s = torch.sigmoid(x)
        return gradients[0] * s * (1 + x * (1 - s))


class Doubled(torch.autograd.Function):
    """Linear, with a backward pass that is the user's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


def view_before_copy(x: Tensor) -> Tensor:
    room = torch.zeros(x.shape, dtype=x.dtype)
    view = room.view(-1)
    room.copy_(x)
    return view.view(x.shape)


def written_by_index(x: Tensor) -> Tensor:
    room = torch.zeros(x.shape, dtype=x.dtype)
    half = room[..., : HIDDEN // 2]
    half.copy_(x[..., : HIDDEN // 2])
    room[..., HIDDEN // 2 :] = 2 * x[..., HIDDEN // 2 :]
    return room


def by_index(x: Tensor) -> Tensor:
    return torch.cat([x[..., : HIDDEN // 2], 2 * x[..., HIDDEN // 2 :]], -1)


def into_room(x: Tensor) -> Tensor:
    room = torch.empty_like(x)
    torch.mul(x, 3.0, out=room)
    return torch.add(room, 1.0, out=room)


def copied(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist(), dtype=x.dtype)


def by_numbers(x: Tensor) -> Tensor:
    return torch.tensor([[[float(value) for value in row] for row in rows] for rows in x], dtype=x.dtype)


def made_again(x: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.tensor(x)


class ThreadedBlock(Block):
    """Parallel branches, each in a thread."""

    def branches(self) -> list[Callable[[Tensor], Tensor]]:
        return [lambda x: self.attn(self.ln_1(x)), lambda x: self.mlp(self.ln_2(x))]

    def forward(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            parts = list(pool.map(lambda branch: branch(x), self.branches()))
        return x + parts[0] + parts[1]


class ParallelBlock(ThreadedBlock):
    def forward(self, x: Tensor) -> Tensor:
        return x + sum(branch(x) for branch in self.branches())


class Checkpointed(Plain):
    """Recomputes in the backward pass, in evaluation too."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.norm(x)


class CompiledBlocks(Plain):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class WrappedBlocks(Plain):
    """Blocks replaced by what torch.compile makes of them: their names in the state gain a part."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([torch.compile(block, backend="eager") for block in self.blocks])


def without_wrapping(model: nn.Module) -> nn.Module:
    plain = Plain().double().eval()
    plain.load_state_dict({name.replace("_orig_mod.", ""): value for name, value in model.state_dict().items()})
    return plain


def compiled_gelu(x: Tensor) -> Tensor:
    return torch.compile(F.gelu, backend="eager")(x)


class FlexAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        mixed = flex_attention(q, k, v, score_mod=_causal)
        return self.proj(mixed.transpose(-3, -2).flatten(-2))


def _causal(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return torch.where(query >= key, score, -float("inf"))


class FusedAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(-3, -2).flatten(-2))


class ClampedAttention(Attention):
    """Scores clamped softly by a scripted function, as some libraries do."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        scores = self.clamped(q @ k.transpose(-1, -2) / math.sqrt(D // H))
        return self.proj((scores.softmax(-1) @ scripted_sum(v)).transpose(-3, -2).flatten(-2))

    def clamped(self, scores: Tensor) -> Tensor:
        return softclamp(scores, 5.0)


@scripted
def softclamp(scores: Tensor, value: float) -> Tensor:
    return (scores / value).tanh() * value


class PlainClampedAttention(ClampedAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D // H) / 5).tanh() * 5
        return self.proj((scores.softmax(-1) @ (v + 0.5 * v.flip(-1))).transpose(-3, -2).flatten(-2))


def autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(x)


def attention(name: str, kind: Callable[[], nn.Module], plain: Callable[[], nn.Module] | None, **more: Any) -> Stranger:
    twin = None if plain is None else plainly(lambda: Plain(lambda: Block(plain())))
    return Stranger(name=name, build=lambda: Plain(lambda: Block(kind())), twin=twin, **more)


def own_rms(x: Tensor) -> Tensor:
    return x / float(x.square().mean().sqrt())


def only_largest(x: Tensor) -> Tensor:
    return torch.where(x >= x.topk(8, -1).values[..., -1:], x, 0.0)


def and_reversed(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row + row.flip(0))(x)


STRANGERS = [
    feed_forward("softplus", F.softplus),
    feed_forward("sigmoid", torch.sigmoid),
    feed_forward("exp", lambda x: (0.3 * x).exp()),
    feed_forward("shifted softplus", lambda x: F.softplus(x) - math.log(2)),
    feed_forward("amax", lambda x: x.unflatten(-1, (-1, 2)).amax(-1), width=HIDDEN // 2),
    feed_forward("max", lambda x: x.unflatten(-1, (-1, 2)).max(-1).values, width=HIDDEN // 2),
    feed_forward("maximum", lambda x: torch.maximum(x, 0.5 * x.flip(-1)), expect="either"),
    feed_forward("cosine", torch.cos, expect="either"),
    feed_forward("rounding", torch.round, expect="either"),
    feed_forward("a sorted half", lambda x: x.sort(-1).values, expect="either"),
    feed_forward("top-k", lambda x: torch.where(x >= x.topk(8, -1).values[..., -1:], x, 0.0), expect="either"),
    feed_forward("ndtr", lambda x: x * torch.special.ndtr(x)),
    feed_forward("threshold", lambda x: F.threshold(x, 0.1, -0.4)),
    feed_forward("elu and softsign", lambda x: F.softsign(F.elu(x))),
    feed_forward("squared relu", lambda x: F.relu(x).square(), lambda x: F.relu(x) * F.relu(x).detach()),
    feed_forward("through numpy", through_numpy, torch.tanh, expect="either"),
    feed_forward("a trip through a list", copied, lambda x: x, expect="either"),
    feed_forward("number by number", by_numbers, lambda x: x, expect="refused"),
    feed_forward("torch.tensor", made_again, lambda x: x, expect="either"),
    feed_forward("a factor by float()", own_rms, expect="either"),
    feed_forward("detach", lambda x: F.gelu(x.detach()), F.gelu, expect="either"),
    feed_forward("data", lambda x: F.gelu(x.data), F.gelu, expect="either"),
    feed_forward("a scripted gelu", scripted_gelu, F.gelu, expect="either"),
    feed_forward("a scripted linear function", scripted_sum, lambda x: x + 0.5 * x.flip(-1), expect="either"),
    feed_forward("a custom function behind a helper", lambda x: Swish.apply(x), F.silu, expect="either"),
    feed_forward("a linear custom function", lambda x: Doubled.apply(x), lambda x: 2 * x, expect="either"),
    feed_forward("vmap of gelu", lambda x: torch.vmap(F.gelu)(x), F.gelu, expect="either"),
    feed_forward(
        "vmap of a sum", lambda x: torch.vmap(lambda r: r + r.flip(0))(x), lambda x: x + x.flip(1), expect="either"
    ),
    feed_forward("a view before copy_", view_before_copy, lambda x: x, expect="either"),
    feed_forward("copy_ into a part", written_by_index, by_index, expect="either"),
    feed_forward("out=", into_room, lambda x: 3 * x + 1, expect="either"),
    feed_forward("autocast", autocast, F.gelu, expect="either"),
    feed_forward("a compiled gelu", compiled_gelu, F.gelu),
    Stranger(
        name="branches in threads",
        build=lambda: Plain(ThreadedBlock),
        twin=plainly(lambda: Plain(ParallelBlock)),
        expect="either",
    ),
    Stranger(name="checkpoint in evaluation", build=lambda: Checkpointed(False), twin=plainly(Plain)),
    Stranger(name="reentrant checkpoint in evaluation", build=lambda: Checkpointed(True), twin=plainly(Plain)),
    Stranger(name="blocks compiled in place", build=CompiledBlocks, twin=plainly(Plain)),
    Stranger(name="blocks wrapped by the compiler", build=WrappedBlocks, twin=without_wrapping),
    attention("flex_attention", FlexAttention, Attention),
    attention("scaled_dot_product_attention", FusedAttention, None),
    attention("attention clamped by a script", ClampedAttention, PlainClampedAttention, expect="either"),
]
