"""`Rules(sink=…)`: what attention takes from the first position moves from its column into B; nothing else moves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import zoo
from bench.families.tiny_models import build
from torch import nn

import tensorlens as tl

MODELS = ["llama-sdpa", "llama-eager", "gpt2-sdpa", "gemma3-eager"]
MEMBERS = {"paper": tl.Rules(), "half_gate": tl.Rules.half_gate(), "gate taylor": tl.Rules(gate="taylor")}


def looked(model, rules, inputs):
    return tl.Lens(model, rules=rules)(inputs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("member", MEMBERS)
def test_the_first_column_splits_and_no_other_changes(name, member):
    family, attention = name.split("-")
    model, inputs = zoo.build(family, attention), zoo.sample(family)
    live = looked(model, MEMBERS[member], inputs)
    held = looked(model, replace(MEMBERS[member], sink=1), inputs)
    for method in ("tensor.in_out", "tensor.in_class"):
        before, after = live.map(method), held.map(method)
        gives, size = torch.tensor(after.meta["sink_gives"]), before.scores.abs().max()
        assert torch.allclose(after.scores[:, 1:], before.scores[:, 1:], atol=1e-12 * float(size))
        moved = before.scores[:, 0] - after.scores[:, 0]
        assert torch.allclose(moved, gives.to(moved), atol=1e-5 * float(size))  # the two go different ways
        assert moved.abs().max() > 1e-4 * size
        assert "sink_gives" not in before.meta
    assert held.certificate().passed
    assert torch.allclose(held.apply(held.input) + held.bias, live.output, atol=1e-5 * float(live.output.abs().max()))


@pytest.mark.parametrize("attention", ["fused", "einsum"])
def test_in_a_block_by_hand(attention):
    """One head, one block, no norm: the values of the first token, weighted by attention, are all that is held."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(6, 18, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if attention == "einsum":
                hidden = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
                scores = (torch.einsum("bqd,bkd->bqk", q, k) / 6**0.5).masked_fill(hidden, -torch.inf)
                return x + torch.einsum("bqk,bkd->bqd", scores.softmax(-1), v)
            return (
                x + nn.functional.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
            )

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(9, 6)
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.table(input_ids)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model, ids = Model().double(), torch.tensor([[3, 1, 4, 5]])
    T = tl.Lens(model, rules=tl.Rules(sink=1))({"input_ids": ids})
    with torch.no_grad():
        x = model.blocks[0](model.table(ids))[0]
        q, k, v = model.blocks[1].qkv(x).chunk(3, -1)
        scores = (q @ k.T / 6**0.5).masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf)
        expected = scores.softmax(-1)[:, :1] * v[:1]  # what every position takes from the first
    assert torch.allclose(T.bias, expected)


def test_the_block_is_found_by_measurement():
    model = zoo.build("llama", "sdpa")
    constant = torch.randn(model.config.hidden_size, dtype=torch.float64) * 1e4

    def sink(module, args, output):
        return output + torch.nn.functional.pad(constant[None], (0, 0, 0, output.shape[1] - 1))

    plain = tl.Lens(model, rules="paper,sink=hold")
    assert plain(zoo.sample("llama")).operator.recording.rules.sink == model.config.num_hidden_layers  # none there
    model.model.layers[0].register_forward_hook(sink)
    lens = tl.Lens(model, rules="half_gate,sink=hold")
    T = lens(zoo.sample("llama"))
    assert T.operator.recording.rules == tl.Rules.half_gate().of("half_gate,sink=1")
    assert lens.rules.sink == "hold" and lens.with_rules("paper,sink=hold").specimen.anatomies.settled == 1
    assert T.map("tensor.in_class", -1).meta["rules"]["sink"] == 1


def test_a_token_that_begins_every_text_is_held_from_the_first_block():
    model = zoo.build("llama", "sdpa")
    model.config.bos_token_id = 2
    lens = tl.Lens(model, rules="paper,sink=hold")
    found = lens([2, 5, 6]).map("tensor.in_class", -1)
    assert found.meta["rules"]["sink"] == 0 and found.scores[0, 0] == 0
    assert lens([5, 5, 6]).map("tensor.in_class", -1).meta["rules"]["sink"] != 0


def test_saved_batched_and_streamed_as_alone(tmp_path, monkeypatch):
    model = zoo.build("llama", "sdpa")
    lens = tl.Lens(model, rules=tl.Rules(sink=1))
    inputs = [[3, 1, 4, 1, 5], [9, 2, 6]]
    alone = [lens(one).map("tensor.in_class", -1) for one in inputs]
    for one, other in zip(lens.maps(inputs, "tensor.in_class", out_token=-1), alone, strict=True):
        assert torch.allclose(one.scores, other.scores, atol=1e-6)
        assert one.meta["sink_gives"] == pytest.approx(other.meta["sink_gives"], abs=1e-6)
    path = lens(inputs[0]).save(tmp_path / "t.safetensors")
    again = tl.AttentionTensor.load(path)
    assert again.operator.recording.rules == tl.Rules(sink=1)
    assert again.map("tensor.in_class", -1).meta["sink_gives"] == alone[0].meta["sink_gives"]
    monkeypatch.setattr("tensorlens.recording.calls.SHARE_OF_RECORDING", 0.0)
    streamed = lens(inputs[0])
    assert streamed.operator.recording.is_streamed
    assert streamed.map("tensor.in_class", -1).meta["sink_gives"] == pytest.approx(alone[0].meta["sink_gives"])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sink": "drop"}, "live, hold or the number of a block; got 'drop'"),
        ({"sink": -1}, "got -1"),
        ({"sink": True}, "got True"),
        ({"sink": "hold", "attention": "half"}, "can only be kept fixed if attention is; got attention='half'"),
    ],
)
def test_what_cannot_be_held_is_refused(given, said):
    with pytest.raises(tl.InputError, match=said):
        tl.Rules(**given)


def test_models_whose_first_position_sees_others_are_refused():
    with pytest.raises(tl.InputError, match="attends only to itself; in `BertModel` it attends to others"):
        looked(zoo.build("bert", "sdpa"), tl.Rules(sink=1), zoo.sample("bert"))
    tiny = build("seq2seq", "t5", "eager")
    with pytest.raises(tl.InputError, match="attends only to itself"):
        looked(tiny.model, tl.Rules(sink=1), tiny.arguments)


def test_names_come_back():
    for name in ("paper,sink=hold", "half_gate,sink=3", "paper"):
        assert tl.Rules.of(name).name == name


def test_components_still_sum_to_the_target():
    held = looked(zoo.build("gpt2", "sdpa"), tl.Rules(sink=1), zoo.sample("gpt2"))
    logit = held.map("tensor.in_class", -1).meta["logit"][0]
    assert float(held.components(-1, effect="direct").scores.sum()) == pytest.approx(logit, rel=1e-6)
