"""A trace of nnsight as an input. Run by `make plugins`."""

from __future__ import annotations

import pytest
import torch
from plugin_samples import PROMPT, TARGET, lens
from tiny_language import tokenizer

nnsight = pytest.importorskip("nnsight", reason="nnsight is not here; `make plugins` has it")

from tensorlens.plugins.nnsight import nnsight_lens, traced_input  # noqa: E402


def test_a_traced_models_input(recorded):
    model = nnsight.TransformersModel(lens().model, tokenizer=tokenizer(), task="text-generation")
    with model.trace(PROMPT):
        inputs = model.inputs.save()
        states = model.gpt_neox.final_layer_norm.output.save()
    T = nnsight_lens(model)(traced_input(model, inputs))
    recorded("captum", T.map("tensor.in_class", -1, TARGET).scores[0].tolist())
    torch.testing.assert_close(T.output, states[0].detach(), rtol=1e-4, atol=1e-5)


def test_any_wrapped_module(recorded):
    model = nnsight.NNsight(lens().model)
    ids = torch.tensor([tokenizer()(PROMPT)["input_ids"]])
    with model.trace(ids):
        inputs = model.inputs.save()
    T = nnsight_lens(model)(traced_input(model, inputs))
    recorded("captum", T.map("tensor.in_class", -1, TARGET).scores[0].tolist())
