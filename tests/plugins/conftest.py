"""Numbers that hosts gave: `make plugins` compares hosts with them, the quick tests compare T with them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

RECORDED = Path(__file__).with_name("recorded.json")


@pytest.fixture
def recorded() -> Callable[[str, list[float]], None]:
    """Compare numbers with those recorded under a name; with ``RECORD=1`` in the environment, record them."""

    def compare(name: str, values: list[float]) -> None:
        known = json.loads(RECORDED.read_text("utf-8")) if RECORDED.exists() else {}
        if os.environ.get("RECORD"):
            known[name] = [float(f"{value:.7g}") for value in values]
            RECORDED.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", "utf-8")
        assert values == pytest.approx(known[name], rel=1e-4, abs=1e-5)

    return compare
