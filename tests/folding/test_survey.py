"""Parts of blocks: found in every family, and never wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from tensorlens.folding import search as survey
from tensorlens.folding.rebuild import held_attention, held_factors, rebuild
from tensorlens.folding.search import block_parts, final_norm
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.models.precision import tf32, tf32_allowed

LAYOUTS = {
    "post_ln": ("bert", "bert-classifier", "bert-mlm", "roberta", "distilbert", "albert"),
    "parallel": ("neox-parallel", "phi"),
    "sandwich": ("gemma2", "gemma3"),
    "post_sublayer": ("olmo2",),
}


def recording_of(name: str, attention: str = "eager", **rules: object) -> Recording:
    lens = tl.Lens(zoo.build(name, attention), rules=tl.Rules(**rules))  # type: ignore[arg-type]
    return lens(zoo.sample(name)).operator.recording


@pytest.mark.parametrize(("name", "attention"), zoo.CASES)
def test_parts_rebuild_the_frozen_block_away_from_x(name: str, attention: str) -> None:
    T = tl.Lens(zoo.build(name, attention))(zoo.sample(name)).operator
    recording = T.recording
    for n in range(recording.n_blocks - 1):
        parts = block_parts(recording, n)
        x = torch.randn(recording.states[n].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        expected = T.replay.push(x, Span(n, n + 1))[0]
        found = rebuild(parts, held_factors(recording, parts), x[0])
        assert (found - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("name", zoo.ZOO)
def test_layouts_are_those_of_the_families(name: str) -> None:
    recording = recording_of(name)
    expected = next((layout for layout, names in LAYOUTS.items() if name in names), "pre_ln")
    assert {block_parts(recording, n).layout for n in range(recording.n_blocks)} == {expected}
    assert (final_norm(recording) is None) == (expected == "post_ln")


@pytest.mark.parametrize("gate", ["freeze_gate", "freeze_up", "half"])
@pytest.mark.parametrize(("name", "up", "gate_path"), [("llama", "up_proj", "gate_proj"), ("modernbert", "Wi", "Wi")])
def test_gate_and_up_are_told_apart_under_every_gate_rule(name: str, up: str, gate_path: str, gate: str) -> None:
    ffn = block_parts(recording_of(name, gate=gate), 1).feed_forward
    assert ffn.gate is not None
    assert (ffn.up.path.split(".")[-1], ffn.gate.path.split(".")[-1]) == (up, gate_path)
    if name == "modernbert":  # the first half goes through the activation
        assert ffn.gate.columns is not None and ffn.gate.columns.tolist() == list(range(24))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma3"])
def test_an_input_as_long_as_a_weight_is_wide_confuses_nothing(name: str) -> None:
    widths = {size for parameter in zoo.build(name).parameters() for size in parameter.shape if size <= 40}
    for n_tokens in {1, 2, *widths}:
        # Parts are kept for each model, so that every length needs its own.
        recording = tl.Lens(zoo.build(name))([4 + i % 20 for i in range(n_tokens)]).operator.recording
        for n in range(recording.n_blocks):
            assert block_parts(recording, n).feed_forward.down.path


def test_gemma_gain_is_one_plus_the_stored_weight() -> None:
    parts = block_parts(recording_of("gemma3"), 0)
    assert parts.norm_1 is not None and parts.norm_1.kind == "rms" and parts.norm_1.gain is not None
    torch.testing.assert_close(parts.norm_1.gain, 1 + parts.norm_1.module.weight.detach())  # type: ignore[operator]


def test_interleaved_values_are_taken_head_by_head() -> None:
    value = block_parts(recording_of("neox-parallel"), 0).value
    assert value.columns is not None
    assert value.columns.tolist() == [12 * head + 8 + channel for head in range(4) for channel in range(4)]


@pytest.mark.parametrize("name", ["llama", "mistral", "modernbert", "gpt2"])
def test_attention_from_queries_and_keys_is_the_softmax(name: str) -> None:
    eager = recording_of(name, "eager")
    expected = [held_attention(eager, block_parts(eager, n)) for n in range(3)]
    fused = recording_of(name, "sdpa")
    found = [held_attention(fused, block_parts(fused, n)) for n in range(3)]
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5, check_dtype=False)


class _Twice(nn.Module):
    """A block's feed-forward followed by another linear layer, which no layout knows."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.more(self.inner(x))


def test_a_block_of_another_make_is_refused_with_what_was_missing() -> None:
    model = zoo.build("gpt2")
    model.transformer.h[1].mlp = _Twice(model.transformer.h[1].mlp).double()  # type: ignore[union-attr,index]
    recording = tl.Lens(model)(zoo.sample("gpt2")).operator.recording
    assert block_parts(recording, 0).layout == "pre_ln"
    with pytest.raises(tl.AnatomyError, match="Block 1 .*cannot be taken apart"):
        block_parts(recording, 1)


def test_a_survey_takes_no_notice_of_the_users_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its errors of 1e-3 no block would be rebuilt to rounding, and folding and four baselines would be gone."""
    allowed, rebuild = [], survey.rebuild

    def watched(*args: Any) -> Tensor:
        allowed.append(tf32_allowed())
        return rebuild(*args)

    monkeypatch.setattr(survey, "rebuild", watched)
    recording = recording_of("bert")  # a model that no survey has seen
    with tf32(True):
        block_parts(recording, 0)
        assert tf32_allowed()
    assert allowed and not any(allowed)
