"""Models that add to a tensor in place: whatever is read from a run of theirs is what stood there at that moment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as hf
import zoo
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.studies.plain_model import plain_states

CLEAN, CORRUPTED = [5, 6, 7, 8, 9, 10, 11], [5, 6, 30, 8, 9, 10, 11]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norms[0](x)).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x += self.out(mixed.transpose(1, 2).reshape(x.shape))
        x += self.mlp(self.norms[1](x))
        return x


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(60, 16), nn.Embedding(40, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 60)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.words(input_ids)
        x += self.places(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def falcon() -> nn.Module:
    """Its block adds attention to the output of its feed-forward, in place."""
    config = hf.FalconConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=4, vocab_size=60, bias=True, parallel_attn=True
    )
    return hf.FalconForCausalLM(config)


@pytest.mark.parametrize("make", [falcon, Decoder])
def test_patching_and_circuits(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.randomise(make()).double().eval())
    found = tl.patching(lens, CLEAN, CORRUPTED, (4, 9), verify=True, progress=False)
    circuit = tl.circuit(lens, CLEAN, CORRUPTED, (4, 9), progress=False)
    curve = dict(circuit.faithfulness((), progress=False).curve)
    assert curve == {0.0: pytest.approx(0, abs=1e-10), 1.0: pytest.approx(1, abs=1e-10)}
    monkeypatch.setattr("tensorlens.inside.patching.seat_of", lambda run, part: None)
    recorded = tl.patching(lens, CLEAN, CORRUPTED, (4, 9))
    torch.testing.assert_close(found.predicted, recorded.predicted, rtol=1e-9, atol=1e-12)


def test_positions_and_states() -> None:
    lens = tl.Lens(zoo.randomise(Decoder()).double().eval())
    T = lens(CLEAN)
    found = T.map("tensor.in_class", -1, 4, positions=True)
    torch.testing.assert_close(found.scores.sum(), T.map("tensor.in_class", -1, 4).scores.sum())
    assert bool((found.scores[0, 7:14].abs() > 1e-3).any()), "columns of positions"
    recording = T.operator.recording
    origin = recording.from_model("A test")
    states = plain_states(origin.anatomy, origin.inputs, read=(0, 1, 2)).entering
    for n, state in states.items():
        torch.testing.assert_close(state, recording.states[n])
