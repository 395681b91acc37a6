"""Samples of a batch are what they are alone, wherever a stranger's model puts the axis that counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from strangers.models import Attention, Block, D, FeedForward, H, WithHead, randomised
from strangers.oracle import gap, randn
from torch import Tensor, nn
from torch.nn import functional as F

import tensorlens as tl

ROWS = [[5, 9, 23, 12], [1, 2, 3, 4], [7, 17, 0, 28], [11, 3, 19, 6]]


class HeadsFirst(Attention):
    """(head, sample, token, channel): as many heads as samples."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).permute(2, 0, 1, 3) for t in self.qkv(x).chunk(3, -1))
        return self.proj(((q @ k.mT).softmax(-1) @ v).permute(1, 2, 0, 3).flatten(-2))


class TokensFirst(FeedForward):
    """(token, sample, channel): as many tokens as samples."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Flat(FeedForward):
    """(sample and token, channel)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class ChannelsFirst(FeedForward):
    """(channel, sample, token)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.gelu(x.permute(2, 0, 1)).permute(1, 2, 0)


class SharedKeys(Attention):
    """One head of keys for several of queries, spelled otherwise where nothing is masked, as in transformers."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        k, v = k[:, :2], v[:, :2]
        if len(x) > 1:
            k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=len(x) == 1)
        return self.proj(mixed.transpose(1, 2).flatten(2))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "heads first": lambda: Block(HeadsFirst()),
    "tokens first": lambda: Block(mlp=TokensFirst()),
    "flat": lambda: Block(mlp=Flat()),
    "channels first": lambda: Block(mlp=ChannelsFirst()),
    "another way for one": lambda: Block(SharedKeys()),
}


@pytest.mark.parametrize("member", ["paper", "jacobian"])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_sample_of_a_batch_is_what_it_is_alone(name: str, member: str) -> None:
    model: Any = WithHead()
    model.blocks = nn.ModuleList([BLOCKS[name]() for _ in range(2)])
    lens = tl.Lens(randomised(model), rules=getattr(tl.Rules, member)())
    for rows in (ROWS, ROWS[:2]):
        batch, v, u = lens.batch(rows), randn(4, D), randn(9, 4, D, seed=2)
        for i in (0, len(rows) - 1):
            alone = lens(rows[i])
            assert gap(batch[i] @ v, alone @ v) < 1e-12
            assert gap(batch[i].T @ u, alone.T @ u) < 1e-12
            assert gap(batch[i].rows(1), alone.rows(1)) < 1e-12
            assert gap(batch[i].bias, alone.bias) < 1e-12
            maps = [T.map("tensor.in_class", out_token=-1, target=3).scores for T in (batch[i], alone)]
            assert gap(*maps) < 1e-6


def by_first(z: Tensor) -> Tensor:
    return z * z[:1].mean(1, keepdim=True).tanh()


def by_last(z: Tensor) -> Tensor:
    return z * z[-1:].mean(1, keepdim=True).tanh()


@pytest.mark.parametrize("gate", [by_first, by_last])
@pytest.mark.parametrize("method", ["tensor.in_out", "tensor.norm"])
def test_what_one_sample_does_to_all_is_noticed(gate: Callable[[Tensor], Tensor], method: str) -> None:
    model: Any = WithHead()
    model.blocks = nn.ModuleList([Block(mlp=FeedForward(gate)) for _ in range(2)])
    lens = tl.Lens(randomised(model))
    for rows in (ROWS[:2], ROWS[:3], [ROWS[0], [8, 9], ROWS[2]]):
        with pytest.raises(tl.InputError, match="mixes samples"):
            lens.batch(rows)
        for found, row in zip(lens.maps(rows, method, batch_size=3, progress=False), rows, strict=True):
            assert gap(found.scores, lens(row).map(method, out_token=-1).scores) < 1e-6


def by_opposite(z: Tensor) -> Tensor:
    return z * z.flip(0).tanh()


def test_a_sample_that_is_its_own_opposite_is_not_the_only_one_looked_at() -> None:
    model: Any = WithHead()
    model.blocks = nn.ModuleList([Block(mlp=FeedForward(by_opposite)) for _ in range(2)])
    lens = tl.Lens(randomised(model))
    rows = [*ROWS, [4, 20, 11, 9], [8, 8, 1, 2]]
    found = lens.maps(rows, batch_size=3, progress=False)
    assert all(gap(one.scores, lens(row).map().scores[-1:]) < 1e-6 for one, row in zip(found, rows, strict=True))


class Experts(nn.Module):
    """One expert for each token, by a softmax; `most` tokens each."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.router, self.experts, self.most = nn.Linear(D, 4), nn.ModuleList(FeedForward() for _ in range(4)), most

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        shares, chosen = self.router(rows).softmax(-1).topk(1, -1)
        found = torch.zeros_like(rows)
        for n, expert in enumerate(self.experts):
            taken = self.taken(chosen, n)
            found = found.index_add(0, taken, expert(rows[taken]) * shares[taken])
        return found.view_as(x)

    def taken(self, chosen: Tensor, n: int) -> Tensor:
        return (chosen[:, 0] == n).nonzero()[:, 0][: self.most]


class ByPython(Experts):
    def taken(self, chosen: Tensor, n: int) -> Tensor:
        return torch.tensor([i for i, one in enumerate(chosen.flatten().tolist()) if one == n][: self.most]).long()


def of_experts(kind: Callable[[int], nn.Module], most: int) -> nn.Module:
    model: Any = WithHead()
    model.blocks = nn.ModuleList([Block(mlp=kind(most)) for _ in range(2)])
    return randomised(model)


@pytest.mark.parametrize("member", ["paper", "jacobian"])
@pytest.mark.parametrize("kind", [Experts, ByPython])
def test_experts_of_a_softmax_that_are_full_are_noticed_in_every_batch(kind: Any, member: str) -> None:
    lens = tl.Lens(of_experts(kind, 5), rules=getattr(tl.Rules, member)())
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 29, (n,), generator=generator).tolist() for n in (1, 1, 2, 2, 3, 3, 4, 5, 6, 6, 5, 6)]
    for found, row in zip(lens.maps(rows, batch_size=4, progress=False), rows, strict=True):
        assert gap(found.scores, lens(row).map().scores[-1:]) < 1e-6


def counted(chosen: Tensor) -> Tensor:
    return torch.zeros(4).long().scatter_add(0, chosen, torch.ones_like(chosen))[chosen]


KEPT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "one by one": lambda x, chosen: (chosen[:, None] == chosen).tril().sum(1) <= 7,
    "by a triangle of ones": lambda x, chosen: (
        (torch.ones(len(x), len(x)).tril() @ F.one_hot(chosen, 4).float()).gather(1, chosen[:, None])[:, 0] <= 7
    ),
    "by their number": lambda x, chosen: counted(chosen) <= 9,
    "by the mean of all": lambda x, chosen: x.softmax(-1).mean(0)[chosen] < 0.08,
    "unlike the one before": lambda x, chosen: (chosen.roll(1) != chosen) | (chosen.roll(2) != chosen),
    "by the length of others": lambda x, chosen: (x.norm(dim=1)[:, None] < x.norm(dim=1)).sum(1) > 1,
}


class Kept(FeedForward):
    """Which tokens are left out depends on all of them."""

    def __init__(self, kept: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.router, self.kept = nn.Linear(D, 4), kept

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = self.router(rows).argmax(-1)
        return super().forward(x) * self.kept(rows, chosen).view(*x.shape[:2], 1)


@pytest.mark.parametrize("name", KEPT)
def test_a_decision_over_tokens_of_all_samples_is_named_in_every_batch(name: str) -> None:
    model: Any = WithHead()
    model.blocks = nn.ModuleList([Block(mlp=Kept(KEPT[name])) for _ in range(2)])
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(0, 29, (6,), generator=generator).tolist() for _ in range(4)]
    assert tl.Lens(randomised(model)).batch(rows[:1]).mixing is None
    for found in tl.Lens(model).maps(rows, progress=False):
        assert "`blocks.0.mlp` combines several of them" in found.meta["batches"]


@pytest.mark.parametrize("member", ["paper", "jacobian"])
def test_experts_with_room_for_all_are_a_batch(member: str) -> None:
    lens = tl.Lens(of_experts(Experts, 100), rules=getattr(tl.Rules, member)())
    for found, row in zip(lens.batch(ROWS).maps(), ROWS, strict=True):
        assert gap(found.scores, lens(row).map().scores[-1:]) < 1e-6


def test_a_sample_that_can_be_cut_out_is_not_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(randomised(WithHead()))
    batch = lens.batch(ROWS)
    monkeypatch.setattr(type(lens), "__call__", lambda self, value: pytest.fail("recorded again"))
    assert batch[3].shape == batch[0].shape == (4, D, 4, D)


def test_a_batch_of_one() -> None:
    lens = tl.Lens(randomised(WithHead()))
    assert gap(lens.batch(ROWS[:1])[0].rows(0), lens(ROWS[0]).rows(0)) < 1e-12


def test_a_second_text_of_another_length_is_not_filled_up() -> None:
    config = transformers.T5Config(
        d_model=16,
        d_ff=24,
        num_layers=1,
        num_heads=2,
        d_kv=8,
        vocab_size=40,
        decoder_start_token_id=0,  # pyright: ignore[reportCallIssue]
    )
    torch.manual_seed(0)
    lens = tl.Lens(transformers.T5ForConditionalGeneration(config).double().eval())
    pairs = [([5, 9, 17], [0, 3]), ([7, 30], [0, 4]), ([7, 30, 2], [0])]
    rows = [{"input_ids": torch.tensor([ids]), "decoder_input_ids": torch.tensor([out])} for ids, out in pairs]
    alone = [lens(row).map("tensor.in_out", out_token=-1) for row in rows]
    for found, own in zip(lens.maps(rows, progress=False), alone, strict=True):
        assert gap(found.scores, own.scores) < 1e-6
    for found, own in zip(lens.batch(rows[:2]).maps("tensor.in_out"), alone[:2], strict=True):
        assert gap(found.scores, own.scores) < 1e-6
    with pytest.raises(tl.InputError, match="samples whose other sizes differ too"):
        lens.batch(rows)
