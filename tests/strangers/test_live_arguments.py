"""Functions that are live in other arguments than the first, or spelled so that the first is hard to tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from strangers.oracle import gap
from strangers.test_functions import IDS, N_INNER, Inner, W, derivative, model_of
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

import tensorlens as tl

MATRIX = torch.outer(W, W.exp()).sin()
aten = torch.ops.aten


class Swish(torch.autograd.Function):
    """Asks its context what a plain one would not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        x, gate = ctx.saved_tensors[0], torch.sigmoid(ctx.saved_tensors[0])
        return gradients[0] * (gate + x * gate * (1 - gate))


def pooled(z: Tensor) -> Tensor:
    return z.mean((0, 1))


def first(z: Tensor) -> Tensor:
    """Channels before tokens, as of pictures."""
    return z.transpose(1, 2)


SMOOTH: dict[str, Inner] = {
    "a live weight by name": lambda z, g: F.linear(z, bias=W, weight=(g.tanh().mT @ z)[0]),
    "a live kernel by name": lambda z, g: first(F.conv1d(first(z), weight=(g.mT @ z)[0].unsqueeze(-1))),
    "gain of a layer norm": lambda z, g: F.layer_norm(z, (N_INNER,), weight=1 + pooled(g).tanh(), bias=pooled(z)),
    "gain of an RMS norm": lambda z, g: F.rms_norm(z, (N_INNER,), pooled(g)),
    "gain of a group norm": lambda z, g: first(F.group_norm(first(z), 4, pooled(g), pooled(z))),
    "gain of a batch norm": lambda z, g: first(F.batch_norm(first(z), W, W**2, pooled(g))),
    "gain of an instance norm": lambda z, g: first(F.instance_norm(first(z), None, None, pooled(g))),
    "logarithm of a running sum": lambda z, g: z - z.logcumsumexp(-1),
    "learned attention with a live bias": lambda z, g: F.scaled_dot_product_attention(
        MATRIX[None, :4], MATRIX[None, 4:8], z, g @ z.mT
    ),
    "a loss": lambda z, g: z * F.mse_loss(z, g, reduction="none"),
    "surprise": lambda z, g: z * F.cross_entropy(first(z), z.argmax(-1) // 2, reduction="none").unsqueeze(-1),
    "a custom function that asks": lambda z, g: Swish.apply(z),
    "overloads by name": lambda z, g: aten.mul.Tensor(aten.sigmoid.default(z), aten.add.Tensor(g, z)),
}
LINEAR: dict[str, Inner] = {
    "a constant by a live weight": lambda z, g: F.linear(MATRIX, z[0]).T[None],
    "a constant by a live kernel": lambda z, g: F.conv1d(MATRIX[None], z[0].unsqueeze(-1)),
    "whole parts of a constant": lambda z, g: z + torch.div(5.0, g, rounding_mode="floor"),
    "leaky": lambda z, g: F.leaky_relu(z, 0.1),
    "a deep copy": lambda z, g: copy.deepcopy(z.detach()) + g if not z.requires_grad else z + g,
}


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
    assert T.certificate().passed


@pytest.mark.parametrize("name", SMOOTH)
def test_other_members_are_affine(name: str) -> None:
    for rules in (tl.Rules.paper(), tl.Rules.attn_lrp()):
        assert tl.Lens(model_of(SMOOTH[name]), rules=rules)(IDS).certificate().passed


def test_the_papers_member_holds_a_gain_like_a_factor() -> None:
    T = tl.Lens(model_of(lambda z, g: F.rms_norm(z, (N_INNER,), torch.sigmoid(pooled(g)))))(IDS)
    held = model_of(
        lambda z, g: z * (z.square().mean(-1, True) + 2**-52).rsqrt().detach() * pooled(g).sigmoid().detach()
    )
    assert gap(T.dense(), derivative(held, T.input)) < 1e-12


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (lambda z, g: first(F.prelu(first(z), pooled(g))), "second live argument"),
        (lambda z, g: F.embedding(torch.tensor([[3, 1, 0, 2]]), z[0]), "`embedding`"),
        (lambda z, g: torch.func.vmap(lambda w: (z * w).tanh())(MATRIX).mean(0), "within torch.func"),
    ],
)
def test_what_no_rule_follows_is_said(inner: Inner, reason: str) -> None:
    with pytest.raises(tl.NotLinearError, match=reason):
        tl.Lens(model_of(inner))(IDS).rows(0)


def set_by_data(z: Tensor, g: Tensor) -> Tensor:
    y = torch.zeros_like(z)
    y.data = 2 * z
    return y


@pytest.mark.parametrize("inner", [lambda z, g: from_dlpack(to_dlpack(z.detach())).tanh(), set_by_data])
def test_a_path_that_no_level_sees_is_not_certified(inner: Inner) -> None:
    T = tl.Lens(model_of(inner))(IDS)
    assert "capture" in T.certificate().failures


class WithOwnKeys(nn.Module):
    """Torch's attention with a learned key, and one that is zero."""

    def __init__(self, needs_weights: bool) -> None:
        super().__init__()
        self.needs_weights = needs_weights
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)

    def forward(self, x: Tensor) -> Tensor:
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return x + self.attention(x, x, x, attn_mask=later, is_causal=True, need_weights=self.needs_weights)[0]


@pytest.mark.parametrize("needs_weights", [True, False])
def test_a_layer_with_keys_of_its_own_is_followed(needs_weights: bool) -> None:
    model = model_of(lambda z, g: z)
    model.blocks = nn.ModuleList(WithOwnKeys(needs_weights) for _ in range(2)).double().eval()
    T = tl.Lens(model, rules=tl.Rules.jacobian())(IDS)
    assert gap(T.dense(), derivative(model, T.input)) < 1e-12
