"""`tensorlens judge`: from the command to the table, and from run folders to the pages of the documentation."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from tiny_study import lens_on
from typer.testing import CliRunner

from tensorlens.app.cli import app

SCRIPT = Path(__file__).parents[2] / "experiments" / "judges" / "leaderboard.py"
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
        "ways",
        "peers",
        "members",
        "differences",
        "tracr",
        "perturbation",
    )
    page.write_text(
        "before\n" + "".join(f"<!-- judges: {key} -->\nold\n<!-- /judges -->\n" for key in keys) + "after\n"
    )
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("leaderboard", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", str(folder / "runs"), "--page", str(page)])
    module.main()
    text = page.read_text()
    summary = json.loads((folder / "runs" / "tiny" / "evidence" / "summary.json").read_text())
    mean = summary["judges"]["evidence"]["measures"]["reciprocal_rank"]["methods"]["control.recency"]["mean"]
    assert f"| `control.recency` | {mean:.3f} [" in text
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert f"{len(keys)} tables" in capsys.readouterr().out
    module.main()
    assert page.read_text() == text


def test_what_the_runs_do_not_hold_stays_on_the_page(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    kept = importlib.import_module("keeping").kept
    old = (
        "**patching**, pearson, mean over 2 sets\n\n| method | a | c | ms an item, a |\n| --- | --- | --- | --- |\n"
        "| `x` | 0.900 [0.8, 1.0] | 0.1 [0, 1] | 7 |\n| `y` | 0.500 [0.4, 0.6] | 0.1 [0, 1] | 8 |\n"
        "| chance | 0.0 | 0.0 |  |"
    )
    new = (
        "**patching**, pearson, mean over one set\n\n| method | b | c | ms an item, b |\n| --- | --- | --- | --- |\n"
        "| `y` | 0.950 [0.9, 1.0] | 0.7 [0, 1] | 3 |\n| `z` | 0.100 [0.0, 0.2] | – | 4 |\n| chance | 0.0 | 0.0 |  |"
    )
    assert kept("component", old, new, ("a", "b", "c")).splitlines() == [
        "**patching**, pearson, mean over 2 sets",
        "",
        "| method | a | b | c | ms an item, a |",
        "| --- | --- | --- | --- | --- |",
        "| `y` | 0.500 [0.4, 0.6] | 0.950 [0.9, 1.0] | 0.7 [0, 1] | 8 |",
        "| `x` | 0.900 [0.8, 1.0] | – | – | 7 |",
        "| `z` | – | 0.100 [0.0, 0.2] | – | – |",
        "| chance | 0.0 | 0.0 | 0.0 |  |",
    ]
    counts = "| model | judge | items |\n| --- | --- | --- |\n"
    mixed = kept(
        "counts", f"{counts}| a | e | 1 |\n| c | e | 2 |", f"{counts}| b | e | 3 |\n| c | e | 4 |", ("a", "b", "c")
    )
    assert mixed == f"{counts}| a | e | 1 |\n| b | e | 3 |\n| c | e | 4 |"
    peers = [
        f"*{model}, evidence*: {n} items.\n\n*{model}, needles*: {n}." for model, n in (("a", 1), ("c", 2), ("c", 3))
    ]
    assert kept("peers", "\n\n".join(peers[:2]), peers[2], ()) == "\n\n".join((peers[0], peers[2]))
    assert kept("ways", "old", "No run yet.", ()) == "old" and kept("ways", "No run yet.", "new", ()) == "new"
