"""`python -m bench judge`: from the command to the table, and from run folders to the pages of the documentation."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from bench.__main__ import app
from bench.judges import leaderboard
from bench.tables import fill
from tiny_study import lens_on
from typer.testing import CliRunner

ROWS = (
    "prefix,good,bad,evidence\nthe cat sat on a,mat,birds,cat\nseven tall grey,houses,fly,seven\nthe cat,sat,sat,cat\n"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """A finished run of a tiny decoder, as leaderboard.py expects it, and what the command printed."""
    folder = tmp_path_factory.mktemp("judge")
    lens = lens_on("llama")
    lens.model.float().save_pretrained(folder / "model")
    lens.processor.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "animals.csv").write_text(ROWS)
    arguments = [
        "judge",
        folder / "model",
        "--data",
        folder / "data",
        "--out",
        folder / "runs" / "tiny" / "evidence",
        "--methods",
        "tensor.in_class,tensor.in_class@attn_lrp,control.recency",
    ]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_the_table_and_the_rows_that_could_not_be_used(run):
    _, said = run
    for word in ("evidence:", "of 2 items measured", "animals.csv, row 3", "tensor.in_class@attn_lrp", "report.html"):
        assert word in said


def test_wrong_names_are_answered_before_torch(tmp_path):
    command = ["judge", "minilm", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--judges", "evidense"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code != 0 and "must be among evidence" in str(found.exception)


def test_pages_are_filled_from_the_runs(run, tmp_path, monkeypatch, capsys):
    folder, _ = run
    page = tmp_path / "page.md"
    keys = (
        "word",
        "passage",
        "sets tiny",
        "counts",
        "peers",
        "members",
        "differences",
        "tracr",
        "perturbation",
    )
    page.write_text(
        "before\n" + "".join(f"<!-- judges: {key} -->\nold\n<!-- /judges -->\n" for key in keys) + "after\n"
    )
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", "page", str(folder / "runs"), "--page", str(page)])
    leaderboard.main()
    text = page.read_text()
    summary = json.loads((folder / "runs" / "tiny" / "evidence" / "summary.json").read_text())
    mean = summary["judges"]["evidence"]["measures"]["reciprocal_rank"]["methods"]["control.recency"]["mean"]
    assert f"| `control.recency` | {mean:.3f} [" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert f"{len(keys)} tables" in capsys.readouterr().out
    leaderboard.main()
    assert page.read_text() == text


def test_what_is_not_a_table_of_runs_stays_as_it_is(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- judges: ways -->\nold\n<!-- /judges -->\n")
    assert fill(page, "judges", lambda key: leaderboard.block(key, {})) == 0
    assert "old" in page.read_text()


def test_it_says_at_once_what_it_does(run):
    _, said = run
    first = next(line for line in said.splitlines() if line)
    assert first.startswith("bench judge, 0 s: evidence of ") and "loading the model" in first
