"""Scores: what they sum to is what the softmax took, and pairs are those that really met."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from test_components import Knots
from tiny_language import tiny_lens
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.inside import score
from tensorlens.operators.attention_matrices import mixing

CASES = [
    (name, attention)
    for name in ("llama", "gpt2", "bert-mlm", "neox-parallel", "qwen2", "qwen3", "gemma3", "mistral", "opt")
    for attention in zoo.ZOO[name].attentions
]


def tensor(name: str, attention: str) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, attention))(zoo.sample(name))


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_the_softmax_of_the_scores_is_the_attention(name: str, attention: str) -> None:
    T = tensor(name, attention)
    close = 1e-5 if zoo.ZOO[name].casts or attention == "eager" else 1e-10  # some softmax in float32 whatever comes
    for block, head, i in ((0, 1, 6), (2, 3, 4)):
        row = mixing(T.operator.recording, block).attention[head, i].double()
        keys = row.nonzero()[:, 0].tolist()
        sums = torch.stack([T.score(block, head, i, j).scores.sum() for j in keys])
        torch.testing.assert_close(sums.softmax(0), row[keys], rtol=close, atol=close)
        contrast = T.score(block, head, i, (keys[0], keys[-1])).scores.sum()
        assert float(contrast) == pytest.approx(float(sums[0] - sums[-1]), rel=1e-9, abs=1e-9)


def test_a_soft_cap_comes_after_the_score() -> None:
    T = tensor("gemma2", "eager")
    cap = zoo.ZOO["gemma2"].config.attn_logit_softcapping
    row = mixing(T.operator.recording, 1).attention[2, 5].double()
    keys = row.nonzero()[:, 0].tolist()
    sums = torch.stack([T.score(1, 2, 5, j).scores.sum() for j in keys])
    torch.testing.assert_close((cap * (sums / cap).tanh()).softmax(0), row[keys], rtol=1e-5, atol=1e-5)


def test_positions_that_the_model_adds_stand_in_the_corner() -> None:
    config = hf.T5Config(
        d_model=16, d_kv=4, num_heads=4, d_ff=24, num_layers=2, vocab_size=60, pad_token_id=0, decoder_start_token_id=0
    )
    model = zoo.randomise(hf.T5EncoderModel(config)).double().eval()
    T = tl.Lens(model)([5, 6, 7, 8, 9])
    for block in (0, 1):
        row = mixing(T.operator.recording, block).attention[1, 3].double()
        found = [T.score(block, 1, 3, j).scores for j in range(5)]
        torch.testing.assert_close(torch.stack([one.sum() for one in found]).softmax(0), row, rtol=1e-5, atol=1e-5)
        assert all(one[-1, -1] != 0 for one in found)  # without biases, that is all there is
        assert not any(one[-1, :-1].any() or one[:-1, -1].any() for one in found)


def test_a_product_within_a_sum_is_followed() -> None:
    config = hf.BloomConfig(hidden_size=16, n_layer=2, n_head=4, vocab_size=zoo.VOCABULARY)
    T = tl.Lens(zoo.randomise(hf.BloomForCausalLM(config)).double().eval())(zoo.sample("gpt2"))
    row = mixing(T.operator.recording, 1).attention[2, 5].double()  # one function multiplies, scales and adds positions
    keys = row.nonzero()[:, 0].tolist()
    sums = torch.stack([T.score(1, 2, 5, j).scores.sum() for j in keys])
    torch.testing.assert_close(sums.softmax(0), row[keys], rtol=1e-5, atol=1e-5)


class Uncommon(nn.Module):
    """Attention whose scores are summed up on their way to the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(x).chunk(3, -1)
        return x + (q @ k.transpose(1, 2)).cumsum(-1).softmax(-1) @ v


def test_a_product_that_cannot_be_followed_is_refused() -> None:
    model = Knots()
    model.layers = nn.ModuleList([Uncommon(), Uncommon()])
    T = tl.Lens(zoo.randomise(model).double().eval(), blocks="layers")([3, 4, 5])
    with pytest.raises(tl.MethodError, match="0 attention layers|no attention layer"):
        T.score(0, 0, 2, 1)


def test_in_the_first_block_a_query_reads_its_own_token_alone() -> None:
    model: Any = zoo.build("gpt2", "sdpa")
    T = tl.Lens(model)(zoo.sample("gpt2"))
    head, i, j = 2, 5, 3
    found = T.score(0, head, i, j).scores
    outside = found.clone()
    outside[[i, i, -1, -1], [j, -1, j, -1]] = 0
    assert found.shape == (8, 8) and not outside.any()
    block = model.transformer.h[0]
    x, norm = T.input, block.ln_1
    plain = (x - x.mean(-1, keepdim=True)) / (x.var(-1, False, keepdim=True) + norm.eps).sqrt() * norm.weight
    queries, keys, _ = (plain @ block.attn.c_attn.weight).detach().split(16, -1)
    pair = queries.view(7, 4, 4)[i, head] @ keys.view(7, 4, 4)[j, head] / 2
    assert float(found[i, j]) == pytest.approx(float(pair), rel=1e-10)


def test_groups_are_sums_of_pairs_and_the_bias_stays_apart() -> None:
    T = tensor("gpt2", "sdpa")
    pairs = T.score(1, 2, 6, 4).scores
    found = T.score(1, 2, 6, 4, groups=[("first", 0, 2), ("then", 2, 5)])
    assert found.in_tokens == found.out_tokens == ("first", "then", "rest", "bias")
    bounds = [slice(0, 2), slice(2, 5), slice(5, 7), slice(7, 8)]
    sums = torch.stack([torch.stack([pairs[rows, columns].sum() for columns in bounds]) for rows in bounds])
    torch.testing.assert_close(found.scores, sums, rtol=1e-10, atol=1e-12)
    with pytest.raises(tl.InputError, match="of tokens"):
        T.score(1, 2, 6, 4, by="component", groups="words")


def test_words_of_a_text_meet() -> None:
    T = tiny_lens("neox")("the cat sat")
    whole, found = T.score(1, 1, -1, 2), T.score(1, 1, -1, 2, groups="words")
    assert found.in_tokens == ("the", " cat", " sat", "bias")
    assert float(found.scores.sum()) == pytest.approx(float(whole.scores.sum()), rel=1e-5)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_masked_key_and_what_is_not_there_are_refused(attention: str, unchecked: None) -> None:
    T = tensor("mistral", attention)
    with pytest.raises(tl.InputError, match="masked"):
        T.score(0, 0, 3, 5)
    with pytest.raises(tl.InputError, match="masked"):  # outside of its window
        T.score(0, 0, 6, 0)
    with pytest.raises(tl.InputError, match="heads 0 to 3"):
        T.score(0, 4, 3, 3)
    with pytest.raises(tl.InputError, match="block 7"):
        T.score(7, 0, 3, 3)
    with pytest.raises(tl.InputError, match="pair"):
        T.score(0, 0, 3, (1, 2, 3))  # type: ignore[arg-type]


def test_a_pair_map_takes_a_cotangent_for_each_channel_of_query_and_key(monkeypatch: pytest.MonkeyPatch) -> None:
    T, pulled = tensor("llama", "sdpa"), []
    of_each = score.of_each
    monkeypatch.setattr(
        score, "of_each", lambda pull, rows: pulled.append(len(next(iter(rows.values())))) or of_each(pull, rows)
    )
    T.score(1, 2, 6, 4)
    assert sum(pulled) == 2 * 2 * zoo.ZOO["llama"].config.head_dim  # through two blocks


def test_only_what_can_be_seen_from_the_block_is_needed() -> None:
    T = tensor("llama", "sdpa")
    of_part, whole = T.blocks(1, 3).score(1, 2, 6, 4), T.score(2, 2, 6, 4)
    assert float(of_part.scores.sum()) == pytest.approx(float(whole.scores.sum()), rel=1e-6)


@pytest.mark.parametrize("rules", ["paper", "jacobian"])
def test_a_saturated_soft_cap_hides_no_score(rules: str) -> None:
    """A cap so low that the derivative of its tanh is zero; the softmax behind it is the witness."""
    config = deepcopy(zoo.ZOO["gemma2"].config)
    config.attn_logit_softcapping = 0.05
    model = zoo.randomise(hf.Gemma2ForCausalLM._from_config(config, attn_implementation="eager")).double().eval()
    T = tl.Lens(model, rules=rules)([5, 6, 7, 8, 9, 10, 11])
    for block, head in ((0, 1), (1, 3)):
        attention = mixing(T.operator.recording, block).attention[head, 5].double()
        keys = attention.nonzero()[:, 0].tolist()
        for by in ("token", "component"):
            scores = torch.stack([T.score(block, head, 5, key, by=by).scores.sum().double() for key in keys])  # type: ignore[arg-type]
            capped = 0.05 * (scores / 0.05).tanh()
            torch.testing.assert_close(capped.diff(), attention[keys].log().diff(), rtol=1e-4, atol=1e-6)
