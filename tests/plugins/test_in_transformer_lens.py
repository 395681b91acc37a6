"""A bridge of TransformerLens as a model. Run by `make plugins`."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from plugin_samples import AGAINST, PROMPT, TARGET, lens
from tiny_language import tokenizer

pytest.importorskip("transformer_lens", reason="transformer_lens is not here; `make plugins` has it")
from transformer_lens.model_bridge import TransformerBridge

from tensorlens.plugins.transformer_lens import bridge_lens, by_label, component_of, hook_of


@pytest.fixture
def bridge(tmp_path):
    """A bridge on a copy of the tiny Llama: it changes the model that it wraps."""
    lens("llama").model.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    model = copy.deepcopy(lens("llama").model)
    model.set_attn_implementation("eager")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path)
    return TransformerBridge.boot_transformers(str(tmp_path), hf_model=model, tokenizer=saved, device="cpu")


def test_the_map_is_that_of_the_model(bridge):
    ids = bridge.to_tokens(PROMPT, prepend_bos=False)[0].tolist()
    found = bridge_lens(bridge)(ids)
    expected = lens("llama")(ids).map("tensor.in_class", -1, TARGET)
    torch.testing.assert_close(found.map("tensor.in_class", -1, TARGET).scores, expected.scores, rtol=1e-4, atol=1e-5)
    assert found.certificate().passed


def test_direct_effects_are_its_direct_logit_attribution(bridge, recorded):
    tokens = bridge.to_tokens(PROMPT, prepend_bos=False)
    T = bridge_lens(bridge)(tokens[0].tolist())
    ours = by_label(T.components(-1, (TARGET, AGAINST), "direct"))
    bridge.enable_compatibility_mode()
    bridge.cfg.use_attn_result = True
    _, cache = bridge.run_with_cache(tokens)
    stack, labels = cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True)
    theirs = cache.logit_attrs(stack, tokens=TARGET, incorrect_tokens=AGAINST, pos_slice=-1, has_batch_dim=True)
    for label, value in zip(labels, theirs[:, 0].tolist(), strict=True):
        assert ours[label] == pytest.approx(value, rel=1e-4, abs=1e-5)
    recorded("transformer_lens", [ours["embed"], ours["L1H2"]])


def test_a_hook_finds_what_the_component_wrote(bridge):
    tokens = bridge.to_tokens(PROMPT, prepend_bos=False)
    _, cache = bridge.run_with_cache(tokens)
    name, head = hook_of(component_of("L1H2"))
    assert cache[name].shape[:3] == (1, tokens.shape[1], 4) and head == 2
    assert hook_of(component_of("2_mlp_out")).name in cache
    assert hook_of(component_of("embed")).name in cache
