"""The experiment on pairs: truth and predictions are those of `tl.patching`; its page says what it found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_language import tiny_lens

import tensorlens as tl

FOLDER = Path(__file__).parents[2] / "experiments"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_truth_and_predictions_are_those_of_patching() -> None:
    pairs, lens = script("patching_pairs"), tiny_lens()
    pair = pairs.Pair("ioi", 0, [5, 9, 40, 7, 8], [5, 9, 41, 7, 30], {3: 1.0, 4: -1.0})
    found = pairs.measured({"paper": lens}, pair, 5)
    known = tl.patching(lens, pair.clean, pair.corrupted, pair.weights, verify=True, progress=False)
    assert known.true is not None
    for kind in pairs.KINDS[:2]:
        chosen = torch.tensor([label.kind == kind for label in known.labels])
        assert found[kind]["true"] == pytest.approx(known.true[chosen].tolist(), rel=1e-3, abs=1e-5)
        assert found[kind]["paper"] == pytest.approx(known.predicted[chosen].tolist(), rel=1e-3, abs=1e-5)
    states = found["state of a token"]
    assert len(states["true"]) == 5 and states["true"][:2] == pytest.approx([0.0, 0.0], abs=1e-5)  # the prompts agree
    assert abs(states["true"][2]) > 1e-4 and abs(states["paper"][2]) > 1e-4


def test_a_page_says_what_was_found(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, page = script("patching_pairs"), script("results_patching")
    true = [1.0, 2.0, 3.0, 5.0]
    effects = {name: [-one for one in true] if "jacobian" in name else true for name in pairs.METHODS}
    rows = [
        {"task": "ioi", "line": k, "effects": {kind: {"true": true} | effects for kind in pairs.KINDS}} for k in (0, 1)
    ]
    run = {"rows": rows, "summary": pairs.summary(rows), "left_out": {"ioi": {"length": 3, "wrong": 1}}}
    (tmp_path / "run.json").write_text(json.dumps(run), "utf-8")
    monkeypatch.setattr(page, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr("sys.argv", ["results_patching.py", str(tmp_path / "run.json")])
    page.main()
    text = (tmp_path / "page.md").read_text("utf-8")
    assert "2 of indirect objects (3 left out" in text and "1.00 (1.00 to 1.00)" in text
    assert "- Feed-forwards: `paper` is best with 1.00; `paper` less `jacobian` is 2.00 (2.00 to 2.00)." in text
