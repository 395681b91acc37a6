"""Every study on a fixed tiny run, beside the numbers that it gave before: a change of code must not change them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_language import tiny_lens, write_relation
from tiny_study import METHODS, TEXTS, lens_on, study, vision_lens, write_pictures

from tensorlens.studies import fidelity, judge, perturbation, relations

ENCODER = {
    "tensor.norm": 0.0435419814,
    "tensor.in_out": 0.0236523715,
    "rollout.attn": 0.145589244,
    "mean.w_attn_res_ln": 0.145561139,
    "rollout.glob_enc": 0.0405667412,
    "control.random": 0.0405969213,
    "control.recency": 0.0241771144,
}
DECODER = {
    "strict, token": (0.802212499, 1.22452891, 0.983295261, 0.865067419),
    "strict, zero": (0.889538549, 1.29934139, 0.936863398, 1.05860339),
    "strict, mean": (0.971170908, 1.24508333, 1.0397148, 0.90170223),
    "strict, attention": (0.870451257, 1.25331571, 0.908282078, 1.0978717),
    "strict, delete": (0.935325467, 1.10125339, 0.907677675, 0.903072788),
    "paper-like, token": (0.967395969, 1.25723128, 1.03147949, 0.879972624),
    "paper-like, delete": (1.16164937, 1.13739667, 0.976715102, 1.11239582),
}
"""Of `tensor.in_out`, `tensor.in_class@attn_lrp`, `mean.attn` and `alti`."""
PICTURES = {
    "black": (0.0628796823, 0.0645114494),
    "mean": (0.0113404356, 0.0109232195),
    "blur": (0.0113404314, 0.0109232164),
}
"""Of `tensor.norm` and `rollout.attn`, the least relevant patches first."""
JUDGED = {
    "tensor.in_class@attn_lrp": 0.833333,
    "tensor.in_class": 0.777778,
    "tensor.in_out": 0.777778,
    "tensor.norm": 0.583333,
    "control.word_overlap": 0.529537,
    "mean.attn": 0.527778,
    "control.recency": 0.361111,
}
ROWS = (
    "the cat sat on a,mat,birds,cat\nseven tall grey,houses,fly,seven\nred green birds fly,over,while,birds\n"
    "red green birds fly,over,,nothing\n"
)


def near(value: float) -> object:
    """Up to what another machine rounds otherwise."""
    return pytest.approx(value, rel=1e-5)


def test_perturbation_of_an_encoder(tmp_path: Path):
    assert study(tmp_path).areas() == {name: near(area) for name, area in ENCODER.items()}


def test_perturbation_of_a_decoder(tmp_path: Path):
    methods = ["tensor.in_out", "tensor.in_class@attn_lrp", "mean.attn", "alti"]
    every = {"presets": ("strict", "paper-like"), "replacements": ("token", "zero", "mean", "attention", "delete")}
    result = study(tmp_path, "llama", methods=methods, **every)
    for condition, areas in DECODER.items():
        assert result.areas(condition) == {name: near(area) for name, area in zip(methods, areas, strict=True)}


def test_perturbation_of_pictures(tmp_path: Path):
    folder, how = write_pictures(tmp_path / "pictures"), {"grid": (0, 0.2, 0.4), "replacements": tuple(PICTURES)}
    result = perturbation(vision_lens(), folder, tmp_path / "run", methods=METHODS, progress=False, **how)
    for condition, (norm, attention) in PICTURES.items():
        areas = result.areas(condition, order="least")
        assert (areas["tensor.norm"], areas["rollout.attn"]) == (near(norm), near(attention))


def test_relations(tmp_path: Path):
    write_relation(tmp_path / "data" / "commonsense" / "fruit.json")
    sizes = {"n_splits": 3, "top_k": 300, "min_test": 2, "max_test": 2, "scales": (0.0, 1.0), "starts": (0, 1)}
    summary = relations(tiny_lens("neox"), tmp_path / "data", tmp_path / "run", progress=False, **sizes).summary
    found = {name: one["agreement"]["mean"] for name, one in summary["categories"]["all"]["methods"].items()}
    assert found["tensor.full.beta1@0"] == near(1 / 3) and found["tensor.full.fixed@1"] == near(1 / 2)
    assert found["lre.fixed@embedding"] == near(1 / 2) and found["lre.tuned@chosen"] == near(1 / 3)
    assert found["tensor.full.beta1@1"] == near(1 / 6) and found["control.mean_output"] == near(1 / 3)


def test_fidelity(tmp_path: Path):
    sizes = {"sizes": (0.1, 1.0), "n_random": 2, "n_token": 2, "n_probes": 2}
    texts = [TEXTS[0], TEXTS[1], TEXTS[5]]
    summary = fidelity(lens_on(), texts, tmp_path, progress=False, **sizes).summary
    assert summary["norms"]["measured"] == pytest.approx(7.134878584, rel=1e-4)
    assert summary["norms"]["relative_distance_to_jacobian"] == near(3.520401711)
    assert summary["norms"]["log10_weights"] == near(6.570973378)
    assert summary["kinds"]["random"]["curves"]["tensor"]["median"] == near([0.0569453625, 0.648597746])
    assert summary["properties"][0]["token_perplexity"] == near(3.842715370)


def test_judge(tmp_path: Path):
    (tmp_path / "animals.csv").write_text("prefix,good,bad,evidence\n" + 4 * ROWS)
    methods = tuple(JUDGED)
    found = judge(lens_on("llama"), tmp_path / "animals.csv", tmp_path / "run", progress=False, methods=methods)
    evidence = found["judges"]["evidence"]
    assert (evidence["n_measured"], evidence["n_problems"]) == (12, 4)
    ranks = evidence["measures"]["reciprocal_rank"]["methods"]
    assert {name: one["mean"] for name, one in ranks.items()} == {name: near(mean) for name, mean in JUDGED.items()}
