"""Ablation: T's word is its own affine function with parts held at another value; the truth is the model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from autograd_twin import block_paths, logit
from test_components import FAMILIES, OUT, TARGET, Knots, family, found, tolerance

import tensorlens as tl
from tensorlens.inside.stream import Component


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_at_zero_are_predicted_as_the_operator_without_them(name: str) -> None:
    _, T = family(name)
    chosen = {0: [1, 3], 1: [0], 2: [2]}
    record = T.ablate([(n, h) for n, heads in chosen.items() for h in heads], OUT, TARGET)
    expected = logit(T.without_heads(chosen), T.input[None], OUT, TARGET)
    assert record.predicted == pytest.approx(expected, rel=tolerance(name), abs=tolerance(name))
    assert record.value == pytest.approx(found(name).value, rel=tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_one_component_at_zero_loses_its_total_effect_and_the_truth_is_the_model(name: str) -> None:
    model, T = family(name)
    c = found(name)
    record = T.ablate("block 1, feed-forward", OUT, TARGET)
    row = next(row for label, row in zip(c.labels, c.scores, strict=True) if str(label) == "block 1, feed-forward")
    close = tolerance(name)
    assert record.predicted == pytest.approx(c.value - float(row.sum()), rel=close, abs=close)
    # The module that gives out what is written to the stream, found by its place in the tree.
    after_norm = {"gemma3": "post_feedforward_layernorm", "olmo2": "post_feedforward_layernorm"}
    end = after_norm.get(name, "output.dense" if name == "bert-mlm" else "mlp")
    module = model.get_submodule(f"{block_paths(T)[1]}.{end}")
    handle = module.register_forward_hook(lambda m, args, y: torch.zeros_like(y))
    with torch.no_grad():
        logits = model(torch.tensor([zoo.sample(name)])).logits[0, OUT]
    handle.remove()
    assert record.true == pytest.approx(float(logits[TARGET]), rel=1e-6, abs=1e-9)
    assert record.after[0].index == int(logits.argmax())
    assert record.after[0].probability == pytest.approx(float(logits.double().softmax(-1).max()), rel=1e-6)
    assert abs(record.true - record.value) > 1e-4


class CalledByKeyword(torch.nn.Module):
    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(input=x)


def test_a_head_is_switched_off_where_its_projection_is_called_by_keyword() -> None:
    """The edit must reach a named argument: skipped, the model would answer as if nothing had been switched off."""
    model = zoo.build("llama", "sdpa")
    expected = tl.Lens(model)(zoo.sample("llama")).ablate([(1, 0)], OUT, TARGET)
    attention = model.get_submodule("model.layers.1.self_attn")
    attention.o_proj = CalledByKeyword(attention.o_proj)
    record = tl.Lens(model)(zoo.sample("llama")).ablate([(1, 0)], OUT, TARGET)
    assert expected.true != pytest.approx(expected.value, rel=1e-6)
    assert record.true == pytest.approx(expected.true, rel=1e-9)


class HeadByKeyword(torch.nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model, self.lm_head = model.config, model.model, model.lm_head

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(input=self.model(input_ids).last_hidden_state)


def test_an_unembedding_that_is_called_by_keyword_reads_the_same() -> None:
    model = zoo.build("llama", "sdpa")
    one, other = (tl.Lens(m)(zoo.sample("llama")) for m in (model, HeadByKeyword(model)))
    maps = [T.map("tensor.in_class", out_token=OUT).scores for T in (one, other)]
    torch.testing.assert_close(*map(torch.as_tensor, maps))
    assert other.ablate([(1, 0)], OUT, TARGET).true == pytest.approx(one.ablate([(1, 0)], OUT, TARGET).true, rel=1e-9)


def test_whole_attention_cuts_the_way_of_its_heads() -> None:
    _, T = family("gpt2")
    whole = T.ablate("block 1, attention", OUT, TARGET)
    both = T.ablate(["block 1, attention", (1, 0)], OUT, TARGET)
    assert both.predicted == pytest.approx(whole.predicted, rel=1e-10)
    assert both.true == pytest.approx(whole.true, rel=1e-10)


def test_a_mean_over_tokens_and_over_other_inputs() -> None:
    model, T = family("gpt2")
    lens = tl.Lens(model)
    others = [lens([4, 9, 8]), lens([7, 7, 30, 31, 2])]
    seen: list[Any] = []
    module: Any = model.get_submodule("transformer.h.2.mlp")
    handle = module.register_forward_hook(lambda m, args, y: seen.append(y[0]))
    with torch.no_grad():
        for ids in ([4, 9, 8], [7, 7, 30, 31, 2], zoo.sample("gpt2")):
            model(torch.tensor([ids]))
    handle.remove()
    means = {"own": seen[2].mean(0), "others": torch.cat(seen[:2]).mean(0)}
    records = {
        "own": T.ablate("block 2, feed-forward", OUT, TARGET, to="mean"),
        "others": T.ablate("block 2, feed-forward", OUT, TARGET, to="mean", over=others),
    }
    for name, mean in means.items():
        handle = module.register_forward_hook(lambda m, args, y, mean=mean: mean.expand_as(y))
        with torch.no_grad():
            logit = model(torch.tensor([zoo.sample("gpt2")])).logits[0, OUT, TARGET]
        handle.remove()
        assert records[name].true == pytest.approx(float(logit), rel=1e-9)
        assert records[name].to == "mean"


def test_the_model_is_left_as_it_was() -> None:
    model, T = family("gpt2")
    hooks = lambda: sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())  # noqa: E731
    before = hooks()
    T.ablate([(0, 1), (2, 3)], OUT, TARGET)
    assert hooks() == before
    assert T.components(OUT, TARGET).value == pytest.approx(found("gpt2").value)


def test_what_cannot_be_switched_off_is_refused(unchecked: None) -> None:
    _, T = family("gpt2")
    for wrong in ("block 9, feed-forward", (0, 7), [], [3], "embedding", 4):
        with pytest.raises(tl.InputError, match="omponent"):
            T.ablate(wrong, OUT, TARGET)  # type: ignore[arg-type]
    with pytest.raises(tl.InputError, match="zero"):
        T.ablate((0, 1), OUT, TARGET, to="noise")  # type: ignore[arg-type]
    config = hf.AlbertConfig(**zoo.TEXT, embedding_size=8)
    albert = tl.Lens(zoo.randomise(hf.AlbertForMaskedLM(config)).double().eval())(zoo.sample("bert"))
    with pytest.raises(tl.MethodError, match="single module"):
        albert.ablate((0, 1), OUT, TARGET)
    knots = tl.Lens(zoo.randomise(Knots()).double().eval(), blocks="layers")([3, 4, 5])
    with pytest.raises(tl.InputError, match="block 0"):
        knots.ablate("block 0", -1, 7)


def test_a_saved_record_comes_back(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, T = family("gpt2")
    record = T.ablate([Component(kind="attention head", block=1, head=2)], OUT, TARGET)
    back = tl.Ablation.load(record.save(tmp_path / "ablation.json"))
    assert back.as_dict() == record.as_dict()
    record.show()
    assert "block 1, attention head 2" in capsys.readouterr().out
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(tl.InputError, match="Ablation"):
        tl.Ablation.load(tmp_path / "other.json")
