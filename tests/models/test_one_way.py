"""One runner, one tree walk, one table of tolerances, one table of memory: whoever adds a second meets this page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tensorlens

HOUSE = Path(tensorlens.__file__).parent

WAYS = {
    "modes of a run": (r"\b(evaluating|in_own_precision|eagerly|observing)\(", ("runner",)),
    "opening of a dataclass": (r"__dataclass_fields__", ("trees",)),
    "tolerance by type": (r"(?m:^\w*(TOLERANCE|ACCEPTED)\w* = )|\.eps \*\* |torch.float32: 1e-\d", ("tolerances",)),
    "share of the free memory": (r"\d \* free_bytes|(?m:^\w*(KEPT|MEMORY)\w*_SHARE = |^SHARE_OF)", ("memory",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_there_is_one_way(way: str):
    pattern, homes = WAYS[way]
    assert any(re.search(pattern, (path).read_text()) for path in HOUSE.rglob("*.py") if path.stem in homes)
    strangers = [
        str(path.relative_to(HOUSE))
        for path in HOUSE.rglob("*.py")
        if path.stem not in homes and "judge_study" not in path.parts and re.search(pattern, path.read_text())
    ]
    assert not strangers, f"another {way}: see {', '.join(homes)}"
