"""Baselines against slow literal twins, and against the sums that a decomposition must give."""

from __future__ import annotations

import math

import pytest
import torch
from tensorlens.freezing.observe import mixings
from zoo import CASES, ZOO, build, names, sample

import tensorlens as tl
from tensorlens.errors import MethodError
from tensorlens.maps import baselines
from tensorlens.maps.decomposition import decompose

MEASURES = ("w_attn", "w_attn_res_ln", "glob_enc", "alti")
WITHOUT_GLOB_ENC = ("neox-parallel", "phi", "olmo2")


def decompositions(name, attention="eager"):
    T = tl.Lens(build(name, attention))(sample(name))
    recording = T.operator.recording
    return T, [decompose(recording, n, mixing) for n, mixing in enumerate(mixings(recording))]


def tolerance(name):
    return dict(rtol=1e-5, atol=1e-6) if ZOO[name].casts else dict(rtol=1e-9, atol=1e-11)


# Test 11: the sums ---------------------------------------------------------------------------------------------------


def true_attention_output(T, block, parts, inputs):
    """What leaves the attention sub-block, as the model's next module sees it."""
    if parts.layout == "post_ln":  # the first norm's input
        return inputs[parts.norm_1.path]
    if parts.layout in ("pre_ln", "sandwich"):
        return inputs[parts.norm_2.path]
    return None


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_sources_add_up_to_what_the_model_computes(name, attention):
    """Σ_j y_ij + b_o is the true norm input (post-LN) or the true residual stream (pre-LN and others)."""
    T, blocks = decompositions(name, attention)
    recording = T.operator.recording
    checked = 0
    for n, (block, mixing) in enumerate(zip(blocks, mixings(recording), strict=True)):
        rows = slice(0, T.n_tokens)
        stream = block.with_residual(block.mixed(rows), rows).sum(1) + block.out_bias(rows)
        expected = true_attention_output(T, n, block.parts, mixing.inputs)
        if expected is not None:
            torch.testing.assert_close(stream, expected.to(stream), **tolerance(name))
            checked += 1
        if block.parts.layout == "post_ln":
            vectors = baselines.attention_block(block, block.mixed(rows), rows)
            output = baselines.attention_output(block, vectors, rows)
            norm = recording.anatomy.model.get_submodule(block.parts.norm_1.path)
            torch.testing.assert_close(output, norm(expected), **tolerance(name))
    assert checked == (0 if blocks[0].parts.layout in ("parallel", "post_sublayer") else T.n_blocks)


@pytest.mark.parametrize("name", ["neox-parallel", "phi", "olmo2"])
def test_sources_add_up_where_no_norm_sees_the_sum(name):
    """Parallel and post-sublayer blocks: against the attention module's own output."""
    T, blocks = decompositions(name)
    model, outputs = T.operator.recording.anatomy.model, []
    for block in T.operator.recording.anatomy.blocks:
        attention = getattr(block, "attention", None) or block.self_attn
        last = block.post_attention_layernorm if name == "olmo2" else attention
        last.register_forward_hook(
            lambda m, a, output: outputs.append(output[0] if isinstance(output, tuple) else output)
        )
    model(input_ids=torch.tensor([sample(name)]))
    for block, output in zip(blocks, outputs, strict=True):
        rows = slice(0, T.n_tokens)
        added = block.added(block.mixed(rows), rows).sum(1) + block.out_bias(rows)
        torch.testing.assert_close(added, output[0].detach().to(added), **tolerance(name))


# Slow twins ----------------------------------------------------------------------------------------------------------


def norm_of(module, y, v, kind):
    """A norm with the scale of y applied to v; written out for one token."""
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None)
    weight = module.weight.detach() + (1.0 if "Gemma" in type(module).__name__ else 0.0)
    if kind == "layer":
        sigma = math.sqrt(float(((y - y.mean()) ** 2).mean()) + eps)
        return weight * (v - v.mean()) / sigma
    return weight * v / math.sqrt(float((y**2).mean()) + eps)


def twin(name):
    """(w_attn, w_attn_res_ln, glob_enc, alti) of each block by loops over outputs, sources and heads."""
    T, blocks = decompositions(name)
    recording = T.operator.recording
    model = recording.anatomy.model
    for block, mixing, x in zip(blocks, mixings(recording), recording.states, strict=False):
        parts, L = block.parts, T.n_tokens
        w_out = parts.out.weight
        width = w_out.shape[0] // parts.n_heads
        found = {measure: torch.zeros(L, L, dtype=torch.float64) for measure in MEASURES}
        module = {
            key: part and model.get_submodule(part.path)
            for key, part in (("1", parts.norm_1), ("p", parts.post_norm_1), ("2", parts.norm_2))
        }
        for i in range(L):
            c = torch.stack([
                sum(mixing.attention[h, i, j] * (mixing.values[h, j] @ w_out[h * width : (h + 1) * width])
                    for h in range(parts.n_heads))
                for j in range(L)
            ])  # fmt: skip
            bias = torch.zeros_like(c[0]) if parts.out.bias is None else parts.out.bias
            scale = 1.0 if parts.layer_scale_1 is None else parts.layer_scale_1.detach()
            if module["p"] is not None:
                whole = c.sum(0) + bias
                s = torch.stack([norm_of(module["p"], whole, cj, parts.post_norm_1.kind) for cj in c])
                bias = norm_of(module["p"], whole, bias, parts.post_norm_1.kind)
            else:
                c = s = c * scale
                bias = bias * scale
            y = torch.stack([s[j] + (x[0, i] if i == j else 0) for j in range(L)])
            stream = y.sum(0) + bias
            found["w_attn"][i] = c.norm(dim=-1)
            if parts.layout == "post_ln":
                g = torch.stack([norm_of(module["1"], stream, yj, parts.norm_1.kind) for yj in y])
                output = norm_of(module["1"], stream, stream, "layer") + module["1"].bias.detach()
            else:
                g, output = y, stream
            found["w_attn_res_ln"][i] = g.norm(dim=-1)
            if name not in WITHOUT_GLOB_ENC and module["2"] is not None:
                second = mixing.inputs[parts.norm_2.path][i]
                found["glob_enc"][i] = torch.stack(
                    [norm_of(module["2"], second, gj, parts.norm_2.kind) for gj in g]
                ).norm(dim=-1)
            near = [max(0.0, float(output.abs().sum() - (gj - output).abs().sum())) for gj in g]
            total = sum(near)
            found["alti"][i] = torch.tensor([n / total for n in near]) if total else torch.eye(L)[i]
        yield block, found


@pytest.mark.parametrize("name", ["bert", "albert", "gpt2", "dinov2", "llama", "gemma3", "olmo2", "phi", "qwen2"])
def test_measures_equal_their_slow_twins(name):
    for block, expected in twin(name):
        for measure in MEASURES:
            if measure == "glob_enc" and name in WITHOUT_GLOB_ENC:
                continue
            torch.testing.assert_close(
                baselines.measured(block, (measure,))[measure], expected[measure], rtol=1e-5, atol=1e-6
            )


def test_w_attn_of_one_token_is_the_length_of_its_transformed_value():
    T = tl.Lens(build("bert"))([11])
    (mixing, *_), recording = mixings(T.operator.recording), T.operator.recording
    block = decompose(recording, 0, mixing)
    value = mixing.values[:, 0].flatten() @ block.parts.out.weight
    torch.testing.assert_close(baselines.w_attn(block), value.norm().reshape(1, 1))


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
    with pytest.raises(MethodError, match="know no chosen heads"):
        T.map("rollout.attn")


# Gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names(lambda family: True))
def test_times_input_is_the_models_own_gradient(name):
    """By finite differences along each token's own state: d/dt r(x with x_j scaled by 1 + t)."""
    T = tl.Lens(build(name))(sample(name))
    token = T.n_tokens - 1
    found = T.map("gradient.times_input", out_token=token).scores[0]
    from tensorlens.maps import gradients
    from tensorlens.maps.methods import Question

    recording, x = T.operator.recording, T.input
    read, _ = gradients._reader(Question(operator=T.operator, out_tokens=(token,), classes=T.context.classes), token)

    def value(j, t):
        moved = x.clone()
        moved[j] *= 1 + t
        with torch.no_grad():
            return float(read(gradients._run(recording, moved[None])))

    step = 1e-3  # not smaller: many families compute their softmax in float32
    expected = torch.tensor([(value(j, step) - value(j, -step)) / (2 * step) for j in range(T.n_tokens)])
    torch.testing.assert_close(found.float(), expected, rtol=5e-3, atol=5e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("name", ["bert", "bert-classifier", "gpt2", "dinov2"])
def test_times_input_is_a_backward_pass_of_the_model_itself(name):
    """The member `Rules.jacobian` gives it; nothing is held in the pass that it is compared with."""
    from tensorlens.maps import gradients
    from tensorlens.maps.methods import Question

    T = tl.Lens(build(name))(sample(name))
    read, explained = gradients._reader(Question(operator=T.operator, out_tokens=(1,), classes=T.context.classes), 1)
    gradient = gradients._gradient(T.operator.recording, T.input[None], read)[0]
    found = T.map("gradient.times_input", out_token=1)
    torch.testing.assert_close(found.scores[0], (gradient * T.input).sum(-1), rtol=1e-10, atol=1e-13)
    assert found.meta["explains"] == explained and bool(found.bias_share.isnan().all())


def test_integrated_gradients_are_complete():
    """They sum to the value at X less the value at zero."""
    from tensorlens.maps import gradients
    from tensorlens.maps.methods import Question

    T = tl.Lens(build("bert-classifier"))(sample("bert-classifier"))
    read, _ = gradients._reader(Question(operator=T.operator, out_tokens=(0,), classes=T.context.classes), 0)
    at = [
        float(read(gradients._run(T.operator.recording, x[None])).detach())
        for x in (T.input, torch.zeros_like(T.input))
    ]
    found = gradients.integrated_gradients(T.operator.recording, read, n_steps=400)
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
    from captum.attr import InputXGradient, IntegratedGradients

    model = build("llama")
    T = tl.Lens(model)(sample("llama"))

    def logit(embeddings: torch.Tensor) -> torch.Tensor:
        return model(inputs_embeds=embeddings).logits[:, -1, 7]

    x = T.input[None].clone().requires_grad_()
    options = {"n_steps": 32, "method": "gausslegendre"} if method == "gradient.integrated" else {}
    oracle = (IntegratedGradients if options else InputXGradient)(logit).attribute(x, **options)
    found = T.map(method, out_token=-1, target=7).scores[0]
    assert torch.allclose(found, oracle[0].sum(-1).detach(), rtol=1e-4, atol=1e-7)
