"""What the perturbation study replaces, and how the plain model is run on it."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from tiny_study import TEXTS, lens_on, vision_lens, write_pictures

import tensorlens as tl
from tensorlens.errors import InputError
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_samples import Images, Texts, maskable
from tensorlens.studies.perturbation_study import PerturbationOptions
from tensorlens.studies.plain_model import PlainModel


def test_special_tokens_and_the_last_of_a_decoder_are_protected():
    encoder = Texts(lens_on("bert"), read_dataset(TEXTS), PerturbationOptions(n_tokens=16))
    sample = encoder.load(1)
    assert not encoder.is_causal
    assert maskable(sample, False, "strict") == [1, 2, 3, 4] == maskable(sample, False, "paper-like")
    decoder = Texts(lens_on("gpt2"), read_dataset(TEXTS), PerturbationOptions(n_tokens=16))
    sample = decoder.load(1)
    assert decoder.is_causal
    assert maskable(sample, True, "strict") == [0, 1, 2]
    assert maskable(sample, True, "paper-like") == [0, 1, 2, 3]


@pytest.mark.parametrize("replacement", ["token", "zero", "mean", "attention", "delete"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_copies_change_the_chosen_tokens_only(name, replacement):
    texts = Texts(lens_on(name), read_dataset(TEXTS), PerturbationOptions(n_tokens=16))
    sample = texts.load(0)
    ids = sample.inputs["input_ids"][0]
    masks = torch.zeros(2, sample.n_tokens, dtype=torch.bool)
    masks[0, 2] = masks[1, 2] = masks[1, 4] = True
    if replacement == "delete":
        assert texts.shapes(sample, masks, replacement) == [len(ids) - 1, len(ids) - 2]
        shorter = [texts.copies(sample, mask[None], replacement)["input_ids"] for mask in masks]
        assert [one.shape for one in shorter] == [(1, len(ids) - 1), (1, len(ids) - 2)]
        assert shorter[0][0].tolist() == [i for p, i in enumerate(ids.tolist()) if p != 2]
        return
    inputs = texts.copies(sample, masks, replacement)
    if replacement == "token":
        assert inputs["input_ids"][0, 2] == 3
        assert torch.equal(inputs["input_ids"][~masks], ids.repeat(2)[~masks.flatten()])
    elif replacement == "attention":
        assert torch.equal(inputs["attention_mask"] == 0, masks)
    else:
        words = texts.lens.model.get_input_embeddings()(ids)
        expected = 0 * words[0] if replacement == "zero" else texts.lens.model.get_input_embeddings().weight.mean(0)
        torch.testing.assert_close(inputs["inputs_embeds"][masks], expected.expand(3, -1))
        torch.testing.assert_close(inputs["inputs_embeds"][0][~masks[0]], words[~masks[0]])


def test_windows_join_texts_and_leave_headings_out():
    texts = Texts(
        lens_on("gpt2"), read_dataset([*TEXTS, "= the heading ="]), PerturbationOptions(n_tokens=8, cut="windows")
    )
    assert {len(ids) for ids in texts.ids} == {8}
    joined = [i for ids in texts.ids for i in ids]
    assert joined == [i for text in TEXTS for i in texts.tokenizer(text)["input_ids"]][: len(joined)]


def test_a_fresh_encoder_is_no_decoder():
    """Whose first output hardly depends on one token of many."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.01
    )
    lens = tl.Lens(hf.BertModel(config).eval(), lens_on("bert").processor)
    assert not Texts(lens, read_dataset([" ".join(TEXTS * 4)]), PerturbationOptions(n_tokens=128)).is_causal


def test_where_positions_are_counted_from_the_mask_hiding_is_deleting_and_refused():
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5)
    texts = Texts(
        tl.Lens(hf.BloomForCausalLM(config).eval(), lens_on("gpt2").processor),
        read_dataset(TEXTS),
        PerturbationOptions(),
    )
    with pytest.raises(InputError, match="counted from the attention mask.*Use that or"):
        texts.check(["token", "attention"])
    texts.check(["token", "delete"])
    Texts(lens_on("gpt2"), read_dataset(TEXTS), PerturbationOptions()).check(["attention"])


@pytest.mark.parametrize("padding", [None, 3])
def test_a_decoder_that_classifies_is_read_at_its_last_token_whatever_that_is(padding):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_labels=3,
        pad_token_id=padding,
    )
    model = hf.LlamaForSequenceClassification(config).eval()
    ids = torch.tensor([[5, 6, 7, 3], [5, 6, 3, 3]])
    found = PlainModel(tl.Lens(model)).run({"input_ids": ids})
    torch.testing.assert_close(found.logits, model.score(found.states).detach())
    assert model.config.pad_token_id == padding


def test_a_model_that_pads_by_itself_keeps_its_padding():
    config = hf.LongformerConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        attention_window=8,
        pad_token_id=0,
    )
    lens = tl.Lens(hf.LongformerForSequenceClassification(config).eval(), lens_on("bert").processor)
    assert PlainModel(lens).run({"input_ids": torch.tensor([[1, 5, 6, 7, 2]])}, "first").states.isfinite().all()


def test_patches_become_black_before_normalisation(tmp_path):
    images = Images(vision_lens(), read_dataset(write_pictures(tmp_path / "pictures")), PerturbationOptions())
    sample = images.load(0)
    assert (sample.n_tokens, sample.fixed) == (5, frozenset({0}))
    masks = torch.zeros(1, 5, dtype=torch.bool)
    masks[0, 2] = True  # the patch in the first row, second column
    inputs = images.copies(sample, masks, "black")
    before, after = sample.inputs["pixel_values"][0], inputs["pixel_values"][0]
    assert torch.allclose(after[:, :4, 4:], torch.tensor([-0.5 / 0.2, -0.4 / 0.3, -0.3 / 0.4])[:, None, None])
    assert torch.equal(after[:, :, :4], before[:, :, :4]) and torch.equal(after[:, 4:], before[:, 4:])
