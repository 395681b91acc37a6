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
BILINEAR = torch.outer(W, torch.outer(W, W.exp()).flatten()).sin().view(3 * (N_INNER,))
GRID = torch.stack(torch.meshgrid(W[:4], W, indexing="ij"), -1)[None]


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


def cut_in_place(z: Tensor) -> Tensor:
    """What an activation has written is read where it was written."""
    z = 1.0 * z
    cut = nn.ReLU(inplace=True)(z)
    return z + 2 * cut


def part_of_held(z: Tensor) -> Tensor:
    mask = (z > 0).double()
    mask[..., :4].zero_()
    return z * mask


def held_and_seen(z: Tensor) -> Tensor:
    order = z.argsort(-1)
    first = order[..., 0]
    order[..., 0] = 3
    return z.gather(-1, order) * (1 + first.unsqueeze(-1))


def factor_written_over(z: Tensor, g: Tensor) -> Tensor:
    z = 1.0 * z
    product = z * g
    z.add_(1)
    return product + z


def by_place(z: Tensor) -> Tensor:
    return z * W.exp()[(7 * torch.tanh(z)).round().long() + 7]


SMOOTH: dict[str, Inner] = {
    "softmax over numpy's axis": lambda z, g: torch.softmax(z, axis=1) * z,  # type: ignore[call-overload]
    "factors by name": lambda z, g: torch.mul(input=z, other=torch.sigmoid(input=g)),
    "quotient by name": lambda z, g: torch.div(input=z, other=torch.sqrt(input=1 + g * g)),
    "angle by names": lambda z, g: F.cosine_similarity(x1=z, x2=g, dim=-1).unsqueeze(-1) * z,
    "length of two": lambda z, g: torch.hypot(z, g),
    "larger of two, softly": lambda z, g: torch.logaddexp(z, g),
    "bent in place": lambda z, g: F.elu_(1.0 * z),
    "times its conjugate": lambda z, g: (torch.complex(z, g) * torch.complex(z, z).conj()).real,
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
    "dot product": lambda z, g: z + torch.linalg.vecdot(z, g).unsqueeze(-1),
    "three matrices": lambda z, g: torch.linalg.multi_dot([z[0], g[0].mT, z[0]])[None],
    "power of a matrix": lambda z, g: torch.linalg.matrix_power(z @ g.mT, 2) @ g,
    "cross product": lambda z, g: F.pad(torch.linalg.cross(z[..., :3], g[..., :3]), (0, 13)),
    "bilinear": lambda z, g: F.bilinear(z, g, BILINEAR, W),
    "added outer product": lambda z, g: torch.addr(z[0], z[0, :, 0], g[0, 0], beta=0.5)[None],
    "looked up where the other says": lambda z, g: F.grid_sample(
        z[:, None], torch.stack([g, z], -1).tanh(), align_corners=False
    )[:, 0],
    "by singular vectors": lambda z, g: (found := torch.linalg.svd(z, full_matrices=False))[0] @ found[2],
    "orthogonal": lambda z, g: torch.linalg.qr(z)[0] @ g,
    "by its root": lambda z, g: torch.linalg.cholesky(z @ z.mT + torch.eye(4)) @ g,
    "over its nuclear norm": lambda z, g: z / torch.linalg.matrix_norm(z, "nuc"),
    "spread of tokens": lambda z, g: torch.cov(z[0])[None] @ g,
    "powers of one number": lambda z, g: z[..., :1].exp().pow(W.abs()),
    "solved for": lambda z, g: (
        torch.linalg.solve_triangular(z[..., :4].tril() + torch.eye(4), W[:4, None], upper=False) * z
    ),
    "by length and angle": lambda z, g: torch.polar(z.exp(), g).real,
}
"""The Jacobian's member must have their derivative."""

LINEAR: dict[str, Inner] = {
    "dims by name": lambda z, g: torch.tensordot(z, torch.diag(W), dims=1),
    "largest over numpy's axis": lambda z, g: z.max(axis=-1, keepdims=True).values + z,  # type: ignore[call-overload]
    "less the largest over numpy's axis": lambda z, g: z - torch.amax(z, axis=1, keepdims=True),  # type: ignore[call-overload]
    "sorted over numpy's axis": lambda z, g: torch.sort(z, axis=1).values,  # type: ignore[call-overload]
    "bounded by name": lambda z, g: torch.clamp(input=z, min=-0.2),
    "cut in place": lambda z, g: cut_in_place(z),
    "part of what is held": lambda z, g: part_of_held(z),
    "held, seen and written": lambda z, g: held_and_seen(z),
    "where it rounds to one": lambda z, g: torch.where((4 * z).round() == 1, z, g),
    "where it is full": lambda z, g: torch.where(F.relu6(9 * z) == 6, g, z),
    "by a place in a table": lambda z, g: by_place(z),
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
    "windows over two axes": lambda z, g: (
        F.unfold(z[:, None], 1).view(z.shape) + F.unfold(z[:, None], (1, 1))[:, 0].view_as(z)
    ),
    "by the place of a bound": lambda z, g: z * torch.bucketize(z.detach(), torch.linspace(-1, 1, 5).double()),
    "smaller than a constant": lambda z, g: torch.minimum(z, W),
    "axes given in place": lambda z, g: (1.0 * z).unsqueeze_(0).transpose_(0, 1).squeeze_(1),
    "token before": lambda z, g: torch.roll(z, 1, 1),
    "made as large as a constant": lambda z, g: torch.mul(*torch.broadcast_tensors(z, W)),
    "dot product with a constant": lambda z, g: z + torch.linalg.vecdot(z, W).unsqueeze(-1),
    "looked up": lambda z, g: F.grid_sample(z[:, None], GRID, align_corners=False)[:, 0],
    "sign of the other": lambda z, g: torch.copysign(z, g),
    "running integral": lambda z, g: F.pad(torch.cumulative_trapezoid(z, dim=-1), (0, 1)),
    "pooled and put back": lambda z, g: F.max_unpool1d(*F.max_pool1d(z, 2, return_indices=True), 2),  # type: ignore[misc]
    "less the mean of all": lambda z, g: z - z.mean(),
}
"""Linear where the choices are held: every member must have their derivative."""

FROZEN: dict[str, tuple[Inner, Inner]] = {
    "factor written over": (
        lambda z, g: factor_written_over(z, g),
        lambda z, g: (z * g.detach() + z.detach() * g) / 2 + z + 1,
    ),
    "parts written to": (
        lambda z, g: torch.cat([part.mul_(2) for part in (1.0 * z).chunk(2, -1)], -1),
        lambda z, g: 2 * z,
    ),
    "as often as it goes": (lambda z, g: z * (z // 0.3), lambda z, g: z * (z / 0.3).floor()),
    "summed over a part of its source": (
        lambda z, g: g.scatter_add(-1, torch.zeros(1, 4, 3).long(), z),
        lambda z, g: torch.cat([g[..., :1] + z[..., :3].sum(-1, keepdim=True), g[..., 1:]], -1),
    ),
    "added by scatter": (
        lambda z, g: z.scatter(-1, torch.arange(4).expand(1, 4, 4), g, reduce="add"),
        lambda z, g: torch.cat([z[..., :4] + g[..., :4], z[..., 4:]], -1),
    ),
    "looked up where the other says": (
        lambda z, g: F.grid_sample(z[:, None], torch.stack([g, z], -1).tanh(), align_corners=False)[:, 0],
        lambda z, g: F.grid_sample(z[:, None], torch.stack([g, z], -1).detach().tanh(), align_corners=False)[:, 0],
    ),
    "squared ReLU": (lambda z, g: F.relu(z) ** 2, lambda z, g: F.relu(z).detach() * F.relu(z)),
    "added product": (
        lambda z, g: torch.addcmul(z, g, torch.sigmoid(z)),
        lambda z, g: z + g * torch.sigmoid(z).detach(),
    ),
    "quotient": (lambda z, g: z / (1 + g.abs()), lambda z, g: z / (1 + g.abs()).detach()),
    "unit length": (
        lambda z, g: z / z.norm(dim=-1, keepdim=True),
        lambda z, g: z / z.norm(dim=-1, keepdim=True).detach(),
    ),
    "bounded": (lambda z, g: torch.tanh(z) * W, lambda z, g: (torch.tanh(z) / z).detach() * z * W),
    "half of the channels gate": (
        lambda z, g: torch.cat([F.glu(z, -1)] * 2, -1),
        lambda z, g: torch.cat([z[..., :8] * z[..., 8:].sigmoid().detach()] * 2, -1),
    ),
}
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
    with pytest.raises(tl.NotLinearError, match=r"`T @ x` is unavailable: .*`aten\._cdist_forward"):
        T @ T.input


def test_a_model_in_inference_mode_is_the_same() -> None:
    """Torch counts no writes there, and follows no derivatives."""

    def inner(z: Tensor, g: Tensor) -> Tensor:
        z, mask = 1.0 * torch.tanh(z), torch.ones_like(z)
        part, shifted = z[..., :5], z + mask
        part.mul_(2)
        mask.zero_()
        return z + shifted + torch.hypot(z, g)

    model = model_of(inner)
    expected = tl.Lens(model, rules=tl.Rules.jacobian())(IDS).dense()
    assert gap(expected, derivative(model, tl.Lens(model)(IDS).input)) < 1e-12
    run = model.forward
    model.forward = torch.inference_mode()(lambda ids: run(ids))
    T = tl.Lens(model, rules=tl.Rules.jacobian())(IDS)
    assert gap(T.dense(), expected) < 1e-12
    assert T.certificate().passed


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (lambda z, g: z.scatter(-1, torch.arange(4).expand(1, 4, 4), g, reduce="multiply"), "scatter by multiply"),
        (lambda z, g: F.bilinear(z, g, BILINEAR, W), "`_trilinear`"),
        (lambda z, g: torch.sgn(torch.complex(z, g)).real, "sgn of complex"),
        (lambda z, g: set_data(z, g), "x.data = y"),
        (lambda z, g: z + torch.full_like(z, z.mean()), "`x.expand\\(shape\\)`"),
        (lambda z, g: z + z.new_tensor([z[0, 0, 0], z[0, 0, 1]] * 8), "`torch.stack`"),
        (lambda z, g: inner_derivative(z), "inside its own forward"),
        (lambda z, g: plain_tensors_only(z), "`raise TypeError"),
    ],
)
def test_what_no_derivative_follows_is_said(inner: Inner, reason: str) -> None:
    with pytest.raises(tl.NotLinearError, match=reason):
        tl.Lens(model_of(inner))(IDS).rows(0)


def set_data(z: Tensor, g: Tensor) -> Tensor:
    z = 1.0 * z
    z.data = g
    return z


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_copy_by_new_tensor_is_carried() -> None:
    T = tl.Lens(model_of(lambda z, g: z + g.new_tensor(z)))(IDS)
    assert gap(T.dense(), derivative(model_of(lambda z, g: 2 * z), T.input)) < 1e-12


def inner_derivative(z: Tensor) -> Tensor:
    with torch.enable_grad():
        v = z.detach().requires_grad_()
        return torch.autograd.grad((v**3).sum(), v)[0]


def plain_tensors_only(z: Tensor) -> Tensor:
    if type(z) is not Tensor:
        raise TypeError("expected a tensor")
    return z
