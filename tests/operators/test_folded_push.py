"""Every token alone through folded blocks, of many samples at once, against pulls of each sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tensorlens as tl
from tensorlens.batches import Batch
from tensorlens.operators.folding import push
from tensorlens.operators.folding.pull import FoldedRows
from tensorlens.recording.recording import Span

IDS = [[3, 8, 5, 9, 11, 2, 7, 30, 4, 21, 6, 17], [5, 6, 7, 8, 9, 1, 2], [40, 3, 40, 3, 9, 9, 8, 1, 2, 30, 31, 6]]
OUTPUTS = (-1, 3, -2)


def folded_batch(name: str, attention: str = "eager", **rules: Any) -> tuple[tl.Lens, FoldedRows]:
    lens = tl.Lens(zoo.build(name, attention), rules=tl.Rules(**rules))
    recording = Batch(lens.specimen, [lens.prepare(ids) for ids in IDS]).recording
    return lens, FoldedRows(recording, Span(0, recording.n_blocks), {})


def outputs() -> Tensor:
    return torch.tensor([place % len(ids) for place, ids in zip(OUTPUTS, IDS, strict=True)])


def gap(lens: tl.Lens, found: Tensor) -> float:
    """The largest relative difference from $T_{oj} x_j$ by one pull for each channel, nothing folded."""
    worst = 0.0
    for i, (ids, place) in enumerate(zip(IDS, OUTPUTS, strict=True)):
        T = lens(ids).operator
        units = torch.zeros(T.shape[1], *T.output.shape, dtype=T.output.dtype)
        units[range(T.shape[1]), place, range(T.shape[1])] = 1
        expected = torch.einsum("cjd,jd->jc", T.pull(units), T.input)
        worst = max(worst, float((found[i, : len(ids)] - expected).norm() / expected.norm()))
    return worst


CASES = [
    ("gpt2", "eager", {}),
    ("gpt2", "sdpa", {}),
    ("llama", "sdpa", {}),
    ("llama", "eager", {"gate": "half"}),
    ("qwen2", "sdpa", {}),
    ("phi", "eager", {}),
    ("neox-parallel", "sdpa", {}),
    ("olmo2", "eager", {}),
    ("bert", "eager", {}),
    ("bert-mlm", "sdpa", {}),
]


@pytest.mark.parametrize(("name", "attention", "rules"), CASES)
def test_tokens_pushed_together_are_the_rows_of_each_sample(name: str, attention: str, rules: dict[str, Any]) -> None:
    lens, folded = folded_batch(name, attention, **rules)
    assert gap(lens, push.push_each_token(folded, outputs())) < 1e-6  # some norms are in float32


def test_bands_leave_out_what_a_causal_model_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def positions(name: str) -> int:
        n_rows: list[int] = []
        whole = push._step
        monkeypatch.setattr(push, "_step", lambda *a: (n_rows.append(a[2][..., 0].numel()), whole(*a))[1])
        push.push_each_token(folded_batch(name)[1], outputs())
        monkeypatch.undo()
        return sum(n_rows) // 3

    assert positions("gpt2") == len(IDS) * (12 * 8 + 4 * 4)  # bands of 8 tokens
    assert positions("bert") == len(IDS) * 12 * 12


def test_a_sample_that_looks_ahead_is_noticed() -> None:
    assert push._looks_ahead(folded_batch("bert")[1])
    _, folded = folded_batch("gpt2")
    assert not push._looks_ahead(folded)
    _, folded = folded_batch("gpt2")
    folded.block(1).factors.mix[2, 0, 7, 4] = 1e-9  # one number of one head of the last sample
    assert push._looks_ahead(folded)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_tokens_and_samples_go_in_parts_where_memory_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, folded = folded_batch(name)
    sizes: list[int] = []
    whole = push._push_some
    monkeypatch.setattr(push, "BYTES_OF_INNER", {"cpu": 2**24})
    monkeypatch.setattr(push, "fitting", lambda bytes_each, wanted, device: 5 if wanted == 12 else 2)
    monkeypatch.setattr(
        push, "_push_some", lambda *a: (sizes.append(sum(band.rows.shape[2] for band in a[1])), whole(*a))[1]
    )
    assert gap(lens, push.push_each_token(folded, outputs())) < 1e-6
    assert sizes == [5, 5, 2]
