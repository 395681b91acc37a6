"""Claims around T: what baselines in its place allow, pairs of words by both embeddings, checkpoints compared."""

from __future__ import annotations

import json

import pytest
import torch
from tiny_language import save_tiny, tiny_lens
from tiny_study import TEXTS, lens_on
from typer.testing import CliRunner

from tensorlens.app.cli import app
from tensorlens.studies import word_pairs
from tensorlens.studies.fidelity_study import alternative_bounds


def test_a_baseline_in_the_place_of_T_has_a_norm_and_an_error_at_the_input_itself():
    lens = lens_on("bert")
    T = lens(TEXTS[0])
    found = alternative_bounds(T)
    assert len(found) == 8
    with torch.no_grad():
        attentions = lens.model(**lens.prepare(TEXTS[0]).arguments, output_attentions=True).attentions
    R = torch.eye(len(T.tokens), dtype=torch.float64)
    steps = [(one[0].mean(0).double() + torch.eye(len(R))) / 2 for one in attentions]
    for step in steps:
        R = step @ R
    one = found["rollout.attn"]
    assert one["norm"] == pytest.approx(float(torch.linalg.matrix_norm(R, 2)), rel=1e-5)
    product = sum(float(torch.linalg.matrix_norm(step, 2).log10()) for step in steps)
    assert one["log10_blocks"] == pytest.approx(product, rel=1e-4)
    x, y = T.input.double(), T.output.double()
    assert one["at_x"] == pytest.approx(float((R @ x - y).norm() / y.norm()), rel=1e-5)
    assert all(
        numbers["at_x"] > 0.01 and numbers["norm"] <= 1.001 * 10 ** numbers["log10_blocks"]
        for numbers in found.values()
    )


def test_pairs_of_words_are_the_largest_entries_between_both_embeddings():
    lens = tiny_lens("llama")
    T = lens("the cat")
    E, U = lens.model.get_input_embeddings().weight, lens.model.get_output_embeddings().weight
    with torch.no_grad():
        table = torch.einsum("wd,de,ve->wv", U, T.rows(-1)[:, 2], E)
    best = table.flatten().topk(5)
    found = word_pairs(T, in_token=2, k=5)
    assert [score for *_, score in found] == pytest.approx(best.values.tolist(), rel=1e-4)
    v = int(best.indices[0]) % len(E)
    assert found[0][0].strip("“” ") == lens.processor.decode([v]).strip()


def test_checkpoints_of_a_training_are_compared(tmp_path):
    for name in ("step1", "step2"):
        save_tiny(tmp_path / "run" / name, "llama" if name == "step1" else "neox")
    given = ["fidelity", str(tmp_path / "run"), "the cat", "--out", str(tmp_path / "out"), "--directions", "1"]
    result = CliRunner().invoke(app, [*given, "--revisions", "step1,step2", "--stride", "0"])
    assert result.exit_code == 0, result.output + repr(result.exception)
    assert "step1" in result.output and "step2" in result.output
    for name in ("step1", "step2"):
        summary = json.loads((tmp_path / "out" / name / "summary.json").read_text())
        assert f"{summary['norms']['measured']:.4g}" in result.output
    missing = CliRunner().invoke(app, [*given, "--revisions", "step1,step9"])
    assert "step9" in str(missing.exception) and "Its checkpoints: step1, step2" in str(missing.exception)
