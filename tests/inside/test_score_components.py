"""Scores by component: what earlier components wrote of a query and of a key, and nothing beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor

import tensorlens as tl

KINDS = {
    "before": "gpt2",
    "after": "bert-mlm",
    "parallel": "neox-parallel",
    "grouped": "qwen2",
    "sandwich": "gemma3",
    "norms of queries": "qwen3",
    "after each": "olmo2",
    "window": "mistral",
    "one norm for both": "phi",
}
"""A family of each kind of block."""

EXPERTS = hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2)
T5 = hf.T5Config(
    d_model=16,
    d_kv=4,
    num_heads=4,
    d_ff=24,
    num_layers=2,
    num_decoder_layers=2,
    vocab_size=60,
    pad_token_id=0,
    decoder_start_token_id=0,
)


def tensor(name: str) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, "sdpa"))(zoo.sample(name))


def encoder_decoder() -> tl.AttentionTensor:
    model = zoo.randomise(hf.T5ForConditionalGeneration(T5)).double().eval()
    return tl.Lens(model)({"input_ids": [[5, 6, 7, 8, 9]], "decoder_input_ids": [[0, 11, 12]]})


def row(found: tl.TokenMap, name: str) -> Tensor:
    return found.scores[found.out_tokens.index(name)]


@pytest.mark.parametrize("name", KINDS.values(), ids=KINDS)
def test_pairs_of_components_sum_to_the_score(name: str) -> None:
    T = tensor(name)
    close = 1e-6 if zoo.ZOO[name].casts else 1e-10
    for block, head, i, j in ((0, 1, 6, 4), (2, 3, 4, 3)):
        by_token, found = T.score(block, head, i, j), T.score(block, head, i, j, by="component")
        assert float(found.scores.sum()) == pytest.approx(float(by_token.scores.sum()), rel=close, abs=close)
        blocks = {label.split(",")[0] for label in found.out_tokens}
        assert blocks == {"embedding", "bias", *(f"block {n}" for n in range(block))}
    both = T.score(2, 3, 4, (3, 4), by="component").scores.sum()
    each = [T.score(2, 3, 4, key, by="component").scores.sum() for key in (3, 4)]
    assert float(both) == pytest.approx(float(each[0] - each[1]), rel=1e-9, abs=1e-9)


def test_experts_are_components_of_a_score() -> None:
    EXPERTS._experts_implementation = "eager"
    T = tl.Lens(zoo.randomise(hf.MixtralForCausalLM(EXPERTS)).double().eval())(zoo.sample("llama"))
    found, by_token = T.score(2, 1, 5, 2, by="component"), T.score(2, 1, 5, 2)
    assert float(found.scores.sum()) == pytest.approx(float(by_token.scores.sum()), rel=1e-6, abs=1e-6)
    assert "block 1, feed-forward" in found.in_tokens


@pytest.mark.parametrize(("name", "bias"), [("llama", False), ("gpt2", True)])
def test_without_biases_nothing_is_left_for_them(name: str, bias: bool) -> None:
    T = tensor(name)
    found = T.score(2, 1, 5, 3, by="component")
    assert bool(row(found, "bias").abs().max() > 1e-6) == bias
    assert ("block 1, attention bias" in found.out_tokens) == bias


def test_a_component_is_what_it_wrote_through_the_held_norm() -> None:
    model: Any = zoo.build("gpt2", "sdpa")
    blocks, kept = model.transformer.h, {}
    taken = blocks[1].mlp.register_forward_hook(lambda module, args, y: kept.update(wrote=y[0].detach()))
    read = blocks[2].ln_1.register_forward_pre_hook(lambda module, args: kept.update(stream=args[0][0].detach()))
    model(torch.tensor([zoo.sample("gpt2")]))
    taken.remove(), read.remove()
    T = tl.Lens(model)(zoo.sample("gpt2"))
    head, i, j = 2, 5, 3
    found = T.score(2, head, i, j, by="component")
    wrote, norm = kept["wrote"], blocks[2].ln_1
    deviation = (kept["stream"].var(-1, False, keepdim=True) + norm.eps).sqrt()
    plain = ((wrote - wrote.mean(-1, keepdim=True)) / deviation * norm.weight).detach()
    queries, keys, _ = (plain @ blocks[2].attn.c_attn.weight).detach().split(16, -1)
    pair = queries.view(7, 4, 4)[i, head] @ keys.view(7, 4, 4)[j, head] / 2
    place = found.out_tokens.index("block 1, feed-forward")
    assert float(found.scores[place, place]) == pytest.approx(float(pair), rel=1e-10)


def test_heads_add_up_to_the_attention_that_they_are_of() -> None:
    """A head's part is linear in what it wrote: heads and bias together are the whole write of the attention."""
    model: Any = zoo.build("gpt2", "sdpa")
    whole = tl.Lens(model)(zoo.sample("gpt2")).score(2, 0, 6, 2, by="component")
    heads = [label for label in whole.out_tokens if label.startswith("block 1, attention")]
    assert heads == [*(f"block 1, attention head {h}" for h in range(4)), "block 1, attention bias"]
    kept = {}
    handles = [
        model.transformer.h[1].attn.register_forward_hook(lambda m, a, y: kept.update(wrote=y[0][0].detach())),
        model.transformer.h[2].ln_1.register_forward_pre_hook(lambda m, a: kept.update(stream=a[0][0].detach())),
    ]
    model(torch.tensor([zoo.sample("gpt2")]))
    for handle in handles:
        handle.remove()
    norm, attention = model.transformer.h[2].ln_1, model.transformer.h[2].attn
    deviation = (kept["stream"].var(-1, False, keepdim=True) + norm.eps).sqrt()
    plain = (kept["wrote"] - kept["wrote"].mean(-1, keepdim=True)) / deviation * norm.weight
    weight = attention.c_attn.weight
    query = (plain @ weight)[6, 0:4].detach()
    normed = norm(kept["stream"])
    key = (normed @ weight + attention.c_attn.bias)[2, 16:20].detach()
    ours = sum(float(row(whole, label).sum()) for label in heads)
    assert ours == pytest.approx(float(query @ key / 2), rel=1e-10)


def test_a_cross_attention_is_chosen_and_its_keys_are_the_encoders() -> None:
    T = encoder_decoder()
    with pytest.raises(tl.MethodError, match="attention=0"):
        T.score(3, 1, 2, 4)
    by_token = T.score(3, 1, 2, 4, attention=1)
    assert not by_token.scores[:, 5:-1].any() and by_token.scores[:, :5].any()  # keys read no token of the decoder
    found = T.score(3, 1, 2, 4, attention=1, by="component")
    assert float(found.scores.sum()) == pytest.approx(float(by_token.scores.sum()), rel=1e-6, abs=1e-6)
    assert row(found, "bias").abs().max() < 1e-6  # the family has no biases, and a cross-attention no positions
    by_key = {label for label, column in zip(found.in_tokens, found.scores.T, strict=True) if column.abs().max() > 1e-9}
    by_query = {label for label, row in zip(found.out_tokens, found.scores, strict=True) if row.abs().max() > 1e-9}
    assert "block 1, feed-forward" in by_key and not any(label.startswith("block 3") for label in by_key)
    assert "block 3, attention head 0" in by_query and "block 2, feed-forward" in by_query


def test_within_an_encoder_pairs_sum_too() -> None:
    T = encoder_decoder()
    found, by_token = T.score(1, 2, 3, 1, by="component"), T.score(1, 2, 3, 1)
    assert float(found.scores.sum()) == pytest.approx(float(by_token.scores.sum()), rel=1e-6, abs=1e-6)
    assert {"embedding", "block 0, attention head 1", "block 0, feed-forward"} <= set(found.out_tokens)


def test_another_way_to_take_it_apart_is_refused(unchecked: None) -> None:
    with pytest.raises(tl.InputError, match="token or component"):
        tensor("gpt2").score(0, 0, 3, 1, by="neuron")  # type: ignore[arg-type]
