"""A recording that keeps no factors gives the same function."""

from __future__ import annotations

import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.freezing import long_inputs, replay_of
from tensorlens.freezing.long_inputs import LongInput, record_long
from tensorlens.freezing.places import Span
from tensorlens.freezing.recorder import Recorder


@pytest.mark.parametrize("reserve", [0.0, 2.0], ids=["graphs kept", "recomputed"])
@pytest.mark.parametrize("name", ["bert-classifier", "gpt2", "llama", "modernbert", "gemma3", "albert", "vit"])
def test_a_long_input_is_the_same_function(name: str, reserve: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_inputs, "RESERVE", reserve)
    model = zoo.build(name, zoo.ZOO[name].attentions[-1])
    replay = tl.Lens(model)(zoo.sample(name)).operator.replay
    recording = replay.recording
    long = record_long(recording.anatomy, recording.inputs, recording.rules)
    assert long is not None and all(parameter.requires_grad for parameter in model.parameters())
    assert len(long.edges) == (3 if reserve == 0 else 1)
    silenced = {1: torch.tensor([1.0, 0.0, 0.5, 1.0])}
    for span, heads in ((Span(0, 3), None), (Span(0, 2), silenced), (Span(1, 3), silenced)):
        u = torch.randn(2, *recording.states[span.stop].shape[1:], dtype=torch.float64)
        x = torch.randn_like(recording.states[span.start])
        torch.testing.assert_close(long.pull(u, span, heads), replay.pull(u, span, heads), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(long.push(x, span, heads), replay.push(x, span, heads), rtol=1e-6, atol=1e-9)
    assert not long.factors.open
    blocks_held = {site.place.block for site in long.recording.factors if site.place.inside}
    assert blocks_held == long.kept == (set() if reserve else {0, 1, 2})


def test_a_second_push_runs_no_block_again_for_its_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_inputs, "RESERVE", 0.0)
    long, made = long_input("llama"), []
    x, span = torch.randn_like(long.recording.states[0]), Span(0, 3)
    first = long.push(x, span)
    run_block = LongInput._run_block

    def watched(self: LongInput, n: int, x: torch.Tensor, factors: object, **options: object) -> torch.Tensor:
        made.append(factors is self.factors)
        return run_block(self, n, x, factors, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(LongInput, "_run_block", watched)
    torch.testing.assert_close(long.push(x, span), first, rtol=0, atol=0)
    assert made and not any(made)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_factors_that_do_not_fit_are_not_kept_and_maps_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build(name, "sdpa"))
    T = lens(zoo.sample(name))
    monkeypatch.setattr(replay_of, "FACTOR_SHARE", 0.0)
    long = lens(zoo.sample(name))
    assert isinstance(long.operator.replay, LongInput)
    for method, target in (("tensor.in_out", None), ("tensor.in_class", 5)):
        expected, found = T.map(method, out_token=-1, target=target), long.map(method, out_token=-1, target=target)
        torch.testing.assert_close(found.scores, expected.scores, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(found.bias_share, expected.bias_share, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        long.map("tensor.norm", out_token=2).scores, T.map("tensor.norm", out_token=2).scores, rtol=1e-6, atol=1e-9
    )
    assert long.certificate().passed


def long_input(name: str) -> LongInput:
    recording = tl.Lens(zoo.build(name, "sdpa"))(zoo.sample(name)).operator.recording
    long = record_long(recording.anatomy, recording.inputs, recording.rules)
    assert long is not None
    return long


def test_a_block_is_made_again_once_for_all_cotangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_inputs, "RESERVE", 2.0)
    long, made = long_input("llama"), []
    run_block = LongInput._run_block
    monkeypatch.setattr(
        LongInput,
        "_run_block",
        lambda self, n, x, *given, **options: (made.append(n), run_block(self, n, x, *given, **options))[1],
    )
    u = torch.randn(5, *long.recording.states[-1].shape[1:], dtype=torch.float64)
    together = long.pull(u, Span(0, 3))
    assert made == [1, 0]  # the last block's graph is always kept
    torch.testing.assert_close(together, torch.cat([long.pull(one[None], Span(0, 3)) for one in u]))
    monkeypatch.setattr(long_inputs, "COTANGENT_SHARE", 0.0)  # room for one at a time
    torch.testing.assert_close(long.pull(u, Span(0, 3)), together)


def test_graphs_are_let_go_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    long = long_input("gpt2")
    u = torch.randn(1, *long.recording.states[-1].shape[1:], dtype=torch.float64)
    expected = long.pull(u, Span(0, 3))
    del long.edges[1]
    pull_again = LongInput._pull_again

    def scarce(self: LongInput, n: int, cs: torch.Tensor) -> torch.Tensor:
        if self.edges:
            raise torch.OutOfMemoryError("out of memory")
        return pull_again(self, n, cs)

    monkeypatch.setattr(LongInput, "_pull_again", scarce)
    torch.testing.assert_close(long.pull(u, Span(0, 3)), expected)
    assert not long.edges


def test_a_recording_that_runs_out_of_memory_keeps_no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    close, kept = long_inputs._BlockGraphs._close, []

    def scarce(self: long_inputs._BlockGraphs, recorder: Recorder, n: int, state: torch.Tensor) -> None:
        close(self, recorder, n, state)
        kept.append(self.keeps_graphs)
        if self.edges:
            raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(long_inputs._BlockGraphs, "_close", scarce)
    assert list(long_input("gpt2").edges) == [2]
    assert kept == [True, False, False]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_several_states_are_pushed_to_the_head_with_each_block_opened_once(name: str, monkeypatch: pytest.MonkeyPatch):
    model = zoo.build(name, "sdpa")
    replay = tl.Lens(model)(zoo.sample(name)).operator.replay
    long = record_long(replay.recording.anatomy, replay.recording.inputs, replay.recording.rules)
    assert long is not None
    x = torch.randn(3, *replay.recording.states[0].shape[1:], dtype=torch.float64)
    expected = torch.cat([replay.push_to_head(one[None]) for one in x])
    opened: list[int] = []
    was = LongInput._run_block

    def counted(self, n, state, factors, **options):
        opened.append(n) if factors is self.factors else None
        return was(self, n, state, factors, **options)

    monkeypatch.setattr(LongInput, "_run_block", counted)
    torch.testing.assert_close(long.push_to_head(x), expected, rtol=1e-6, atol=1e-9)
    assert opened == [0, 1, 2]
