"""Speed: every part runs, on tiny models. What it says of them is no matter; that it can be measured again is."""

from __future__ import annotations

import pytest
import torch
from bench.speed.__main__ import PARTS, record
from bench.speed.parts import functions_seen
from tiny_study import lens_on

from tensorlens.recording.live import Followed

OTHERS = ("circuits", "sizes")
"""They need weights, and a GPU."""
OFTEN = ("answers", "certificates", "clock", "long", "pairs")


SHOWN = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.large) for name in PARTS if name not in OTHERS]


@pytest.mark.parametrize("name", SHOWN)
def test_every_part_runs(name):
    rows = PARTS[name][1]()
    assert rows and all(rows[0].keys() == row.keys() for row in rows)
    assert record(rows)["rows"]


def test_functions_that_a_recording_sees_are_counted():
    lens, before = lens_on("llama"), vars(Followed)["__torch_function__"]
    short, long = (functions_seen(lambda text=text: lens(text)) for text in ("the cat", "the cat sat on a mat"))
    assert short == long > 50, "a recording takes the same functions for every length"
    assert functions_seen(lambda: torch.ones(2) + 1) == 0 and vars(Followed)["__torch_function__"] is before
