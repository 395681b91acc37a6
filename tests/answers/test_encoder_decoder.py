"""Answers of models with an encoder: rows are the decoder's outputs, columns the encoder's groups and the answer."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
import zoo
from tiny_language import tokenizer

import tensorlens as tl

PROMPT = "The cat sat. It was dark!"
ANSWER = "A cat. Yes."


def lens_of(kind: str) -> tl.Lens:
    if kind == "t5":
        config = hf.T5Config(
            vocab_size=len(tokenizer()),
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )
        model = hf.T5ForConditionalGeneration(config)
    else:
        config = hf.BartConfig(
            vocab_size=len(tokenizer()),
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=64,
            decoder_start_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=0,
            forced_eos_token_id=None,
        )
        model = hf.BartForConditionalGeneration(config)
        model.generation_config.forced_bos_token_id = 5
    return tl.Lens(zoo.randomise(model).eval().double(), tokenizer(), name=f"tiny-{kind}")


@pytest.fixture(scope="module", params=["t5", "bart"])
def answer(request):
    return lens_of(request.param).answer(PROMPT, ANSWER)


@pytest.mark.parametrize("engine", ["pulls", "pushes"])
@pytest.mark.parametrize("target", ["centred", "logit"])
def test_rows_sum_to_the_decoders_own_logits(answer, engine, target):
    found = answer.map("sentences", "tokens", target, engine=engine, answer_columns=True)
    start = answer.prompt.decoder_ids
    with torch.no_grad():
        logits = answer.specimen.model(
            input_ids=torch.tensor([answer.prompt.ids[: -len(start)]]),
            decoder_input_ids=torch.tensor([[*start, *answer.ids]]),
        ).logits[0, len(start) - 1 : -1]
    own = logits.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    values = own - logits.mean(1) if target == "centred" else own
    at_zero = torch.stack([answer.tensor.operator.logits_at_zero(i) for i in answer.positions])
    bias = at_zero.gather(1, torch.tensor(answer.ids)[:, None])[:, 0] - (at_zero.mean(1) if target == "centred" else 0)
    torch.testing.assert_close(found.scores.sum(1), values - bias, rtol=1e-6, atol=1e-6)
    assert found.in_tokens[:3] == ("The cat sat.", "It was dark!", "rest")
    assert found.scores[:, :2].abs().min() > 0  # every output reads the whole encoder
    assert float(found.scores[:, 3:].triu().abs().max()) < 1e-12  # and of the answer what was said before
    expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.log_probabilities), expected.float(), rtol=1e-4, atol=1e-5)


def test_pushes_equal_pulls_and_the_text_keeps_its_places(answer):
    one, other = (answer.map("words", "words", engine=engine) for engine in ("pulls", "pushes"))
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-9, atol=1e-9)
    meta = answer.tensor.context.meta
    assert meta["text"] == f"{PROMPT}\n{ANSWER}"
    assert [meta["text"][slice(*pair)] for pair in meta["offsets"] if pair] == list(PROMPT + ANSWER)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_generated_answers_are_the_models_own(kind):
    lens = lens_of(kind)
    found = lens.answer(PROMPT, max_new_tokens=5)
    ids = torch.tensor([lens.processor(PROMPT)["input_ids"]])
    made = lens.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=7, do_sample=False)[0].tolist()
    assert tuple(made[: len(found.prompt.decoder_ids)]) == found.prompt.decoder_ids
    rest = made[len(found.prompt.decoder_ids) :]
    assert list(found.ids) == rest[: len(found.ids)]
    assert found.prompt.decoder_ids == ((0,) if kind == "t5" else (0, 5))  # a forced token is none of the answer
    assert found.map(against=[7, 8]).in_tokens[-2:] == ("answer", "against")
