"""`tensorlens circuit`: what it prints and writes is what Python gives."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app import cli

runner = CliRunner()
CLEAN, CORRUPTED = "The cat sat. Who sat there?", "The dog sat. Who sat there?"
ASKED = ["--clean", CLEAN, "--corrupted", CORRUPTED, "--target", "a", "--against", "b"]


def test_the_command_prints_the_curve_and_writes_page_and_graph(folder, tmp_path):
    shown = runner.invoke(cli.app, ["circuit", folder, *ASKED, "--out", str(tmp_path / "c.html")])
    assert shown.exit_code == 0, shown.output
    assert "CPR" in shown.stdout and "100.0%" in shown.stdout
    page = (tmp_path / "c.html").read_text("utf-8")
    assert "<polyline" in page and 'data-tensorlens="inside"' in page
    found = runner.invoke(cli.app, ["circuit", folder, *ASKED, "--json", "--out", str(tmp_path / "c.json")])
    content = json.loads(found.stdout)
    expected = tl.circuit(tl.load(folder, rules="jacobian"), CLEAN, CORRUPTED, ("a", "b"), progress=False).faithfulness(
        progress=False
    )
    assert content["faithfulness"]["cpr"] == pytest.approx(expected.cpr, rel=1e-4)
    assert {"metadata", "qParams", "nodes", "links"} == json.loads((tmp_path / "c.json").read_text()).keys()


def test_wrong_options_are_refused(folder, tmp_path):
    for options in (["--out", str(tmp_path / "x.csv")], ["--unit", "paths"], ["--scores", "none"], ["--share", "3"]):
        assert runner.invoke(cli.app, ["circuit", folder, *ASKED, *options]).exit_code != 0
