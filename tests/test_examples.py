"""The notebook in `examples/` runs from top to bottom and shows what it promises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebooks import run

TOUR = Path(__file__).parent.parent / "examples" / "tour.ipynb"


@pytest.mark.large
@pytest.mark.usefixtures("unchecked")
def test_the_tour_runs_and_is_stored_with_its_outputs():
    stored = json.loads(TOUR.read_text("utf-8"))
    fresh = run(json.loads(TOUR.read_text("utf-8")))
    for before, after in zip(stored["cells"], fresh["cells"], strict=True):
        if before["cell_type"] == "code":
            kinds = [[*output.get("data", "text")] for output in before["outputs"]]
            assert kinds == [[*output.get("data", "text")] for output in after["outputs"]]
    maps = [cell for cell in fresh["cells"] if "data-tensorlens" in json.dumps(cell.get("outputs", []))]
    assert len(maps) >= 5
