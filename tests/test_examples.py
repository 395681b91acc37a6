"""What lies in `examples/` runs from top to bottom and shows what it promises."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
from notebooks import run
from tiny_language import tiny_lens

import tensorlens as tl

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_code"))
from execute import same  # type: ignore[import-not-found]  # noqa: E402

EXAMPLES = ROOT / "examples"
TOUR = EXAMPLES / "tour.ipynb"
SCRIPTS = sorted(ROOT.glob("bench/**/*.py"))


def test_the_demo_runs_and_says_what_the_model_says_and_what_it_sums_to(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tl, "load", lambda name: tiny_lens("neox"))
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "demo.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "The model says" in said and "exact and linear" in said and said.count("nputs sum to") == 1
    assert f'  {Path(sys.executable).with_name("tensorlens")} explain smollm2-135m "The capital of Italy is"\n' in said
    assert "data-tensorlens" in (tmp_path / "demo.html").read_text("utf-8")


@pytest.mark.large
@pytest.mark.usefixtures("unchecked")
def test_the_tour_runs_and_is_stored_with_its_outputs():
    stored = json.loads(TOUR.read_text("utf-8"))
    fresh = run(json.loads(TOUR.read_text("utf-8")))
    for before, after in zip(stored["cells"], fresh["cells"], strict=True):
        if before["cell_type"] == "code":
            kinds = [[*output.get("data", "text")] for output in before["outputs"]]
            assert kinds == [[*output.get("data", "text")] for output in after["outputs"]]
            printed = [[output["text"] for output in one["outputs"] if "text" in output] for one in (before, after)]
            assert all(map(same, printed[1], printed[0])), printed
    maps = [cell for cell in fresh["cells"] if "data-tensorlens" in json.dumps(cell.get("outputs", []))]
    assert len(maps) >= 5


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_script_finds_what_it_imports_and_says_what_it_does(path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(path.parent), str(ROOT), *sys.path])
    assert path.name == "__init__.py" or runpy.run_path(str(path), run_name="imported")["__doc__"]
