"""A model whose code branches by length: samples that padding would send another way are mapped as they are alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo

import tensorlens as tl
from tensorlens.batches import Batch
from tensorlens.models.samples import length_of

pytestmark = pytest.mark.usefixtures("unchecked")
LENGTHS = (12, 3, 8, 14, 7, 4, 9, 10, 5, 8, 13, 11, 3, 7, 6, 12, 8, 9)


def inputs() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


def stretched() -> Any:
    """Rotary embeddings with other factors beyond 8 tokens, as Phi-3's."""
    rope = {
        "rope_type": "longrope",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 2,
        "long_factor": [4.0] * 2,
        "original_max_position_embeddings": 8,
    }
    config = hf.LlamaConfig(**zoo.TEXT | {"max_position_embeddings": 16}, rope_parameters=rope)
    return zoo.randomise(hf.LlamaForCausalLM(config)).double().eval()


def hooked() -> Any:
    """A hook that scales what is longer than 8 tokens."""
    model: Any = zoo.build("gpt2")
    model.transformer.h[1].mlp.register_forward_hook(lambda _, __, y: 2 * y if y.shape[1] > 8 else None)
    return model


@pytest.mark.parametrize("build", [stretched, hooked])
@pytest.mark.parametrize("batch_size", [4, 6, None])
def test_padding_sends_no_sample_another_way(build: Any, batch_size: int | None) -> None:
    lens = tl.Lens(build())
    for one, ids in zip(lens.maps(inputs(), "tensor.in_out", batch_size=batch_size), inputs(), strict=True):
        torch.testing.assert_close(one.scores, lens(ids).map("tensor.in_out", -1).scores, rtol=1e-5, atol=1e-8)
        assert "samples go by length" in one.meta["batches"]


def test_the_shortest_sample_is_padded_to_the_longest_and_mapped_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[int] = []
    lens = tl.Lens(zoo.build("gpt2"))
    record = Batch.__init__

    def noted(self: Batch, specimen: Any, prepared: Any) -> None:
        alone.extend(length_of(one) for one in prepared if len(prepared) == 1)
        record(self, specimen, prepared)

    monkeypatch.setattr(Batch, "__init__", noted)
    found = list(lens.maps(inputs() * 10, "tensor.in_out", batch_size=6))
    assert min(LENGTHS) in alone and len(alone) <= 2 and not any("batches" in one.meta for one in found)
