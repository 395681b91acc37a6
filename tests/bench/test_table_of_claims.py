"""The table of claims from records: its numbers are those of the run, and a claim without a run is not tested."""

from __future__ import annotations

import json

import numpy as np
import pytest
from bench.claims import CLAIMS, pack, table
from tiny_study import TEXTS, study

from tensorlens.errors import InputError

METHODS = ["tensor.norm", "tensor.in_out", "mean.attn", "rollout.attn", "control.random"]


def test_a_row_is_what_the_samples_say(tmp_path):
    study(tmp_path / "run", methods=METHODS, data=[text for text in TEXTS if text != "the"])
    pack(tmp_path / "run", "tiny-imdb", tmp_path / "records")
    rows = table(tmp_path / "records").splitlines()
    assert len(rows) == len(CLAIMS) + 2 and sum("not tested" in row for row in rows) == len(CLAIMS) - 3
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]

    def areas(method):
        curves = [line["conditions"]["token"][method]["most"]["hs_mse"] for line in lines]
        return np.array([np.trapezoid(curve, [0, 0.2, 0.4]) / 0.4 for curve in curves])

    best = max(("mean.attn", "rollout.attn"), key=lambda name: areas(name).mean())
    cells = [cell.strip() for cell in rows[2].strip("|").split("|")]
    assert cells[3] == f"tensor.in_out {areas('tensor.in_out').mean():.4g}"
    assert cells[4] == f"{best} {areas(best).mean():.4g}"
    assert cells[6].startswith(f"{(areas('tensor.in_out') - areas(best)).mean():+.3g}")
    assert cells[7] in ("holds", "no", "in part")


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no summary"):
        pack(tmp_path, "tiny-imdb", tmp_path)
