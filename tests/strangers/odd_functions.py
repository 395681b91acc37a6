"""Functions and mixings that are easily got wrong: writes in place, shared storage, ways to mix tokens."""

from __future__ import annotations

import torch
from strangers.frozen import held
from strangers.models import Attention, D, FeedForward, H
from torch import Tensor, nn
from torch.nn import functional as F

# Writing in place ----------------------------------------------------------------------------------------------------


def masked_in_place(x: Tensor) -> Tensor:
    y = F.gelu(x).clone()
    y[:, 1] = 0
    y[..., ::2] += 0.5 * x[..., ::2]
    y.masked_fill_(torch.arange(y.shape[-1]) == 3, 0.7)
    return y.index_add_(1, torch.tensor([0, 2]), x[:, :2])


def masked_plainly(x: Tensor) -> Tensor:
    rows, columns = torch.arange(x.shape[1])[:, None], torch.arange(x.shape[2])
    y = F.gelu(x) * (rows != 1) + 0.5 * x * (columns % 2 == 0)
    y = torch.where(columns == 3, 0.7, y)
    moved = torch.zeros(x.shape[1], x.shape[1], dtype=x.dtype)
    moved[0, 0] = moved[2, 1] = 1
    return y + moved @ x


def turned_in_place(x: Tensor) -> Tensor:
    y = x.clone().transpose_(1, 2).mul_(2).transpose_(1, 2)
    return y.relu_().sub_(0.1)


def scattered(x: Tensor) -> Tensor:
    order = torch.arange(x.shape[-1]).flip(0).expand_as(x)
    return torch.zeros_like(x).scatter_(-1, order, x)


def shared_storage(x: Tensor) -> Tensor:
    room = torch.empty(2, *x.shape, dtype=x.dtype)
    room[0], room[1] = x, 2 * x
    room[0].add_(room[1])
    return room.view(2, -1)[0].view(x.shape)


def as_strided(x: Tensor) -> Tensor:
    return x.contiguous().as_strided(x.shape, x.stride()) * 1.5


def through_unbind(x: Tensor) -> Tensor:
    return torch.stack([row + 0.3 * rows[0] for rows in [x.unbind(1)] for row in rows], 1)


# Ways to mix ---------------------------------------------------------------------------------------------------------


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(-3, -2)


class SigmoidAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        scores = held(torch.sigmoid(q @ k.transpose(-1, -2) - 1))
        return self.proj((scores @ v).transpose(-3, -2).flatten(-2))


class LinearAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (heads_of(t) for t in self.qkv(x).chunk(3, -1))
        q, k = held(F.elu(q) + 1), held(F.elu(k) + 1)
        mixed = q @ (k.transpose(-1, -2) @ v) / (q @ k.sum(-2)[..., None])
        return self.proj(mixed.transpose(-3, -2).flatten(-2))


class FourierMixing(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(torch.fft.fft2(x, dim=(1, 2)).real)


class ConvolutionalMixing(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv1d(D, D, 3, padding=2, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.mix(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))


class Scanning(Attention):
    """A recurrence over tokens with a gate of the input."""

    def forward(self, x: Tensor) -> Tensor:
        _, gate, v = self.qkv(x).chunk(3, -1)
        gate, h, rows = held(torch.sigmoid(gate)), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            h = gate[:, t] * h + v[:, t]
            rows.append(h)
        return self.proj(torch.stack(rows, 1))


class Sparse(Attention):
    def forward(self, x: Tensor) -> Tensor:
        neighbours = (
            torch.eye(x.shape[1], dtype=x.dtype) + torch.eye(x.shape[1], dtype=x.dtype).roll(1, 0)
        ).to_sparse()
        return self.proj(torch.sparse.mm(neighbours, x[0])[None])


class PlainSparse(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x + x.roll(1, 1))


class Experts(FeedForward):
    """Each token goes to the expert with the larger score, by a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 2)
        self.experts = nn.ModuleList([FeedForward(), FeedForward()])

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        chosen, out = weights.argmax(-1), torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            mask = chosen == n
            out[mask] = held(weights[mask][:, n : n + 1]) * expert(x[mask])
        return out


class ComplexFeedForward(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.complex(self.up(x), self.up(x.flip(-1))) * torch.tensor(0.6 + 0.8j)
        return self.down(y.real + 0.5 * y.imag)


def by_condition(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > -1e9, lambda v: F.gelu(v), lambda v: v, (x,))
