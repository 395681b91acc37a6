"""Pair maps: they sum to the similarity that the model itself gives, and are what one push per token gives."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from playwright.sync_api import expect
from safetensors.torch import save_file
from tiny_study import lens_on
from torch import nn
from typer.testing import CliRunner
from zoo import TEXT, VISION, build, randomise

import tensorlens as tl
from tensorlens.app import cli
from tensorlens.models.bundled import is_installed
from tensorlens.pairs import similarity as similarity_code

A, B = [3, 9, 14, 22, 31, 8], [7, 9, 40, 12]
POOLINGS = ("mean", "cls", "last", "max", "late")
SENTENCES = [
    ("A man is playing a guitar.", "Someone plays an instrument."),
    ("How do I reset my password?", "Open settings. Choose a new password."),
    ("The cat sat on the mat.", "Stock prices fell sharply on Monday."),
    ("It rains.", "Unbelievably heavy precipitation was forecast by meteorologists!"),
]


def total(found: tl.PairMap) -> float:
    return float(found.scores.double().sum())


@cache
def minilm() -> tl.Lens:
    return tl.load("minilm")


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", SENTENCES, ids=lambda pair: pair[0][:12])
@pytest.mark.parametrize("groups", [None, "words", "sentences"])
def test_real_weights_sum_to_the_cosine(pair: tuple[str, str], groups: str | None) -> None:
    lens = minilm()
    vectors = []
    for text in pair:  # as sentence-transformers does it
        states = lens.model(**lens.processor(text, return_tensors="pt")).last_hidden_state[0].double()
        vectors.append(states.mean(0))
    truth = float(torch.cosine_similarity(*vectors, dim=0))
    found = tl.similarity(lens, *pair, groups=groups)
    assert found.meta["pooling"] == "mean + normalise"
    assert found.value == pytest.approx(truth, abs=1e-6)
    assert abs(total(found) - found.value) < 1e-6
    for pooling in POOLINGS:
        found = tl.similarity(lens, *pair, pooling=pooling, groups=groups)
        assert abs(total(found) - found.value) < 1e-6 * max(1.0, abs(found.value)), pooling


FIRSTS = (
    "A man is playing a guitar.|How do I reset my password?|The cat sat on the mat.|It rains.|Who wrote Faust?|"
    "The bank raised its rates. Shares fell.|She sings well.|Dogs bark at night.|He bought a red car.|"
    "Snow fell. Roads closed."
)
SECONDS = (
    "Someone plays an instrument.|Open settings. Choose a new password.|A kitten rests on a rug.|Heavy precipitation!|"
    "Goethe is the author of the play.|Interest became dearer. Markets dropped.|A fine voice.|The hound is loud.|"
    "My bicycle is blue.|Winter storm shuts highways."
)


@pytest.mark.large
@pytest.mark.parametrize("name", ["minilm", "mpnet", "nomic-bert"])
def test_twenty_pairs_of_real_encoders(name: str) -> None:
    """Every pair with every pooling and every grouping."""
    if not is_installed(name):
        pytest.skip(f"{name} is not installed")
    lens, firsts, seconds = tl.load(name, device="cpu"), FIRSTS.split("|"), SECONDS.split("|")
    for k, first in enumerate(firsts):
        passages = [seconds[k], seconds[-1 - k]]
        for pooling, groups in itertools.product((None, *POOLINGS), (None, "words", "sentences")):
            for found in tl.similarities(lens, first, passages, pooling=pooling, groups=groups):
                assert abs(total(found) - found.value) < 1e-6 * abs(found.value), (first, pooling, groups)
        # In float32 the bias of a map is what is left; here it is measured, by a pass of zeros.
        for text in (first, *passages):
            taken = compared(lens, text, "mean").first
            at_zero = taken._pooled(taken.program.run(*taken.program.zeros())[0])
            assert (taken.parts[:-1].sum(0) + at_zero - taken.whole).norm() < 3e-5 * taken.whole.norm()
            plain = lens.model(**lens.processor(text, return_tensors="pt")).last_hidden_state[0].double().mean(0)
            assert (taken.whole[0, 0] - plain).norm() < 1e-5 * plain.norm()


def test_a_shared_meaning_comes_first() -> None:
    found = tl.similarity(minilm(), *SENTENCES[0], groups="words")
    assert [(one.a, one.b) for one in found.top(2)] == [("guitar", "instrument"), ("playing", "plays")]


def by_hand(lens: tl.Lens, ids: list[int], pool: Any) -> np.ndarray:
    """(token + 1, channel): one push per token, pooled; the bias last."""
    T = lens(ids)
    alone = [T.input * (torch.arange(len(ids)) == i)[:, None] for i in range(len(ids))]
    return np.stack([pool(T.apply(x)).numpy() for x in alone] + [pool(T.bias).numpy()])


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("measure", ["cosine", "dot"])
def test_one_push_per_token_gives_the_same(name: str, pooling: str, measure: Any) -> None:
    lens, parts, wholes = tl.Lens(build(name)), [], []
    for ids in (A, B):
        output = lens(ids).output
        choice = output.argmax(0)
        pool = {
            "mean": lambda x: x.mean(0),
            "cls": lambda x: x[0],
            "last": lambda x: x[-1],
            "max": lambda x, choice=choice: x[choice, torch.arange(x.shape[1])],
        }[pooling]
        parts.append(by_hand(lens, ids, pool))
        wholes.append(pool(output).numpy())
    norms = np.prod([np.linalg.norm(one) for one in wholes]) if measure == "cosine" else 1.0
    found = tl.similarity(lens, A, B, pooling=pooling, measure=measure)
    np.testing.assert_allclose(found.scores.numpy(), np.einsum("ic,jc->ij", *parts) / norms, rtol=0, atol=1e-12)
    assert found.value == pytest.approx(float(wholes[0] @ wholes[1] / norms), abs=1e-12)
    assert total(found) == pytest.approx(found.value, abs=1e-6 if name == "llama" else 1e-12)  # llama casts to float32


def test_late_interaction_by_hand() -> None:
    lens = tl.Lens(build("bert"))
    a, b = (lens(ids).output for ids in (A, B))
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    best = (a @ b.T).max(1)
    rows = [by_hand(lens, ids, lambda x: x) for ids in (A, B)]
    first = rows[0] / lens(A).output.norm(dim=1, keepdim=True).numpy()
    second = (rows[1] / lens(B).output.norm(dim=1, keepdim=True).numpy())[:, best.indices]
    found = tl.similarity(lens, A, B, pooling="late")
    np.testing.assert_allclose(found.scores.numpy(), np.einsum("ikc,jkc->ij", first, second), rtol=0, atol=1e-12)
    assert total(found) == pytest.approx(float(best.values.sum()), abs=1e-12)


def compared(lens: tl.Lens, first: Any, pooling: str | None = None, groups: Any = None) -> Any:
    return similarity_code._Comparing(lens, None, first, {}, pooling, groups, "cosine")


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "max", "late", "dense"])
@pytest.mark.parametrize("is_short_first", [True, False])
def test_a_short_text_is_pulled_through_a_long_one(pooling: Any, is_short_first: bool, tmp_path: Path) -> None:
    dense = {"pooling_mode_mean_tokens": True}
    lens = encoder_folder(tmp_path, dense) if pooling == "dense" else tl.Lens(build("bert"))
    texts = [[3, 9], [3 + k % 50 for k in range(30)]]
    first, second = texts if is_short_first else texts[::-1]
    work = compared(lens, first, None if pooling == "dense" else pooling)
    a, b = work.first, compared(lens, second, work.pooling).first
    (found,) = work.compare(a, b)
    assert ("parts" in vars(a), "parts" in vars(b)) == (is_short_first, not is_short_first)
    assert b.parts is not None and a.parts is not None  # with both known, nothing is pulled
    (both,) = work.compare(a, b)
    assert (found.scores - both.scores).abs().max() < 1e-12 and both.scores[:-1, :-1].abs().max() > 1e-4


@pytest.mark.parametrize("pooling", [None, "mean", "cls", "last", "max"])
def test_the_other_way_round_is_the_transpose(pooling: str | None) -> None:
    lens = tl.Lens(build("bert"))
    there, back = tl.similarity(lens, A, B, pooling=pooling), tl.similarity(lens, B, A, pooling=pooling)
    assert (there.scores - back.scores.T).abs().max() < 1e-12
    assert there.out_tokens == back.in_tokens and there.in_tokens == back.out_tokens


def test_groups_sum_rows_and_columns() -> None:
    lens = lens_on()
    tokens = tl.similarity(lens, "the cat sat on a mat", "red birds fly over the mat")
    named = tl.similarity(lens, "the cat sat on a mat", "red birds fly over the mat", groups=["cat sat", "red birds"])
    assert named.out_tokens == ("cat sat", "rest", "bias") and named.in_tokens == ("red birds", "rest", "bias")
    assert float(named.scores[0, 0]) == pytest.approx(float(tokens.scores[2:4, 1:3].sum()), abs=1e-5)
    assert total(named) == pytest.approx(tokens.value, abs=1e-5)


def test_a_mask_leaves_outputs_out_of_the_mean() -> None:
    lens = tl.Lens(build("bert"))
    masked = {
        "input_ids": torch.tensor([B]),
        "attention_mask": torch.tensor([[1, 1, 0, 1]]),
    }  # padding would be cut off
    a, b = lens(A).output.mean(0), lens(masked).output[[0, 1, 3]].mean(0)
    found = tl.similarity(lens, A, masked, pooling="mean")
    assert found.value == pytest.approx(float(torch.cosine_similarity(a, b, dim=0)), abs=1e-12)
    assert total(found) == pytest.approx(found.value, abs=1e-12)
    assert found.bias + float(found.scores[:-1, :-1].sum()) == pytest.approx(found.value, abs=1e-12)
    late = tl.similarity(lens, A, masked, pooling="late")
    first, second = (nn.functional.normalize(one) for one in (lens(A).output, lens(masked).output[[0, 1, 3]]))
    assert late.value == pytest.approx(float((first @ second.T).amax(1).sum()), abs=1e-12)
    assert total(late) == pytest.approx(late.value, abs=1e-12)


def test_against_a_third_text() -> None:
    lens, third = tl.Lens(build("bert")), [5, 6, 30]
    near, far = tl.similarity(lens, A, B), tl.similarity(lens, A, third)
    found = tl.similarity(lens, A, B, against=third)
    assert found.n_against == 3 and found.scores.shape == (7, 8)
    by_size = sorted(found.scores[:-1, :-1].flatten().tolist(), key=abs, reverse=True)
    assert [one.score for one in found.top(42)] == by_size and min(by_size[:10]) < 0
    assert torch.equal(found.scores[:, :4], near.scores[:, :4]) and torch.equal(
        found.scores[:, 4:7], -far.scores[:, :3]
    )
    assert total(found) == pytest.approx(near.value - far.value, abs=1e-12)
    assert found.value == pytest.approx(near.value - far.value, abs=1e-12)


PASSAGES = [B, A, [5, 6], [40, 12, 9, 3, 17], [8] * 30, [7, 9]]


def test_passages_share_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    lens, seen = tl.Lens(build("bert")), []
    record = lens.specimen.record
    monkeypatch.setattr(
        lens.specimen, "record", lambda given, n_samples=1: seen.append(n_samples) or record(given, n_samples=n_samples)
    )
    found = tl.similarities(lens, A, PASSAGES)
    assert seen == [1, 6, 1, 1]  # the query, all passages, and the shortest and another once more alone
    assert found[1].value == pytest.approx(1.0)


@pytest.mark.parametrize("pooling", [None, *POOLINGS, "dense"])
@pytest.mark.parametrize("query", [A, [3 + k % 50 for k in range(30)]], ids=["short", "long"])
def test_passages_together_are_what_each_is_alone(pooling: Any, query: list[int], tmp_path: Path) -> None:
    dense = pooling == "dense"
    lens = encoder_folder(tmp_path, {"pooling_mode_mean_tokens": True}) if dense else tl.Lens(build("bert"))
    pooling = None if dense else pooling
    for one, other in zip(tl.similarities(lens, query, PASSAGES, pooling=pooling), PASSAGES, strict=True):
        alone = tl.similarity(lens, query, other, pooling=pooling)
        assert (one.scores - alone.scores).abs().max() < 1e-12 and one.value == pytest.approx(alone.value, abs=1e-12)
        assert one.in_tokens == alone.in_tokens and one.meta == alone.meta and total(one) == pytest.approx(one.value)


@pytest.mark.parametrize("pooling", [None, "mean", "late"])
def test_only_the_most_similar_passages_are_taken_apart(pooling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, taken = tl.Lens(build("bert")), []
    every = tl.similarities(lens, A, PASSAGES, pooling=pooling)
    best = sorted(range(len(every)), key=lambda k: every[k].value, reverse=True)
    products = similarity_code._products
    monkeypatch.setattr(
        similarity_code, "_products", lambda a, b, *rest: taken.append(len(b.batch)) or products(a, b, *rest)
    )
    found = tl.similarities(lens, A, PASSAGES, pooling=pooling, top=2)
    assert sum(taken) == 2 and [one.meta["passage"] for one in found] == best[:2]
    for one, place in zip(found, best, strict=False):
        assert (one.scores - every[place].scores).abs().max() < 1e-12
        assert one.value == pytest.approx(every[place].value, abs=1e-12)
    assert len(tl.similarities(lens, A, PASSAGES, pooling=pooling, top=9)) == len(PASSAGES)


def test_passages_that_padding_changes_go_by_length() -> None:
    model: Any = build("bert")
    lens = tl.Lens(model)
    model.encoder.layer[1].register_forward_hook(lambda _, __, y: 2 * y if y.shape[1] > 8 else None)
    for one, other in zip(tl.similarities(lens, A, PASSAGES), PASSAGES, strict=True):
        assert (one.scores - tl.similarity(lens, A, other).scores).abs().max() < 1e-12
        assert "by length" in one.meta["batches"]


@pytest.mark.parametrize("query", [A, [3 + k % 50 for k in range(30)]], ids=["short", "long"])
def test_a_long_input_is_taken_block_by_block(query: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(build("bert"))
    kept = tl.similarity(lens, query, query)
    monkeypatch.setattr("tensorlens.recording.calls.SHARE_OF_RECORDING", 0.0)
    assert compared(lens, query).first.recording.is_streamed
    assert (tl.similarity(lens, query, query).scores - kept.scores).abs().max() < 1e-12


def test_a_recording_that_was_stopped_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(build("bert"))
    with monkeypatch.context() as broken:
        broken.setattr("tensorlens.specimen.record", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            lens(A)
    assert tl.similarity(lens, B, B).value == pytest.approx(1.0)


# Poolings of the model's own -----------------------------------------------------------------------------------------


def tower(kind: str) -> Any:
    text: dict[str, Any] = {**TEXT, "num_hidden_layers": 2}
    vision: dict[str, Any] = {**VISION, "num_hidden_layers": 2}
    made = {
        "clip text": lambda: hf.CLIPTextModelWithProjection(hf.CLIPTextConfig(**text, projection_dim=12)),
        "clip image": lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**vision, projection_dim=12)),
        "siglip text": lambda: hf.SiglipTextModel(hf.SiglipTextConfig(**text, projection_size=16)),
        "siglip image": lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**vision)),
        "bert": lambda: hf.BertModel(hf.BertConfig(**text)),
    }[kind]()
    return randomise(made).double().eval()


PICTURE = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("first", "second", "modules"),
    [
        ("clip text", "clip image", "module text_projection and module visual_projection"),
        ("siglip text", "siglip image", "module head"),
        ("bert", "bert", "module pooler"),
    ],
)
def test_towers_end_in_their_own_projection(first: str, second: str, modules: str) -> None:
    models, vectors = [tower(first), tower(second)], []
    ids = [*A, 2]  # CLIP reads the token with the end's id
    for model in models:
        is_image = getattr(model, "main_input_name", "") == "pixel_values"
        given = model(PICTURE[None]) if is_image else model(torch.tensor([ids]))
        vectors.append(
            next(given[key] for key in ("text_embeds", "image_embeds", "pooler_output") if key in given)[0].detach()
        )
    truth = float(torch.cosine_similarity(*vectors, dim=0))
    other = PICTURE if "image" in second else ids
    found = tl.similarity(tl.Lens(models[0]), ids, other, other=tl.Lens(models[1], rules="jacobian"))
    assert found.meta["pooling"] == modules
    assert found.meta["other_rules"] == tl.Rules.jacobian().as_dict() != found.meta["rules"]
    if first == "siglip text":
        with pytest.raises(tl.InputError, match="no attention pooling after its blocks"):
            tl.similarity(tl.Lens(models[0]), ids, ids, pooling="attention")
        own = tl.Lens(models[1])
        named, unnamed = (tl.similarity(own, PICTURE, 2 * PICTURE, pooling=one) for one in ("attention", None))
        assert torch.equal(named.scores, unnamed.scores) and named.meta["pooling"] == "module head"
    assert found.value == pytest.approx(truth, abs=1e-9) and total(found) == pytest.approx(truth, abs=1e-9)
    assert found.scores[:-1, :-1].abs().max() > 1e-3


def held_norm(norm: Any, x: torch.Tensor) -> Any:
    """The linear part of a layer norm with the deviations at x kept."""
    scale = norm.weight.detach() / (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    return lambda y: (y - y.mean(-1, keepdim=True)) * scale


def held_end(kind: str, model: Any, x: torch.Tensor, ids: Any) -> Any:
    """What leads from the last states to the vector, written out from the equations and linear at the states x."""
    if kind == "bert":
        z = model.pooler.dense(x[0]).detach()
        return lambda y: torch.tanh(z) / z * (y[0] @ model.pooler.dense.weight.detach().T)
    if kind == "clip image":
        norm = held_norm(model.vision_model.post_layernorm, x[0])
        return lambda y: norm(y[0]) @ model.visual_projection.weight.detach().T
    if kind == "clip text":  # the last norm is in x already, and CLIP reads the largest id
        return lambda y: y[int(np.argmax(ids))] @ model.text_projection.weight.detach().T
    head = model.head
    mix, n = head.attention, head.attention.num_heads
    w, b = mix.in_proj_weight.detach().chunk(3), mix.in_proj_bias.detach().chunk(3)

    def by_head(k: int, y: torch.Tensor, bias: float = 1.0) -> torch.Tensor:
        return (y @ w[k].T + bias * b[k]).unflatten(-1, (n, -1)).transpose(0, 1)

    query, key = by_head(0, head.probe[0].detach()), by_head(1, x)
    weights = (query @ key.mT / key.shape[-1] ** 0.5).softmax(-1)
    attended = mix.out_proj((weights @ by_head(2, x)).transpose(0, 1).flatten(1)).detach()
    after, inner = held_norm(head.layernorm, attended), head.mlp.fc1(head.layernorm(attended)).detach()
    gain = model.head.mlp.activation_fn(inner) / inner

    def end(y: torch.Tensor) -> torch.Tensor:
        mixed = (weights @ by_head(2, y, 0.0)).transpose(0, 1).flatten(1) @ mix.out_proj.weight.detach().T
        widened = gain * (after(mixed) @ head.mlp.fc1.weight.detach().T)
        return (mixed + widened @ head.mlp.fc2.weight.detach().T)[0]

    return end


@pytest.mark.parametrize("kind", ["bert", "clip text", "clip image", "siglip image"])
def test_one_push_per_token_through_the_models_own_end(kind: str) -> None:
    model = tower(kind)
    lens, parts = tl.Lens(model), []
    inputs = [PICTURE, PICTURE.flip(-1)] if "image" in kind else [[*A, 2], [*B, 2]]
    for one in inputs:
        T = lens(one)
        end = held_end(kind, model, T.output, one)
        parts.append(
            np.stack(
                [end(T.apply(T.input * (torch.arange(T.n_tokens) == i)[:, None])).numpy() for i in range(T.n_tokens)]
            )
        )
    found = tl.similarity(lens, *inputs, measure="dot")
    truth = np.einsum("ic,jc->ij", *parts)
    np.testing.assert_allclose(
        found.scores[:-1, :-1].numpy(), truth, rtol=0, atol=1e-12 * max(1.0, np.abs(truth).max())
    )
    assert np.abs(truth).max() > 1e-3


def encoder_folder(folder: Path, pooling: dict[str, Any], *, dense: bool = True) -> tl.Lens:
    model: Any = build("bert")
    model.save_pretrained(folder)
    rows = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Dense", "Dense")] if dense else []),
        ("3", "Normalize"),
    ]
    listed = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in rows]
    (folder / "modules.json").write_text(json.dumps(listed), "utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    if dense:
        (folder / "2_Dense").mkdir()
        settings = {"activation_function": "torch.nn.modules.activation.Tanh"}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(settings), "utf-8")
        save_file(dense_weights(), folder / "2_Dense" / "model.safetensors")
    return tl.Lens(hf.BertModel.from_pretrained(folder, dtype=torch.float64))


def dense_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(5, 16, generator=generator, dtype=torch.float64) / 4
    return {"linear.weight": weight, "linear.bias": torch.tensor([0.1, -0.2, 0.3, 0.0, 0.5], dtype=torch.float64)}


def dense_truth(lens: tl.Lens, pool: Any) -> float:
    weight, bias = dense_weights().values()
    vectors = [(weight @ pool(lens(ids).output) + bias).tanh() for ids in (A, B)]
    return float(torch.cosine_similarity(*vectors, dim=0))


@pytest.mark.parametrize(
    ("config", "pool"),
    [
        ({"pooling_mode_mean_tokens": True}, lambda x: x.mean(0)),
        ({"pooling_mode": "cls"}, lambda x: x[0]),
        ({"pooling_mode_lasttoken": True, "pooling_mode_cls_token": False}, lambda x: x[-1]),
        ({"pooling_mode_max_tokens": True}, lambda x: x.amax(0)),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, lambda x: x.sum(0) / len(x) ** 0.5),
        (
            {"pooling_mode": ["weightedmean"]},
            lambda x: (x * torch.arange(1.0, len(x) + 1)[:, None]).sum(0) / sum(range(len(x) + 1)),
        ),
    ],
)
def test_modules_beside_the_weights(config: dict[str, Any], pool: Any, tmp_path: Path) -> None:
    lens = encoder_folder(tmp_path, config)
    found = tl.similarity(lens, A, B, measure="dot")  # normalised by the encoder itself
    assert found.value == pytest.approx(dense_truth(lens, pool), abs=1e-9)
    assert total(found) == pytest.approx(found.value, abs=1e-12)
    assert found.meta["pooling"].endswith("+ dense + normalise")


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("sentence_bert_config.json", {"max_seq_length": 3}, "first 3 tokens of a text; 'the cat' has 4"),
        ("tokenizer_config.json", {"model_max_length": 3}, "reads the first 3 tokens"),
        (
            "config_sentence_transformers.json",
            {"prompts": {"query": "find: "}, "default_prompt_name": "query"},
            "puts 'find: ' before every text",
        ),
    ],
)
def test_a_text_that_the_encoder_would_change_is_refused(name: str, config: Any, said: str, tmp_path: Path) -> None:
    encoder_folder(tmp_path, {"pooling_mode_mean_tokens": True})
    (tmp_path / name).write_text(json.dumps(config), "utf-8")
    lens = tl.Lens(hf.BertModel.from_pretrained(tmp_path), lens_on().processor)
    with pytest.raises(tl.InputError, match=said):
        tl.similarity(lens, "the cat", "a mat")
    assert tl.similarity(lens, "the cat", "a mat", pooling="mean").meta["pooling"] == "mean"
    if "prompts" in config:
        assert tl.similarity(lens, "find: the cat", "find: a mat").meta["pooling"] == "mean + dense + normalise"


def sentence_transformer(*kinds: str, inner: Any = None) -> Any:
    class Module(nn.Module):
        def __init__(self, config: dict[str, Any], weights: dict[str, Any]) -> None:
            super().__init__()
            self.config, self.weights = config, weights

        def get_config_dict(self) -> dict[str, Any]:
            return self.config

        def state_dict(self, **_: Any) -> dict[str, Any]:  # type: ignore[override]
            return self.weights

    given = {
        "Pooling": ({"pooling_mode": "mean"}, {}),
        "Dense": ({"activation_function": "torch.nn.Tanh"}, dense_weights()),
    }
    made = [type(kind, (Module,), {})(*given.get(kind, ({}, {}))) for kind in ("Transformer", *kinds)]
    made[0].auto_model = inner
    return nn.Sequential(*made)


def test_a_sentence_transformer_is_taken_as_it_is() -> None:
    model = build("bert")
    found = tl.similarity(sentence_transformer("Pooling", "Dense", inner=model), A, B)
    assert found.value == pytest.approx(dense_truth(tl.Lens(model), lambda x: x.mean(0)), abs=1e-9)
    assert total(found) == pytest.approx(found.value, abs=1e-12)


def test_dense_layers_are_pulled_through_in_their_order() -> None:
    encoder = sentence_transformer("Pooling", "Dense", "Dense", inner=build("bert"))
    weight, bias = dense_weights().values()
    encoder[-1].weights = {"linear.weight": weight[:, :5].contiguous(), "linear.bias": bias}
    ids = [[3, 9], [3 + k % 50 for k in range(30)]]  # so long that the short one is pulled through it
    found = tl.similarity(encoder, *ids)
    means = [tl.Lens(encoder[0].auto_model)(some).output.mean(0) for some in ids]
    vectors = [(weight[:, :5] @ (weight @ mean + bias).tanh() + bias).tanh() for mean in means]
    assert found.value == pytest.approx(float(torch.cosine_similarity(*vectors, dim=0)), abs=1e-9)
    assert total(found) == pytest.approx(found.value, abs=1e-12)


@pytest.mark.parametrize("kinds", [(), ("Pooling", "Normalize", "Dense"), ("Pooling", "LayerNorm"), ("Dense",)])
def test_modules_in_another_order_are_refused(kinds: tuple[str, ...]) -> None:
    """As they would be added up, the vector would be another than the encoder's."""
    with pytest.raises(tl.InputError, match=f"it has {', '.join(kinds) or 'none'}"):
        tl.similarity(sentence_transformer(*kinds, inner=build("bert")), A, B)


def test_the_vector_of_a_classifier_is_not_its_logits() -> None:
    model: Any = build("bert-classifier")
    vectors = [model.bert(torch.tensor([ids])).pooler_output[0].detach() for ids in (A, B)]
    found = tl.similarity(tl.Lens(model), A, B)
    assert found.value == pytest.approx(float(torch.cosine_similarity(*vectors, dim=0)), abs=1e-9)


def test_a_causal_model_pools_at_its_last_token() -> None:
    lens = tl.Lens(build("gpt2"))
    found = tl.similarity(lens, A, B)
    assert found.meta["pooling"] == "last" and torch.equal(
        found.scores, tl.similarity(lens, A, B, pooling="last").scores
    )


# Bad input -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_answered_in_one_sentence(tmp_path: Path) -> None:
    lens = lens_on()
    model: Any = build("bert")
    zero = tl.Lens(model)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_position_embeddings": 64,
    }
    heads: dict[str, Any] = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
    }
    bart = hf.BartModel(hf.BartConfig(**sizes, **heads)).eval()
    with torch.no_grad():
        model.pooler.dense.weight.zero_()
        model.pooler.dense.bias.zero_()
    cases: list[tuple[str, Any]] = [
        ("has no words", lambda: tl.similarity(lens, "the cat", "  ")),
        ("image", lambda: tl.similarity(lens, "the cat", Image.new("RGB", (8, 8)))),
        ("`pooling` must be one of", lambda: tl.similarity(lens, "the cat", "a mat", pooling="sum")),
        ("`measure` must be", lambda: tl.similarity(lens, "the cat", "a mat", measure="euclid")),  # type: ignore[arg-type]
        ("must be a lens", lambda: tl.similarity(lens.model, "the cat", "a mat")),
        ("one input on each side", lambda: tl.similarity(lens, "the cat", ["a", "mat"])),
        ("`passages` must be a list", lambda: tl.similarities(lens, "the cat", "a mat")),
        ("`passages\\[1\\]`: Expected some text", lambda: tl.similarities(lens, "the cat", ["a mat", ""])),
        ("none of the inputs is one", lambda: tl.similarity(lens, "the cat", "a mat", groups={"regions": (2, 2)})),
        ("late\\.$", lambda: tl.similarity(zero, A, B, pooling="attention")),
        ("`top` must be", lambda: tl.similarities(lens, "the cat", ["a mat"], top=0)),
        ("does not occur in any of the texts", lambda: tl.similarity(lens, "the cat", "a mat", groups=["dog"])),
        ("has no cosine", lambda: tl.similarity(zero, A, B)),
        ("same width", lambda: tl.similarity(lens, "the cat", A, other=tl.Lens(tower("clip text")), pooling=None)),
        ("an encoder and a decoder", lambda: tl.similarity(tl.Lens(bart), A, B)),
        ("pools by cls and max", lambda: tl.similarity(encoder_folder(tmp_path, BOTH, dense=False), A, B)),
    ]
    for said, ask in cases:
        with pytest.raises(tl.InputError, match=said) as caught:
            ask()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 320


BOTH = {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}


# Views ---------------------------------------------------------------------------------------------------------------


def test_it_is_shown_saved_and_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tl.similarity(minilm(), *SENTENCES[0], groups="words")
    found.show(k=2)
    said = capsys.readouterr().out
    assert "Why are these two texts similar (cosine 0.6674)?" in said and "guitar" in said and "+0.2335" in said
    for suffix in (".json", ".safetensors"):
        back = tl.PairMap.load(found.save(tmp_path / f"pairs{suffix}"))
        assert torch.equal(back.scores, found.scores) and back.meta == found.meta and back.value == found.value
    assert 'data-tensorlens="pairs"' in found._repr_html_()
    wrong: Any = SimpleNamespace(scores=torch.zeros(2, 2), labels=("a", "b"))
    with pytest.raises(tl.InputError, match="bias"):
        tl.PairMap(
            scores=wrong.scores, out_tokens=wrong.labels, in_tokens=wrong.labels, measure="cosine", value=0.0, meta={}
        )


def test_text_over_picture(tmp_path: Path) -> None:
    text, image = tl.Lens(tower("clip text")), tl.Lens(tower("clip image"))
    ids = [*A, 2]
    found = tl.similarity(text, ids, PICTURE, other=image)
    assert found.headline.startswith("Why are text and picture similar (cosine")
    places = found.meta["b_pictures"][0]["places"]
    n = len(found.in_tokens) - 2  # a class token and the bias
    assert len(places) == n and [place[0] for place in places] == list(range(1, n + 1))
    assert len(found.payload()["pictures"][1][0]["places"]) == n and found.payload()["pictures"][0] == []
    halves = tl.similarity(image, PICTURE, PICTURE, groups={"regions": (1, 2)})
    tokens = tl.similarity(image, PICTURE, PICTURE)
    assert halves.out_tokens == ("[CLS]", "region 0,0", "region 0,1", "bias")
    left = [place[0] for place in tokens.meta["a_pictures"][0]["places"] if place[1] < 0.5]
    assert float(halves.scores[1, 1]) == pytest.approx(float(tokens.scores[left][:, left].sum()), abs=1e-12)
    assert total(halves) == pytest.approx(halves.value, abs=1e-9)
    cut = tl.similarity(text, ids, PICTURE, other=image, groups={"regions": (1, 2)})
    assert cut.scores.shape == (len(ids) + 1, 4) and total(cut) == pytest.approx(found.value, abs=1e-9)
    assert found.save(tmp_path / "pairs.png").stat().st_size > 5000
    closer = tl.similarity(text, ids, PICTURE, other=image, against=-PICTURE)
    sides = closer.payload()
    assert sides["sides"] == ["First text", "Second picture", "Third picture"] and "third picture" in closer.headline
    third = [place[0] for place in sides["pictures"][2][0]["places"]]
    assert [closer.in_tokens[k] for k in third] == [found.in_tokens[place[0]] for place in places]
    assert min(third) == len(found.in_tokens) and torch.equal(closer.scores[:, :n], found.scores[:, :n])


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner()
    given = ["similar", "minilm", *SENTENCES[0]]
    shown = run.invoke(cli.app, [*given, "--out", str(tmp_path / "pairs.html"), "--pairs", "3"])
    assert shown.exit_code == 0 and "Why are these two texts similar" in shown.stdout
    assert "script-src 'sha256-" in (tmp_path / "pairs.html").read_text("utf-8")
    content = json.loads(run.invoke(cli.app, [*given, "--json", "--against", "A cat."]).stdout)
    assert content["n_against"] == 5 and len(content["top"]) == 10
    for wrong in (["--pooling", "sum"], ["--groups", "x"], ["--measure", "x"], ["--out", "x.csv"]):
        assert isinstance(run.invoke(cli.app, [*given, *wrong]).exception, tl.InputError)
    refused = run.invoke(cli.app, ["similar", "minilm", " ", "A cat."])
    assert str(refused.exception) == "Expected a text or the path of an image, but it is empty."
    assert str(run.invoke(cli.app, ["answer", "minilm", " "]).exception) == "Expected a text, but it is empty."


def test_a_sum_in_which_much_cancels_has_a_warning() -> None:
    def warning(size: float, value: float) -> str | None:
        scores, names = torch.tensor([[value + size, 0.0], [0.0, -size]]), ("one", "bias")
        found = tl.PairMap(scores=scores, out_tokens=names, in_tokens=names, measure="cosine", value=value)
        return dict(found.payload()["caption"]).get("Warning")

    assert warning(49, 0.5) is None
    assert (
        warning(51, -0.5) == "the pairs with a bias are 102 times the sum. Rules with live attention may cancel less."
    )
    assert str(warning(1, 0)).startswith("the pairs with a bias are larger than the sum.")


@pytest.mark.browser
def test_a_word_lights_up_its_patches(browser: Any, tmp_path: Path) -> None:
    boxes = [[1, 0.0, 0.0, 0.5, 1.0], [2, 0.5, 0.0, 1.0, 1.0]]
    found = tl.PairMap(
        scores=torch.tensor([[0.0, 0.5, 0.0, 0.1], [0.0, 0.0, -0.4, 0.0], [0.1, 0.0, 0.0, 0.2]]),
        out_tokens=("one", "two", "bias"),
        in_tokens=("[CLS]", "patch 0,0", "patch 0,1", "bias"),
        measure="cosine",
        value=0.5,
        meta={"b_pictures": [{"image": None, "places": boxes}]},
    )
    tab = browser.new_page()
    tab.goto(found.save(tmp_path / "pairs.html").as_uri())
    expect(tab.locator(".token:visible")).to_have_text(["one", "two", "[CLS]"])
    tab.locator(".token").nth(1).click()
    read = "node => [...node.getContext('2d').getImageData(330, 224, 1, 1).data]"
    red, _, blue, _ = tab.locator(".pictures canvas").evaluate(read)
    assert blue > red + 40
    tab.locator(".pictures canvas").click(position={"x": 20, "y": 20})
    expect(tab.locator(".partners li").first).to_have_text("+0.500 one × patch 0,0")
    tab.close()


@pytest.mark.browser
def test_the_page_lights_up_partners(browser: Any, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=window.hacked=1>"
    found = tl.PairMap(
        scores=torch.tensor([[0.5, -0.25, 0.0, 0.1], [0.0, 0.125, 0.0, 0.0], [0.1, 0.0, 0.0, 0.2]]),
        out_tokens=("one", hostile, "bias"),
        in_tokens=("uno", "dos", "tres", "bias"),
        measure="cosine",
        value=0.775,
        n_against=1,
    )
    problems: list[str] = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(found.save(tmp_path / "pairs.html").as_uri())
    expect(tab.locator(".token")).to_have_count(5)
    tab.locator(".token").nth(0).click()
    tab.mouse.move(2, 2)
    expect(tab.locator(".partners li").first).to_have_text("+0.500 one × uno")
    colours = [tab.locator(".token").nth(k).evaluate("node => getComputedStyle(node).backgroundColor") for k in (2, 3)]
    red, blue = ([int(part) for part in one.removeprefix("rgb(").removesuffix(")").split(",")] for one in colours)
    assert red[0] > red[2] + 60 and blue[2] > blue[0] + 40
    tab.locator(".token").nth(3).click()  # a token of the second text: its partners are in the first
    expect(tab.locator(".partners li").first).to_have_text("−0.250 one × dos")
    assert tab.evaluate("window.hacked") is None and not problems
    tab.close()


# A judge that knows the pair -----------------------------------------------------------------------------------------

CONCEPTS = (
    "guitar violin, dog puppy, doctor physician, car automobile, ocean sea, house cottage, money cash, bread toast, "
    "train railway, king monarch, rain storm, book novel, teacher professor, coffee espresso, child toddler,"
    " ship boat, winter snow, lawyer attorney, movie film, forest woods"
)
FIRST = (
    "Near the {1} and the {2} we noticed a {0} yesterday.",
    "My uncle sold his {0} together with a {1} and a {2}.",
)
SECOND = (
    "They talked about the {0}, the {1} and the {2} for hours.",
    "Nobody expected a {1}, a {2} or a {0} in that corner.",
)
BESIDE = "bottle ladder pencil carpet window basket candle hammer mirror button".split()  # noqa: SIM905
BESIDE_OTHER = "tunnel blanket engine wallet helmet scissors garden ticket bucket shelf".split()  # noqa: SIM905


@pytest.mark.large
@pytest.mark.parametrize(("rules", "least"), [("paper", 0.9), ("attn_lrp", 0.9)])
def test_the_shared_concept_is_the_first_pair(rules: str, least: float) -> None:
    lens, draw, hits = minilm().with_rules(rules), random.Random(0), list[bool]()
    for k, pair in enumerate(CONCEPTS.split(", ")):
        for v in range(2):
            a, b = pair.split()
            first = FIRST[(k + v) % 2].format(a, *draw.sample(BESIDE, 2))
            second = SECOND[v].format(b, *draw.sample(BESIDE_OTHER, 2))
            best = tl.similarity(lens, first, second, groups="words").top(1)[0]
            hits.append((best.a.strip(), best.b.strip()) == (a, b))
    assert len(hits) == 40 and sum(hits) / 40 >= least
