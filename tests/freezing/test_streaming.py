"""A model held without a tape is the same function."""

from __future__ import annotations

import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.freezing import streaming
from tensorlens.freezing.frozen_model import Span
from tensorlens.freezing.streaming import StreamedModel, stream


@pytest.mark.parametrize("reserve", [0.0, 2.0], ids=["graphs kept", "recomputed"])
@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "llama", "modernbert", "gemma3", "albert", "vit"])
def test_streamed_is_frozen(name: str, reserve: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "RESERVE", reserve)
    model = zoo.build(name, zoo.ZOO[name].attentions[-1])
    frozen = tl.Lens(model)(zoo.sample(name)).operator.frozen
    streamed = stream(frozen.anatomy, frozen.inputs, frozen.rules)
    assert streamed is not None and all(parameter.requires_grad for parameter in model.parameters())
    assert len(streamed.edges) == (3 if reserve == 0 else 1)
    silenced = {1: torch.tensor([1.0, 0.0, 0.5, 1.0])}
    for span, heads in ((Span(0, 3), None), (Span(0, 2), silenced), (Span(1, 3), silenced)):
        u = torch.randn(2, *frozen.hidden[span.stop].shape[1:], dtype=torch.float64)
        x = torch.randn_like(frozen.hidden[span.start])
        torch.testing.assert_close(streamed.pull(u, span, heads), frozen.pull(u, span, heads), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(streamed.push(x, span, heads), frozen.push(x, span, heads), rtol=1e-6, atol=1e-9)
    assert not streamed.tape.opened
    assert not any(site.place.startswith("block") for site in streamed.tape.factors)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_long_input_is_streamed_and_its_maps_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build(name, "sdpa"))
    T = lens(zoo.sample(name))
    monkeypatch.setattr(streaming, "TAPE_SHARE", 0.0)
    long = lens(zoo.sample(name))
    assert isinstance(long.operator.frozen, StreamedModel)
    for method, target in (("tensor.in_out", None), ("tensor.in_class", 5)):
        expected, found = T.map(method, out_token=-1, target=target), long.map(method, out_token=-1, target=target)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.bias_share, expected.bias_share, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        long.map("tensor.norm", out_token=2).scores, T.map("tensor.norm", out_token=2).scores, rtol=1e-6, atol=1e-9
    )
    assert long.certificate().passed


def streamed_model(name: str) -> StreamedModel:
    frozen = tl.Lens(zoo.build(name, "sdpa"))(zoo.sample(name)).operator.frozen
    streamed = stream(frozen.anatomy, frozen.inputs, frozen.rules)
    assert streamed is not None
    return streamed


def test_a_block_is_made_again_once_for_all_cotangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "RESERVE", 2.0)
    streamed, made = streamed_model("llama"), []
    run_block = StreamedModel._run_block
    monkeypatch.setattr(
        StreamedModel, "_run_block", lambda self, n, x, **options: (made.append(n), run_block(self, n, x, **options))[1]
    )
    u = torch.randn(5, *streamed.hidden[-1].shape[1:], dtype=torch.float64)
    together = streamed.pull(u, Span(0, 3))
    assert made == [1, 0]  # the last block's graph is always kept
    torch.testing.assert_close(together, torch.cat([streamed.pull(one[None], Span(0, 3)) for one in u]))
    monkeypatch.setattr(streaming, "COTANGENT_SHARE", 0.0)  # room for one at a time
    torch.testing.assert_close(streamed.pull(u, Span(0, 3)), together)


def test_graphs_are_let_go_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    streamed = streamed_model("gpt2")
    u = torch.randn(1, *streamed.hidden[-1].shape[1:], dtype=torch.float64)
    expected = streamed.pull(u, Span(0, 3))
    del streamed.edges[1]
    pull_again = StreamedModel._pull_again

    def scarce(self: StreamedModel, n: int, cs: torch.Tensor) -> torch.Tensor:
        if self.edges:
            raise torch.OutOfMemoryError("out of memory")
        return pull_again(self, n, cs)

    monkeypatch.setattr(StreamedModel, "_pull_again", scarce)
    torch.testing.assert_close(streamed.pull(u, Span(0, 3)), expected)
    assert not streamed.edges


def test_a_recording_that_runs_out_of_memory_keeps_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    close = streaming._Recording._close

    def scarce(self: streaming._Recording, n: int, state: torch.Tensor) -> None:
        close(self, n, state)
        if self.frozen.edges:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(streaming._Recording, "_close", scarce)
    streamed = streamed_model("gpt2")
    assert not streamed.keeps_graphs and list(streamed.edges) == [2]
