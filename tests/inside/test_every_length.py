"""Long inputs: blocks whose constants are let go answer every question as blocks that are kept do, one at a time."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers as hf
import zoo

import tensorlens as tl
from tensorlens.inside.components import ComponentMap, find_components
from tensorlens.inside.target import Pass
from tensorlens.recording import calls

OUT, TARGET = 4, 5
CLEAN, CORRUPTED = [5, 6, 7, 8, 9, 10, 11], [5, 6, 30, 8, 9, 10, 11]
FAMILIES = [("llama", "sdpa"), ("gemma2", "eager"), ("bert-mlm", "sdpa"), ("neox-parallel", "eager")]
MEMBERS = {"paper": tl.Rules.paper(), "attn_lrp": tl.Rules.attn_lrp()}


def tensors(monkeypatch: pytest.MonkeyPatch, lens: tl.Lens, ids: Any = None) -> tuple[tl.AttentionTensor, Any]:
    """The same input with everything kept, and with every block let go."""
    kept = lens(CLEAN if ids is None else ids)
    monkeypatch.setattr(calls, "SHARE_OF_RECORDING", 0.0)
    long = lens(CLEAN if ids is None else ids)
    assert long.operator.recording.is_streamed and not kept.operator.recording.is_streamed
    return kept, long


def assert_same(a: ComponentMap, b: ComponentMap) -> None:
    assert a.labels == b.labels and a.value == pytest.approx(b.value, rel=1e-12)
    torch.testing.assert_close(a.scores, b.scores, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(a.flow(), b.flow(), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("name", "attention"), FAMILIES)
@pytest.mark.parametrize("member", MEMBERS)
def test_every_question_has_the_same_answer(
    name: str, attention: str, member: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = tl.Lens(zoo.build(name, attention), rules=MEMBERS[member])
    kept, long = tensors(monkeypatch, lens)
    for effect in ("total", "direct"):
        assert_same(kept.components(OUT, TARGET, effect), long.components(OUT, TARGET, effect))  # type: ignore[arg-type]
    assert_same(kept.components(OUT, TARGET, neurons=[1]), long.components(OUT, TARGET, neurons=[1]))
    ours, theirs = (T.graph(OUT, TARGET, share=0.6, max_nodes=40) for T in (kept, long))
    assert [(node.component, node.token) for node in ours.nodes] == [(n.component, n.token) for n in theirs.nodes]
    weights = [[edge.weight for edge in graph.edges] for graph in (ours, theirs)]
    assert weights[0] == pytest.approx(weights[1], rel=1e-9, abs=1e-12)
    for by in ("token", "component"):
        pairs = [T.score(2, 1, 5, (4, 5), by=by).scores for T in (kept, long)]  # type: ignore[arg-type]
        torch.testing.assert_close(*pairs, rtol=1e-10, atol=1e-12)
    records = [T.ablate(["block 0, feed-forward", (2, 1)], OUT, TARGET, to="mean") for T in (kept, long)]
    assert records[0].predicted == pytest.approx(records[1].predicted, rel=1e-10)
    assert records[0].true == pytest.approx(records[1].true, rel=1e-10)


def test_patching_and_the_whole_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build("gpt2", "sdpa"))
    kept, long = tensors(monkeypatch, lens)
    ours, theirs = (T.inside(OUT, TARGET, max_nodes=12, n_whys=2) for T in (kept, long))
    assert list(ours.reads) == list(theirs.reads) and ours.looks.keys() == theirs.looks.keys()
    for head, row in ours.reads.items():
        torch.testing.assert_close(row, theirs.reads[head], rtol=1e-10, atol=1e-12)
    assert len(theirs.whys) == 2
    found = tl.patching(lens, CLEAN, CORRUPTED, target=TARGET, verify=True, progress=False)
    monkeypatch.setattr(calls, "SHARE_OF_RECORDING", 0.3)
    whole = tl.patching(lens, CLEAN, CORRUPTED, target=TARGET, verify=True, progress=False)
    torch.testing.assert_close(found.predicted, whole.predicted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found.true, whole.true, rtol=1e-10, atol=1e-12)


def test_experts_are_told_apart_at_every_length(monkeypatch: pytest.MonkeyPatch) -> None:
    config = hf.MixtralConfig(**zoo.TEXT, **zoo.GROUPED, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"
    kept, long = tensors(monkeypatch, tl.Lens(zoo.randomise(hf.MixtralForCausalLM(config)).double().eval()))
    c = long.components(OUT, TARGET, experts=[1])
    assert any(label.expert is not None for label in c.labels)
    assert_same(kept.components(OUT, TARGET, experts=[1]), c)


def test_one_block_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, long = tensors(monkeypatch, tl.Lens(zoo.build("llama", "sdpa")))
    for T, n_there in ((kept, 3), (long, 1)):
        run = Pass(T.operator, {TARGET: 1.0}, OUT)
        find_components(run, "total")
        assert len(run._values) == len(run._cotangents) == n_there


@pytest.mark.parametrize("effect", ["total", "direct"])
def test_each_block_is_recorded_again_once(effect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, long = tensors(monkeypatch, tl.Lens(zoo.build("llama", "sdpa")))
    n_times: Counter[int] = Counter()
    record = calls.BlockCall.record
    monkeypatch.setattr(
        calls.BlockCall, "record", lambda call, x, rules: (n_times.update([call.n]), record(call, x, rules))[1]
    )
    long.components(OUT, TARGET, effect)
    # The walk goes from the last block to the first; direct effects find their cotangent at the last one alone.
    assert n_times == {0: 1, 1: 1, 2: 1}
