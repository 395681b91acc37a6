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
