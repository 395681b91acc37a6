"""Dictionaries: features, bias and error sum to what they take apart, files of others load, graphs keep their sums."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from safetensors.torch import save_file

import tensorlens as tl
from tensorlens.inside.dictionary import Encoder

IDS = [5, 6, 7, 8, 9, 10]
D = 16


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + sum(shape)))


def dictionary(reads: Any = "output", n: int = 40, **more: Any) -> tl.Dictionary:
    encoder = Encoder(weight=drawn(n, D), bias=drawn(n) - 1, reads=reads, **more)
    return tl.Dictionary(encoders=(encoder,), decoders=(drawn(n, D, seed=3),), bias=drawn(D, seed=4))


def tensor(name: str = "gpt2", rules: str = "paper") -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, "sdpa"), rules=rules)(IDS)


@pytest.mark.parametrize("effect", ["total", "direct"])
@pytest.mark.parametrize("reads", ["output", "input", "stream"])
@pytest.mark.parametrize("name", ["gpt2", "neox-parallel", "llama"])
def test_features_bias_and_error_sum_to_the_feed_forward(name: str, reads: Any, effect: Any) -> None:
    T = tensor(name)
    plain = T.components(-1, 4, effect)
    fine = T.components(-1, 4, effect, features={1: dictionary(reads)})
    own = [
        i
        for i, label in enumerate(fine.labels)
        if label.block == 1 and label.kind in ("feature", "decoder bias", "error")
    ]
    whole = next(i for i, label in enumerate(plain.labels) if str(label) == "block 1, feed-forward")
    assert len(own) > 10 and not any(str(label) == "block 1, feed-forward" for label in fine.labels)
    torch.testing.assert_close(fine.scores[own].sum(0), plain.scores[whole], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(fine.scores.sum(), plain.scores.sum(), rtol=1e-10, atol=1e-12)
    assert fine.meta["error_share"]["1"] > 0


def test_a_features_score_is_its_activation_times_what_its_direction_is_worth() -> None:
    model: Any = zoo.build("gpt2", "sdpa")
    T = tl.Lens(model)(IDS)
    given, kept = dictionary("input"), []
    handle = model.transformer.h[2].mlp.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    handle.remove()
    f = torch.nn.functional.linear(kept[0][0], given.encoders[0].weight, given.encoders[0].bias).relu()
    found = T.components(-1, 4, features={2: given})
    place = next(i for i, label in enumerate(found.labels) if label.kind == "feature" and label.feature == 7)
    norm = model.transformer.ln_f
    before: list[torch.Tensor] = []
    handle = norm.register_forward_pre_hook(lambda m, args: before.append(args[0]))
    with torch.no_grad():
        model(torch.tensor([IDS]))
    handle.remove()
    d, s = given.decoders[0][7], before[0][0, -1]
    sigma = (s.var(unbiased=False) + norm.eps).sqrt()
    worth = (((d - d.mean()) / sigma) * norm.weight * model.lm_head.weight[4]).sum()
    assert float(found.scores[place, -1]) == pytest.approx(float((f[-1, 7] * worth).detach()), rel=1e-9)
    assert not found.scores[place, :-1].any()  # nothing after the last feed-forward moves between tokens
    with torch.no_grad():
        y = model.transformer.h[2].mlp(kept[0])[0]
        error = y - given.bias - f @ given.decoders[0]
        share = error.square().sum() / (y - y.mean(0)).square().sum()
    assert found.meta["error_share"]["2"] == pytest.approx(float(share), rel=1e-9)


@pytest.mark.parametrize("component", ["feed-forward", "attention"])
@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("gemma3", ("model.layers.1.mlp", "model.layers.1.self_attn.v_proj")),
        ("olmo2", ("model.layers.1.mlp", "model.layers.1.self_attn.v_proj")),
        ("bert-mlm", ("bert.encoder.layer.1.intermediate", "bert.encoder.layer.1.attention.self.value")),
        ("opt", ("model.decoder.layers.1.fc1", "model.decoder.layers.1.self_attn.v_proj")),
    ],
)
def test_the_input_is_what_enters_the_first_matrices_whatever_norms_come_after(
    name: str, modules: tuple[str, str], component: Any
) -> None:
    model: Any = zoo.build(name, "sdpa")
    kept = list[torch.Tensor]()
    place = modules[component == "attention"]
    handle = model.get_submodule(place).register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    model(torch.tensor([IDS]))
    handle.remove()
    encoder = Encoder(weight=drawn(40, D), bias=drawn(40) - 7, reads="input")
    given = replace(dictionary("input"), component=component, encoders=(encoder,))
    f = given.encoders[0](kept[0].detach().reshape(-1, D))
    T = tl.Lens(model)(IDS)
    fine = T.components(-1, 4, features={1: given})
    active = {label.feature for label in fine.labels if label.kind == "feature"}
    assert active == set(f.any(0).nonzero()[:, 0].tolist()) and 0 < len(active) < 40
    own = [label.block == 1 and label.kind in ("feature", "decoder bias", "error") for label in fine.labels]
    plain = T.components(-1, 4)
    whole = [label.block == 1 and label.kind.startswith(component) for label in plain.labels]
    found, expected = (c.scores[torch.tensor(some)].sum(0) for c, some in ((fine, own), (plain, whole)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reads", ["output", "input", "stream"])
@pytest.mark.parametrize("rules", ["paper", "attn_lrp"])
def test_a_graph_over_features_keeps_its_sums(reads: Any, rules: str) -> None:
    T = tensor("gpt2", rules)
    graph = T.graph(-1, 4, 1.0, max_nodes=150, features={1: dictionary(reads, 12), 2: dictionary(reads, 12)})
    opened = [i for i, node in enumerate(graph.nodes) if node.component.kind == "feature"]
    assert opened, "features are nodes"
    for place in opened:
        node = graph.nodes[place]
        into = sum(edge.weight for edge in graph.edges if edge.target == place)
        assert into + node.constant + node.cut == pytest.approx(node.value, rel=1e-9, abs=1e-12)
    whole = T.graph(-1, 4, 1.0, max_nodes=5000, features={1: dictionary(reads, 12)})
    assert whole.share == pytest.approx(1.0)
    for node in whole.nodes:
        assert abs(node.cut) <= 1e-9 * max(1.0, abs(node.value)), "nothing is cut off where all edges are kept"
    assert set(whole.meta["error_share"]) == {"1"}


@pytest.mark.parametrize("reads", ["output", "input", "stream"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox-parallel"])
def test_a_feature_is_a_target(name: str, reads: Any) -> None:
    """Autograd through the model itself, from what the feature reads, is the witness of `Rules.jacobian`."""
    close = 1e-5 if name == "llama" else 1e-10  # its norms are computed in float32
    model: Any = zoo.build(name, "sdpa")
    T, given = tl.Lens(model, rules="jacobian")(IDS), dictionary(reads)
    target, at, kept = given.feature(7, block=1), 4, dict[str, torch.Tensor]()
    block: Any = {"gpt2": "transformer.h.1", "llama": "model.layers.1", "neox-parallel": "gpt_neox.layers.1"}[name]
    block = model.get_submodule(block)
    norms = {"gpt2": "ln_2", "llama": "post_attention_layernorm", "neox-parallel": "post_attention_layernorm"}
    ids = torch.tensor([IDS])
    x = model.get_input_embeddings()(ids).detach().requires_grad_()
    handles = [
        block.get_submodule(norms[name]).register_forward_pre_hook(lambda m, args: kept.update(stream=args[0])),
        block.mlp.register_forward_pre_hook(lambda m, args: kept.update(input=args[0])),
        block.mlp.register_forward_hook(lambda m, args, y: kept.update(output=y)),
    ]
    model(inputs_embeds=x)
    [handle.remove() for handle in handles]
    encoder = given.encoders[0]
    t = encoder.weight[7] @ kept[reads][0, at] + encoder.bias[7]
    expected = (torch.autograd.grad(t, x)[0] * T.input).sum(-1)
    found = T.map("tensor.in_class", at, target)
    torch.testing.assert_close(found.scores, expected, rtol=close, atol=close)
    assert float(found.scores.sum()) == pytest.approx(float(t.detach()) * (1 - float(found.bias_share[0])), rel=close)
    total, direct = (T.components(at, target, effect) for effect in ("total", "direct"))
    assert total.value == pytest.approx(float(t.detach()), rel=close)
    torch.testing.assert_close(total.flow()[:1], expected, rtol=close, atol=close)
    assert float(direct.scores.sum()) == pytest.approx(total.value, rel=close)
    graph = T.graph(at, target, 1.0, max_nodes=5000, features={0: dictionary("output", 12)})
    assert graph.target == total.target == "feature 7 of block 1" and graph.value == pytest.approx(total.value)
    for place, node in enumerate(graph.nodes):
        into = [edge.weight for edge in graph.edges if edge.target == place]
        assert not into or sum(into) + node.constant == pytest.approx(node.value, rel=close, abs=close)


def test_a_feature_has_a_block_and_needs_no_logits() -> None:
    given, T = dictionary(), tensor()
    with pytest.raises(tl.InputError, match="block"):
        given.feature(3)
    with pytest.raises(tl.InputError, match="number"):
        given.feature(40, block=1)
    with pytest.raises(tl.MethodError, match="0 to 2"):
        T.components(-1, given.feature(3, block=3))
    with pytest.raises(tl.InputError, match="logits"):
        T.ablate((0, 1), -1, given.feature(3, block=1))
    with pytest.raises(tl.MethodError, match="tensor.in_class"):
        T.map("gradient.times_input", target=given.feature(3, block=1))


def test_folders_of_saelens_load(tmp_path: Path) -> None:
    weights = {"W_enc": drawn(D, 8), "b_enc": drawn(8), "W_dec": drawn(8, D), "b_dec": drawn(D)}
    x = drawn(3, D)
    for architecture, more in (("standard", {}), ("jumprelu", {"threshold": drawn(8).abs()}), ("topk", {})):
        folder = tmp_path / architecture
        folder.mkdir()
        save_file(
            {name: one.contiguous() for name, one in (weights | more).items()}, folder / "sae_weights.safetensors"
        )
        config = {
            "architecture": architecture,
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            **({"k": 2} if architecture == "topk" else {}),
            "metadata": {"hook_name": "blocks.1.hook_mlp_out"},
        }
        (folder / "cfg.json").write_text(json.dumps(config))
        loaded = tl.Dictionary.load(folder)
        before = (x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"]
        expected = before.relu()
        if architecture == "jumprelu":
            expected = before.relu() * (before > more["threshold"])
        if architecture == "topk":
            best = before.topk(2).indices
            expected = torch.zeros_like(before).scatter(1, best, before.relu().gather(1, best))
        torch.testing.assert_close(loaded.encoders[0](x), expected)
        assert loaded.meta["block"] == 1 and loaded.encoders[0].reads == "output"
        again = tl.Dictionary.load(loaded.save(tmp_path / f"{architecture}-again"))
        torch.testing.assert_close(again.encoders[0](x), expected)
        T = tensor()
        total = T.components(-1, 4, features={1: loaded}).scores.sum()
        torch.testing.assert_close(total, T.components(-1, 4).scores.sum(), rtol=1e-10, atol=1e-12)


X = drawn(5, D, seed=9)
WEIGHTS = {"W_enc": drawn(D, 8), "b_enc": drawn(8), "W_dec": drawn(8, D), "b_dec": drawn(D)}


def saved(folder: Path, config: dict[str, Any], **more: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: one.contiguous() for name, one in (WEIGHTS | more).items()}, folder / "sae_weights.safetensors")
    (folder / "cfg.json").write_text(json.dumps({"hook_name": "blocks.1.hook_mlp_out"} | config))
    return folder


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    return torch.zeros_like(values).scatter(1, values.topk(k).indices, 1)


def test_what_saelens_leaves_out_or_rescales_is_read_as_it_does(tmp_path: Path) -> None:
    """What SAELens 6 computes, by its own formulas: the input less b_dec unless it is a transcoder's, and so on."""
    moved = (X - WEIGHTS["b_dec"]) @ WEIGHTS["W_enc"] + WEIGHTS["b_enc"]
    plain, norms = X @ WEIGHTS["W_enc"] + WEIGHTS["b_enc"], WEIGHTS["W_dec"].norm(dim=1)
    scaled, scale = moved * norms, drawn(8, seed=3).abs() + 0.5
    level = torch.tensor(0.7, dtype=torch.float64)
    best = scaled.relu() * largest(scaled, 3)
    for config, more, wrote in (
        ({}, {}, moved.relu()),
        ({"architecture": "transcoder", "hook_name_out": "blocks.1.hook_mlp_out"}, {}, plain.relu()),
        ({"architecture": "batchtopk", "k": 2.5}, {"topk_threshold": level}, moved * (moved > level)),
        ({"architecture": "topk", "k": 3, "rescale_acts_by_decoder_norm": True}, {}, best / norms),
        ({"activation_fn": "topk", "activation_fn_kwargs": {"k": 3}}, {}, moved.relu() * largest(moved, 3)),
        ({"finetuning_scaling_factor": True}, {"scaling_factor": scale}, moved.relu() * scale),
    ):
        given = tl.Dictionary.load(saved(tmp_path / "sae", config, **more))
        torch.testing.assert_close(given.encoders[0](X) @ given.decoders[0], wrote @ WEIGHTS["W_dec"])


@pytest.mark.parametrize(
    ("config", "odd", "said"),
    [
        ({"architecture": "skip_transcoder"}, None, "skip_transcoder"),
        ({"architecture": "abstopk", "k": 2}, None, "abstopk"),
        ({"architecture": "matching_pursuit"}, None, "matching_pursuit"),
        ({"activation_fn": "tanh-relu"}, None, "tanh-relu"),
        ({"architecture": "transcoder"}, "W_skip", "also holds W_skip"),
        ({}, "r_mag", "also holds r_mag"),
        ({"architecture": "batchtopk", "k": 2}, None, "threshold"),
        ({"hook_name": "blocks.1.hook_resid_mid"}, None, "stream itself"),
        ({"hook_name": "model.layers.1"}, None, "stream itself"),
        ({"hook_name": "blocks.1.hook_resid_pre", "hook_name_out": "blocks.1.hook_mlp_out"}, None, "resid_pre"),
    ],
)
def test_what_does_not_sum_to_a_component_is_refused(tmp_path: Path, config: Any, odd: str | None, said: str) -> None:
    more = {} if odd is None else {odd: drawn(8)}
    with pytest.raises(tl.InputError, match=said):
        tl.Dictionary.load(saved(tmp_path / "sae", config, **more))


def test_circuit_tracers_config_says_what_is_read_and_how_many_are_active(tmp_path: Path) -> None:
    one = {"W_enc": drawn(9, D), "b_enc": drawn(9) - 2, "W_dec": drawn(9, D), "b_dec": drawn(D)}
    before = X @ one["W_enc"].T + one["b_enc"]
    path, config = tmp_path / "layer_0.safetensors", tmp_path / "config.yaml"
    save_file(one, path)
    config.write_text("feature_input_hook: mlp.hook_in\nfeature_output_hook: mlp.hook_out\nactivation: topk\nk: 7\n")
    (given,) = tl.Dictionary.load(tmp_path)[0].encoders
    assert given.reads == "input" and bool((given(X) < 0).any())  # its top-k keeps what is below zero
    torch.testing.assert_close(given(X), before * largest(before, 7))
    config.unlink()
    save_file(one | {"k": torch.tensor(2)}, path)
    (given,) = tl.Dictionary.load(tmp_path)[0].encoders
    assert given.reads == "stream"
    torch.testing.assert_close(given(X), before * largest(before, 2))
    save_file(one | {"activation_function.threshold": torch.full((9,), -1.0)}, path)
    loaded = tl.Dictionary.load(tmp_path)[0]
    torch.testing.assert_close(loaded.encoders[0](X), before * (before > -1))
    with pytest.raises(tl.InputError, match="below zero"):
        loaded.save(tmp_path / "again")
    save_file(one | {"W_skip": drawn(D, D)}, path)
    with pytest.raises(tl.InputError, match="W_skip"):
        tl.Dictionary.load(tmp_path)


def test_transcoders_per_layer_and_across_layers_load(tmp_path: Path) -> None:
    per_layer, across = tmp_path / "plt", tmp_path / "clt"
    per_layer.mkdir()
    across.mkdir()
    for n in range(3):
        one = {"W_enc": drawn(9, D, seed=n), "b_enc": drawn(9), "W_dec": drawn(9, D), "b_dec": drawn(D)}
        save_file(one, per_layer / f"layer_{n}.safetensors")
        read = {f"W_enc_{n}": drawn(9, D, seed=n), f"b_enc_{n}": drawn(9), f"b_dec_{n}": drawn(D)}
        save_file(read | {f"threshold_{n}": drawn(1, 9).abs()}, across / f"W_enc_{n}.safetensors")
        save_file({f"W_dec_{n}": drawn(9, 3 - n, D, seed=n)}, across / f"W_dec_{n}.safetensors")
    T = tensor()
    plain = T.components(-1, 4)
    for folder in (per_layer, across):
        loaded = tl.Dictionary.load(folder)
        assert sorted(loaded) == [0, 1, 2]
        found = T.components(-1, 4, features=loaded)
        torch.testing.assert_close(found.scores.sum(), plain.scores.sum(), rtol=1e-10, atol=1e-12)
    assert [len(loaded[n].encoders) for n in range(3)] == [1, 2, 3]
    for n in range(3):
        for i, decoder in enumerate(loaded[n].decoders):  # in the file (feature, block from i on, channel)
            assert torch.equal(decoder, drawn(9, 3 - i, D, seed=i)[:, n - i])
    kinds = {label.kind for label in found.labels}
    assert {"feature", "feature of block 0", "feature of block 1", "error", "decoder bias"} <= kinds
    with pytest.raises(tl.MethodError, match="read block 0"):
        T.blocks(1, 3).components(-1, 4, features={0: loaded[1]})
    graph = T.graph(-1, 4, 1.0, max_nodes=400, features=loaded)
    scores = dict(zip(found.labels, found.scores, strict=True))
    for place, node in enumerate(graph.nodes):
        if node.component.kind.startswith("feature"):
            assert node.value == pytest.approx(float(scores[node.component][node.token]), rel=1e-9, abs=1e-12)
            into = sum(edge.weight for edge in graph.edges if edge.target == place)
            assert into + node.constant + node.cut == pytest.approx(node.value, rel=1e-9, abs=1e-12)


def test_a_dictionary_trained_here_explains_more_than_a_mean(tmp_path: Path) -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa", torch.float32))
    texts = [torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(40)]
    with pytest.raises(tl.InputError, match="0 to 2"):
        tl.Dictionary.fit(lens, texts, block=3, progress=False)
    for kind in ("dictionary", "transcoder"):
        fitted = tl.Dictionary.fit(
            lens, texts, block=1, kind=kind, n_features=48, k=6, steps=500, batch_size=128, progress=False
        )
        assert fitted.meta["error_share"] < 0.7 and fitted.n_features == 48
        again = tl.Dictionary.load(fitted.save(tmp_path / kind))
        found, same = (lens(IDS).components(-1, 4, features={1: one}) for one in (fitted, again))
        torch.testing.assert_close(found.scores, same.scores)
        n_active = sum(label.kind == "feature" for label in found.labels)
        assert 0 < n_active <= 6 * len(IDS)


@pytest.mark.usefixtures("unchecked")
def test_what_is_not_a_dictionary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(tl.InputError, match="has none of them"):
        tl.Dictionary.load(tmp_path)
    (tmp_path / "cfg.json").write_text("{}")
    with pytest.raises(tl.InputError, match="Could not read a dictionary"):
        tl.Dictionary.load(tmp_path)
    for wrong in ({9: dictionary()}, {0: "dictionary"}):
        with pytest.raises(Exception, match="features"):
            tensor().components(-1, 4, features=wrong)  # type: ignore[arg-type]
    narrow = tl.Dictionary(
        encoders=(Encoder(weight=drawn(4, 3), bias=drawn(4)),), decoders=(drawn(4, 3),), bias=drawn(3)
    )
    with pytest.raises(tl.InputError, match="16 channels"):
        tensor().components(-1, 4, features={1: narrow})
    lens = tl.Lens(zoo.build("llama"))
    for texts, kind, said in (
        (IDS, "sae", "`kind` must be dictionary or transcoder"),
        ("abc", "dictionary", "list"),
    ):
        with pytest.raises(tl.InputError, match=said):
            tl.Dictionary.fit(lens, texts, block=1, kind=kind, steps=2, progress=False)  # type: ignore[arg-type]
