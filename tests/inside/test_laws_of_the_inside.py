"""The laws of components and scores on every family of the sample that has a head, and on those that need more words.

Conservation is checked against runs at zero from every depth, heads against runs without them, scores against
the attention that the model itself computes: nothing here is a difference that holds by construction.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from autograd_twin import logit
from torch import Tensor

import tensorlens as tl
from tensorlens.operators.attention_matrices import mixing

OUT, TARGET = 4, 2
HEADLESS = ("bert", "albert", "dinov2")
SAMPLE = [name for name in zoo.ZOO if name not in HEADLESS]
OTHERS: dict[str, tuple[type, Any]] = {
    "experts": (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2),
    ),
    "experts and one for all": (
        hf.Qwen2MoeForCausalLM,
        hf.Qwen2MoeConfig(
            **zoo.TEXT,
            **zoo.GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            decoder_sparse_step=1,
        ),
    ),
}
FAMILIES = [*SAMPLE, *OTHERS]


@cache
def tensor(name: str) -> tl.AttentionTensor:
    if name in zoo.ZOO:
        attention = "sdpa" if "sdpa" in zoo.ZOO[name].attentions else "eager"
        return tl.Lens(zoo.build(name, attention))(zoo.sample(name))
    family, config = OTHERS[name]
    config._experts_implementation = "eager"
    return tl.Lens(zoo.randomise(family(config)).double().eval())(zoo.sample("llama"))


def tolerance(name: str) -> float:
    return 1e-6 if name in OTHERS or zoo.ZOO[name].casts else 1e-10


def output(T: tl.AttentionTensor) -> int:
    return 0 if T.operator.recording.pools else OUT


@cache
def found(name: str, effect: Any = "total") -> tl.ComponentMap:
    T = tensor(name)
    return T.components(output(T), TARGET, effect)


def pushed(T: tl.AttentionTensor, state: Tensor, depth: int = 0) -> float:
    return logit(T, state, output(T), TARGET, depth)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_depth_carries_the_target_but_for_what_zero_gives(name: str) -> None:
    T, c, close = tensor(name), found(name), tolerance(name)
    for depth, carried in enumerate(c.flow()[:-1].sum(1).tolist()):
        constant = pushed(T, torch.zeros_like(T.operator.recording.states[depth]), depth)
        assert carried + constant == pytest.approx(c.value, rel=close, abs=close)


@pytest.mark.parametrize("name", FAMILIES)
def test_direct_effects_are_complete(name: str) -> None:
    d = found(name, "direct")
    assert float(d.scores.sum()) == pytest.approx(d.value, rel=tolerance(name), abs=tolerance(name))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_is_what_is_lost_without_it(name: str) -> None:
    T, table, close = tensor(name), found(name).heads(), tolerance(name)
    assert table.shape == (T.n_blocks, 4) and not table.isnan().any()
    for block, head in ((0, 3), (T.n_blocks - 1, 1)):
        lost = found(name).value - pushed(T.without_heads({block: [head]}), T.input[None])
        assert float(table[block, head]) == pytest.approx(lost, rel=close, abs=close)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_by_token_and_by_component_are_those_of_the_softmax(name: str) -> None:
    T, block, head, i = tensor(name), 1, 2, OUT
    attention = mixing(T.operator.recording, block).attention[head, i].double()
    keys = attention.nonzero()[:, 0].tolist()[:3]
    # Gemma 2 takes its softmax in float32, ModernBERT its rotations.
    close = max(tolerance(name), {"gemma2": 1e-5, "modernbert": 1e-6}.get(name, 0.0))
    sums = {}
    for by in ("token", "component"):
        sums[by] = torch.stack([T.score(block, head, i, j, by=by).scores.sum().double() for j in keys])  # type: ignore[arg-type]
        if name != "gemma2":  # a soft cap comes in between
            ours, theirs = sums[by].diff(), attention[keys].log().diff()
            torch.testing.assert_close(ours, theirs, rtol=close, atol=max(close, 1e-6 if close > 1e-10 else close))
    torch.testing.assert_close(sums["token"], sums["component"], rtol=close, atol=close)


def of(c: tl.ComponentMap, kind: str) -> Tensor:
    chosen = [label.block == 1 and label.kind == kind for label in c.labels]
    return c.scores[torch.tensor(chosen)]


@pytest.mark.parametrize("name", [name for name in FAMILIES if name in zoo.ZOO])
def test_neurons_are_all_there_is_to_a_feed_forward(name: str) -> None:
    T, close = tensor(name), tolerance(name)
    c = T.components(output(T), TARGET, neurons=[1])
    neurons, bias = (of(c, kind) for kind in ("neuron", "feed-forward bias"))
    whole = of(found(name), "feed-forward")[0]
    torch.testing.assert_close(neurons.sum(0) + bias[0], whole, rtol=close, atol=close)
    if not zoo.ZOO[name].has_biases:
        assert bias.abs().max() < close


def test_between_encoder_and_decoder_with_biases() -> None:
    config = hf.BartConfig(
        vocab_size=60,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_position_embeddings=40,
        pad_token_id=1,
        decoder_start_token_id=2,
        tie_word_embeddings=False,
    )
    model = zoo.randomise(hf.BartForConditionalGeneration(config)).double().eval()
    T = tl.Lens(model)({"input_ids": [[5, 6, 7, 8, 9]], "decoder_input_ids": [[2, 11, 12]]})
    c, d = T.components(2, TARGET), T.components(2, TARGET, "direct")
    constant = logit(T, torch.zeros_like(T.operator.recording.states[0]), 2, TARGET)
    assert float(c.flow()[0].sum()) + constant == pytest.approx(c.value, rel=1e-10)
    assert float(d.scores.sum()) == pytest.approx(c.value, rel=1e-10)
    for block, attention, query, key in ((1, None, 3, 4), (2, 0, 2, 1), (3, 1, 2, 4)):
        pair = [T.score(block, 1, query, key, attention=attention, by=by).scores.sum() for by in ("token", "component")]  # type: ignore[arg-type]
        assert float(pair[0]) == pytest.approx(float(pair[1]), rel=1e-10)
