"""Maps of many inputs are those of each alone: in batches, padded or not, and of a whole data set."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import zoo
from torch import nn

import tensorlens as tl
from tensorlens import batches
from tensorlens.batches import Batch
from tensorlens.models.runner import tf32
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program import folding
from tensorlens.recording.recording import Recording

CASES = [("bert-classifier", "sdpa"), ("gpt2", "eager"), ("qwen2", "sdpa")]
"""Families: every one is in the zoo, and each takes a second."""
LENGTHS = (5, 3, 5, 1)
TOGETHER = [name for name, method in tl.METHODS.items() if method.takes_samples]
"""Methods of several samples at once."""
pytestmark = pytest.mark.usefixtures("unchecked")


def ids(lengths=LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, zoo.VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def made(lens: tl.Lens, inputs) -> Batch:
    """A batch that is not compared with samples alone."""
    return Batch(lens.specimen, [lens.prepare(value) for value in inputs])


def alone(lens: tl.Lens, value, method: str, out_token: int | None = -1, target=None, **options) -> tl.TokenMap:
    T = lens(value)
    pools = T.operator.recording.pools and method == "tensor.in_class"
    return T.map(method, None if pools else out_token, target, **options)


def error(one: tl.TokenMap, other: tl.TokenMap) -> float:
    assert one.in_tokens == other.in_tokens and one.out_tokens == other.out_tokens
    difference = (one.scores.double() - other.scores.double()).norm() / other.scores.double().norm().clamp_min(1e-30)
    share = (one.bias_share.double() - other.bias_share.double()).abs().nan_to_num().max()
    return max(float(difference), float(share))


def same(lens: tl.Lens, inputs, found, method: str = "tensor.in_out", **options) -> bool:
    pairs = zip(inputs, found, strict=True)
    return all(error(one, alone(lens, value, method, **options)) < 1e-12 for value, one in pairs)


# Each is what it is alone --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "attention"), CASES)
def test_every_method_of_mixed_lengths(name, attention):
    model, tolerance = zoo.build(name, attention), 1e-12
    if zoo.ZOO[name].casts:
        model, tolerance = model.float(), 2e-5
    lens, inputs = tl.Lens(model), ids()
    batch, tensors = made(lens, inputs), [lens(value) for value in inputs]
    for method in TOGETHER:
        pending = batch.begin(method, -1)
        assert pending is not None, method
        out_token = None if method == "tensor.in_class" and tensors[0].operator.recording.pools else -1
        for T, one in zip(tensors, pending(), strict=True):
            assert error(one, T.map(method, out_token)) < tolerance, method


@pytest.mark.parametrize("method", ["tensor.in_class", "tensor.in_out", "tensor.norm", "rollout.glob_enc"])
@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_padding_is_silent(name, method):
    lens, inputs = tl.Lens(zoo.build(name)), ids()
    options: dict[str, Any] = {"probes": 4} if method == "tensor.norm" else {}
    found = list(lens.maps(inputs, method, **options))
    assert [len(one.in_tokens) for one in found] == list(LENGTHS) and same(lens, inputs, found, method, **options)
    assert not any("batches" in one.meta for one in found)


@pytest.mark.parametrize("method", TOGETHER)
def test_a_batch_of_one_is_the_sample(method):
    lens = tl.Lens(zoo.build("gpt2"))
    options: dict[str, Any] = {"probes": 4} if method == "tensor.norm" else {}
    [value] = ids((5,))
    [found] = lens.batch([value]).maps(method, **options)
    assert error(found, alone(lens, value, method, **options)) < 1e-12


def test_every_method_goes_for_all_samples_at_once():
    assert set(TOGETHER) == tl.METHODS.keys()


def test_a_method_of_single_samples_goes_through_the_same_door(monkeypatch):
    monkeypatch.setitem(tl.METHODS, "mean.attn", replace(tl.METHODS["mean.attn"], takes_samples=False))
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids((3, 3, 2))
    for value, one in zip(inputs, lens.maps(inputs, "mean.attn"), strict=True):
        assert error(one, alone(lens, value, "mean.attn")) < 1e-12


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_float32_agrees_to_rounding(attention):
    lens, inputs = tl.Lens(zoo.build("gpt2", attention, torch.float32)), ids()
    for method in ("tensor.in_class", "tensor.in_out", "tensor.contribution"):
        for value, one in zip(inputs, lens.maps(inputs, method), strict=True):
            assert one.scores.dtype is torch.float32 and error(one, alone(lens, value, method)) < 1e-4


def test_contributions_of_blocks_that_do_not_fold_are_those_of_folded_ones(monkeypatch):
    lens, inputs = tl.Lens(zoo.build("llama", "sdpa").float()), ids()
    folded = list(lens.maps(inputs, "tensor.contribution"))
    monkeypatch.setattr(FrozenOperator, "folded", None)
    for one, other in zip(folded, lens.maps(inputs, "tensor.contribution"), strict=True):
        assert "batches" not in one.meta | other.meta and error(one, other) < 1e-5


def test_the_next_batch_is_begun_before_the_last_is_waited_for(monkeypatch):
    order, begin = [], Batch.begin

    def watched(self, *args, **options):
        if len(self) == 1:  # the sample that is also mapped alone
            return begin(self, *args, **options)
        number = len(order)
        pending: Any = begin(self, *args, **options)
        order.append(f"begun {number}")
        return lambda: (order.append(f"finished {number}"), pending())[1]

    monkeypatch.setattr(Batch, "begin", watched)
    list(tl.Lens(zoo.build("gpt2")).maps(ids((3,) * 6), "tensor.in_out", batch_size=2))
    assert order == ["begun 0", "begun 1", "finished 0", "begun 3", "finished 1", "finished 3"]


def test_a_batch_begun_before_the_check_failed_is_made_again(monkeypatch):
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids((4,) * 9)
    expected = [alone(lens, value, "tensor.in_out") for value in inputs]
    begin = Batch.begin

    def faulty(self, *args, **options):
        pending: Any = begin(self, *args, **options)
        factor = 2 if len(self) > 1 else 1  # batches are wrong
        return lambda: [msgspec.structs.replace(one, scores=factor * one.scores) for one in pending()]

    monkeypatch.setattr(Batch, "begin", faulty)
    found = list(lens.maps(inputs, "tensor.in_out", batch_size=3))
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < 1e-12 and "one by one" in one.meta["batches"]


@pytest.mark.parametrize(
    ("method", "place", "name"), [("tensor.in_class", Recording, "pull"), ("tensor.contribution", folding, "_push")]
)
def test_memory_that_runs_out_on_the_way_halves_the_batch(method, place, name, monkeypatch):
    lens, inputs, whole, sizes = tl.Lens(zoo.build("llama", "eager")), ids((4,) * 6), getattr(place, name), []

    def short(*arguments, **options):
        n = len(arguments[1])
        sizes.append(n)
        if n > 3:
            raise torch.OutOfMemoryError("none left")
        return whole(*arguments, **options)

    monkeypatch.setattr(place, name, short)
    found = list(lens.maps(inputs, method))
    monkeypatch.undo()
    assert 6 in sizes and 3 in sizes
    for value, one in zip(inputs, found, strict=True):
        assert error(one, alone(lens, value, method)) < 1e-6  # Llama's norm is float32


def test_pictures():
    lens = tl.Lens(zoo.build("vit"))
    inputs = [zoo.sample("vit", seed=seed) for seed in range(3)]
    for method in ("tensor.in_class", "tensor.in_out"):
        for value, one in zip(inputs, lens.maps(inputs, method, out_token=0), strict=True):
            assert error(one, alone(lens, value, method, 0)) < 1e-12


def test_padding_on_either_side_is_dropped_first():
    lens, (long, short) = tl.Lens(zoo.build("gpt2")), ids((5, 3))
    sides = {"left": [0, 0, *short], "right": [*short, 0, 0]}
    for side, padded in sides.items():
        mask = [0, 0, 1, 1, 1] if side == "left" else [1, 1, 1, 0, 0]
        inputs = [{"input_ids": [long], "attention_mask": [[1] * 5]}, {"input_ids": [padded], "attention_mask": [mask]}]
        found = list(lens.maps(inputs, "tensor.in_class"))
        assert error(found[1], alone(lens, short, "tensor.in_class")) < 1e-12


@pytest.mark.parametrize("target", [None, 9, (9, 17)])
def test_targets_and_contrasts(target):
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids()
    for value, one in zip(inputs, lens.maps(inputs, "tensor.in_class", target=target), strict=True):
        other = alone(lens, value, "tensor.in_class", target=target)
        assert error(one, other) < 1e-12 and one.meta["target"] == other.meta["target"]
        assert one.meta["prediction"] == lens(value).predictions(1)[0].name
        assert one.meta["logit"] == pytest.approx(other.meta["logit"], rel=1e-12)


def test_the_last_output_is_each_samples_own():
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids()
    assert [one.meta["out_positions"] for one in lens.maps(inputs)] == [[n - 1] for n in LENGTHS]
    firsts = list(lens.maps(inputs, out_token=0))
    assert all(
        error(one, alone(lens, value, "tensor.in_out", 0)) < 1e-12 for value, one in zip(inputs, firsts, strict=True)
    )
    with pytest.raises(tl.InputError, match="-1 .* 0|out_token|output"):
        list(lens.maps(inputs, out_token=2))  # the last sample has one token only


@pytest.mark.parametrize("batch_size", [1, 2, 100, None])
def test_any_batch_size_keeps_the_order(batch_size):
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids((3, 6, 2, 4, 1, 3))
    found = list(lens.maps(inputs, "tensor.in_class", batch_size=batch_size))
    assert [one.in_tokens for one in found] == [tuple(map(str, value)) for value in inputs]
    assert (
        max(error(one, alone(lens, value, "tensor.in_class")) for value, one in zip(inputs, found, strict=True)) < 1e-12
    )


def test_a_batch_gives_the_tensors_too():
    lens, inputs = tl.Lens(zoo.build("gpt2")), ids((4, 6, 6))
    batch = lens.batch(inputs)
    assert len(batch) == 3 and len(batch[:2]) == 2
    second = batch[2]
    assert second is batch[2] and second.certificate().passed
    assert second.predictions(3) == lens(inputs[2]).predictions(3)
    assert error(second.map("tensor.norm", -1), batch.maps("tensor.norm")[2]) < 1e-12
    for value, T in zip(inputs, batch, strict=True):
        assert torch.allclose(T.output, lens(value).output, rtol=1e-12, atol=1e-14)
        assert float((T @ T.input + T.bias - T.output).norm() / T.output.norm()) < 1e-12
    with pytest.raises(tl.InputError, match="sample"):
        batch[3]
    with pytest.raises(tl.InputError, match="at least one"):
        lens.batch([])


# Models that would give other numbers --------------------------------------------------------------------------------


class Mixing(nn.Module):
    """Blocks in a row, after each of which something happens between samples or between places."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.embed = nn.Embedding(zoo.VOCABULARY, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
            x = x - 0.5 * x.mean(0, keepdim=True) if self.what == "samples" else x + x.mean(1, keepdim=True)
        return self.head(x)


def mixing(what: str) -> tl.Lens:
    return tl.Lens(zoo.randomise(Mixing(what)).double().eval())


@pytest.mark.parametrize(
    ("what", "lengths", "said"), [("samples", (4, 4, 4, 4), "one by one"), ("places", (4, 6, 6, 4, 2), "by length")]
)
def test_models_that_mix_are_noticed(what, lengths, said):
    lens, inputs = mixing(what), ids(lengths)
    found = list(lens.maps(inputs, "tensor.in_class"))
    for value, one in zip(inputs, found, strict=True):
        assert error(one, alone(lens, value, "tensor.in_class")) < 1e-12
        assert said in one.meta["batches"]
    with pytest.raises(tl.InputError, match="mixes samples or reacts to padding"):
        lens.batch(inputs)
    with tf32(True):
        assert all(said in one.meta["batches"] for one in lens.maps(inputs, "tensor.in_class"))


# Bounds --------------------------------------------------------------------------------------------------------------


def test_out_of_memory_halves_the_batch(monkeypatch):
    lens, inputs, sizes, make = tl.Lens(zoo.build("gpt2")), ids((4,) * 9), [], batches.Batch.__init__

    def small_memory(self, specimen, prepared):
        sizes.extend([len(prepared)] if len(prepared) > 1 else [])  # of one: the sample that is also mapped alone
        if len(prepared) > 3:
            raise torch.OutOfMemoryError("no room")
        make(self, specimen, prepared)

    monkeypatch.setattr(batches.Batch, "__init__", small_memory)
    found = list(lens.maps(inputs, batch_size=8))
    assert sizes == [8, 4, 2, 2, 2, 2] and len(found) == 9  # the last one goes alone
    assert all(
        error(one, alone(lens, value, "tensor.in_out")) < 1e-12 for value, one in zip(inputs, found, strict=True)
    )


def test_an_endless_iterator_is_read_as_far_as_needed(monkeypatch):
    monkeypatch.setattr(batches, "WINDOW", 2)
    lens, read = tl.Lens(zoo.build("gpt2")), []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield ids((3,), seed=i)[0]

    maps = lens.maps(endless(), batch_size=2)
    assert read == []
    assert len(list(itertools.islice(maps, 5))) == 5 and len(read) == 8  # two windows of two batches of two


def test_nothing_in_nothing_out():
    assert list(tl.Lens(zoo.build("gpt2")).maps([])) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "tensor.in_clas"}, "Did you mean"),
        ({"method": "tensor.in_out", "target": 3}, "takes no target"),
        ({"method": "tensor.in_class", "probes": 3}, "option of `tensor.contribution`"),
        ({"batch_size": 0}, "batch_size"),
        ({"on_error": "forget"}, "on_error"),
    ],
)
def test_mistakes_are_named_before_work_begins(options, message):
    with pytest.raises(tl.TensorLensError, match=message):
        tl.Lens(zoo.build("gpt2")).maps(ids(), **options)


def test_a_target_needs_a_head():
    with pytest.raises(tl.MethodError, match="no head"):
        list(tl.Lens(zoo.build("bert")).maps(ids(), "tensor.in_class"))


@pytest.mark.parametrize("method", [name for name, one in tl.METHODS.items() if one.takes_target])
def test_every_method_that_takes_a_target_takes_one_for_each_sample(method):
    lens, targets = tl.Lens(zoo.build("gpt2")), [(3, 4), 5, (6, 3)]
    inputs = ids((4, 4, 3))
    found = made(lens, inputs).maps(method, targets=targets)
    for value, target, one in zip(inputs, targets, found, strict=True):
        assert error(one, alone(lens, value, method, target=target)) < 1e-12
        assert error(one, alone(lens, value, method)) > 1e-3  # which explains the prediction


def test_a_batch_takes_a_target_for_each_sample():
    lens = tl.Lens(zoo.build("llama"))
    batch = lens.batch([zoo.sample("llama"), zoo.sample("llama", seed=1), zoo.sample("llama", seed=2)])
    targets = [(3, 4), 5, (6, 3)]
    for i, found in enumerate(batch.maps("tensor.in_class", targets=targets)):
        alone = batch[i].map("tensor.in_class", out_token=-1, target=targets[i])
        assert torch.allclose(found.scores, alone.scores) and found.meta["target"] == alone.meta["target"]
    with pytest.raises(tl.InputError, match="one for each of the 3 samples; got 2"):
        batch.maps("tensor.in_class", targets=targets[:2])


@pytest.mark.parametrize("method", ["tensor.norm", "tensor.contribution"])
def test_a_sketch_in_a_batch_is_that_of_the_sample(method):
    lens, sample = tl.Lens(zoo.build("llama")), zoo.sample("llama")
    alone = lens(sample).map(method, out_token=-1, probes=4).scores
    for batch in ([sample], [sample, sample[:4]]):
        found = lens.batch(batch).maps(method, probes=4)[0]
        assert torch.allclose(found.scores, alone, rtol=1e-4)


def test_batches_grow_once_the_first_has_shown_what_a_token_takes(monkeypatch):
    lens, sizes = tl.Lens(zoo.build("llama")), []
    texts = [zoo.sample("llama")] * 24
    make = batches.Batch.__init__

    def counted(self, specimen, prepared):
        sizes.append(len(prepared))
        make(self, specimen, prepared)

    monkeypatch.setattr(batches.Batch, "__init__", counted)
    monkeypatch.setattr(batches, "free_bytes", lambda device: 2**20)
    monkeypatch.setattr(batches.DatasetMaps, "_guessed_bytes", 2**20 / 4 / len(texts[0]) / 3)  # three samples
    found = list(lens.maps(texts, "tensor.in_class", progress=False))
    assert sizes[0] <= 3 < max(sizes[1:]) and len(found) == 24
    torch.testing.assert_close(found[-1].scores, lens(texts[0]).map("tensor.in_class", -1).scores)
