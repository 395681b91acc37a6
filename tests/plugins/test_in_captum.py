"""Captum's own quick start with one line changed. Run by `make plugins`."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
import zoo
from plugin_samples import PROMPT, TARGET, ids_of, lens
from tiny_language import tokenizer

import tensorlens as tl

pytest.importorskip("captum", reason="captum is not here; `make plugins` has it")
from captum.attr import LayerGradientXActivation, TextTokenInput
from captum.attr import visualization as viz

from tensorlens.plugins.captum import LLMTensorAttribution, TensorAttribution


def test_attributions_sum_to_the_in_class_map(recorded):
    model, ids = lens().model, torch.tensor([ids_of(PROMPT)])
    attributions, delta = TensorAttribution(model).attribute(ids, target=(-1, TARGET), return_convergence_delta=True)
    assert attributions.shape == (1, ids.shape[1], 16) and abs(float(delta)) < 1e-4
    recorded("captum", attributions.sum(-1)[0].tolist())


def test_under_the_rules_of_the_jacobian_it_is_their_gradient_times_activation():
    model, ids = lens("llama").model, torch.tensor([ids_of(PROMPT)])
    theirs = LayerGradientXActivation(lambda ids: model(ids).logits[:, -1], model.model.embed_tokens)
    expected = theirs.attribute(ids, target=TARGET)
    found = TensorAttribution(model, rules="jacobian").attribute(ids, target=(-1, TARGET))
    torch.testing.assert_close(found, expected.detach(), rtol=1e-3, atol=1e-5)


def test_a_padded_batch_of_a_classifier():
    config = hf.BertConfig(**zoo.TEXT, num_labels=3)
    model = zoo.randomise(hf.BertForSequenceClassification(config)).eval()
    ids = torch.tensor([[5, 6, 7, 8, 0, 0], [9, 8, 7, 6, 5, 4]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    found = TensorAttribution(model).attribute(ids, target=[2, 0], additional_forward_args=(mask,))
    for k, (n, target) in enumerate(((4, 2), (6, 0))):
        alone = tl.Lens(model)(ids[k, :n].tolist()).map("tensor.in_class", target=target).scores[0]
        torch.testing.assert_close(found[k, :n].sum(-1), alone, rtol=1e-4, atol=1e-5)
        assert not found[k, n:].any()


def test_an_answer_and_its_figure(recorded):
    llm = LLMTensorAttribution(lens().model, tokenizer())
    result = llm.attribute(TextTokenInput(PROMPT, tokenizer()), target=" no", explained="centred")
    assert result.token_attr.shape == (len(ids_of(" no")), len(ids_of(PROMPT)))
    recorded("captum answer", result.seq_attr.tolist())
    figure, _ = result.plot_token_attr()
    assert figure.axes


def test_its_table_of_words():
    scores = TensorAttribution(lens().model).attribute(torch.tensor([ids_of(PROMPT)]), target=(-1, TARGET)).sum(-1)[0]
    words = [f"word{k}" for k in range(len(PROMPT))]
    html = viz.format_word_importances(words, scores / scores.norm())
    assert all(word in html for word in words) and html.count("<mark") == len(words)


@pytest.mark.parametrize("target", [(-1, 10**6), [1, 2, 3]])
def test_a_target_that_is_not_there(target):
    with pytest.raises(tl.InputError, match="`target` must be"):
        TensorAttribution(lens().model).attribute(torch.tensor([ids_of(PROMPT)]), target=target)
