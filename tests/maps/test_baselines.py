"""Baselines against slow literal twins, and against the sums that a decomposition must give."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from bench.families import tiny_models
from torch import nn
from zoo import ZOO, build, names, sample

import tensorlens as tl
from tensorlens.errors import MethodError
from tensorlens.maps import baselines, peers
from tensorlens.maps.baselines import decompose
from tensorlens.maps.methods import Question
from tensorlens.operators.attention_matrices import mixing

MEASURES = ("w_attn", "w_attn_res_ln", "glob_enc", "alti")


class Paths(NamedTuple):
    """Where a family's blocks have the output weight, the norms, and a scale behind the weight."""

    out: str
    first: str | None = None
    "Behind the residual sum (post-LN)."
    behind: str | None = None
    "Between the output weight and the residual sum."
    second: str | None = None
    scale: str | None = None


FAMILIES = {
    "bert": Paths("attention.output.dense", "attention.output.LayerNorm", second="output.LayerNorm"),
    "albert": Paths(
        "albert_layers.0.attention.dense",
        "albert_layers.0.attention.LayerNorm",
        second="albert_layers.0.full_layer_layer_norm",
    ),
    "gpt2": Paths("attn.c_proj", second="ln_2"),
    "dinov2": Paths("attention.o_proj", second="norm2", scale="layer_scale1.lambda1"),
    "llama": Paths("self_attn.o_proj", second="post_attention_layernorm"),
    "qwen2": Paths("self_attn.o_proj", second="post_attention_layernorm"),
    "gemma3": Paths("self_attn.o_proj", behind="post_attention_layernorm", second="pre_feedforward_layernorm"),
    "olmo2": Paths("self_attn.o_proj", behind="post_attention_layernorm"),
    "phi": Paths("self_attn.dense"),
    "neox-parallel": Paths("attention.dense"),
}
WITHOUT_GLOB_ENC = [name for name, paths in FAMILIES.items() if paths.second is None]
CASES = [(name, attention) for name in FAMILIES for attention in ZOO[name].attentions]


def decompositions(name, attention="eager"):
    T = tl.Lens(build(name, attention))(sample(name))
    recording = T.operator.recording
    return T, [decompose(recording, n, mixing(recording, n)) for n in range(T.n_blocks)]


def tolerance(name: str) -> dict[str, Any]:
    return dict(rtol=1e-5, atol=1e-6) if ZOO[name].casts else dict(rtol=1e-9, atol=1e-11)


def blocks_of(T):
    return [call.module for call in T.operator.recording.origin.calls]


def inputs_of(T, name, path):
    """What a module of each block is given by the model itself."""
    found, value = [], sample(name)
    handles = [
        block.get_submodule(path).register_forward_pre_hook(lambda _, args: found.append(args[0][0].detach()))
        for block in dict.fromkeys(blocks_of(T))
    ]
    with torch.no_grad():
        T.operator.recording.origin.model(
            **({"pixel_values": value[None]} if ZOO[name].vision else {"input_ids": torch.tensor([value])})
        )
    for handle in handles:
        handle.remove()
    return found


def bias_of(block, paths):
    """What the output weight's own bias adds to what it gives."""
    bias = block.get_submodule(paths.out).bias
    scale = 1.0 if paths.scale is None else block.get_parameter(paths.scale).detach()
    return torch.zeros(16, dtype=torch.float64) if bias is None else scale * bias.detach()


# Test 11: the sums ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), [case for case in CASES if FAMILIES[case[0]].second is not None])
def test_sources_add_up_to_what_the_model_computes(name, attention):
    """Σ_j y_ij + b_o is what the first norm (post-LN) or the second is given."""
    T, blocks = decompositions(name, attention)
    paths, rows = FAMILIES[name], slice(0, T.n_tokens)
    seen = inputs_of(T, name, paths.first or paths.second)
    assert len(seen) == T.n_blocks
    for block, module, expected in zip(blocks, blocks_of(T), seen, strict=True):
        stream = block.with_residual(rows).sum(1) + bias_of(module, paths)
        torch.testing.assert_close(stream, expected.to(stream), **tolerance(name))
        after = expected if paths.first is None else module.get_submodule(paths.first)(expected)
        torch.testing.assert_close(block.output.double(), after.detach().double(), **tolerance(name))


@pytest.mark.parametrize("name", WITHOUT_GLOB_ENC)
def test_sources_add_up_where_no_norm_sees_the_sum(name):
    """Parallel and post-sublayer blocks: against what attention itself gives."""
    T, blocks = decompositions(name)
    paths, rows = FAMILIES[name], slice(0, T.n_tokens)
    seen = inputs_of(T, name, paths.behind or paths.out)
    for block, module, given in zip(blocks, blocks_of(T), seen, strict=True):
        expected = module.get_submodule(paths.behind or paths.out)(given).detach()
        added = block.after(block.mixed(rows), rows).sum(1) + bias_of(module, paths)
        torch.testing.assert_close(added, expected.to(added), **tolerance(name))


# Slow twins ----------------------------------------------------------------------------------------------------------


def norm_of(module, y, v):
    """A norm with the scale of y applied to v; written out for one token."""
    eps = float(getattr(module, "eps", None) or module.variance_epsilon)
    weight = module.weight.detach() + (1.0 if "Gemma" in type(module).__name__ else 0.0)
    if isinstance(module, nn.LayerNorm):
        sigma = math.sqrt(float(((y - y.mean()) ** 2).mean()) + eps)
        return weight * (v - v.mean()) / sigma
    return weight * v / math.sqrt(float((y**2).mean()) + eps)


def twin(name):
    """(w_attn, w_attn_res_ln, glob_enc, alti) of each block by loops over outputs, sources and heads."""
    T, blocks = decompositions(name)
    recording, paths, L = T.operator.recording, FAMILIES[name], T.n_tokens
    second = [None] * T.n_blocks if paths.second is None else inputs_of(T, name, paths.second)
    for n, (block, model, x) in enumerate(zip(blocks, blocks_of(T), recording.states, strict=False)):
        at, out = mixing(recording, n), model.get_submodule(paths.out)
        w_out = out.weight.detach() if name == "gpt2" else out.weight.detach().T
        n_heads = len(at.attention)
        width = len(w_out) // n_heads
        scale = 1.0 if paths.scale is None else model.get_parameter(paths.scale).detach()
        found = {measure: torch.zeros(L, L, dtype=torch.float64) for measure in MEASURES}
        for i in range(L):
            c = torch.stack(
                [
                    sum(
                        (
                            at.attention[h, i, j] * (at.values[h, j] @ w_out[h * width : (h + 1) * width])
                            for h in range(n_heads)
                        ),
                        start=torch.zeros(()),
                    )
                    for j in range(L)
                ]
            )
            bias = bias_of(model, paths)
            if paths.behind is not None:
                behind, whole = model.get_submodule(paths.behind), c.sum(0) + bias
                s = torch.stack([norm_of(behind, whole, cj) for cj in c])
                bias = norm_of(behind, whole, bias)
            else:
                c = s = c * scale
            y = torch.stack([s[j] + (x[0, i] if i == j else 0) for j in range(L)])
            stream = y.sum(0) + bias
            found["w_attn"][i] = c.norm(dim=-1)
            g, output = y, stream
            if paths.first is not None:
                first = model.get_submodule(paths.first)
                g = torch.stack([norm_of(first, stream, yj) for yj in y])
                output = norm_of(first, stream, stream) + first.bias.detach()
            found["w_attn_res_ln"][i] = g.norm(dim=-1)
            if paths.second is not None:
                norm = model.get_submodule(paths.second)
                found["glob_enc"][i] = torch.stack([norm_of(norm, second[n][i], gj) for gj in g]).norm(dim=-1)
            near = [max(0.0, float(output.abs().sum() - (gj - output).abs().sum())) for gj in g]
            total = sum(near)
            found["alti"][i] = torch.tensor([n / total for n in near]) if total else torch.eye(L)[i]
        yield block, found


@pytest.mark.parametrize("name", FAMILIES)
def test_measures_equal_their_slow_twins(name):
    for block, expected in twin(name):
        for measure in MEASURES:
            if measure == "glob_enc" and FAMILIES[name].second is None:
                continue
            torch.testing.assert_close(baselines.measured(block, measure), expected[measure], rtol=1e-5, atol=1e-6)


def test_w_attn_of_one_token_is_the_length_of_its_transformed_value():
    T = tl.Lens(build("bert"))([11])
    found = mixing(T.operator.recording, 0)
    weight = blocks_of(T)[0].attention.output.dense.weight.detach()
    value = weight @ found.values[:, 0].flatten()
    block = decompose(T.operator.recording, 0, found)
    torch.testing.assert_close(baselines.measured(block, "w_attn"), value.norm().reshape(1, 1))


# Test 10: rollout ----------------------------------------------------------------------------------------------------


def test_rollout_of_identity_attention_is_the_identity():
    identity = torch.eye(5, dtype=torch.float64)
    assert torch.equal(baselines.rollout([identity] * 3, has_residual=False), identity)


def test_rollout_puts_the_later_block_on_the_left():
    torch.manual_seed(0)
    first, second = (torch.rand(4, 4, dtype=torch.float64).softmax(-1) for _ in range(2))
    half = torch.eye(4, dtype=torch.float64) / 2
    expected = (second / 2 + half) @ (first / 2 + half)
    torch.testing.assert_close(baselines.rollout([first, second], has_residual=False), expected)
    assert not torch.allclose(expected, (first / 2 + half) @ (second / 2 + half))


def test_raw_rollout_ranks_as_the_plain_product_does():
    torch.manual_seed(0)
    matrices = [10.0 ** float(torch.randint(-3, 4, (1,))) * torch.rand(5, 5, dtype=torch.float64) for _ in range(4)]
    product = torch.linalg.multi_dot(matrices[::-1])
    found = baselines.rollout(matrices, has_residual=True, raw=True)
    torch.testing.assert_close(found / found.max(), product / product.max())


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma3", "vit"])
def test_rows_of_every_joined_map_sum_to_one(name):
    T = tl.Lens(build(name))(sample(name))
    for method in (name for name in tl.METHODS if name.startswith(("rollout", "mean", "alti"))):
        found = T.map(method)
        torch.testing.assert_close(found.scores.sum(1), torch.ones(T.n_tokens, dtype=torch.float64), msg=method)
        assert found.bias_share.isnan().all()
        if ZOO[name].causal:
            assert not found.scores.triu(1).any(), method


def test_mean_is_the_average_of_the_blocks_alone():
    T = tl.Lens(build("bert"))(sample("bert"))
    alone = [T.blocks(n, n + 1).map("mean.w_attn").scores for n in range(T.n_blocks)]
    torch.testing.assert_close(T.map("mean.w_attn").scores, torch.stack(alone).mean(0))


def test_without_sink_drops_the_first_column():
    T = tl.Lens(build("gpt2"))(sample("gpt2"))
    whole, kept = (T.map(f"rollout.attn{suffix}").scores for suffix in ("", "_without_sink"))
    assert not kept[1:, 0].any() and kept[0, 0] == 1
    torch.testing.assert_close(kept[1:, 1:], whole[1:, 1:] / whole[1:, 1:].sum(-1, keepdim=True))


# Test 12: what does not apply ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WITHOUT_GLOB_ENC)
@pytest.mark.parametrize("join", ["rollout", "mean"])
def test_glob_enc_is_refused_where_no_second_norm_sees_attention(name, join):
    T = tl.Lens(build(name))(sample(name))
    with pytest.raises(MethodError, match=r"`glob_enc` does not apply.*Use `w_attn_res_ln`"):
        T.map(f"{join}.glob_enc")


def test_chosen_heads_are_refused():
    T = tl.Lens(build("bert"))(sample("bert")).heads({0: [1]})
    with pytest.raises(MethodError, match="do not support selected heads"):
        T.map("rollout.attn")


# Gradients -----------------------------------------------------------------------------------------------------------


def question(T, token):
    return Question(operator=T.operator, out_tokens=(token,), classes=T.context.classes)


def explained(T, token, x):
    """The number that gradients are of, by the model itself with another first state."""
    return question(T, token).explained(peers._run(T.operator.recording, x[None]), [0])[0]


@pytest.mark.parametrize("name", names(lambda family: True))
def test_times_input_is_the_models_own_gradient(name):
    """By finite differences along each token's own state: d/dt r(x with x_j scaled by 1 + t)."""
    T = tl.Lens(build(name))(sample(name))
    token = T.n_tokens - 1
    found = T.map("gradient.times_input", out_token=token).scores[0]

    def value(j, t):
        moved = T.input
        moved[j] *= 1 + t
        with torch.no_grad():
            return float(explained(T, token, moved))

    step = 1e-3  # not smaller: many families compute their softmax in float32
    expected = torch.tensor([(value(j, step) - value(j, -step)) / (2 * step) for j in range(T.n_tokens)])
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["bert", "bert-classifier", "gpt2", "dinov2"])
def test_times_input_is_a_backward_pass_of_the_model_itself(name):
    """The member `Rules.jacobian` gives it; nothing is held in the pass that it is compared with."""
    T = tl.Lens(build(name))(sample(name))
    x = T.input.requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(explained(T, 1, x), x)
    found = T.map("gradient.times_input", out_token=1)
    torch.testing.assert_close(found.scores[0], (gradient * T.input).sum(-1), rtol=1e-10, atol=1e-13)
    best = T.predictions(1, 1)[0].name if T.context.classes else "output state"
    assert found.meta["explains"] == best
    assert bool(found.bias_share.isnan().all())


def test_integrated_gradients_are_complete():
    """They sum to the value at X less the value at zero."""
    T = tl.Lens(build("bert-classifier"))(sample("bert-classifier"))
    at = [float(explained(T, 0, x).detach()) for x in (T.input, torch.zeros_like(T.input))]
    found = peers.integrated_gradients(T.operator.recording, question(T, 0), [0], n_steps=400)
    assert float(found.sum()) == pytest.approx(at[0] - at[1], rel=1e-3)


def test_gradients_leave_the_model_as_it_was():
    model = build("gpt2").train()
    T = tl.Lens(model)(sample("gpt2"))
    T.map("gradient.integrated", out_token=-1)
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with pytest.raises(MethodError, match="whole model"):
        T.blocks(1, 2).map("gradient.times_input")


# Controls ------------------------------------------------------------------------------------------------------------


def test_controls():
    T = tl.Lens(build("gpt2"))(sample("gpt2"))
    assert T.map("control.recency", out_token=-1).scores[0].argsort(descending=True).tolist() == list(range(6, -1, -1))
    assert T.map("control.position", out_token=-1).scores[0].argsort(descending=True).tolist() == list(range(7))
    torch.testing.assert_close(T.map("control.embedding_norm").scores[2], T.input.norm(dim=-1))
    assert torch.equal(T.map("control.random").scores, T.map("control.random").scores)
    assert T.map("control.random").shape == (7, 7)


@pytest.mark.large  # captum comes with the oracles, in `make test-all`
@pytest.mark.parametrize("method", ["gradient.times_input", "gradient.integrated"])
def test_captum_finds_the_same_gradients(method):
    captum = pytest.importorskip("captum.attr")

    model = build("llama")
    T = tl.Lens(model)(sample("llama"))

    def logit(embeddings: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embeddings).logits[:, -1, 7]

    x = T.input[None].clone().requires_grad_()
    options = {"n_steps": 32, "method": "gausslegendre"} if method == "gradient.integrated" else {}
    oracle = (captum.IntegratedGradients if options else captum.InputXGradient)(logit).attribute(x, **options)
    found = T.map(method, out_token=-1, target=7).scores[0]
    assert torch.allclose(found, oracle[0].sum(-1).detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("family", ["bart", "fsmt"])
def test_gradients_of_the_model_reach_an_encoder_and_its_decoder(family):
    """Both streams move along the path: what the encoder takes and what the decoder takes, in their own layouts."""
    tiny = tiny_models.build("seq2seq", family)
    T = tl.Lens(tiny.model, rules="jacobian")(tiny.arguments)
    asked = Question(operator=T.operator, out_tokens=(T.shape[0] - 1,), target=3, classes=T.context.classes)
    recording = T.operator.recording
    points = torch.cat([recording.states[0]] * 2)
    found = peers._gradient(recording, points, asked, [0])
    expected = T.map("tensor.in_class", out_token=-1, target=3).scores
    assert torch.allclose((found[:1] * points[:1]).sum(-1), expected, rtol=1e-3, atol=1e-5)
    T.map("gradient.integrated", out_token=-1, target=3)
