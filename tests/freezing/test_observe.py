"""Attention matrices read from a replay are those of the model, for every family and kernel."""

from __future__ import annotations

import pytest
import torch
from zoo import CASES, ZOO, build, sample

import tensorlens as tl
from tensorlens.freezing.observe import attention_matrices, mixings


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_they_are_the_models_own(name: str, attention: str) -> None:
    # In this order: models of one family share their configuration, and with it the kernel.
    key = "pixel_values" if ZOO[name].vision else "input_ids"
    with torch.no_grad():
        inputs = {key: torch.as_tensor(sample(name))[None]}
        expected = build(name, "eager")(**inputs, output_attentions=True).attentions
    T = tl.Lens(build(name, attention))(sample(name))
    found = mixings(T.operator.recording)
    assert len(found) == len(expected) == T.n_blocks
    for block, own in enumerate(expected):
        torch.testing.assert_close(
            found[block].attention, own[0].to(found[block].attention.dtype), rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(attention_matrices(T.operator.recording, block), found[block].attention)
        assert found[block].values.shape[:2] == own.shape[1:3]
