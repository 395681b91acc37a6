"""Feed-forwards by whatever function a stranger takes, against derivatives of the model itself or of a frozen copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from strangers.oracle import gap
from torch import Tensor, nn

import tensorlens as tl

IDS = [3, 7, 1, 9]
N_CHANNELS, N_INNER = 8, 16
Inner = Callable[[Tensor, Tensor], Tensor]
"""From the two projections of a token to the inner channels."""

W = torch.linspace(-1, 1, N_INNER, dtype=torch.float64)


class FeedForward(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(N_CHANNELS, N_INNER), nn.Linear(N_CHANNELS, N_INNER)
        self.down, self.inner = nn.Linear(N_INNER, N_CHANNELS), inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(self.one(x), self.other(x)))


class OfFunction(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, N_CHANNELS)
        self.blocks = nn.ModuleList(FeedForward(inner) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def model_of(inner: Inner) -> Any:
    torch.manual_seed(0)
    return OfFunction(inner).double().eval()


def derivative(model: Any, x: Tensor) -> Tensor:
    """(out_token, out_channel, in_token, in_channel)."""
    return torch.autograd.functional.jacobian(lambda y: model.blocks[1](model.blocks[0](y))[0], x[None])[:, :, 0]  # type: ignore[return-value]


def over_tokens(z: Tensor) -> Tensor:
    """Frequencies over the tokens, damped."""
    return torch.fft.irfft(torch.fft.rfft(z, dim=1) * 0.7, n=z.shape[1], dim=1)


def put(z: Tensor) -> Tensor:
    found = torch.zeros_like(z)
    found[z > 0] = z[z > 0]
    return found


SMOOTH: dict[str, Inner] = {
    "cube": lambda z, g: z.pow(3),
    "square with its sign": lambda z, g: torch.sign(z) * z**2,
    "root": lambda z, g: (z * z + 1).sqrt(),
    "own root": lambda z, g: z * (z * z + 1).rsqrt(),
    "blend by itself": lambda z, g: torch.lerp(z, g, torch.sigmoid(z)),
    "running product": lambda z, g: (1 + 0.1 * z).cumprod(1),
    "product of all": lambda z, g: z * (1 + 0.01 * z).prod(-1, keepdim=True),
    "less their log-sum": lambda z, g: z - z.logsumexp(-1, keepdim=True),
    "softmax of channels": lambda z, g: F.softmax(z, -1) * z,
    "three live factors": lambda z, g: torch.einsum("bti,bti,bti->bti", z, g, torch.tanh(z)),
    "outer product": lambda z, g: (z.unsqueeze(-1) * g.unsqueeze(-2)).mean(-1),
    "second-order attention": lambda z, g: torch.baddbmm(g, z @ z.mT, z),
    "bell": lambda z, g: torch.exp(-z * z),
    "masked exponential": lambda z, g: (z.masked_fill(g < 0, -torch.inf) - z.amax(-1, keepdim=True)).exp(),
    "logarithm": lambda z, g: torch.log(1 + z * z),
    "wave": lambda z, g: torch.sinc(z),
    "less its median": lambda z, g: z - torch.quantile(z, 0.5, dim=-1, keepdim=True),
    "bounded by the other": lambda z, g: torch.clamp(z, min=g - 1, max=g + 1),
    "larger of two": lambda z, g: torch.maximum(z, g),
    "over its spread": lambda z, g: z / z.std(-1, keepdim=True),
    "added quotient": lambda z, g: torch.addcdiv(z, g, 1 + z.abs()),
}
"""The Jacobian's member must have their derivative."""

LINEAR: dict[str, Inner] = {
    "leaky by a choice": lambda z, g: torch.where(z > 0, z, 0.1 * z),
    "sorted": lambda z, g: z.sort(-1).values,
    "gathered in order": lambda z, g: z.gather(-1, z.argsort(-1)),
    "largest four": lambda z, g: z * (z >= z.topk(4, -1).values[..., -1:]),
    "largest four put back": lambda z, g: torch.zeros_like(z).scatter(-1, (best := z.topk(4, -1)).indices, best.values),
    "put where positive": lambda z, g: put(z),
    "scattered where positive": lambda z, g: torch.zeros_like(z).masked_scatter(z > 0, z[z > 0]),
    "frequencies": lambda z, g: torch.fft.fft(z, dim=-1).real,
    "frequencies of tokens": lambda z, g: over_tokens(z),
    "turned": lambda z, g: torch.view_as_real(
        torch.view_as_complex(z.view(*z.shape[:2], -1, 2)) * torch.polar(W[:8].abs(), W[:8])
    ).flatten(2),
    "blend": lambda z, g: torch.lerp(z, g, torch.sigmoid(W)),
    "windows": lambda z, g: F.pad(z, (0, 0, 2, 0)).unfold(1, 3, 1).mean(-1),
    "by the place of a bound": lambda z, g: z * torch.bucketize(z.detach(), torch.linspace(-1, 1, 5).double()),
    "smaller than a constant": lambda z, g: torch.minimum(z, W),
    "token before": lambda z, g: torch.roll(z, 1, 1),
}
"""Linear where the choices are held: every member must have their derivative."""

FROZEN: dict[str, tuple[Inner, Inner]] = {
    "squared ReLU": (lambda z, g: F.relu(z) ** 2, lambda z, g: F.relu(z).detach() * F.relu(z)),
    "added product": (
        lambda z, g: torch.addcmul(z, g, torch.sigmoid(z)), lambda z, g: z + g * torch.sigmoid(z).detach()
    ),
    "quotient": (lambda z, g: z / (1 + g.abs()), lambda z, g: z / (1 + g.abs()).detach()),
    "unit length": (
        lambda z, g: z / z.norm(dim=-1, keepdim=True), lambda z, g: z / z.norm(dim=-1, keepdim=True).detach()
    ),
    "bounded": (lambda z, g: torch.tanh(z) * W, lambda z, g: (torch.tanh(z) / z).detach() * z * W),
    "half of the channels gate": (
        lambda z, g: torch.cat([F.glu(z, -1)] * 2, -1),
        lambda z, g: torch.cat([z[..., :8] * z[..., 8:].sigmoid().detach()] * 2, -1),
    ),
}  # fmt: skip
"""What the paper's member holds of them, written out."""


@pytest.mark.parametrize("name", SMOOTH | LINEAR)
def test_the_jacobians_member_has_the_derivative(name: str) -> None:
    model = model_of((SMOOTH | LINEAR)[name])
    T = tl.Lens(model, rules=tl.Rules.jacobian())(IDS)
    assert gap(T.dense(), derivative(model, T.input)) < 1e-12
    assert T.certificate().passed


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_live_in_the_papers_member(name: str) -> None:
    model = model_of(LINEAR[name])
    T = tl.Lens(model)(IDS)
    assert gap(T.dense(), derivative(model, T.input)) < 1e-12


@pytest.mark.parametrize("name", FROZEN)
def test_the_papers_member_holds_what_is_written_out(name: str) -> None:
    function, frozen = FROZEN[name]
    T = tl.Lens(model_of(function))(IDS)
    assert gap(T.dense(), derivative(model_of(frozen), T.input)) < 1e-12
    assert T.certificate().passed


def test_a_function_without_a_second_derivative_is_pulled_through_and_not_pushed() -> None:
    far = W[None, None].expand(1, 3, -1).contiguous()
    model = model_of(lambda z, g: torch.cdist(z, far).mean(-1, keepdim=True) * z)
    T = tl.Lens(model, rules=tl.Rules.jacobian())(IDS)
    u = torch.zeros(1, *T.output.shape, dtype=torch.float64)
    u[0, -1, 0] = 1
    assert gap((T.T @ u)[0], derivative(model, T.input)[-1, 0]) < 1e-12
    with pytest.raises(tl.NotLinearError, match="Nothing can be pushed through `cdist`"):
        T @ T.input
