"""Every token alone through folded blocks, of many samples at once, against pulls of each sample alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tensorlens as tl
from tensorlens.batches import Batch
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program import folding

IDS = [[3, 8, 5, 9, 11, 2, 7, 30, 4, 21, 6, 17], [5, 6, 7, 8, 9, 1, 2], [40, 3, 40, 3, 9, 9, 8, 1, 2, 30, 31, 6]]
OUTPUTS = (-1, 3, -2)


def of_batch(name: str, attention: str = "eager", **rules: Any) -> tuple[tl.Lens, FrozenOperator]:
    lens = tl.Lens(zoo.build(name, attention), rules=tl.Rules(**rules))
    operator = FrozenOperator(Batch(lens.specimen, [lens.prepare(ids) for ids in IDS]).recording)
    assert operator.folded is not None
    return lens, operator


def outputs() -> list[int]:
    return [place % len(ids) for place, ids in zip(OUTPUTS, IDS, strict=True)]


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
    lens, operator = of_batch(name, attention, **rules)
    assert gap(lens, operator.push_each_token(outputs())) < 1e-6  # some norms are in float32


def shapes_of(operator: FrozenOperator, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """(position, token) of the rows that go through the first block."""
    found: list[tuple[int, ...]] = []
    whole = folding._push
    monkeypatch.setattr(folding, "_push", lambda *a: (found.append(tuple(a[1].shape[1:3])), whole(*a))[1])
    operator.push_each_token(outputs())
    return found[:: operator.n_blocks]


def test_bands_leave_out_what_a_causal_model_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shapes_of(of_batch("gpt2")[1], monkeypatch) == [(12, 8), (4, 4)]
    assert shapes_of(of_batch("bert")[1], monkeypatch) == [(12, 12)]


def test_a_sample_that_looks_ahead_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    operator: Any = of_batch("gpt2")[1]
    operator.folded.block(1).mix[2, 0, 7, 4] = 1e-9  # one number of one head of the last sample
    assert shapes_of(operator, monkeypatch) == [(12, 12)]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_tokens_go_in_parts_where_memory_is_short(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lens, operator = of_batch(name)
    monkeypatch.setattr(folding, "fitting", lambda bytes_each, wanted, device: 5)
    assert gap(lens, operator.push_each_token(outputs())) < 1e-6
    assert [n for _, n in shapes_of(operator, monkeypatch)] == [5, 5, 2]
