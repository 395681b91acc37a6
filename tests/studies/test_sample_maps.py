"""The maps of a group of samples are those of each alone, for every method and member, from one recording."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import zoo
from tiny_study import TEXTS, study, tokenizer

import tensorlens as tl
from tensorlens import batch as batches
from tensorlens.batch import difference
from tensorlens.errors import InputError
from tensorlens.folding import pull
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.sample_maps import SampleMaps
from tensorlens.studies.perturbation_study.subjects import Texts

MEMBERS = [f"tensor.in_class@{member}" for member in ("paper", "half_gate", "attn_lrp", "jacobian")]


def group(name: str) -> tuple[tl.Lens, list]:
    lens = tl.Lens(zoo.build(name), tokenizer(wrapped=name.startswith("bert")))
    subject = Texts(lens, read_dataset(TEXTS), n_tokens=12, min_tokens=3)
    return lens, [subject.load(index) for index in range(len(subject))]


def alone(maps: SampleMaps, samples: list) -> list:
    for work in maps.works:
        work.together = "one by one"
    return maps.of(samples)


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_all_methods_of_a_group_are_those_of_each_sample(name, monkeypatch):
    lens, samples = group(name)
    out_token = -1 if name == "gpt2" else 0
    recorded, record = [], batches.record_samples
    monkeypatch.setattr(
        batches, "record_samples", lambda *args, **named: recorded.append(args[3]) or record(*args, **named)
    )
    maps = SampleMaps(lens, list(tl.METHODS), out_token=out_token)
    together = maps.of(samples)
    assert recorded == [len(samples)] and not maps.works[0].reason
    one_by_one = alone(SampleMaps(lens, list(tl.METHODS), out_token=out_token), samples)
    assert recorded == [len(samples)]
    for found, expected in zip(together, one_by_one, strict=True):
        assert list(found) == list(tl.METHODS)
        for method, one in expected.items():
            assert difference(found[method], one)[0] < 1e-12, method
            assert found[method].out_tokens == one.out_tokens


def test_a_member_behind_an_at_is_a_lens_with_its_rules():
    lens, samples = group("gpt2")
    found = SampleMaps(lens, MEMBERS, out_token=-1).of(samples)
    for name in MEMBERS:
        member = name.partition("@")[2]
        rules = tl.Rules(gate="half") if member == "half_gate" else getattr(tl.Rules, member)()
        own = tl.Lens(lens.model, lens.processor, rules=rules)
        for maps, sample in zip(found, samples, strict=True):
            expected = own(sample.value).map("tensor.in_class", out_token=-1)
            assert difference(maps[name], expected)[0] < 1e-12
            assert maps[name].meta["rules"] == rules.as_dict()


def test_samples_that_share_wrong_factors_are_noticed(monkeypatch):
    lens, samples = group("gpt2")
    methods = ["tensor.norm", "tensor.in_out"]
    expected = SampleMaps(lens, methods, out_token=-1).of(samples)
    whole = pull.fold_beside
    monkeypatch.setattr(pull, "fold_beside", lambda like, *rest: replace(whole(like, *rest), gain=like.gain))
    maps = SampleMaps(lens, methods, out_token=-1)
    found = maps.of(samples)
    assert maps.works[0].singly == {"tensor.norm"}
    for one, other in zip(found, expected, strict=True):
        assert difference(one["tensor.norm"], other["tensor.norm"])[0] < 1e-12
        assert "samples go one by one" in one["tensor.norm"].meta["batches"]
        assert one["tensor.in_out"].meta["engine"] == "batched" and "batches" not in one["tensor.in_out"].meta


def test_a_sample_that_cannot_be_recorded_leaves_the_others(monkeypatch):
    lens, samples = group("gpt2")
    whole = batches.record_samples

    def refuse(anatomy, arguments, *rest, **named):
        raise tl.NotLinearError("one of them")

    monkeypatch.setattr(batches, "record_samples", refuse)
    found = SampleMaps(lens, ["tensor.in_out"], out_token=-1).of(samples)
    assert whole is not batches.record_samples
    assert all(torch.isfinite(one["tensor.in_out"].scores).all() for one in found)


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
        PerturbationOptions(methods=[name])
