"""Deliberate faults in batches: each is noticed by the first batch of a data set, and no map is given from it."""

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
from tensorlens import batches
from tensorlens.batches import Batch
from tensorlens.maps import baselines, peers, tensor_maps
from tensorlens.maps.methods import METHODS, Question
from tensorlens.models.samples import Collated
from tensorlens.operators.operator import FrozenOperator
from tensorlens.specimen import Specimen

Patch = pytest.MonkeyPatch
INPUTS = [[7, 21, 5, 33, 9, 14, 50], [3, 8, 40, 11, 6], [12, 30, 4, 17, 29, 44]]


@cache
def lens(name: str) -> tl.Lens:
    return tl.Lens(zoo.build(name))


def in_batches(kind: type, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """A fault in what a question or an operator of several samples gives."""

    def make(whole: Any) -> Any:
        def call(self: Any, *args: Any, **options: Any) -> Tensor:
            found = whole(self, *args, **options)
            return change(found) if self.recording.n_samples > 1 else found

        return call

    return lambda patch: patch.setattr(kind, name, make(getattr(kind, name)))


def patched(place: Any, name: str, make: Callable[[Any], Any]) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(place, name, make(getattr(place, name)))


def mask_forgotten(whole: Any) -> Any:
    def init(self: Any, *args: Any) -> None:
        whole(self, *args)
        if len(self.lengths) > 1:
            self.arguments.pop("attention_mask", None)

    return init


def of_other_tokens(whole: Any) -> Any:
    """A batch is answered from a recording of other tokens."""

    def record(self: Specimen, arguments: Any, *, n_samples: int = 1) -> Any:
        moved = arguments | {"input_ids": arguments["input_ids"] + 1} if n_samples > 1 else arguments
        return whole(self, moved, n_samples=n_samples)

    return record


def of_logits(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """A fault in the logits that a batch takes its targets from."""
    whole = Question.__dict__["logits"].func
    return lambda patch: patch.setattr(
        Question, "logits", property(lambda self: change(whole(self)) if self.is_batch else whole(self))
    )


def samples_exchanged(whole: Any) -> Any:
    return lambda matrices, **options: whole([one.roll(1, 0) if one.dim() == 3 else one for one in matrices], **options)


def root_not_taken(patch: Patch) -> None:
    norm = METHODS["tensor.norm"]

    def squares(question: Question) -> Any:
        found = norm.compute(question)
        return replace(found, scores=found.scores.square()) if question.is_batch else found

    patch.setitem(METHODS, "tensor.norm", replace(norm, compute=squares))


PULLS, OUTPUTS = (FrozenOperator, "pull_samples"), (Question, "at_outputs")
MUTATIONS: dict[str, tuple[str, str, Callable[[Patch], None]]] = {
    "the output of another sample": ("bert-mlm", "tensor.in_out", in_batches(*OUTPUTS, lambda x: x.roll(1, 0))),
    "the rows of another sample": ("llama", "tensor.in_out", in_batches(*PULLS, lambda x: x.roll(1, 0))),
    "tokens shifted": ("llama", "tensor.in_out", in_batches(*PULLS, lambda x: x.roll(1, 1))),
    "a mean in place of a sum": ("gpt2", "tensor.in_class", in_batches(*PULLS, lambda x: x / 3)),
    "one per cent too much": ("llama", "tensor.in_class", in_batches(*PULLS, lambda x: 1.01 * x)),
    "the mask of padding forgotten": ("bert-mlm", "tensor.in_out", patched(Collated, "__init__", mask_forgotten)),
    "a stale recording": ("gpt2", "tensor.in_out", patched(Specimen, "record", of_other_tokens)),
    "the worst class for the best": ("gpt2", "tensor.in_class", of_logits(torch.neg)),
    "another output's pushes": (
        "gpt2",
        "tensor.contribution",
        in_batches(FrozenOperator, "push_each_token", lambda x: x.roll(1, 0)),
    ),
    "probes of another seed": (
        "gpt2",
        "tensor.norm",
        patched(tensor_maps, "probe_vectors", lambda w: lambda n, d, seed, *a: w(n, d, seed + 1, *a)),
    ),
    "the attention of another sample": ("gpt2", "rollout.attn", patched(baselines, "rollout", samples_exchanged)),
    "the root not taken": ("gpt2", "tensor.norm", root_not_taken),
    "a path that ends early": (
        "gpt2",
        "gradient.integrated",
        patched(peers, "integrated_gradients", lambda w: lambda *a: w(*a, n_steps=3) if a[1].is_batch else w(*a)),
    ),
}


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
    found = list(lens(name).maps(INPUTS, asked, **options(asked)))
    assert all("samples go" in one.meta["batches"] for one in found), fault
    for one, score in zip(found, right, strict=True):
        torch.testing.assert_close(one.scores, score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("asked", ["tensor.in_out", "tensor.in_class", "tensor.contribution", "tensor.norm"])
def test_without_a_fault_batches_answer(asked: str, monkeypatch: Patch) -> None:
    right, looks, look = expected("gpt2", asked), [], Specimen.look
    monkeypatch.setattr(Specimen, "look", lambda self, one: looks.append(1) or look(self, one))
    found = list(lens("gpt2").maps(INPUTS, asked, **options(asked)))
    assert not any("batches" in one.meta for one in found) and len(looks) <= 2
    for one, score in zip(found, right, strict=True):
        torch.testing.assert_close(one.scores, score, rtol=1e-10, atol=1e-12)


def test_one_faulty_method_of_several_goes_alone(monkeypatch: Patch) -> None:
    in_batches(FrozenOperator, "push_each_token", lambda x: 2 * x)(monkeypatch)
    for one in lens("gpt2").maps(INPUTS, ["tensor.in_out", "tensor.contribution"]):
        assert "batches" not in one["tensor.in_out"].meta
        assert "samples go one by one" in one["tensor.contribution"].meta["batches"]


def test_a_batch_of_a_model_that_mixes_samples_is_refused(monkeypatch: Patch) -> None:
    assert lens("gpt2").batch(INPUTS).is_separable()
    monkeypatch.setattr(batches, "carries_across", lambda recording: True)
    with pytest.raises(tl.InputError, match="mixes samples"):
        lens("gpt2").batch(INPUTS)


def test_the_program_of_a_batch_shows_whether_samples_touch() -> None:
    batch = Batch(lens("gpt2").specimen, [lens("gpt2").prepare(one) for one in INPUTS])
    assert batch.mixing is None
    program = batch.recording.program
    steps = list(program.steps)
    place = next(n for n, step in enumerate(steps) if step.operation == "linear")
    one = steps[place]
    before = max(program.specs) + 1
    specs = {**program.specs, before: program.specs[one.slots[0]]}
    steps[place : place + 1] = [
        replace(one, out=before, operation="roll", args=(one.args[0], 1, 0)),
        replace(one, args=(type(one.args[0])(before), *one.args[1:])),
    ]
    mixed = replace(batch.recording, program=replace(program, steps=tuple(steps), specs=specs))
    assert batches.carries_across(mixed) and not batches.carries_across(batch.recording)
