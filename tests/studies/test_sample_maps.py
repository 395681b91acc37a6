"""The maps of a group of samples are those of each alone, for every method and member, from one recording."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import zoo
from msgspec.structs import replace
from tiny_study import TEXTS, study, tokenizer

import tensorlens as tl
from tensorlens.batches import Batch
from tensorlens.errors import InputError
from tensorlens.specimen import Specimen
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_samples import Texts
from tensorlens.studies.perturbation_study import GroupMaps, PerturbationOptions

MEMBERS = [f"tensor.in_class@{member}" for member in ("paper", "half_gate", "attn_lrp", "jacobian")]


def group(name: str) -> tuple[tl.Lens, list]:
    lens = tl.Lens(zoo.build(name), tokenizer(wrapped=name.startswith("bert")))
    subject = Texts(lens, read_dataset(TEXTS), PerturbationOptions(n_tokens=12, min_tokens=3))
    return lens, [subject.load(index) for index in range(len(subject))]


def maps_of(lens: tl.Lens, samples: list, methods: list[str], watch: Any = "last") -> list[Any]:
    return GroupMaps(lens, methods, PerturbationOptions(watch=watch)).of(samples)


def assert_same(one: tl.TokenMap, other: tl.TokenMap) -> None:
    assert one.out_tokens == other.out_tokens
    torch.testing.assert_close(one.scores, other.scores, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_all_methods_of_a_group_are_those_of_each_sample(name):
    lens, samples = group(name)
    methods, watch = list(tl.METHODS), "last" if name == "gpt2" else "first"
    for sample, found in zip(samples, maps_of(lens, samples, methods, watch), strict=True):
        assert list(found) == methods
        [alone] = maps_of(lens, [sample], methods, watch)
        for method, one in alone.items():
            assert_same(found[method], one)
            assert "batches" not in found[method].meta


def test_a_member_behind_an_at_is_a_lens_with_its_rules():
    lens, samples = group("gpt2")
    found = maps_of(lens, samples, MEMBERS)
    for name in MEMBERS:
        member = name.partition("@")[2]
        rules = tl.Rules(gate="half") if member == "half_gate" else getattr(tl.Rules, member)()
        own = tl.Lens(lens.model, lens.processor, rules=rules)
        for maps, sample in zip(found, samples, strict=True):
            expected = own(sample.prepared).map("tensor.in_class", out_token=-1)
            assert_same(maps[name], expected)
            assert maps[name].meta["rules"] == rules.as_dict()


def test_a_method_that_is_wrong_together_goes_one_by_one(monkeypatch):
    lens, samples = group("gpt2")
    methods = ["tensor.norm", "tensor.in_out"]
    expected = maps_of(lens, samples, methods)
    begin = Batch.begin

    def wrong(batch, method, *args, **named):
        finish = begin(batch, method, *args, **named)
        if method != "tensor.norm" or finish is None or len(batch) == 1:
            return finish
        return lambda: [replace(one, scores=2 * one.scores) for one in finish()]

    monkeypatch.setattr(Batch, "begin", wrong)
    found = maps_of(lens, samples, methods)
    for one, other in zip(found, expected, strict=True):
        assert_same(one["tensor.norm"], other["tensor.norm"])
        assert "samples go one by one" in one["tensor.norm"].meta["batches"]
        assert "batches" not in one["tensor.in_out"].meta


def test_samples_that_cannot_be_recorded_together_are_recorded_alone(monkeypatch):
    lens, samples = group("gpt2")
    record = Specimen.record

    def refuse(specimen, arguments, *, n_samples=1):
        if n_samples > 1:
            raise tl.NotLinearError("several")
        return record(specimen, arguments, n_samples=n_samples)

    monkeypatch.setattr(Specimen, "record", refuse)
    found = maps_of(lens, samples, ["tensor.in_out"])
    assert all("several" in one["tensor.in_out"].meta["batches"] for one in found)


def test_members_in_a_run(tmp_path):
    methods = [*MEMBERS, "tensor.in_class", "control.random"]
    summary = study(tmp_path, "gpt2", methods=methods).summary
    found = summary["conditions"]["strict, token"]["most"]["hs_mse"]["methods"]
    assert set(found) == set(methods)
    assert found["tensor.in_class@paper"] == found["tensor.in_class"]
    assert found["tensor.in_class@attn_lrp"]["auc"] != found["tensor.in_class"]["auc"]
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert "tensor.in_class@jacobian" in records[0]["conditions"]["strict, token"]


@pytest.mark.parametrize("name", ["tensor.in_class@attn_lrb", "rollout.attn@attn_lrp", "tensor.in_clas@jacobian"])
def test_members_that_do_not_exist(name):
    with pytest.raises(InputError, match="@|Did you mean"):
        PerturbationOptions(methods=(name,))
