"""Deliberate faults in the engine for long inputs: each is noticed where it answers, and by the certificate."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
import zoo
from torch import Tensor

import tensorlens as tl
from tensorlens.freezing import long_inputs, proof, replay_of
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.long_inputs import LongInput

Patch = pytest.MonkeyPatch


@cache
def model(name: str) -> Any:
    return zoo.build(name, "sdpa")


def tensor(name: str, rules: Rules | None = None) -> tl.AttentionTensor:
    T = tl.Lens(model(name), rules=rules)(zoo.sample(name))
    assert isinstance(T.operator.replay, LongInput)
    return T


@pytest.fixture(autouse=True)
def streamed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(replay_of, "FACTOR_SHARE", 0.0)
    monkeypatch.setattr(proof, "_proofs", WeakKeyDictionary())


def method(name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    """A fault in one method of the engine, made from the right one."""
    return lambda patch: patch.setattr(LongInput, name, make(getattr(LongInput, name)))


def recomputed(fault: Callable[[Patch], None]) -> Callable[[Patch], None]:
    """The same with no graphs kept, so that blocks are run again."""

    def patch(monkeypatch: Patch) -> None:
        monkeypatch.setattr(long_inputs, "RESERVE", 2.0)
        fault(monkeypatch)

    return patch


def graph_of_another_block(whole: Any) -> Any:
    def pull(self: Any, n: int, cs: Tensor, heads: Any) -> Tensor:
        return whole(self, 0 if n == 1 else n, cs, heads)

    return pull


def block_left_out(whole: Any) -> Any:
    return lambda self, n, cs, heads: cs if n == 1 else whole(self, n, cs, heads)


def another_state(whole: Any) -> Any:
    """The block is run again at the state of the next one: its factors are others."""

    def again(self: Any, n: int, cs: Tensor) -> Tensor:
        states = list(self.recording.states)
        states[n] = states[n + 1]
        object.__setattr__(self.recording, "states", tuple(states))
        return whole(self, n, cs)

    return again


def stale_graph(whole: Any) -> Any:
    kept: dict[Any, Tensor] = {}
    return lambda self, n, cs, heads: kept.setdefault((n, cs.shape), whole(self, n, torch.ones_like(cs), heads))


def other_rules(whole: Any) -> Any:
    def run(self: Any, *args: Any, **options: Any) -> Tensor:
        mine, held = self.recording.rules, Rules()
        object.__setattr__(self.recording, "rules", held)
        try:
            return whole(self, *args, **options)
        finally:
            object.__setattr__(self.recording, "rules", mine)

    return run


def without_heads(whole: Any) -> Any:
    return lambda self, *args, **options: whole(self, *args[:2], None, **options)


def pushed_past_a_block(whole: Any) -> Any:
    def run(self: Any, n: int, x: Tensor, factors: Any, **options: Any) -> Tensor:
        found = whole(self, n, x, factors, **options)
        is_push = factors is not self.factors and n == 1
        return x if is_push else found

    return run


def without_residual(whole: Any) -> Any:
    return lambda self, n, cs, heads: whole(self, n, cs, heads) - cs


def wrong_end(monkeypatch: Patch) -> None:
    """The graph behind the last block ends before the final norm."""
    whole = LongInput.__init__

    def init(self: Any, recording: Any, factors: Any, calls: Any, leaves: Any, edges: Any, *ends: Tensor) -> None:
        with torch.enable_grad():
            whole(self, recording, factors, calls, leaves, edges, 1.01 * ends[0], ends[1])

    monkeypatch.setattr(LongInput, "__init__", init)


def wrong_logits(monkeypatch: Patch) -> None:
    """What the head reads is taken one token too early."""
    whole = LongInput.__init__

    def init(self: Any, recording: Any, factors: Any, calls: Any, leaves: Any, edges: Any, *ends: Tensor) -> None:
        with torch.enable_grad():
            whole(self, recording, factors, calls, leaves, edges, ends[0], ends[1].roll(1, 1))

    monkeypatch.setattr(LongInput, "__init__", init)


def one_cotangent_for_all(monkeypatch: Patch) -> None:
    whole = long_inputs._gradients
    monkeypatch.setattr(long_inputs, "_gradients", lambda y, x, us: whole(y, x, us.flip(-1)))


def second_wrong(whole: Any) -> Any:
    """Of several at once only the first is right."""

    def run(self: Any, x: Tensor, *args: Any) -> Tensor:
        found = whole(self, x, *args)
        return torch.cat([found[:1], 1.01 * found[1:]]) if len(x) > 1 else found

    return run


def range_wrong(whole: Any) -> Any:
    """A range of blocks is pulled wrongly, and all of them rightly."""

    def pull(self: Any, us: Tensor, span: Any, *args: Any) -> Tensor:
        found = whole(self, us, span, *args)
        return found if span == (0, self.recording.n_blocks) else 1.01 * found

    return pull


MUTATIONS: dict[str, tuple[str, Callable[[Patch], None], str]] = {
    "the second of two cotangents": ("gpt2", method("_pull_some", second_wrong), "streamed"),
    "the second of two states": ("llama", method("push", second_wrong), "linearity"),
    "the graph of another block": ("gpt2", method("_pull_block", graph_of_another_block), "streamed"),
    "a block left out of the pull": ("llama", method("_pull_block", block_left_out), "streamed"),
    "a residual dropped": ("gpt2", method("_pull_block", without_residual), "streamed"),
    "a stale answer": ("bert", method("_pull_block", stale_graph), "streamed"),
    "one per cent too much": ("bert", method("_pull_block", lambda w: lambda *a: 1.01 * w(*a)), "streamed"),
    "run again at another state": ("gpt2", recomputed(method("_pull_again", another_state)), "streamed"),
    "run again, tokens shifted": (
        "gpt2", recomputed(method("_pull_again", lambda w: lambda *a: w(*a).roll(1, 1))), "streamed"
    ),
    "channels of a cotangent reversed": ("llama", one_cotangent_for_all, "streamed"),
    "an end of its own": ("gpt2", wrong_end, "streamed"),
    "logits of the token before": ("llama", wrong_logits, "logits"),
    "a block left out of the push": ("gpt2", method("_run_block", pushed_past_a_block), "value"),
    "pushed one per cent too far": ("llama", method("push", lambda w: lambda *a: 1.01 * w(*a)), "value"),
    "bias added twice": ("gpt2", method("push", lambda w: lambda s, x, *a: w(s, x, *a) + (x == 0).all()), "linearity"),
}  # fmt: skip


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_without_a_fault_a_long_input_passes(name: str) -> None:
    T = tensor(name)
    T.map("tensor.in_out", out_token=-1)
    certificate = T.certificate()
    assert certificate.passed and certificate.engines["streamed"] < 1e-6, str(certificate)
    assert T.operator.engines.fallback is None


@pytest.fixture
def unproved(monkeypatch: Patch) -> None:
    """No first answer is compared, so that the certificate is alone."""
    monkeypatch.setattr(replay_of, "_prove", lambda long_input: proof.Proof(0.0, 1.0))


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_noticed_where_the_engine_answers(fault: str, monkeypatch: Patch) -> None:
    name, patch, _ = MUTATIONS[fault]
    patch(monkeypatch)
    found = tensor(name).map("tensor.in_out", out_token=-1)
    assert "differed from a replay" in found.meta["fallback"]


def test_a_range_is_proved_too(monkeypatch: Patch) -> None:
    method("_pull_some", range_wrong)(monkeypatch)
    found = tensor("gpt2").blocks(1, 2).map("tensor.in_out", out_token=-1)
    assert "differed from a replay" in found.meta["fallback"]


@pytest.mark.parametrize(
    "fault", ["run again, tokens shifted", "an end of its own", "channels of a cotangent reversed"]
)
def test_after_a_fault_blocks_go_by_their_factors_and_are_right(fault: str, monkeypatch: Patch) -> None:
    name, patch, _ = MUTATIONS[fault]
    expected = tensor(name).map("tensor.in_out", out_token=-1).scores
    proof._proofs.clear()
    patch(monkeypatch)
    found = tensor(name).map("tensor.in_out", out_token=-1)
    assert "fallback" in found.meta
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-9)


def test_the_proof_is_made_once_for_a_state_of_the_model(monkeypatch: Patch) -> None:
    made, prove = [], replay_of._prove
    monkeypatch.setattr(replay_of, "_prove", lambda long_input: made.append(1) or prove(long_input))
    lens, sample = tl.Lens(zoo.build("gpt2", "sdpa")), zoo.sample("gpt2")
    for _ in range(2):
        lens(sample)
    assert len(made) == 1
    torch.nn.init.ones_(lens.model.transformer.ln_f.weight)
    lens(sample)
    assert len(made) == 2


def test_an_input_whose_beginning_does_not_run_goes_by_factors_and_says_so(monkeypatch: Patch) -> None:
    expected = tensor("gpt2").map("tensor.in_out", out_token=-1).scores
    proof._proofs.clear()
    monkeypatch.setattr(replay_of, "beginning", lambda inputs, n: {})
    found = tensor("gpt2").map("tensor.in_out", out_token=-1)
    assert "could not be compared" in found.meta["fallback"]
    torch.testing.assert_close(found.scores, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("embedded", [False, True])
def test_what_stands_in_for_a_long_input(embedded: bool) -> None:
    tokens = {"inputs_embeds": torch.ones(1, 8, 8)} if embedded else {"input_ids": torch.ones(1, 8, dtype=torch.long)}
    mask, positions, more = torch.ones(1, 1, 8, 8), torch.arange(8), torch.ones(1, 5)
    found = replay_of.beginning(tokens | {"mask": mask, "positions": positions, "more": more, "flag": True}, 3)
    sizes = [list(value.shape) for value in found.values() if isinstance(value, Tensor)]
    assert sizes == [[1, 3, 8] if embedded else [1, 3], [1, 1, 3, 3], [3], [1, 5]] and found["flag"] is True


@pytest.mark.parametrize("fault", MUTATIONS)
@pytest.mark.usefixtures("unproved")
def test_a_fault_is_noticed_by_the_certificate(fault: str, monkeypatch: Patch) -> None:
    name, patch, law = MUTATIONS[fault]
    patch(monkeypatch)
    certificate = tensor(name).certificate()
    assert law in certificate.failures, str(certificate)


@pytest.mark.usefixtures("unproved")
def test_rules_forgotten_when_a_block_is_run_again(monkeypatch: Patch) -> None:
    monkeypatch.setattr(long_inputs, "RESERVE", 2.0)
    rules = Rules(gate="half")
    assert tensor("llama", rules).certificate().passed
    method("_pull_again", other_rules)(monkeypatch)
    assert "streamed" in tensor("llama", rules).certificate().failures


@pytest.mark.usefixtures("unproved")
def test_heads_forgotten(monkeypatch: Patch) -> None:
    assert tensor("gpt2").heads({1: [0, 2]}).certificate().passed
    method("pull", without_heads)(monkeypatch)
    assert "streamed" in tensor("gpt2").heads({1: [0, 2]}).certificate().failures
