"""Deliberate faults in folded blocks: each is noticed by the law of the certificate that is named for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

import tensorlens as tl
from tensorlens.program import folding
from tensorlens.program.folding import FoldedBlock

Patch = pytest.MonkeyPatch


@cache
def model(name: str) -> Any:
    return zoo.build(name)


def tensor(name: str) -> tl.AttentionTensor:
    T = tl.Lens(model(name))(zoo.sample(name))
    T.rows(3)  # folded blocks have answered, and are judged too
    return T


def of_blocks(change: Callable[[FoldedBlock], FoldedBlock]) -> Callable[[Patch], None]:
    """A fault in the matrices of every block."""

    def patch(monkeypatch: Patch) -> None:
        whole = folding.fold_block
        monkeypatch.setattr(folding, "fold_block", lambda *args: change(whole(*args)))

    return patch


def of_factors(**changes: Callable[[Any], Tensor]) -> Callable[[Patch], None]:
    """A fault in what depends on the input."""

    def change(block: FoldedBlock) -> FoldedBlock:
        return replace(block, **{name: make(getattr(block, name)) for name, make in changes.items()})

    return of_blocks(change)


def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A fault in one function, made from the right one."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, make(getattr(module, name)))


def off_by_one(monkeypatch: Patch) -> None:
    whole = folding.FoldedBlocks.block
    monkeypatch.setattr(folding.FoldedBlocks, "block", lambda self, place: whole(self, max(0, place - 1)))


def skipped_block(monkeypatch: Patch) -> None:
    whole = folding.FoldedBlocks._through
    monkeypatch.setattr(folding.FoldedBlocks, "_through", lambda self, n, *a: a[:2] if n == 1 else whole(self, n, *a))


MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "attention transposed": ("bert", of_factors(mix=lambda mix: mix.mT.contiguous())),
    "heads in reverse": ("bert", of_factors(mix=lambda mix: mix.flip(1))),
    "heads rolled, shared values": ("llama", of_factors(mix=lambda mix: mix.roll(1, 1))),
    "gate forgotten": ("llama", of_factors(gain=torch.ones_like)),
    "gain of the token before": ("llama", of_factors(gain=lambda gain: gain.roll(1, 1))),
    "residual dropped after a norm": ("bert", of_factors(skip=torch.zeros_like)),
    "up of another channel": ("gpt2", of_blocks(lambda b: replace(b, up=b.up.roll(1, 0)))),
    "one per cent too much": ("gpt2", of_blocks(lambda b: replace(b, value=1.01 * b.value))),
    "value and out exchanged": ("gpt2", of_blocks(lambda b: replace(b, out=b.value.T.contiguous()))),
    "parallel taken for sequential": ("neox-parallel", of_blocks(lambda b: replace(b, is_parallel=not b.is_parallel))),
    "attention of another head": ("gpt2", replaced(folding, "_mixing", lambda w: lambda form: w(form).roll(1, 1))),
    "token-wise matrices halved": ("bert", replaced(folding, "token_matrices", lambda w: lambda *a: 0.5 * w(*a))),
    "block before it": ("gpt2", off_by_one),
    "block left out": ("llama", skipped_block),
}


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "neox-parallel"])
def test_without_a_fault_the_law_holds(name: str) -> None:
    certificate = tensor(name).certificate()
    assert certificate.passed and certificate.errors["folded"] < 1e-6, str(certificate)


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_noticed_by_the_law_of_folded_blocks(fault: str, monkeypatch: Patch) -> None:
    name, patch = MUTATIONS[fault]
    patch(monkeypatch)
    assert tensor(name).certificate().failures == ("folded",)
