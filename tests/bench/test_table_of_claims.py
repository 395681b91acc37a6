"""The table of claims from records: its numbers are those of the run, and a claim without a run is not tested."""

from __future__ import annotations

import gzip
import json
import re

import numpy as np
import pytest
from bench.claims import CLAIMS, FOLDER, PAGE, pack, table
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
    assert cells[3] == f"tensor.in_out {areas('tensor.in_out').mean():.3g}"
    assert cells[4] == f"{best} {areas(best).mean():.3g}"
    assert cells[6].startswith(f"{(areas('tensor.in_out') - areas(best)).mean():+.2g}")
    assert cells[7] in ("holds", "no", "in part")


def test_a_run_that_is_not_finished_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no summary"):
        pack(tmp_path, "tiny-imdb", tmp_path)


def _published(name):
    return [json.loads(line) for line in gzip.decompress((FOLDER / f"{name}.jsonl.gz").read_bytes()).splitlines()]


def _cells(says, run):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text("utf-8").splitlines()]
    first = next(number for number, row in enumerate(rows) if row[0].startswith(says))
    return next(row for row in rows[first:] if len(row) > 2 and row[2].startswith(run))  # a claim is named once


@pytest.mark.parametrize(
    ("says", "run", "condition", "metric", "sign"),
    [
        ("encoders: In+Out is ahead of every", "mpnet-cls-imdb", "token", "hs_mse", 1),
        ("encoders: Norm is ahead of every", "mpnet-mean-imdb", "token", "hs_mse", 1),
        ("classifiers: In+Out is ahead of every", "mpnet-sentiment", "token", "hs_mse", 1),
        ("classifiers: Norm is ahead of every", "rxnfp-reactions", "token", "hs_mse", 1),
        ("classifiers: masking by In+Out lowers", "mpnet-sentiment", "token", "accuracy", -1),
        ("pictures: Norm is ahead", "dinov2-images", "black", "hs_mse", 1),
        ("decoders, strict", "smollm2-wikitext", "strict, token", "hs_mse", 1),
    ],
)
def test_the_page_says_what_the_samples_say(says, run, condition, metric, sign):
    head, *lines = _published(run)
    _, _, ran, value, other, _, difference, holds, _ = _cells(says, run)
    grid = head["settings"]["grid"]

    def areas(method):
        curves = [line["conditions"][condition][method]["most"][metric] for line in lines]
        return np.array([np.trapezoid(curve, grid) / (grid[-1] - grid[0]) for curve in curves])

    baselines = [name for name in head["settings"]["methods"] if name.startswith(("rollout.", "mean."))]
    best = max(baselines, key=lambda name: sign * areas(name).mean())
    method = value.split()[0]
    gains = sign * (areas(method) - areas(best))
    if run in (
        "smollm2-wikitext",
        "rxnfp-reactions",
    ):  # Windows of one article, reactions of one template are one unit.
        units = [line["unit"] for line in lines]
        by_unit = [gains[[unit == one for unit in units]] for one in sorted(set(units))]
        error = np.std([part.sum() for part in by_unit]) * len(by_unit) ** 0.5 / len(gains)
    else:
        error = gains.std() / len(gains) ** 0.5
    assert f"{len(lines)} samples" in ran and value == f"{method} {areas(method).mean():.3g}"
    assert other == f"{best} {areas(best).mean():.3g}"
    mean, low, high = map(float, re.findall(r"[-+][\d.e-]+\d", difference))
    assert mean == pytest.approx(gains.mean(), rel=0.06)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.3)
    assert holds == ("holds" if low > 0 else "no" if high < 0 else "in part")


def test_records_hold_no_data():
    for line in _published("smollm2-relations")[1:]:
        assert not {"facts", "train", "text"} & set(line)
