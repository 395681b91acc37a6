"""Inseq's own quick start with one line changed. Run by `make plugins`."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
import zoo
from plugin_samples import AGAINST, PROMPT, TARGET, lens
from tiny_language import tokenizer

import tensorlens as tl

inseq = pytest.importorskip("inseq", reason="inseq is not here; `make plugins` has it")
import tensorlens.plugins.inseq  # noqa: E402  registers the method


def piece(index: int) -> str:
    return tokenizer().decode([index])


def attributed(**options):
    model = inseq.load_model(lens().model, "tensorlens", tokenizer=tokenizer())
    return model.attribute(PROMPT, PROMPT + piece(TARGET) + piece(AGAINST), show_progress=False, **options)


def test_each_row_is_the_in_class_map_of_its_prefix():
    found = attributed().sequence_attributions[0]
    n = len(PROMPT)
    for step, target in enumerate((TARGET, AGAINST)):
        text = PROMPT + piece(TARGET) * step
        expected = lens()(text).map("tensor.in_class", -1, target)
        torch.testing.assert_close(
            found.target_attributions[: n + step, step], expected.scores[0], rtol=1e-4, atol=1e-5
        )
        whole = expected.scores.sum() + found.step_scores["bias"][step]
        assert float(whole) == pytest.approx(expected.meta["logit"][0], rel=1e-4)


def test_a_contrast_and_a_probability(recorded):
    contrast = PROMPT + piece(AGAINST) * 2
    with pytest.warns(UserWarning, match="Contrastive inputs"):
        found = attributed(attributed_fn="contrast_logits_diff", contrast_targets=contrast)
    recorded("inseq contrast", found.sequence_attributions[0].target_attributions[: len(PROMPT), 0].tolist())
    slope = attributed(attributed_fn="probability", step_scores=["probability"]).sequence_attributions[0]
    assert slope.step_scores["probability"][0] > 0 and not torch.equal(
        slope.target_attributions, found[0].target_attributions
    )


def test_rules_html_and_files(tmp_path):
    found = attributed(rules="jacobian")
    expected = lens().with_rules("jacobian")(PROMPT).map("tensor.in_class", -1, TARGET).scores[0]
    got = found.sequence_attributions[0].target_attributions[: len(PROMPT), 0]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-5)
    assert "<table" in found.show(display=False, return_html=True)
    found.save(str(tmp_path / "found.json"))
    assert inseq.FeatureAttributionOutput.load(str(tmp_path / "found.json")).info["attribution_method"] == "tensorlens"


def test_an_encoder_decoder():
    config = hf.T5Config(d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, vocab_size=len(tokenizer()))
    config.decoder_start_token_id, config.pad_token_id, config.eos_token_id = 0, 0, 1
    t5 = zoo.randomise(hf.T5ForConditionalGeneration(config)).eval()
    model = inseq.load_model(t5, "tensorlens", tokenizer=tokenizer())
    found = model.attribute("The cat", "sat", attribute_target=True, show_progress=False).sequence_attributions[0]
    ids = {
        "input_ids": tokenizer()("The cat", return_tensors="pt")["input_ids"],
        "decoder_input_ids": torch.tensor([[0]]),
    }
    n = ids["input_ids"].shape[1]
    expected = tl.Lens(t5, tokenizer())(ids).map("tensor.in_class", -1, found.target[1].id)
    torch.testing.assert_close(found.source_attributions[:n, 0], expected.scores[0, :n], rtol=1e-4, atol=1e-5)


def test_the_default_of_inseq_comes_back():
    model = inseq.load_model(lens().model, "tensorlens", tokenizer=tokenizer())
    assert model.default_attributed_fn_id == "logit"
    model.get_attribution_method("saliency")
    assert model.default_attributed_fn_id == "probability"
