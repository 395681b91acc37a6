"""A recording that keeps nothing of its blocks gives the same function: each is recorded again when it is needed."""

from __future__ import annotations

import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.recording import calls
from tensorlens.recording.calls import BlockCall
from tensorlens.recording.recording import Span

Patch = pytest.MonkeyPatch


def long(name: str, monkeypatch: Patch, attention: str = "sdpa", **options: object) -> tl.AttentionTensor:
    """The tensor of an input for whose blocks there is no room."""
    with monkeypatch.context() as patch:
        patch.setattr(calls, "SHARE_OF_RECORDING", 0.0)
        T = tl.Lens(zoo.build(name, attention, **options))(zoo.sample(name))
    assert T.operator.recording.is_streamed
    return T


@pytest.fixture
def recorded(monkeypatch: Patch) -> list[int]:
    """The blocks that were recorded again, in order."""
    found: list[int] = []
    record = BlockCall.record
    monkeypatch.setattr(BlockCall, "record", lambda self, *args: found.append(self.n) or record(self, *args))
    return found


@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "llama", "modernbert", "gemma3", "albert", "vit"])
def test_a_long_input_is_the_same_function(name: str, monkeypatch: Patch) -> None:
    attention = zoo.ZOO[name].attentions[-1]
    kept = tl.Lens(zoo.build(name, attention))(zoo.sample(name)).operator.recording
    again = long(name, monkeypatch, attention).operator.recording
    silenced = {1: torch.tensor([1.0, 0.0, 0.5, 1.0])}
    for span, heads in ((Span(0, 3), None), (Span(0, 2), silenced), (Span(1, 3), silenced)):
        u, x = torch.randn_like(kept.states[span.stop]), torch.randn_like(kept.states[span.start])
        assert torch.equal(again.pull(u, span, heads), kept.pull(u, span, heads))
        assert torch.equal(again.push(x, span, heads), kept.push(x, span, heads))
    there = {n for n, value in enumerate(again.program.constants.values) if value is not None}
    assert there < again.program.used, "of the blocks one is there at a time"


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_maps_of_a_long_input_are_the_same(name: str, monkeypatch: Patch) -> None:
    T, streamed = tl.Lens(zoo.build(name, "sdpa"))(zoo.sample(name)), long(name, monkeypatch)
    for method, target in (("tensor.in_out", None), ("tensor.in_class", 5), ("tensor.norm", None)):
        expected, found = (one.map(method, out_token=-1, target=target) for one in (T, streamed))
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.bias_share, expected.bias_share, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert streamed.certificate().passed


@pytest.mark.parametrize("direction", ["push", "pull"])
def test_a_block_is_recorded_again_once_for_several_states(
    direction: str, monkeypatch: Patch, recorded: list[int]
) -> None:
    operator = long("llama", monkeypatch).operator
    ask = getattr(operator, direction)
    some = torch.randn(5, *operator.output.shape, dtype=torch.float64)
    recorded.clear()
    together = ask(some)
    assert recorded == ([0, 1, 2] if direction == "push" else [2, 1, 0])
    torch.testing.assert_close(together, torch.cat([ask(one[None]) for one in some]))


def test_a_block_that_gives_another_state_is_refused(monkeypatch: Patch) -> None:
    T = long("gpt2", monkeypatch)
    block = T.operator.recording.origin.model.transformer.h[1]  # type: ignore[union-attr]
    hook = block.mlp.register_forward_hook(lambda _, __, y: 1.5 * y)
    with pytest.raises(tl.InputError, match="Block 1 gave a different state when it was recorded again"):
        T @ T.input
    hook.remove()
    T @ T.input
    block.mlp.act = torch.nn.ReLU()
    with pytest.raises(tl.InputError, match="Block 1"):
        T @ T.input


def test_a_long_input_is_stored_as_maps_alone(monkeypatch: Patch, tmp_path) -> None:
    with pytest.raises(tl.InputError, match="too long for its operator to be stored"):
        long("gpt2", monkeypatch).save(tmp_path / "T.safetensors")
