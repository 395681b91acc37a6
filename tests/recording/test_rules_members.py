"""The family of exact operators: every member obeys the laws, and named members are what they are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import laws
import pytest
import torch
import zoo
from bench.families.tiny_models import build
from torch import Tensor, nn
from torch.nn import functional as F

import tensorlens as tl
from tensorlens.recording.rules import products

MEMBERS = {
    "attn_lrp": tl.Rules.attn_lrp(),
    "gim": tl.Rules.gim(),
    "jacobian": tl.Rules.jacobian(),
    "attention half": tl.Rules(attention="half"),
    "attention taylor": tl.Rules(attention="taylor", gate="freeze_up"),
    "gate taylor": tl.Rules(gate="taylor"),
    "norm taylor": tl.Rules(norm="taylor"),
    "activation taylor": tl.Rules(activation="taylor"),
}
MODELS = ["llama-sdpa", "llama-eager", "bert-sdpa", "gemma3-eager", "gpt2-sdpa", "mixtral-eager", "t5-eager"]
OTHERS = {"mixtral": "causal", "t5": "seq2seq"}
CASTS = {"llama", "gemma3", "mixtral", "t5"}


def made(name: str) -> tuple[nn.Module, Any]:
    family, attention = name.split("-")
    if family in OTHERS:
        tiny = build(OTHERS[family], family, attention)
        return tiny.model, tiny.arguments
    return zoo.build(family, attention), zoo.sample(family)


def tolerance(name: str) -> float:
    return laws.TOLERANCE_FLOAT32_INSIDE if name.split("-")[0] in CASTS else laws.TOLERANCE


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return request.param, *made(request.param)


@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_obeys_the_laws(model, member):
    name, module, inputs = model
    T = tl.Lens(module, rules=MEMBERS[member])(inputs)
    expected = T.output
    u = torch.randn(2, *T.output.shape, dtype=T.dtype, generator=torch.Generator().manual_seed(4))
    by_adjoint = (T.adjoint(u) * T.input).sum((1, 2)) + (u * T.bias).sum((1, 2))
    completeness = laws.relative(by_adjoint - (u * expected).sum((1, 2)), u.norm(dim=(1, 2)) * expected.norm())
    errors = {
        "value": laws.value(T, expected),
        "linearity": laws.linearity(T),
        "adjoint": laws.adjoint(T),
        "composition": laws.composition(T),
        "completeness with the bias of a run at zero": completeness,
    }
    assert max(errors.values()) <= 3 * tolerance(name), errors


def states_of(module: nn.Module, T: tl.AttentionTensor, inputs: Any) -> tuple[list[Tensor], Tensor]:
    """X⁰ as leaves and X^N of the plain model after it, joined by autograd."""
    leaves: list[Tensor] = []

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        old = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        leaves.append(old.detach().clone().requires_grad_())
        return tuple(leaves[-1] if a is old else a for a in args), {
            key: leaves[-1] if value is old else value for key, value in kwargs.items()
        }

    stacks = [m for m in module.modules() if isinstance(m, nn.ModuleList) and len(m) == T.n_blocks]
    if hasattr(module, "decoder"):
        stacks = [module.encoder.block, module.decoder.block]
    hooks = [stack[0].register_forward_pre_hook(enter, with_kwargs=True) for stack in stacks[:2]]
    given = inputs if isinstance(inputs, dict) else {"input_ids": torch.tensor([inputs])}
    body, ends = getattr(module, "decoder", module.base_model), []
    hooks.append(body.register_forward_hook(lambda *call: ends.append(call[-1].last_hidden_state[0])))
    module(**given)
    y = ends[0]
    for hook in hooks:
        hook.remove()
    return leaves, y


def joined(parts: Any) -> Tensor:
    return torch.cat([part[0] for part in parts]).detach()


def test_the_jacobian_is_the_derivative_of_the_plain_model(model):
    name, module, inputs = model
    T = tl.Lens(module, rules=tl.Rules.jacobian())(inputs)
    leaves, y = states_of(module, T, inputs)
    assert laws.relative(joined(leaves) - T.input, T.input) <= tolerance(name)
    u = torch.randn(3, *y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7))
    pulled = [torch.autograd.grad(y, leaves, one, retain_graph=True) for one in u]
    expected = torch.stack([joined(parts) for parts in pulled])
    assert laws.relative(T.adjoint(u) - expected, expected) <= tolerance(name)
    by_definition = (u * y.detach()).sum((1, 2)) - (expected * T.input).sum((1, 2))
    found = (u * T.bias).sum((1, 2))
    assert laws.relative(found - by_definition, by_definition) <= 10 * tolerance(name)


@pytest.mark.parametrize("member", ["attn_lrp", "jacobian"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_with_heads_left_out_the_pull_is_still_the_operator_frozen_at_x(attention, member):
    """Behind a silenced head no state is the recorded one, and a derivative taken there would be another operator."""
    T = tl.Lens(zoo.build("gpt2", attention), rules=MEMBERS[member])(zoo.sample("gpt2"))
    part = T.heads({0: [1], 1: [0, 2]})
    assert laws.adjoint(part) <= laws.TOLERANCE
    assert laws.linearity(part) <= laws.TOLERANCE
    assert laws.relative(part.bias - T.bias, T.bias) > 1e-3


def test_members_have_names_and_are_data():
    names = [tl.Rules.paper().name, tl.Rules.cp_lrp().name, tl.Rules.attn_lrp().name, tl.Rules.jacobian().name]
    assert names == ["paper", "paper", "attn_lrp", "jacobian"]
    assert tl.Rules.gim().name == "gim" and tl.Rules.of("gim,softmax_temperature=3").softmax_temperature == 3
    assert tl.Rules(attention="half").name is None
    assert tl.Rules() == tl.Rules.paper() == tl.Rules(**tl.Rules.paper().as_dict())
    assert tl.Rules(**tl.Rules.jacobian().as_dict()) == tl.Rules.jacobian()


# AttnLRP, written by hand ---------------------------------------------------------------------------------------------

D, H, HIDDEN, VOCABULARY = 8, 2, 12, 11


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.gate, self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1)]

    def forward(self, x: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.heads(self.norm_1(x)), is_causal=True)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        y = self.norm_2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attn_lrp(self, x: Tensor) -> Tensor:
        """The same values; gradients by AttnLRP's rules."""
        q, k, v = self.heads(rms_norm(self.norm_1, x))
        scores = uniform(torch.matmul, q, k.transpose(-1, -2)) / (D // H) ** 0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        mixed = uniform(torch.matmul, scores.masked_fill(later, -torch.inf).softmax(-1), v)
        x = x + self.out(mixed.transpose(-3, -2).flatten(-2))
        y = rms_norm(self.norm_2, x)
        gate = self.gate(y)
        return x + self.down(uniform(torch.mul, gate * gate.sigmoid().detach(), self.up(y)))


def uniform(multiply: Any, a: Tensor, b: Tensor) -> Tensor:
    return (multiply(a.detach(), b) + multiply(a, b.detach())) / 2


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt().detach() * norm.weight


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, D)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.RMSNorm(D, eps=1e-6)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


IDS = [3, 1, 4, 1, 5]
CLASS = torch.randn(D, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
"""The row of an unembedding."""


def by_hand(model: Any) -> Tensor:
    x0 = model.embedding(torch.tensor([IDS])).detach().requires_grad_()
    x = x0
    for block in model.blocks:
        x = block.attn_lrp(x)
    logit = (rms_norm(model.norm, x)[0, -1] * CLASS).sum()
    return (torch.autograd.grad(logit, x0)[0] * x0)[0].sum(-1).detach()


def in_class(model: nn.Module, rules: tl.Rules) -> Tensor:
    T = tl.Lens(model, rules=rules)(IDS)
    u = torch.zeros(1, *T.output.shape, dtype=T.dtype)
    u[0, -1] = CLASS
    return (T.adjoint(u)[0] * T.input).sum(-1)


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return zoo.randomise(Model()).double().eval()


def test_attn_lrp_with_a_class_is_attn_lrp_written_by_hand(tiny):
    expected = by_hand(tiny)
    assert laws.relative(in_class(tiny, tl.Rules.attn_lrp()) - expected, expected) <= laws.TOLERANCE
    assert laws.relative(in_class(tiny, tl.Rules.paper()) - expected, expected) > 1e-2


class Softened(torch.autograd.Function):
    """A softmax whose derivative is that of another temperature."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward((scores / temperature).softmax(-1))
        return scores.softmax(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (s,) = ctx.saved_tensors
        return s * (grads[0] - (s * grads[0]).sum(-1, keepdim=True)), None


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_the_softmax_has_the_derivative_of_its_temperature(monkeypatch, attention, temperature):
    """Autograd through a plain GPT-2 whose softmax is `Softened`: nothing else is held or halved."""
    T = tl.Lens(zoo.build("gpt2", attention), rules=replace(tl.Rules.jacobian(), softmax_temperature=temperature))(
        zoo.sample("gpt2")
    )
    plain = zoo.build("gpt2", "eager")
    monkeypatch.setattr(F, "softmax", lambda scores, dim=-1, dtype=None: Softened.apply(scores, temperature))
    leaves, y = states_of(plain, T, zoo.sample("gpt2"))
    u = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(7))
    expected = joined(torch.autograd.grad(y, leaves, u))
    assert laws.relative(T.adjoint(u) - expected, expected) <= laws.TOLERANCE
    assert laws.adjoint(T) <= laws.TOLERANCE and laws.value(T, T.output) <= laws.TOLERANCE


@pytest.mark.parametrize("wrong", [0, -1.0, float("nan"), float("inf"), "warm", True, None])
def test_what_is_not_a_temperature_is_refused(wrong):
    with pytest.raises(tl.InputError, match="`softmax_temperature` must be a number above 0"):
        tl.Rules(softmax_temperature=wrong)


def test_a_wrong_weight_is_noticed(tiny, monkeypatch):
    """Any weights have the right value at X, so that only the definition of the member can tell."""
    expected = by_hand(tiny)
    monkeypatch.setitem(products.WEIGHTS, "half", (0.5, 0.4))
    assert laws.relative(in_class(tiny, tl.Rules.attn_lrp()) - expected, expected) > 1e-3
