"""Components: they conserve the target at every depth, add up to their sublayers, and are named by dataflow alone."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from autograd_twin import Twin, block_paths, given_by, logit
from laws import is_bias
from torch import Tensor, nn

import tensorlens as tl

FAMILIES = {
    "llama": ("self_attn.o_proj", "mlp.down_proj"),
    "gpt2": ("attn.c_proj", "mlp.c_proj"),
    "bert-mlm": ("attention.output.dense", "output.dense"),
    "neox-parallel": ("attention.dense", "mlp.dense_4h_to_h"),
    "gemma3": ("self_attn.o_proj", "mlp.down_proj"),
    "olmo2": ("self_attn.o_proj", "mlp.down_proj"),
    "phi": ("self_attn.dense", "mlp.fc2"),
}
"""The last matrix of attention and of feed-forward in each."""

OUT, TARGET = 4, 5


@cache
def family(name: str) -> tuple[nn.Module, tl.AttentionTensor]:
    model = zoo.build(name, "sdpa" if "sdpa" in zoo.ZOO[name].attentions else "eager")
    return model, tl.Lens(model)(zoo.sample(name))


@cache
def found(name: str, effect: Any = "total") -> tl.ComponentMap:
    return family(name)[1].components(OUT, TARGET, effect)


def tolerance(name: str) -> float:
    return 1e-6 if zoo.ZOO[name].casts else 1e-10


@cache
def twin(name: str) -> Twin:
    return Twin(family(name)[1], OUT, TARGET)


def by_parameter(name: str) -> dict[str, float]:
    """⟨∂t/∂p, p⟩ of every parameter that a gradient of the frozen target reaches."""
    return twin(name).effects()


def blocks_of(name: str) -> list[str]:
    return block_paths(family(name)[1])


def passing(name: str, paths: list[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """What modules took and gave in a plain pass of the model."""
    model, _ = family(name)
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def keep(path: str) -> Any:
        return lambda module, args, y: seen.__setitem__(path, (args[0][0].detach(), y[0].detach()))

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        model(torch.tensor([zoo.sample(name)]))
    for handle in handles:
        handle.remove()
    return seen


def rows(c: tl.ComponentMap, block: int, kind: str) -> Tensor:
    chosen = [i for i, label in enumerate(c.labels) if label.block == block and label.kind == kind]
    return c.scores[chosen]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_depth_and_the_biases_after_it_carry_the_target(name: str) -> None:
    model, _ = family(name)
    c, effects, blocks = found(name), by_parameter(name), blocks_of(name)
    parameters = dict(model.named_parameters())
    biases = {
        path: effect for path, effect in effects.items() if path == "head.bias" or is_bias(path, parameters[path])
    }
    for depth, row in enumerate(c.flow()):
        before = tuple(f"{block}." for block in blocks[:depth])
        after = sum(effect for path, effect in biases.items() if not path.startswith(before))
        assert float(row.sum()) + after == pytest.approx(c.value, rel=tolerance(name), abs=tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_first_depth_is_the_in_class_map(name: str) -> None:
    _, T = family(name)
    in_class = T.map("tensor.in_class", OUT, TARGET).scores[0]
    torch.testing.assert_close(found(name).flow()[0], in_class, rtol=1e-12, atol=1e-12)
    assert str(found(name).labels[0]) == "embedding"
    torch.testing.assert_close(found(name).scores[0], in_class, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_add_up_to_their_sublayers(name: str) -> None:
    c, effects, close = found(name), by_parameter(name), tolerance(name)
    for n, block in enumerate(blocks_of(name)):
        attention, feed_forward = (f"{block}.{path}" for path in FAMILIES[name])
        assert rows(c, n, "attention head").shape[0] == 4
        heads, bias = rows(c, n, "attention head").sum(), rows(c, n, "attention bias").sum()
        assert float(heads) == pytest.approx(effects[f"{attention}.weight"], rel=close, abs=close)
        assert float(bias) == pytest.approx(effects.get(f"{attention}.bias", 0.0), rel=close, abs=close)
        of_feed_forward = effects[f"{feed_forward}.weight"] + effects.get(f"{feed_forward}.bias", 0.0)
        assert float(rows(c, n, "feed-forward").sum()) == pytest.approx(of_feed_forward, rel=close, abs=close)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_what_the_operator_loses_without_it(name: str) -> None:
    _, T = family(name)
    x, close = T.input[None], tolerance(name)
    table = found(name).heads()
    assert table.shape == (3, 4)
    for n, h in ((0, 1), (1, 3), (2, 0)):
        lost = found(name).value - logit(T.without_heads({n: [h]}), x, OUT, TARGET)
        assert float(table[n, h]) == pytest.approx(lost, rel=close, abs=close)


@pytest.mark.parametrize("name", FAMILIES)
def test_direct_effects_are_complete(name: str) -> None:
    d = found(name, "direct")
    assert float(d.scores.sum()) == pytest.approx(d.value, rel=tolerance(name))
    torch.testing.assert_close(d.flow()[0], d.scores[0], rtol=0, atol=0)
    kinds = {label.kind for label in d.labels}
    assert kinds == {"embedding", "attention head", "attention bias", "feed-forward", "bias"}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bert-mlm"])
def test_without_norms_on_the_stream_direct_effects_see_one_cotangent(name: str) -> None:
    _, T = family(name)
    d, blocks = found(name, "direct"), blocks_of(name)
    written = "post_feedforward_layernorm" if name in ("gemma3", "olmo2") else "mlp"
    seen = passing(name, [f"{block}.{written}" for block in blocks])
    last = twin(name).at(given_by(T, blocks[2]))[0]
    for n, block in enumerate(blocks):
        expected = (last * seen[f"{block}.{written}"][1]).sum(-1)
        torch.testing.assert_close(rows(d, n, "feed-forward")[0], expected, rtol=tolerance(name), atol=tolerance(name))
    biases = {path: effect for path, effect in by_parameter(name).items() if path.endswith("bias")}
    after = sum(effect for path, effect in biases.items() if not path.startswith(tuple(f"{b}." for b in blocks)))
    assert float(d.scores[-1].sum()) == pytest.approx(after, rel=tolerance(name), abs=tolerance(name))


def test_norms_on_the_stream_are_passed_on_the_direct_way() -> None:
    # BERT normalises the sum: s = x + y, x' = norm(s). Here the same by plain torch, with the variance held.
    model, T = family("bert-mlm")
    d, blocks = found("bert-mlm", "direct"), blocks_of("bert-mlm")
    norms = [f"{block}.{path}" for block in blocks for path in ("attention.output.LayerNorm", "output.LayerNorm")]
    seen = passing("bert-mlm", [*norms, *(f"{block}.output.dense" for block in blocks)])
    cotangent = twin("bert-mlm").at(given_by(T, blocks[2]))[0]
    for n in reversed(range(3)):
        bias = torch.zeros(zoo.N_TOKENS, dtype=torch.float64)
        for path in (norms[2 * n + 1], norms[2 * n]):
            norm: Any = model.get_submodule(path)
            bias = bias + cotangent @ norm.bias.detach()
            deviation = (seen[path][0].var(-1, False, keepdim=True) + norm.eps).sqrt()
            scaled = cotangent * norm.weight.detach() / deviation
            cotangent = scaled - scaled.mean(-1, keepdim=True)
            if path == norms[2 * n + 1]:
                of_feed_forward = (cotangent * seen[f"{blocks[n]}.output.dense"][1]).sum(-1)
                torch.testing.assert_close(rows(d, n, "feed-forward")[0], of_feed_forward, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(rows(d, n, "bias")[0], bias, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(d.scores[0], (cotangent * T.input).sum(-1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("effect", ["total", "direct"])
def test_neurons_add_up_to_their_feed_forward(name: str, effect: Any) -> None:
    model, T = family(name)
    c = T.components(OUT, TARGET, effect, neurons=[1])
    whole, close = rows(found(name, effect), 1, "feed-forward")[0], tolerance(name)
    neurons, bias = rows(c, 1, "neuron"), rows(c, 1, "feed-forward bias")
    last = model.get_submodule(f"{blocks_of(name)[1]}.{FAMILIES[name][1]}")
    width = last.weight.shape[0 if name == "gpt2" else 1]  # gpt2 keeps its matrices the other way round
    assert neurons.shape[0] == width and c.heads().shape == (3, 4)
    torch.testing.assert_close(neurons.sum(0) + bias[0], whole, rtol=close, atol=close)
    if effect == "total":  # each of them by the gradient of its own row of the matrix
        weight = last.weight.detach().T if name == "gpt2" else last.weight.detach()
        by_row = (twin(name).gradient(f"{blocks_of(name)[1]}.{FAMILIES[name][1]}.weight") * weight).sum(0)
        torch.testing.assert_close(neurons.sum(1), by_row, rtol=close, atol=close)


# Other ways to build a model -----------------------------------------------------------------------------------------


def test_experts_are_one_feed_forward() -> None:
    config = hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    model = zoo.randomise(hf.MixtralForCausalLM(config)).double().eval()
    T = tl.Lens(model)(zoo.sample("llama"))
    c, d = T.components(OUT, TARGET), T.components(OUT, TARGET, "direct")
    assert [rows(c, n, "feed-forward").shape[0] for n in range(3)] == [1, 1, 1]
    assert c.flow().sum(1).tolist() == pytest.approx([c.value] * 4, rel=1e-6)  # it has no biases
    assert float(d.scores.sum()) == pytest.approx(c.value, rel=1e-6)
    assert float(rows(d, 2, "feed-forward").sum()) == pytest.approx(float(rows(c, 2, "feed-forward").sum()), rel=1e-6)


@pytest.mark.parametrize("effect", ["total", "direct"])
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_add_up_to_their_feed_forward(effect: Any, implementation: str, shared: bool) -> None:
    if shared:
        options = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "decoder_sparse_step": 1}
        config: Any = hf.Qwen2MoeConfig(**zoo.TEXT, **zoo.GROUPED, num_experts=4, num_experts_per_tok=2, **options)
        family = hf.Qwen2MoeForCausalLM
    else:
        config = hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2)
        family = hf.MixtralForCausalLM
    config._experts_implementation = implementation
    dtype = torch.float32 if implementation == "grouped_mm" else torch.float64  # torch has no other for it
    model: Any = zoo.randomise(family(config)).to(dtype).eval()
    chosen: dict[str, Tensor] = {}
    handle = model.model.layers[1].mlp.experts.register_forward_pre_hook(
        lambda module, args: chosen.update(experts=args[1].detach())
    )
    model(torch.tensor([zoo.sample("llama")]))
    handle.remove()
    T = tl.Lens(model)(zoo.sample("llama"))
    c = T.components(OUT, TARGET, effect, experts=[1])
    whole = rows(T.components(OUT, TARGET, effect), 1, "feed-forward")[0]
    experts = {label.expert: c.scores[i] for i, label in enumerate(c.labels) if label.kind == "expert"}
    assert list(experts) == chosen["experts"].unique().tolist()
    rest = rows(c, 1, "feed-forward")
    assert len(rest) == int(shared)  # the expert of all tokens
    atol = 1e-9 if dtype is torch.float64 else 1e-6 * float(whole.abs().max())
    torch.testing.assert_close(sum(experts.values()) + rest.sum(0), whole, rtol=1e-6, atol=atol)
    for number, scores in experts.items():
        is_chosen = (chosen["experts"] == number).any(1)
        assert not scores[~is_chosen].any()
        if effect == "total":
            assert bool((scores[: OUT + 1][is_chosen[: OUT + 1]] != 0).all())
    assert "block 1, expert 0" in {str(label) for label in c.labels} and c.heads().shape == (3, 4)


def test_without_experts_a_feed_forward_stays_whole() -> None:
    _, T = family("llama")
    assert T.components(OUT, TARGET, experts=[1]).labels == found("llama").labels
    with pytest.raises(tl.InputError, match="block 3"):
        T.components(OUT, TARGET, experts=[3])


def test_what_crosses_a_depth_between_encoder_and_decoder_carries_the_target() -> None:
    config = hf.T5Config(
        d_model=16,
        d_kv=4,
        num_heads=4,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        vocab_size=60,
        pad_token_id=0,
        decoder_start_token_id=0,
        tie_word_embeddings=False,
    )
    model = zoo.randomise(hf.T5ForConditionalGeneration(config)).double().eval()
    T = tl.Lens(model)({"input_ids": [[5, 6, 7, 8, 9]], "decoder_input_ids": [[0, 11, 12]]})
    c, d = T.components(2, TARGET), T.components(2, TARGET, "direct")
    assert c.scores.shape[1] == 8
    assert c.flow().sum(1).tolist() == pytest.approx([c.value] * 5, rel=1e-6)  # no biases
    assert float(d.scores.sum()) == pytest.approx(c.value, rel=1e-6)
    assert {label.kind for label in c.labels if label.block == 2} >= {
        "attention head",
        "attention 2 head",
        "feed-forward",
    }
    assert not rows(c, 0, "attention head")[:, 5:].any() and not rows(c, 2, "attention head")[:, :5].any()


class Knot(nn.Module):
    """A block without a residual around its attention: its parts cannot be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return self.out((q @ k.transpose(1, 2) / 8**0.5).softmax(-1) @ v)


class Knots(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(20, 8), nn.ModuleList([Knot(), Knot()])
        self.lm_head = nn.Linear(8, 20)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def test_a_block_whose_parts_cannot_be_told_apart_is_one_component() -> None:
    model = zoo.randomise(Knots()).double().eval()
    T = tl.Lens(model, blocks="layers")([3, 4, 5])
    c, d = T.components(-1, 7), T.components(-1, 7, "direct")
    assert [str(label) for label in c.labels] == ["embedding", "block 0", "block 1"]
    assert float(d.scores.sum()) == pytest.approx(d.value, rel=1e-10)
    assert c.heads().shape == (2, 0)


# The record ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_saved_map_comes_back(suffix: str, tmp_path: Any) -> None:
    c = found("gpt2", "direct")
    back = tl.ComponentMap.load(c.save(tmp_path / f"inside{suffix}"))
    assert torch.equal(back.scores, c.scores) and torch.equal(back.flow(), c.flow())
    assert (back.labels, back.tokens, back.target, back.value) == (c.labels, c.tokens, c.target, c.value)
    assert back.meta == c.meta


def test_a_foreign_file_is_refused(tmp_path: Any) -> None:
    (tmp_path / "map.json").write_text("{}")
    with pytest.raises(tl.InputError, match="ComponentMap"):
        tl.ComponentMap.load(tmp_path / "map.json")
    with pytest.raises(tl.InputError, match="json"):
        found("gpt2").save(tmp_path / "map.xlsx")


def test_top_and_show(capsys: pytest.CaptureFixture[str]) -> None:
    c = found("gpt2")
    best = c.top(3)
    sums = c.scores.sum(1).abs().sort(descending=True).values
    assert [abs(one.score) for one in best] == pytest.approx(sums[:3].tolist())
    c.show(k=3)
    assert str(best[0].component) in capsys.readouterr().out
    with pytest.raises(tl.InputError, match="at least 1"):
        c.top(0)


def test_a_model_without_a_head_and_a_wrong_effect_are_refused(unchecked: None) -> None:
    with pytest.raises(tl.MethodError, match="head"):
        tl.Lens(zoo.build("bert"))(zoo.sample("bert")).components()
    unknown: Any = "indirect"
    with pytest.raises(tl.InputError, match="effect"):
        family("gpt2")[1].components(effect=unknown)
    with pytest.raises(tl.MethodError, match="last"):
        family("gpt2")[1].blocks(0, 2).components()
