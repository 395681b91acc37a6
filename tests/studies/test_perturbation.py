"""The perturbation study as a whole: what it finds, what it refuses, what it survives."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_study import METHODS, TEXTS, lens_on, study, vision_lens, write_pictures

import tensorlens as tl
from tensorlens.errors import InputError, MethodError
from tensorlens.maps.methods import Method
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_report import perturbation_summary
from tensorlens.studies.perturbation_samples import Sample, Texts
from tensorlens.studies.perturbation_study import GroupMaps, PerturbationOptions, perturbation

TINY = str(Path(__file__).parents[1] / "tiny_study.py")


@pytest.fixture
def picture_folder(tmp_path):
    return write_pictures(tmp_path / "pictures")


# The whole path ------------------------------------------------------------------------------------------------------


def test_deleting_everything_is_a_gap_that_says_why(tmp_path):
    result = study(tmp_path, "gpt2", presets=("paper-like",), replacements=("delete", "token"), grid=(0.0, 0.5, 1.0))
    deleted, replaced = (result.summary["conditions"][f"paper-like, {how}"] for how in ("delete", "token"))
    assert {gap["reason"].split(".")[0] for gap in deleted["missing"].values()} == {
        "Deleting every token leaves no input"
    }
    assert "tensor.norm" in replaced["most"]["hs_mse"]["methods"]


def test_a_model_that_gives_no_number_is_skipped(tmp_path):
    lens = lens_on()
    with torch.no_grad():
        lens.model.get_input_embeddings().weight[7] = float("nan")  # "sat"
    result = perturbation(lens, ["the cat on a mat", "the cat sat"], tmp_path, methods=["control.recency"])
    assert (result.summary["n_measured"], result.summary["n_skipped"]) == (1, 1)


def test_an_encoder_with_texts_of_every_length(tmp_path):
    result = study(tmp_path, min_tokens=1)
    summary = result.summary
    assert (summary["n_samples"], summary["n_measured"], summary["n_skipped"]) == (6, 6, 0)
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    cell, copy = (records[i]["conditions"]["token"]["tensor.norm"] for i in (0, 4))
    assert cell == copy
    assert all(c[order]["hs_mse"][0] == 0 for c in (cell, copy) for order in ("most", "least"))
    assert set(result.areas()) == set(METHODS) - {"tensor.in_class"}
    gap = summary["conditions"]["token"]["missing"]["tensor.in_class"]
    assert gap["n"] == 6 and "no head" in gap["reason"]
    assert "abs_aopc" not in summary["conditions"]["token"]["most"]
    against = summary["conditions"]["token"]["most"]["hs_mse"]["tensor_against_baseline"]
    assert against["n"] == 6 and 0 <= against["probability"] <= 1
    page = result.report.read_text()
    assert "<svg" in page and "tensor.norm" in page and "no head" in page and "Run it again" in page
    assert "src=" not in page.replace('src="data:', "") and page.count("<svg") == len(result.summary["conditions"])
    assert "Maps of the first samples" in page and "data-tensorlens" in page
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "samples.jsonl",
        "summary.json",
        "report.html",
    }


def test_a_decoder_under_both_presets_and_two_replacements(tmp_path):
    result = study(tmp_path, "gpt2", presets=("strict", "paper-like"), replacements=("token", "attention"))
    assert set(result.summary["conditions"]) == {
        "strict, token",
        "strict, attention",
        "paper-like, token",
        "paper-like, attention",
    }
    assert result.summary["n_skipped"] == 1  # one token, which is the last
    found = result.summary["conditions"]["paper-like, token"]["most"]
    assert set(found) == {"hs_mse", "abs_aopc", "aopc"} and "tensor.in_class" in found["abs_aopc"]["methods"]


def test_presets_together_are_the_presets_alone_and_replace_nothing_twice(tmp_path, monkeypatch):
    run_masks, copies = [], Texts.copies

    def counted(self, sample, masks, replacement):
        run_masks.append(masks)
        return copies(self, sample, masks, replacement)

    monkeypatch.setattr(Texts, "copies", counted)
    texts = [text for text in TEXTS if " " in text]  # one token may go under one preset only
    both = study(tmp_path / "both", "gpt2", presets=("strict", "paper-like"), data=texts)
    n_together = sum(map(len, run_masks))
    assert all(len(masks.unique(dim=0)) == len(masks) for masks in run_masks)
    run_masks.clear()
    alone = {
        preset: study(tmp_path / preset, "gpt2", presets=(preset,), data=texts) for preset in ("strict", "paper-like")
    }
    assert n_together < sum(map(len, run_masks))
    for preset, result in alone.items():
        for condition, cells in result.summary["conditions"].items():
            assert condition.startswith(preset)
            for name, found in cells["most"]["hs_mse"]["methods"].items():
                of_both = both.summary["conditions"][condition]["most"]["hs_mse"]["methods"][name]
                assert of_both["curve"] == pytest.approx(found["curve"], rel=1e-5)


def test_a_classifier_has_probabilities(tmp_path):
    result = study(tmp_path, "bert-classifier", limit=2)
    assert result.areas(metric="abs_aopc").keys() == set(METHODS)


def test_pictures_one_of_them_broken(tmp_path, picture_folder):
    result = perturbation(
        vision_lens(),
        picture_folder,
        tmp_path / "run",
        methods=METHODS,
        replacements=("black", "mean", "blur"),
        progress=False,
    )
    summary = result.summary
    assert (summary["n_measured"], summary["n_skipped"]) == (3, 1)
    assert summary["skipped"][0]["name"] == "broken.png" and "cannot be read" in summary["skipped"][0]["reason"]
    assert set(summary["conditions"]) == {"black", "mean", "blur"}
    assert "broken.png" in result.report.read_text()


def test_a_method_that_fails_on_one_sample_loses_that_cell_only(tmp_path, monkeypatch):
    plain = tl.METHODS["rollout.attn"]

    def fails_on_short(question):
        if len(question.operator.input) == 6:
            raise MethodError("not this one")
        return plain.compute(question)

    monkeypatch.setitem(tl.METHODS, "rollout.attn", Method(name="rollout.attn", summary="", compute=fails_on_short))
    broken, whole = study(tmp_path / "broken").summary, None
    monkeypatch.undo()
    whole = study(tmp_path / "whole").summary
    found, expected = (summary["conditions"]["token"]["most"]["hs_mse"]["methods"] for summary in (broken, whole))
    assert found["rollout.attn"]["n"] == 5 and expected["rollout.attn"]["n"] == 6
    assert broken["conditions"]["token"]["missing"]["rollout.attn"]["reason"].endswith("not this one")
    assert {name: cell for name, cell in found.items() if name != "rollout.attn"} == {
        name: cell for name, cell in expected.items() if name != "rollout.attn"
    }


def test_wrong_choices_are_named(tmp_path):
    for options, message in (
        ({"methods": ["tensor.nrom"]}, "methods"),
        ({"replacements": ["black"]}, "replacements"),
        ({"presets": ["lax"], "name": "gpt2"}, "presets"),
        ({"min_tokens": 99}, "min_tokens"),
        ({"methods": ["tensor.nrom"]}, "Did you mean 'tensor.norm'"),
        ({"methods": []}, "methods.*none"),
        ({"presets": "paperlike"}, "Did you mean 'paper-like'"),
        ({"limit": 0}, "`limit` of at least 1; got 0"),
        ({"n_random": 0}, "n_random"),
        ({"norm_probes": -3}, "norm_probes"),
        ({"grid": (0.0, 0.1, math.nan)}, "grid"),
        ({"n_tokens": 2, "cut": "windows"}, "above the 2 special tokens"),
        ({"data": 3}, "Pass a list"),
    ):
        with pytest.raises(InputError, match=message):
            study(tmp_path / "x", **options)
    study(tmp_path / "run", limit=2)
    with pytest.raises(InputError, match="limit is 2 there and 3 here"):
        study(tmp_path / "run", limit=3)
    with pytest.raises(InputError, match="fingerprint"):
        study(tmp_path / "run", limit=2, data=[*TEXTS, "another"])


def test_another_model_of_the_same_name_is_refused(tmp_path):
    lens, options = lens_on(), {"methods": ["tensor.in_out"], "progress": False}
    perturbation(lens, TEXTS[:2], tmp_path, **options)
    perturbation(lens_on(), TEXTS[:2], tmp_path, **options)  # the same weights once more
    with torch.no_grad():
        next(lens.model.parameters()).mul_(1.5)
    with pytest.raises(InputError, match="weights is .* there and .* here"):
        perturbation(lens, TEXTS[:2], tmp_path, **options)


def test_another_picture_of_the_same_size_is_other_data(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"one picture")
    first = read_dataset(tmp_path).fingerprint
    path.write_bytes(b"two picture")
    assert read_dataset(tmp_path).fingerprint != first


def test_ranked_by_magnitude_position_is_not_recency(tmp_path):
    controls = ["control.position", "control.recency"]
    areas = study(tmp_path, "gpt2", methods=controls, absolute=True).areas()
    assert areas["control.position"] != pytest.approx(areas["control.recency"])
    assert "ranked by magnitude" in (tmp_path / "report.html").read_text("utf-8")


def test_where_nothing_could_be_measured_it_says_why(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    result = perturbation(vision_lens(), tmp_path / "broken.png", tmp_path / "run", methods=METHODS, progress=False)
    assert result.summary["n_measured"] == 0
    with pytest.raises(InputError, match="No sample could be measured; the first: .*cannot be read"):
        result.areas()


def test_the_report_of_few_samples_says_so(tmp_path):
    text = study(tmp_path, limit=2).report.read_text("utf-8")
    assert "With 2 samples they say little" in text and "`token` stands for [MASK]" in text


def test_the_model_is_left_in_its_mode(tmp_path):
    lens = lens_on()
    lens.model.train()
    perturbation(lens, TEXTS[:2], tmp_path, methods=["tensor.in_out"], progress=False)
    assert all(module.training for module in lens.model.modules())
    assert not any(module._forward_hooks for module in lens.model.modules())


# The summary ---------------------------------------------------------------------------------------------------------


def test_without_matplotlib_the_report_says_how_to_get_the_curves(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = study(tmp_path, data=TEXTS[:1], methods=["tensor.in_out"]).report.read_text("utf-8")
    assert "attention-tensorlens[plot]" in page and "<table>" in page


def test_a_method_that_is_better_on_every_sample_is_better_for_sure():
    noise = np.random.default_rng(0).random(40)
    records = [
        {
            "index": i,
            "n_tokens": 9,
            "conditions": {
                "token": {
                    "tensor.norm": {"most": {"hs_mse": [0.0, value + 0.1]}},
                    "rollout.attn": {"most": {"hs_mse": [0.0, value]}},
                }
            },
        }
        for i, value in enumerate(noise)
    ]
    summary = perturbation_summary(records, {"methods": ["tensor.norm", "rollout.attn"], "grid": [0.0, 0.3], "seed": 0})
    found = summary["conditions"]["token"]["most"]["hs_mse"]
    assert found["tensor_against_baseline"]["probability"] == 1.0
    assert found["tensor_against_baseline"]["advantage"] == pytest.approx(0.05)
    assert found["tensor_against_baseline"]["interval"] == pytest.approx([0.05, 0.05])  # paired: the noise cancels
    low, high = found["methods"]["tensor.norm"]["interval"]
    assert low < found["methods"]["tensor.norm"]["auc"] < high


# Interruptions and processes -----------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    folders = [str(Path(__file__).parents[1]), str(Path(tl.__file__).parents[1])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | more


@pytest.mark.large  # as `test_kills.py`, where no process imports torch for itself
def test_killed_at_a_random_moment_it_ends_with_the_same_summary(tmp_path):
    study(tmp_path / "whole")
    process = subprocess.Popen([sys.executable, TINY, str(tmp_path / "killed")], env=environment())
    samples = tmp_path / "killed" / "samples.jsonl"
    while process.poll() is None and not (samples.exists() and samples.stat().st_size):
        time.sleep(0.01)
    time.sleep(random.random() / 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    study(tmp_path / "killed")
    for name in ("summary.json", "samples.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.large
def test_two_processes_give_the_summary_of_one(tmp_path):
    lens = lens_on()
    for part in (lens.model, lens.processor):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    # Without GPUs too, `--multi_gpu` is what makes accelerate start several processes.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command = ["-m", "tensorlens", "perturb", str(tmp_path / "model"), "--data", str(tmp_path / "texts.txt"), "--out"]
    for start, name in (([sys.executable], "one"), (launch, "two")):
        subprocess.run([*start, *command, str(tmp_path / name)], check=True, env=environment(OMP_NUM_THREADS="1"))
    assert (tmp_path / "two" / "summary.json").read_bytes() == (tmp_path / "one" / "summary.json").read_bytes()


def test_in_out_of_the_mean_state_adds_up():
    """Its row and the share of the bias make up the square of the mean state."""
    lens = lens_on("gpt2")
    ids = torch.tensor([lens.processor(TEXTS[0])["input_ids"]])
    inputs, fixed = {"input_ids": ids}, frozenset[int]()
    sample = Sample(prepared=lens.prepare(inputs), inputs=inputs, n_tokens=ids.shape[1], fixed=fixed)
    [maps] = GroupMaps(lens, ["tensor.in_out"], PerturbationOptions(watch="mean")).of([sample])
    found, mean = maps["tensor.in_out"], lens({"input_ids": ids}).output.double().mean(0)
    assert float(found.scores.sum() / (1 - found.bias_share[0])) == pytest.approx(float(mean @ mean), rel=1e-5)
