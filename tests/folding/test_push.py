"""Every token alone through folded blocks, of many samples at once, against the rows of each sample alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from tensorlens.batch import Batch
from tensorlens.folding import push
from tensorlens.folding.fold import FoldedBlock
from tensorlens.folding.pull import FoldedRows
from tensorlens.freezing.places import Place, Site, Span
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import FactorReplay
from torch import Tensor

import tensorlens as tl

IDS = [[3, 8, 5, 9, 11, 2, 7, 30, 4, 21, 6, 17], [5, 6, 7, 8, 9, 1, 2], [40, 3, 40, 3, 9, 9, 8, 1, 2, 30, 31, 6]]
OUTPUTS = (-1, 3, -2)


def folded_batch(name: str, attention: str = "eager", **rules: Any) -> tuple[tl.Lens, Batch, FoldedRows]:
    lens = tl.Lens(zoo.build(name, attention), rules=tl.Rules(**rules))
    batch = lens.batch(IDS)
    first = batch.replay.recording.sample(0)
    return lens, batch, FoldedRows(first, Span(0, first.n_blocks), {})


def outputs() -> Tensor:
    return torch.tensor([place % len(ids) for place, ids in zip(OUTPUTS, IDS, strict=True)])


def gap(lens: tl.Lens, found: Tensor) -> float:
    """The largest relative difference from $T_{oj} x_j$ by one backward pass for each channel, nothing folded."""
    worst = 0.0
    for i, (ids, place) in enumerate(zip(IDS, OUTPUTS, strict=True)):
        T = lens(ids).operator
        units = torch.zeros(T.shape[1], *T.output.shape, dtype=T.output.dtype)
        units[range(T.shape[1]), place, range(T.shape[1])] = 1
        expected = torch.einsum("cjd,jd->jc", T.pull_replayed(units), T.input)
        worst = max(worst, float((found[i, : len(ids)] - expected).norm() / expected.norm()))
    return worst


CASES = [
    ("gpt2", "eager", {}), ("gpt2", "sdpa", {}), ("llama", "sdpa", {}), ("llama", "eager", {"gate": "half"}),
    ("qwen2", "sdpa", {}), ("phi", "eager", {}), ("neox-parallel", "sdpa", {}), ("olmo2", "eager", {}),
    ("bert", "eager", {}), ("bert-mlm", "sdpa", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "attention", "rules"), CASES)
def test_tokens_pushed_together_are_the_rows_of_each_sample(name: str, attention: str, rules: dict[str, Any]) -> None:
    lens, batch, folded = folded_batch(name, attention, **rules)
    found = push.push_each_token(folded, batch.replay.recording, outputs())
    assert gap(lens, found) < 1e-6  # some norms are in float32


def test_bands_leave_out_what_a_causal_model_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(name: str) -> int:
        n_rows: list[int] = []
        whole = push._step
        monkeypatch.setattr(push, "_step", lambda *a: (n_rows.append(a[2][..., 0].numel()), whole(*a))[1])
        _, batch, folded = folded_batch(name)
        push.push_each_token(folded, batch.replay.recording, outputs())
        monkeypatch.undo()
        return sum(n_rows) // batch.replay.recording.n_blocks

    assert positions("gpt2") == len(IDS) * (12 * 8 + 4 * 4)  # bands of 8 tokens
    assert positions("bert") == len(IDS) * 12 * 12


def test_a_sample_that_looks_ahead_is_noticed() -> None:
    assert push._looks_ahead(folded_batch("bert")[2], folded_batch("bert")[1].replay.recording)
    _, batch, folded = folded_batch("gpt2")
    recording = batch.replay.recording
    assert not push._looks_ahead(folded, recording)
    last = recording.factors[Site(Place(1, inside=True), folded.parts[1].attention, "softmax", 0)]
    last[2, 0, 4, 7] = 1e-9  # one number of one head of the last sample
    assert push._looks_ahead(folded, recording)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_tokens_and_samples_go_in_parts_where_memory_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, batch, folded = folded_batch(name)
    sizes: list[int] = []
    whole = push._push_some
    monkeypatch.setattr(push, "INNER_BYTES", {})
    monkeypatch.setattr(push, "fitting", lambda bytes_each, wanted, device: 5 if wanted == 12 else 2)
    monkeypatch.setattr(
        push, "_push_some", lambda *a: (sizes.append(sum(band.rows.shape[2] for band in a[2])), whole(*a))[1]
    )
    assert gap(lens, push.push_each_token(folded, batch.replay.recording, outputs())) < 1e-6
    assert sizes == [5, 5, 2]


def edited(edit: Callable[[FoldedBlock], FoldedBlock]) -> Callable[[FoldedRows], None]:
    def fault(folded: FoldedRows) -> None:
        for n in range(folded.span.stop):
            folded._blocks[n] = edit(folded.block(n))

    return fault


FAULTS: dict[str, Callable[[FoldedRows], None]] = {
    "a wrong transpose": edited(lambda block: replace(block, up=block.down.T.contiguous(), down=block.up.T)),
    "a residual dropped": edited(lambda block: replace(block, down=torch.zeros_like(block.down))),
    "heads in another order": edited(lambda block: replace(block, out=block.out.roll(block.d_head, 0))),
    "the final norm forgotten": lambda folded: setattr(folded, "tail", None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows_in_the_data_sets_own_check(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens = tl.Lens(zoo.build("gpt2"))
    expected = [lens(ids).map("tensor.contribution", out_token=-1).scores for ids in IDS]

    def faulty(folded: FoldedRows, recording: Recording, out_tokens: Tensor) -> Tensor:
        FAULTS[fault](folded)
        return push.push_each_token(folded, recording, out_tokens)

    monkeypatch.setattr("tensorlens.maps.batched.push_each_token", faulty)
    found = list(lens.maps(IDS, "tensor.contribution", progress=False))
    assert all("together they give other numbers" in one.meta["batches"] for one in found)
    for one, scores in zip(found, expected, strict=True):
        torch.testing.assert_close(one.scores, scores)


def test_a_batch_that_folds_goes_this_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FactorReplay, "push_each_token", None)
    monkeypatch.setattr("tensorlens.maps.batched._pushed_by_factors", None)
    lens = tl.Lens(zoo.build("llama", "sdpa"))
    for one, ids in zip(lens.maps(IDS, "tensor.contribution", progress=False), IDS, strict=True):
        assert "batches" not in one.meta
        torch.testing.assert_close(one.scores, lens(ids).map("tensor.contribution", out_token=-1).scores)
