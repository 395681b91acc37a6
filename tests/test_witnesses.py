"""Three witnesses that share no code: the operator, `equations.py`, and the Jacobian of a hand-patched Transformer."""

from __future__ import annotations

import itertools

import pytest
import torch
from plain_transformer import ACTIVATIONS, PlainTransformer, gap, live, randn, written_out
from torch import Tensor, nn

import tensorlens as tl

LAYOUTS = ("post_ln", "pre_ln", "parallel", "sandwich", "post_sublayer")
CASES = list(itertools.product(LAYOUTS, ("layer", "rms"), ("gelu", "swiglu"), (False, True)))


class Naturally(PlainTransformer):
    """The same network with its feed-forward spelled as a model would spell it, no factor named."""

    def _ffn(self, n, x, hold):
        w = self.weights[n]
        up = x @ w["w_up"] + w["b_up"]
        if not self.is_gated:
            return ACTIVATIONS[self.ffn_kind](up) @ w["w_down"] + w["b_down"]
        gate = x @ w["w_gate"] + w["b_gate"]
        return (ACTIVATIONS[self.ffn_kind](gate) * up) @ w["w_down"] + w["b_down"]


class Block(nn.Module):
    def __init__(self, plain: PlainTransformer, n: int) -> None:
        super().__init__()
        self.plain, self.n = plain, n
        self.used = nn.Parameter(torch.ones(1))  # a block is recognised by its parameters

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.plain._block(self.n, hidden_states, live)


class Model(nn.Module):
    """A `PlainTransformer` as a torch module, so that a lens can look through it."""

    def __init__(self, plain: PlainTransformer) -> None:
        super().__init__()
        self.plain = plain
        self.blocks = nn.ModuleList(Block(plain, n) for n in range(plain.n_blocks))

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        x = inputs_embeds
        for block in self.blocks:
            x = block(x)
        return self.plain._norm(self.plain.n_blocks, "final", x, live) if self.plain.has_final_norm else x


@pytest.mark.parametrize(("layout", "norm", "ffn", "is_causal"), CASES)
def test_operator_equations_and_jacobian_agree(layout, norm, ffn, is_causal):
    options = {"norm": norm, "ffn": ffn, "is_causal": is_causal, "n_kv_heads": 2}
    plain, x = PlainTransformer(layout, **options), randn(5, 8, seed=3)
    T = tl.Lens(Model(Naturally(layout, **options)).double())(x)

    tensor, bias = written_out(plain, x)
    by_jacobian = torch.autograd.functional.jacobian(plain.patched, x)
    assert gap(T.dense(), by_jacobian) < 1e-12
    assert gap(T.dense(), tensor) < 1e-12
    assert gap(T.bias, bias) < 1e-12
    assert gap(T.output, plain(x)) < 1e-12


@pytest.mark.parametrize("gate", ["freeze_gate", "freeze_up", "half"])
@pytest.mark.parametrize("ffn", ["swiglu", "geglu"])
def test_gate_conventions_agree_with_the_hand_patched_model(gate, ffn):
    plain, x = PlainTransformer("pre_ln", ffn=ffn, gate=gate), randn(5, 8, seed=4)
    T = tl.Lens(Model(Naturally("pre_ln", ffn=ffn)).double(), rules=tl.Rules(gate=gate))(x)
    assert gap(T.dense(), torch.autograd.functional.jacobian(plain.patched, x)) < 1e-12
    assert gap(T.apply(x) + T.bias, plain(x)) < 1e-12, "the product once, and not twice"
