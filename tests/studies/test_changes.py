"""Samples measured together: the same numbers as alone, from fewer and fuller batches."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from tiny_study import TEXTS, lens_on, study

from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_samples import Texts
from tensorlens.studies.perturbation_study import PerturbationOptions, changes_of, groups_of
from tensorlens.studies.plain_model import PlainModel


class Counted(PlainModel):
    """Counts the rows of each batch."""

    sizes: list[int]

    def _run(self, inputs, watch):
        self.sizes.append(len(next(iter(inputs.values()))))
        return super()._run(inputs, watch)


def prepared(name: str, texts: list[str], n_copies: int = 5):
    subject = Texts(lens_on(name), read_dataset(texts), PerturbationOptions(n_tokens=16))
    plain = subject.plain = Counted(subject.lens, batch_size=16)
    plain.sizes = []
    loaded = {index: subject.load(index) for index in range(len(subject))}
    masks = {}
    for index, sample in loaded.items():
        masks[index] = torch.zeros(n_copies, sample.n_tokens, dtype=torch.bool)
        for copy in range(n_copies):
            masks[index][copy, 1 : 2 + copy % (sample.n_tokens - 2)] = True
    clean = {index: plain.run(sample.inputs) for index, sample in loaded.items()}
    plain.sizes.clear()

    def changes(replacement: str, *only: int) -> dict[int, Any]:
        some = {index: loaded[index] for index in only or loaded}
        return {**changes_of(subject, some, clean, masks, replacement)}

    return plain, masks, changes


@pytest.mark.parametrize("replacement", ["token", "zero", "mean", "attention", "delete"])
@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
def test_copies_of_several_samples_share_batches_and_change_nothing(name, replacement):
    plain, masks, changes = prepared(name, [*TEXTS[:2], *TEXTS[3:], TEXTS[1]])
    together = changes(replacement)
    shared = list(plain.sizes)
    plain.sizes.clear()
    alone = {index: changes(replacement, index)[index] for index in masks}
    assert sum(shared) == sum(plain.sizes) == 5 * len(masks)
    assert len(shared) < len(plain.sizes) and max(shared) <= 16
    for index, found in together.items():
        assert set(found) == {"hs_mse", "abs_aopc", "aopc"}
        for metric in found:
            torch.testing.assert_close(found[metric], alone[index][metric], rtol=1e-4, atol=1e-7)
            assert bool(found[metric].any())


def test_a_sample_that_cannot_be_copied_says_why_and_the_others_are_measured():
    _, masks, changes = prepared("gpt2", TEXTS[:2])
    masks[0][2] = True
    gone, found = changes("delete").values()
    assert "leaves no input" in gone
    assert set(found) == {"hs_mse", "abs_aopc", "aopc"}


def test_groups_are_of_like_length_and_cover_every_sample_once():
    subject = Texts(lens_on("gpt2"), read_dataset(TEXTS * 6), PerturbationOptions(n_tokens=16))
    groups = groups_of(subject, PerturbationOptions(group_size=4))
    lengths = [[subject.length(index) for index in group] for group in groups]
    assert sorted(index for group in groups for index in group) == list(range(len(subject)))
    assert lengths == sorted(lengths, reverse=True) and max(map(len, groups)) == 4
    assert len(groups_of(subject, PerturbationOptions())) >= 8


def samples_of(folder, group_size):
    study(folder, "gpt2", group_size=group_size, replacements=("token", "delete"), presets=("paper-like",))
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return samples_of(tmp_path_factory.mktemp("one"), 1)


@pytest.mark.parametrize("group_size", [2, 6])
def test_a_study_in_groups_finds_what_it_finds_one_by_one(tmp_path, one, group_size):
    many = samples_of(tmp_path, group_size)
    assert [record["name"] for record in one] == [record["name"] for record in many]
    for alone, together in zip(one, many, strict=True):
        for condition, cells in alone["conditions"].items():
            for method, cell in cells.items():
                found = together["conditions"][condition][method]
                assert found.keys() == cell.keys()  # "missing" where all tokens of a text would go
                for order in found.keys() & {"most", "least"}:
                    for metric, curve in cell[order].items():
                        assert found[order][metric] == pytest.approx(curve, rel=1e-3, abs=1e-7)


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_a_batch_is_halved_when_memory_runs_out_on_any_device(error):
    class Small(Counted):
        def _run(self, inputs, watch):
            found = super()._run(inputs, watch)
            if self.sizes[-1] > 2:
                raise error
            return found

    plain, ids = Small(lens_on("bert"), batch_size=8), torch.arange(5, 29).reshape(8, 3)
    plain.sizes = []
    found = plain.run({"input_ids": ids})
    assert plain.sizes == [8, 4, 2, 2, 2, 2]
    assert torch.allclose(
        found.states, PlainModel(lens_on("bert"), batch_size=8).run({"input_ids": ids}).states, atol=1e-6
    )
