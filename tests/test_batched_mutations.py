"""Deliberate faults in batches: each is noticed by the proof of the first batch, and no map is given from it."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from tensorlens.batch import Batch, Collated
from tensorlens.freezing import proof
from tensorlens.freezing import recording as recordings
from tensorlens.freezing.replay import FactorReplay
from tensorlens.maps.batch_question import BatchQuestion
from torch import Tensor

import tensorlens as tl
from tensorlens import dataset_maps
from tensorlens.maps import batch_question, batched, batched_baselines, batched_gradients
from tensorlens.maps.gradients import integrated_gradients
from tensorlens.models.precision import tf32, tf32_allowed

Patch = pytest.MonkeyPatch
INPUTS = [[7, 21, 5, 33, 9, 14, 50], [3, 8, 40, 11, 6], [12, 30, 4, 17, 29, 44]]


@cache
def lens(name: str) -> tl.Lens:
    return tl.Lens(zoo.build(name))


def method(kind: type, name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(kind, name, make(getattr(kind, name)))


def function(name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(batched, name, make(getattr(batched, name)))


def question_function(name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(batch_question, name, make(getattr(batch_question, name)))


def baseline_function(name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    whole = getattr(batched_baselines, name, None) or getattr(builtins, name)
    return lambda patch: patch.setattr(batched_baselines, name, make(whole), raising=False)


def of_pulls(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """A fault in what is pulled for several samples at once."""

    def make(whole: Any) -> Any:
        def pull(self: Any, *args: Any, **options: Any) -> Tensor:
            found = whole(self, *args, **options)
            return change(found) if self.recording.n_samples > 1 else found

        return pull

    return method(FactorReplay, "pull", make)


def mask_forgotten(whole: Any) -> Any:
    def init(self: Any, *args: Any) -> None:
        whole(self, *args)
        if len(self.lengths) > 1:
            self.arguments.pop("attention_mask", None)

    return init


def padded_in_front(whole: Any) -> Any:
    def answers(self: Any, scores: Tensor, shares: Tensor, notes: Any = None) -> Any:
        longest = max(self.lengths)
        moved = torch.stack([row.roll(n - longest) for row, n in zip(scores, self.lengths, strict=True)])
        return whole(self, moved, shares, notes)

    return answers


def stale_recording(monkeypatch: Patch) -> None:
    """A batch is answered from one of other tokens."""
    whole = batched.record
    monkeypatch.setattr(
        batched,
        "record",
        lambda anatomy, inputs, *rest: whole(anatomy, inputs | {"input_ids": inputs["input_ids"] + 1}, *rest),
    )


MUTATIONS: dict[str, tuple[str, str, Callable[[Patch], None]]] = {
    "the output before": (
        "gpt2", "tensor.in_out", method(BatchQuestion, "rows", lambda w: lambda s, x: w(s, x.roll(1, 1)))
    ),
    "the output of another sample": (
        "bert-mlm", "tensor.in_out", method(BatchQuestion, "rows", lambda w: lambda s, x: w(s, x.roll(1, 0)))
    ),
    "the input of another sample": (
        "gpt2", "tensor.in_out",
        method(BatchQuestion, "weigh", lambda w: lambda s, x: (x * s.recording.states[0].roll(1, 0)).sum(-1)),
    ),
    "the rows of another sample": ("llama", "tensor.in_out", of_pulls(lambda x: x.roll(1, 1))),
    "tokens shifted": ("llama", "tensor.in_out", of_pulls(lambda x: x.roll(1, 2))),
    "a mean in place of a sum": ("gpt2", "tensor.in_class", of_pulls(lambda x: x / 3)),
    "one per cent too much": ("llama", "tensor.in_class", of_pulls(lambda x: 1.01 * x)),
    "the mask of padding forgotten": ("bert-mlm", "tensor.in_out", method(Collated, "__init__", mask_forgotten)),
    "padding at the other end": ("gpt2", "tensor.in_out", method(BatchQuestion, "answers", padded_in_front)),
    "a stale recording": ("gpt2", "tensor.in_out", stale_recording),
    "the worst class for the best": (
        "gpt2", "tensor.in_class", question_function("all_logits", lambda w: lambda q: -w(q))
    ),
    "the weights of another class": (
        "bert-mlm", "tensor.in_class", function("reader", lambda w: lambda q, ids, weights: w(q, ids - 1, weights))
    ),
    "the bias not taken off": (
        "gpt2", "tensor.contribution",
        function("push_each_token", lambda w: lambda *a: w(*a) + 1),
    ),
    "probes of another seed": (
        "gpt2", "tensor.norm",
        function("probe_vectors", lambda w: lambda n, d, seed, *a: w(n, d, seed + 1, *a)),
    ),
    "the attention of another sample": (
        "gpt2", "rollout.attn", baseline_function("attn", lambda w: lambda attention: w(attention.roll(1, 0)))
    ),
    "a norm forgotten": (
        "bert", "mean.w_attn_res_ln",
        baseline_function("decompose", lambda w: lambda *a: replace(w(*a), norm_1=None)),
    ),
    "blocks in the other order": (
        "gpt2", "rollout.w_attn", baseline_function("reversed", lambda w: lambda blocks: blocks)
    ),
    "a path that ends early": (
        "gpt2", "gradient.integrated",
        lambda patch: patch.setattr(batched_gradients, "integrated_gradients",
                                    lambda recording, read: integrated_gradients(recording, read, n_steps=3)),
    ),
    "the paper's member for the Jacobian": (
        "gpt2", "gradient.times_input", function("jacobian_rules", lambda w: lambda rules: rules)
    ),
    "the root not taken": (
        "gpt2", "tensor.norm",
        function("norm", lambda w: lambda q: lambda: [replace(a, scores=a.scores.square()) for a in w(q)()]),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_memory(monkeypatch: Patch) -> Any:
    """Each fault meets a model of which nothing is known yet."""
    proof._proofs.clear()
    yield
    proof._proofs.clear()


def options(asked: str) -> dict[str, Any]:
    return {"probes": 8} if asked == "tensor.norm" else {}


@cache
def expected(name: str, asked: str) -> list[Tensor]:
    return [lens(name)(one).map(asked, out_token=-1, **options(asked)).scores for one in INPUTS]


@pytest.mark.parametrize("fault", MUTATIONS)
def test_a_fault_is_noticed_and_samples_are_mapped_alone(fault: str, monkeypatch: Patch) -> None:
    name, asked, patch = MUTATIONS[fault]
    right = expected(name, asked)
    patch(monkeypatch)
    monkeypatch.setitem(batched.BATCHED, "tensor.norm", batched.norm)
    found = list(lens(name).maps(INPUTS, asked, **options(asked)))
    assert all("samples go" in one.meta["batches"] for one in found), fault
    made = Batch(lens(name), [lens(name).prepare(one) for one in INPUTS])
    directly = made.maps(asked, **options(asked))
    assert all("each was mapped alone" in one.meta["fallback"] for one in directly), fault
    for maps in (found, directly):
        for one, score in zip(maps, right, strict=True):
            torch.testing.assert_close(one.scores, score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["tensor.in_out", "tensor.in_class", "tensor.contribution", "tensor.norm"])
def test_without_a_fault_batches_answer(asked: str) -> None:
    for one in lens("gpt2").maps(INPUTS, asked, **options(asked)):
        assert one.meta["engine"] == "batched" and "batches" not in one.meta
    for one in lens("gpt2").batch(INPUTS).maps(asked, **options(asked)):
        assert one.meta["engine"] == "batched" and "fallback" not in one.meta


def test_factors_of_another_sample_are_noticed_by_the_certificate(monkeypatch: Patch) -> None:
    inputs = [one[:5] for one in INPUTS]
    made = lens("gpt2").batch(inputs)
    assert made[1].certificate().passed
    whole = recordings._CutFactors.__getitem__
    monkeypatch.setattr(
        recordings._CutFactors, "__getitem__", lambda self, site: recordings._cut(self._factors[site], 0, len(inputs))
    )
    assert "value" in made[1].certificate().failures
    assert whole is not recordings._CutFactors.__getitem__


def test_a_batch_is_proved_once(monkeypatch: Patch) -> None:
    calls: list[Any] = []
    whole = tl.Lens.__call__
    monkeypatch.setattr(tl.Lens, "__call__", lambda self, value: (calls.append(value), whole(self, value))[1])
    made = lens("gpt2").batch(INPUTS)
    calls.clear()
    for _ in range(3):
        made.maps("tensor.in_out")
    assert len(calls) == 2, "the shortest, and a longest"


def test_rounding_by_tf32_is_no_fault_if_a_few_samples_agree_without_it(monkeypatch):
    inputs, sizes, agree, make = INPUTS * 5, [], dataset_maps.agree, Batch.__init__

    def counted(self, lens, prepared, *rest, **named):
        sizes.append(len(prepared))
        make(self, lens, prepared, *rest, **named)

    monkeypatch.setattr(Batch, "__init__", counted)
    monkeypatch.setattr(dataset_maps, "agree", lambda *found: not tf32_allowed() and agree(*found))
    with tf32(True):
        found = list(lens("gpt2").maps(inputs, "tensor.in_class", batch_size=15))
    assert sizes == [15, 8] and not any("batches" in one.meta for one in found)


def wrong_beyond_five_tokens(whole: Any) -> Any:
    return lambda *a: torch.cat([(found := whole(*a))[:, :5], 2 * found[:, 5:]], 1)


def first_output_for_others(whole: Any) -> Any:
    return lambda self, state: whole(self, state if int(self.out_tokens[0]) > 2 else state.roll(1, 1))


def filled_with_ones(whole: Any) -> Any:
    def targets(question: BatchQuestion) -> tuple[Tensor, Tensor]:
        ids, weights = whole(question)
        return ids, weights.masked_fill(weights == 0, 1)

    return targets


@pytest.mark.parametrize(
    ("patch", "asked", "options"),
    [
        (function("push_each_token", wrong_beyond_five_tokens), "tensor.contribution", {}),
        (method(BatchQuestion, "rows", first_output_for_others), "tensor.in_out", {"out_token": 1}),
        (function("targets_of", filled_with_ones), "tensor.in_class", {"targets": [(3, 4), 5, (6, 7)]}),
    ],
)
def test_every_kind_of_question_of_a_batch_is_proved(patch: Any, asked: str, options: Any, monkeypatch: Patch) -> None:
    made = lens("gpt2").batch(INPUTS)
    expected = [one.scores for one in made.maps(asked, **options)]
    proof._proofs.clear()
    patch(monkeypatch)
    made = lens("gpt2").batch(INPUTS)
    made.maps(asked)  # which the fault may leave alone
    for one, right in zip(made.maps(asked, **options), expected, strict=True):
        torch.testing.assert_close(one.scores, right, rtol=1e-4, atol=1e-5)
