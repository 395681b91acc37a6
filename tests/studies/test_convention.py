"""One convention for all studies: options by record or by name, one result, and no run continued on other data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import zoo
from killed_studies import STUDIES
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, lens_on

import tensorlens as tl
from tensorlens.errors import InputError
from tensorlens.studies import (
    FidelityOptions,
    PerturbationOptions,
    RelationOptions,
    StudyResult,
    fidelity,
    perturbation,
    relations,
)

FAST = {"sizes": (0.1,), "n_random": 1, "n_token": 0, "n_probes": 1, "stride": 0}


def test_options_by_record_and_by_name_are_the_same_run(tmp_path):
    one = perturbation(lens_on(), TEXTS[:2], tmp_path, progress=False, methods="tensor.in_out", seed=3)
    record = PerturbationOptions(methods=["tensor.in_out"], seed=3)
    two = perturbation(lens_on(), TEXTS[:2], tmp_path, progress=False, options=record)
    three = perturbation(
        lens_on(), TEXTS[:2], tmp_path, progress=False, options=PerturbationOptions(seed=3), methods=["tensor.in_out"]
    )
    assert one == two == three
    assert isinstance(one, StudyResult)
    assert one["n_samples"] == one.summary["n_samples"] == 2
    assert one.report == tmp_path / "report.html" and one.report.is_file()
    assert json.loads((tmp_path / "config.json").read_text())["settings"]["methods"] == ["tensor.in_out"]


@pytest.mark.parametrize(
    ("study", "record"),
    [(perturbation, FidelityOptions()), (relations, PerturbationOptions()), (fidelity, RelationOptions())],
)
def test_wrong_options_are_refused_before_anything_is_done(tmp_path, unchecked, study, record):
    with pytest.raises(InputError, match="got 'sede'. Did you mean 'seed'"):
        study(lens_on(), TEXTS, tmp_path / "run", sede=1)
    with pytest.raises(InputError, match=f"got {type(record).__name__}"):
        study(lens_on(), TEXTS, tmp_path / "run", options=record)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", [PerturbationOptions, RelationOptions, FidelityOptions])
def test_records_are_frozen_and_by_name_only(kind):
    with pytest.raises(AttributeError):
        kind().seed = 1
    with pytest.raises(TypeError):
        kind(1)


def test_areas_are_a_perturbation_study_s():
    with pytest.raises(InputError, match="only available for perturbation studies"):
        StudyResult(folder=Path(), summary={"n_inputs": 1}).areas()


@pytest.mark.parametrize("name", STUDIES)
def test_every_file_of_a_run_is_strict_json(tmp_path, name):
    STUDIES[name](tmp_path / "run")
    for path in [*(tmp_path / "run").glob("*.json"), *(tmp_path / "run").glob("*.jsonl")]:
        texts = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        assert texts
        for text in texts:
            json.loads(text, parse_constant=lambda constant, path=path: pytest.fail(f"{constant} in {path}"))


# Other data ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_templates": ["{} were"]},
        {"samples": [{"subject": "apple", "object": "pink"}, {"subject": "grape", "object": "blue"}]},
    ],
)
def test_relations_whose_templates_or_facts_changed_are_refused(tmp_path, change):
    path = write_relation(tmp_path / "data" / "fruit.json")
    options = RelationOptions(n_splits=1, top_k=300, min_test=2, max_test=2, with_lre=False)
    before = relations(tiny_lens(), tmp_path / "data", tmp_path / "run", options=options, progress=False)
    write_relation(path, **change)
    with pytest.raises(InputError, match=r"relations\.commonsense/fruit is .* there and .* here"):
        relations(tiny_lens(), tmp_path / "data", tmp_path / "run", options=options, progress=False)
    write_relation(path)
    again = relations(tiny_lens(), tmp_path / "data", tmp_path / "run", options=options, progress=False)
    assert again == before


def test_fidelity_at_other_ids_is_refused(tmp_path):
    lens, ids = tl.Lens(zoo.build("bert"), name="tiny"), list(zoo.sample("bert"))
    fidelity(lens, ids, tmp_path, progress=False, **FAST)
    with pytest.raises(InputError, match="inputs is .* there and .* here"):
        fidelity(lens, [*ids[:-1], ids[-1] - 1], tmp_path, progress=False, **FAST)
