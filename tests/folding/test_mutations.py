"""Deliberate faults in the fast engines: each is noticed by the certificate, and no map is given from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from tensorlens.folding import fold, pull, pull_few, rebuild
from tensorlens.folding.fold import FoldedBlock
from tensorlens.freezing import proof
from tensorlens.operators.matrix_free import FrozenOperator
from torch import Tensor

import tensorlens as tl

Patch = pytest.MonkeyPatch


@cache
def model(name: str) -> Any:
    return zoo.build(name)


def tensor(name: str) -> tl.AttentionTensor:
    return tl.Lens(model(name))(zoo.sample(name))


def of_folds(change: Callable[[FoldedBlock], FoldedBlock]) -> Callable[[Patch], None]:
    """A fault in the matrices of every block."""

    def patch(monkeypatch: Patch) -> None:
        whole = pull.fold_block
        monkeypatch.setattr(pull, "fold_block", lambda *args: change(whole(*args)))

    return patch


def replaced(module: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A fault in one function, made from the right one."""
    return lambda monkeypatch: monkeypatch.setattr(module, name, make(getattr(module, name)))


def off_by_one(monkeypatch: Patch) -> None:
    whole = pull.FoldedRows.block
    monkeypatch.setattr(pull.FoldedRows, "block", lambda self, n: whole(self, max(self.span.start, n - 1)))


def skipped_block(monkeypatch: Patch) -> None:
    whole = pull.FoldedRows._through
    monkeypatch.setattr(
        pull.FoldedRows, "_through", lambda self, n, rows, **k: rows if n == 1 else whole(self, n, rows, **k)
    )


def forgotten_attention(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pull_few._Buffers, "_leave_attention", lambda self, block: self.gathered.zero_())


def stale_buffer(monkeypatch: Patch) -> None:
    whole = pull_few._Buffers.step

    def step(self: Any, block: FoldedBlock) -> None:
        first = self.__dict__.setdefault("first_gain", block)
        whole(self, replace(block, gain=first.gain))

    monkeypatch.setattr(pull_few._Buffers, "step", step)


def stale_states(monkeypatch: Patch) -> None:
    whole, kept = pull.FoldedRows.pull_states, {}
    monkeypatch.setattr(
        pull.FoldedRows, "pull_states", lambda self, u: kept.setdefault(u.shape, whole(self, torch.ones_like(u)))
    )


def forgotten_tail(monkeypatch: Patch) -> None:
    monkeypatch.setattr(pull, "norm_rows", lambda norm, rows: rows)


def half_the_tokens(monkeypatch: Patch) -> None:
    whole = pull.FoldedRows.live

    def live(self: Any, n: int, tokens: Any) -> Any:
        found = whole(self, n, tokens)
        return found._replace(start=min(found.start + 1, tokens.start))

    monkeypatch.setattr(pull.FoldedRows, "live", live)


MUTATIONS: dict[str, tuple[str, Callable[[Patch], None]]] = {
    "attention transposed": ("bert", of_folds(lambda b: replace(b, mix=b.mix.mT.contiguous()))),
    "heads in reverse": ("bert", of_folds(lambda b: replace(b, mix=b.mix.flip(0)))),
    "heads rolled, shared values": ("llama", of_folds(lambda b: replace(b, mix=b.mix.roll(1, 0)))),
    "value and out exchanged": ("gpt2", of_folds(lambda b: replace(b, out=b.value.T.contiguous()))),
    "gate forgotten": ("llama", of_folds(lambda b: replace(b, gain=torch.ones_like(b.gain)))),
    "gain of the token before": ("llama", of_folds(lambda b: replace(b, gain=b.gain.roll(1, 0)))),
    "up of another channel": ("gpt2", of_folds(lambda b: replace(b, up=b.up.roll(1, 0)))),
    "residual dropped after a norm": ("bert", of_folds(lambda b: replace(b, skip=torch.zeros_like(b.gain[:, :16])))),  # noqa: E501
    "one per cent too much": ("gpt2", of_folds(lambda b: replace(b, value=1.01 * b.value))),
    "parallel taken for sequential": ("neox-parallel", of_folds(lambda b: replace(b, is_parallel=not b.is_parallel))),
    "centring before a weight": ("gpt2", replaced(fold, "before_weight", lambda _: lambda p, n: p.weight)),
    "gain behind a weight": ("gemma3", replaced(fold, "after_weight", lambda _: lambda p, *_: p.weight)),
    "scale of a norm": ("gpt2", replaced(fold, "_scales", lambda _: lambda *_: None)),
    "attention of another head": ("gpt2", replaced(rebuild, "held_attention", lambda w: lambda *a: w(*a).roll(1, 1))),
    "scales of other tokens": ("gpt2", replaced(rebuild, "norm_scale", lambda w: lambda *a: w(*a).roll(1, 0))),
    "token-wise without its factor": ("bert", replaced(pull, "_token_wise", lambda _: lambda *a: a[3].copy_(a[1]))),
    "matrices without the skip": ("gpt2", replaced(pull, "token_matrices", lambda w: lambda *a: w(*a) - torch.eye(16))),
    "mixing transposed": ("bert", replaced(pull, "_mix", lambda w: lambda b, *a: w(replace(b, mix=b.mix.mT), *a))),
    "block before it": ("gpt2", off_by_one),
    "block left out": ("llama", skipped_block),
    "few: attention forgotten": ("llama", forgotten_attention),
    "few: stale factors": ("llama", stale_buffer),
    "states: stale answer": ("gpt2", stale_states),
    "final norm forgotten": ("gpt2", forgotten_tail),
    "a token out of sight": ("gpt2", half_the_tokens),
}  # fmt: skip


BY_CERTIFICATE = ("matrices without the skip", "a token out of sight")
"""Faults in ways that so small a map does not go: the certificate alone tries them."""


@pytest.fixture(autouse=True)
def no_memory() -> Any:
    """Each fault meets a model of which nothing is known yet."""
    proof._proofs.clear()
    yield
    proof._proofs.clear()


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "neox-parallel", "gemma3"])
def test_without_a_fault_every_engine_passes(name: str) -> None:
    T = tensor(name)
    certificate = T.certificate(engines="all")
    assert certificate.passed, str(certificate)
    assert {"recorded graph", "folded"} <= certificate.engines.keys()
    assert T.map("tensor.norm").meta["engine"] == "folded" and "fallback" not in T.map("tensor.norm").meta


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_noticed_and_the_slow_way_answers(fault: str, monkeypatch: Patch) -> None:
    name, patch = MUTATIONS[fault]
    T = tensor(name)
    tl.Lens(model(name))(zoo.sample(name)).rows(0)  # the parts are found before the fault
    proof._proofs.clear()
    expected = T.operator.pull_replayed(torch.eye(16, dtype=T.dtype)[:, None] * one_hot(T, 3))
    patch(monkeypatch)
    certificate = T.certificate(engines="all")
    assert "folded" in certificate.failures and not certificate.passed
    assert (T.rows(3) - expected).norm() <= 1e-6 * expected.norm()
    adjoint = T.adjoint(torch.stack([T.output] * 9))
    assert (adjoint[0] - T.operator.pull_replayed(T.output[None])[0]).norm() <= 1e-6 * adjoint[0].norm()
    assert T.operator.engines.fallback is not None or fault in BY_CERTIFICATE


def one_hot(T: tl.AttentionTensor, token: int) -> Tensor:
    return (torch.arange(T.shape[0]) == token).to(T.dtype)[:, None]


def test_a_map_says_that_the_slow_way_answered(monkeypatch: Patch) -> None:
    MUTATIONS["heads in reverse"][1](monkeypatch)
    T = tensor("bert")
    meta = T.map("tensor.norm").meta
    assert meta["engine"] == "recorded graph" and "differed from a replay by" in meta["fallback"]
    assert meta["fallback"] in T.certificate().reservations and T.certificate().passed


def test_a_fault_that_comes_later_is_noticed_by_the_certificate_alone(monkeypatch: Patch) -> None:
    T = tensor("gpt2")
    T.rows(3)
    assert T.certificate().passed and "folded" in T.certificate().engines
    again = tensor("gpt2")
    again.rows(3)
    MUTATIONS["one per cent too much"][1](monkeypatch)
    assert not tensor("gpt2").certificate(engines="all").passed


def test_heads_are_certified_by_the_weights(monkeypatch: Patch) -> None:
    T = tensor("gpt2").heads({1: [0, 2]})
    assert T.certificate().passed
    push = type(T.operator.replay).push

    def wrong(self: Any, x: Tensor, span: Any, heads: Any = None) -> Tensor:
        return push(self, x, span, {n: m.roll(1) for n, m in (heads or {}).items()})

    monkeypatch.setattr(type(T.operator.replay), "push", wrong)
    again = tensor("gpt2").heads({1: [0, 2]})
    assert "value" in again.certificate().failures


# Faults in ways that the first answer does not go ---------------------------------------------------------------------


def gathered(monkeypatch: Patch) -> None:
    """Outputs that do not follow each other are taken from the wrong places."""
    whole = pull._positions

    def positions(tokens: Any, device: Any) -> Any:
        found = whole(tokens, device)
        return found if isinstance(found, slice) else found - 1

    monkeypatch.setattr(pull, "_positions", positions)


def several_outputs(monkeypatch: Patch) -> None:
    whole = pull.FoldedRows._leave_last

    def leave(self: Any, n: int, out_tokens: Any, starts: Tensor) -> Any:
        found = whole(self, n, out_tokens, starts)
        return found._replace(values=1.1 * found.values) if len(out_tokens) > 1 else found

    monkeypatch.setattr(pull.FoldedRows, "_leave_last", leave)


def many_cotangents(monkeypatch: Patch) -> None:
    whole = FrozenOperator.adjoint_folded
    monkeypatch.setattr(FrozenOperator, "adjoint_folded", lambda self, u: whole(self, u.flip(0) if len(u) > 16 else u))


def part_of_the_tokens(monkeypatch: Patch) -> None:
    whole = pull_few._Buffers.step

    def step(self: Any, block: FoldedBlock) -> None:
        whole(self, block if self.is_all else replace(block, mix=block.mix.mT))

    monkeypatch.setattr(pull_few._Buffers, "step", step)


def stale_heads(monkeypatch: Patch) -> None:
    whole, kept = fold._mixing, []

    def mixing(factors: Any, in_norm: str, out_norm: str, heads: Tensor | None) -> Tensor:
        kept.extend([] if heads is None or kept else [heads])
        return whole(factors, in_norm, out_norm, None if heads is None else kept[0])

    monkeypatch.setattr(fold, "_mixing", mixing)


LATER: dict[str, tuple[Callable[[Patch], None], Callable[[Any], Tensor], Callable[[Any], Tensor]]] = {
    "gathered outputs": (
        gathered, lambda T: T.rows(3), lambda T: T.map("tensor.norm", out_token=[5, 1, 2]).scores
    ),
    "several outputs": (
        several_outputs, lambda T: T.rows(3), lambda T: T.map("tensor.norm", out_token=range(2, 5)).scores
    ),
    "many cotangents": (
        many_cotangents, lambda T: T.adjoint(T.output.expand(9, -1, -1)),
        lambda T: T.adjoint(torch.arange(40, dtype=T.dtype)[:, None, None] * T.output),
    ),
    "part of the tokens": (part_of_the_tokens, lambda T: T.rows(-1), lambda T: T.rows(3)),
    "heads of another question": (
        stale_heads, lambda T: T.heads({1: [0]}).rows(3), lambda T: T.heads({1: [2]}).rows(3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", LATER)
def test_another_kind_of_question_is_proved_by_itself(fault: str, monkeypatch: Patch) -> None:
    patch, first, then = LATER[fault]
    expected = then(tensor("gpt2"))
    proof._proofs.clear()
    patch(monkeypatch)
    T = tensor("gpt2")
    first(T)
    torch.testing.assert_close(then(T), expected, rtol=1e-6, atol=1e-9)
