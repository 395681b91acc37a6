"""Maps of the attention tensor: their values, their sums, their cost, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from zoo import ZOO, build, names, sample

import tensorlens as tl
from tensorlens.maps import tensor_maps
from tensorlens.program.program import Program
from tensorlens.progress import cancelled_by

LANGUAGE_MODELS = names(lambda family: family.causal or "MaskedLM" in family.model.__name__)
CLASSIFIERS = names(lambda family: "Classification" in family.model.__name__)


def lens_on(name: str, **options) -> tl.AttentionTensor:
    return tl.Lens(build(name), **options)(sample(name))


def logits(T: tl.AttentionTensor, name: str) -> torch.Tensor:
    value = sample(name)
    argument = {"pixel_values": value[None]} if ZOO[name].vision else {"input_ids": torch.tensor([value])}
    with torch.no_grad():
        return T.operator.recording.anatomy.model(**argument).logits[0]


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_in_class_sums_to_the_logit_less_the_biases(name):
    T = lens_on(name)
    if name == "gemma2":  # its logits are soft-capped; ours are those before the cap
        model: Any = T.operator.recording.anatomy.model
        model.config.final_logit_softcapping = None
        T = tl.Lens(model)(sample(name))
    expected = logits(T, name)[:, 11]
    found = T.map("tensor.in_class", target=11)
    by_bias = torch.stack([T.operator.logits_at_zero(i)[11] for i in range(T.n_tokens)])
    assert torch.allclose(found.scores.sum(1) + by_bias, expected, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found.bias_share, by_bias / expected, rtol=1e-5, atol=1e-5)
    assert found.scores.shape == (T.n_tokens, T.n_tokens)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_in_class_of_a_classifier_goes_through_its_head(name):
    T = lens_on(name)
    expected = logits(T, name)
    for index in range(3):
        found = T.map("tensor.in_class", target=f"LABEL_{index}")
        assert found.shape == (1, T.n_tokens)
        by_bias = T.operator.logits_at_zero(0)[index]
        assert torch.allclose(found.scores.sum() + by_bias, expected[index], rtol=1e-9)
        assert torch.allclose(found.bias_share[0], by_bias / expected[index], rtol=1e-9)


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_a_contrast_is_the_difference_of_two_targets(name):
    T = lens_on(name)
    token = None if name == "bert-classifier" else -1
    both = T.map("tensor.in_class", out_token=token, target=(2, 1)).scores
    apart = [T.map("tensor.in_class", out_token=token, target=index).scores for index in (2, 1)]
    assert torch.allclose(both, apart[0] - apart[1], rtol=1e-9)


def test_weights_by_class_are_a_target():
    T = lens_on("gpt2")
    by_weights, by_pair = (T.map("tensor.in_class", -1, target) for target in ({5: 1.0, 6: -1.0}, (5, 6)))
    assert torch.equal(by_weights.scores, by_pair.scores) and by_weights.meta == by_pair.meta
    with pytest.raises(tl.InputError, match="id: number"):
        T.map("tensor.in_class", -1, {5: float("nan")})


@pytest.mark.parametrize("target", [5, (5, 6)])
@pytest.mark.parametrize("part", ["whole", "range", "heads", "range and heads"])
def test_the_bias_share_of_in_class_is_what_a_run_at_zero_gives(part, target):
    T = lens_on("gpt2")
    T = T.blocks(1, 3) if "range" in part else T
    T = T.heads({1: [0, 2]}) if "heads" in part else T
    found = T.map("tensor.in_class", out_token=-1, target=target)
    at_zero, at_x = T.operator.logits_at_zero(T.n_tokens - 1), T.operator.recording.logits_at(-1)
    of_target = (lambda z: z[5]) if target == 5 else (lambda z: z[5] - z[6])
    assert torch.allclose(found.bias_share[0], of_target(at_zero) / of_target(at_x), rtol=1e-9)
    assert found.meta["logit"] == pytest.approx([float(of_target(at_x))])
    # Without some heads the logits are others than those the map is of, and completeness says nothing of the bias.
    assert found.meta.get("bias") == (None if "heads" in part else "by completeness")


def test_in_half_precision_the_share_is_that_of_a_run_at_zero_up_to_rounding():
    T = tl.Lens(build("gpt2", dtype=torch.bfloat16))(sample("gpt2"))
    found = T.map("tensor.in_class", out_token=-1, target=5)
    expected = T.operator.logits_at_zero(T.n_tokens - 1)[5] / T.operator.recording.logits_at(-1)[5]
    rounding = torch.finfo(torch.bfloat16).eps / min(found.meta["kept"])
    assert found.meta["bias"] == "by completeness"
    assert float(found.bias_share[0]) == pytest.approx(float(expected), abs=4 * rounding)


@pytest.mark.parametrize("name", ["gpt2", "bert", "gemma3"])
def test_collapses_equal_sums_over_the_dense_tensor(name):
    T = lens_on(name)
    dense, x, y = T.dense(), T.input, T.output
    expected = {
        "tensor.norm": dense.square().sum((1, 3)).sqrt(),
        "tensor.in_out": torch.einsum("id,idje,je->ij", y, dense, x),
        "tensor.contribution": torch.einsum("idje,je->ijd", dense, x).norm(dim=-1),
    }
    for method, values in expected.items():
        whole, row = T.map(method), T.map(method, out_token=2)
        assert torch.allclose(whole.scores, values, rtol=1e-5, atol=1e-7), method
        assert torch.allclose(row.scores[0], values[2], rtol=1e-5, atol=1e-7), method
    spectral = torch.stack([torch.linalg.svdvals(dense[2, :, j])[0] for j in range(T.n_tokens)])
    assert torch.allclose(T.map("tensor.norm", out_token=2, norm="spectral").scores[0], spectral, rtol=1e-9)


def test_probes_estimate_contributions_within_their_standard_error():
    T = lens_on("gpt2")
    for part in (T, T.blocks(1, 3)):
        exact, found = (part.map("tensor.contribution", 4, probes=probes) for probes in (None, 400))
        errors = torch.tensor(found.meta["standard_error"])
        assert ((found.scores - exact.scores).abs() <= 4 * errors).all() and (errors <= 0.05 * exact.scores).all()
        assert torch.equal(found.bias_share, exact.bias_share) and found.meta["probes"] == 400
    with pytest.raises(tl.MethodError, match=r"option of `tensor\.contribution` and `tensor\.norm`"):
        T.map("tensor.in_out", 4, probes=4)


def test_inputs_that_are_pushed_a_few_at_a_time_say_how_far_they_are(monkeypatch):
    T, parts = lens_on("gpt2"), list[float | None]()
    together = T.map("tensor.contribution", 4)
    monkeypatch.setitem(tensor_maps.TOKENS_TOGETHER, "cpu", 2 * T.n_tokens)
    with cancelled_by(parts.append):
        apart = T.map("tensor.contribution", 4)
    assert torch.allclose(apart.scores, together.scores, rtol=1e-12)
    told = [part for part in parts if part is not None]
    assert told == sorted(set(told)) == [k / T.n_tokens for k in range(0, T.n_tokens, 2)]


def test_bias_share_is_beside_every_map():
    T = lens_on("bert")
    share = (T.output * T.bias).sum(1) / T.output.square().sum(1)
    for method in ("tensor.norm", "tensor.in_out", "tensor.contribution"):
        assert torch.allclose(T.map(method).bias_share, share)
    without = lens_on("llama").map("tensor.in_out").bias_share  # its code casts norms to float32
    assert torch.allclose(without, torch.zeros(7, dtype=torch.float64), atol=1e-6)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    ("method", "target"), [("tensor.in_out", None), ("tensor.in_class", 5), ("tensor.in_class", (5, 6))]
)
def test_one_output_costs_one_pull(method, target, attention, monkeypatch):
    T = tl.Lens(build("llama", attention))(sample("llama"))
    pulls, pull = [], Program.pull_each
    monkeypatch.setattr(Program, "pull_each", lambda self, several: pull(self, pulls.extend(several) or several))
    T.map(method, out_token=-1, target=target)
    assert len(pulls) == 1


def test_a_block_range_explains_its_own_output():
    T = lens_on("gpt2")
    part = T.blocks(1, 3)
    assert part.n_blocks == 2
    found = part.map("tensor.in_out", out_token=-1)
    assert torch.allclose(found.scores.sum(), (part.output[-1] * (part.output[-1] - part.bias[-1])).sum())
    assert found.meta["blocks"] == [1, 3]
    assert torch.equal(T.blocks(1, 3).blocks(0, 1).rows(2), T.blocks(1, 2).rows(2))


def test_the_final_norm_can_be_left_out():
    model: Any = build("gpt2")
    T = tl.Lens(model, rules=tl.Rules(include_final_norm=False))(sample("gpt2"))
    with torch.no_grad():
        states = model(torch.tensor([sample("gpt2")]), output_hidden_states=True).hidden_states
        normed = model.transformer.ln_f(T.output)
    assert torch.allclose(normed, states[-1][0])
    assert T.certificate().passed
    assert torch.allclose(
        T.map("tensor.in_class", target=4).scores, lens_on("gpt2").map("tensor.in_class", target=4).scores
    )


def test_predictions_rank_the_models_own_logits():
    T = lens_on("gpt2")
    best = T.predictions(k=3)
    expected = logits(T, "gpt2")[-1]
    assert [found.index for found in best] == expected.topk(3).indices.tolist()
    assert best[0].probability == pytest.approx(float(expected.softmax(-1).max()))


def test_mean_tensor_is_the_mean_of_what_its_members_do():
    model = build("gpt2")
    members = [tl.Lens(model)(sample("gpt2", seed=seed)) for seed in range(3)]
    mean, x = tl.MeanTensor(members), members[0].input
    assert torch.allclose(mean.rows(-1), torch.stack([T.rows(-1) for T in members]).mean(0))
    assert torch.allclose(mean(x), torch.stack([T.apply(x) + T.bias for T in members]).mean(0))
    assert torch.allclose((mean.T @ x), torch.stack([T.adjoint(x) for T in members]).mean(0))
    alone = tl.MeanTensor(members[:1])
    assert torch.allclose(alone(members[0].input), members[0].output)


ERRORS = {
    "unknown method": (lambda T: T.map("tensor.inout"), tl.MethodError, "tensor.in_out"),
    "target for a map without one": (lambda T: T.map("tensor.norm", target=3), tl.MethodError, "takes no target"),
    "target out of range": (lambda T: T.map("tensor.in_class", target=99), tl.InputError, "0 to 59"),
    "target without tokenizer": (lambda T: T.map("tensor.in_class", target=" Paris"), tl.InputError, "no tokenizer"),
    "contrast with itself": (lambda T: T.map("tensor.in_class", target=(3, 3)), tl.InputError, "must differ"),
    "out_token out of range": (lambda T: T.map("tensor.in_out", out_token=7), tl.InputError, "-7 to 6"),
    "out_token of the wrong kind": (lambda T: T.rows("3"), tl.InputError, "position"),
    "norm of another kind": (lambda T: T.map("tensor.norm", norm="nuclear"), tl.InputError, "spectral"),
    "block range out of range": (lambda T: T.blocks(0, 4), tl.InputError, "0:3"),
    "empty block range": (lambda T: T.blocks(2, 2), tl.InputError, "not empty"),
    "head that is not there": (lambda T: T.heads({0: [4]}), tl.InputError, "0 to 3"),
    "block of heads that is not there": (lambda T: T.without_heads({3: [0]}), tl.InputError, "`block` must be"),
    "class of a range that ends early": (lambda T: T.blocks(0, 2).map("tensor.in_class"), tl.MethodError, "ends at"),
    "state of the wrong shape": (lambda T: T.apply(torch.zeros(7, 15)), tl.InputError, r"7, 16"),
    "state of whole numbers": (lambda T: T @ torch.zeros(7, 16, dtype=torch.long), tl.InputError, "floating"),
    "mean of nothing": (lambda T: tl.MeanTensor([]), tl.InputError, "at least one"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_asked_is_refused_by_name(case, unchecked):
    ask, kind, words = ERRORS[case]
    with pytest.raises(kind, match=words):
        ask(lens_on("gpt2"))


def test_a_model_without_a_head_has_no_classes():
    with pytest.raises(tl.MethodError, match="no head"):
        lens_on("bert").map("tensor.in_class", target=1)
    with pytest.raises(tl.MethodError, match="no head"):
        lens_on("bert").predictions()


def test_a_pooling_head_has_one_row():
    with pytest.raises(tl.InputError, match="one row"):
        lens_on("bert-classifier").map("tensor.in_class", out_token=0, target=1)
    with pytest.raises(tl.InputError, match="LABEL_0, LABEL_1, LABEL_2"):
        lens_on("bert-classifier").map("tensor.in_class", target="positive")


def test_dense_that_would_not_fit_says_how_large_it_is(monkeypatch):
    from tensorlens.operators import operator

    monkeypatch.setattr(operator, "free_bytes", lambda device: 50_000)
    with pytest.raises(tl.SizeError, match=r"GiB.*rows"):
        lens_on("gpt2").dense()


@pytest.mark.parametrize("name", ["GraniteConfig", "CohereConfig", "Gemma2Config"])
def test_predictions_are_the_models_own_behind_scales_and_caps(name):
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "vocab_size": 60,
        "head_dim": 8,
        "pad_token_id": 0,
    }
    more = {"GraniteConfig": {"logits_scaling": 8.0}, "Gemma2Config": {"final_logit_softcapping": 2.0}}
    config = getattr(transformers, name)(**sizes, **more.get(name, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.tensor([[3, 5, 7, 9, 11]])
    T = tl.Lens(model)(ids[0].tolist())
    with torch.no_grad():
        own = model(ids).logits[0]
    for token in (-1, 2):
        best = T.predictions(1, token)[0]
        assert best.index == int(own[token].argmax())
        assert best.logit == pytest.approx(float(own[token].max()), rel=1e-4)
        assert best.probability == pytest.approx(float(own[token].softmax(-1).max()), rel=1e-4)


def test_mistakes_are_named_and_numpys_numbers_are_numbers(unchecked):
    T: Any = lens_on("gpt2")
    assert torch.equal(T.map(out_token=np.int64(-1)).scores, T.map(out_token=-1).scores)
    with pytest.raises(tl.InputError, match="must be a position"):
        T.map(out_token=True)
    with pytest.raises(tl.MethodError, match="no method None"):
        T.map(None)
    with pytest.raises(tl.MethodError, match="an option of `tensor.norm`"):
        T.map("tensor.in_out", -1, norm="spectral")
    for wrong in ({0: 1}, [1, 2]):
        with pytest.raises(tl.InputError, match="named by block"):
            T.heads(wrong)
    assert "some heads of block 0" in repr(T.heads({0: [1]}))
    with pytest.raises(tl.InputError, match="got 'film'"):
        T.map(out_token="film")


def test_a_method_says_whether_its_scores_are_signed():
    signed = {name for name, one in tl.METHODS.items() if one.signed}
    assert signed == {name for name, one in tl.METHODS.items() if one.summary.endswith("; signed")}
    assert signed == {"tensor.in_out", "tensor.in_class", "gradient.times_input", "gradient.integrated"}


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("method", ["tensor.in_out", "gradient.times_input"])
def test_a_norm_that_cancels_its_own_output_is_warned_of(name, method):
    """Under the Jacobian the final norm passes nothing of its own output back: In+Out of large states is rounding."""
    maps = {}
    for dtype in (torch.float64, torch.float32):
        model: Any = build(name, dtype=torch.float64)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(100)
            last = model.base_model.ln_f if name == "gpt2" else model.base_model.norm
            for part, value in zip(last.parameters(), (1, 0), strict=False):  # gain and shift
                part.fill_(value)
        lens = tl.Lens(model.base_model.to(dtype), rules="jacobian")
        maps[dtype] = lens(sample(name)).map(method)
        (batched, _) = lens.maps([sample(name), sample(name)], method)
        assert "warning" in batched.meta if dtype is torch.float32 else "warning" not in batched.meta
    exact, rounded = (found.scores.double() for found in maps.values())
    assert float((rounded - exact).norm() / exact.norm()) > 0.02
    assert max(maps[torch.float64].meta["kept"]) < 1e-4 and "warning" not in maps[torch.float64].meta
    assert "large terms cancel" in maps[torch.float32].meta["warning"]
    held = tl.Lens(model.base_model)(sample(name)).map("tensor.in_out")
    assert min(held.meta["kept"]) > 1e-3 and "warning" not in held.meta
