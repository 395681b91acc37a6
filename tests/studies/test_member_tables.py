"""Tables of members: each is compared with the paper's on the splits that both have, errors as parts of the change."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "experiments" / "members.py"


@pytest.fixture(scope="module")
def members() -> ModuleType:
    spec = importlib.util.spec_from_file_location("members", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, records: list[dict[str, Any]]) -> None:
    folder.mkdir()
    (folder / "samples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def split(members: ModuleType, relation: int, number: int, bits: str) -> dict[str, Any]:
    methods = {name: {"agreement": bits} for name in members.OPERATORS}
    return {"relation": f"r{relation}", "split": number, "methods": methods}


def test_a_member_is_compared_on_the_splits_that_it_has(members, tmp_path):
    n = members.MIN_RELATIONS
    first, second = ([split(members, k, number, bits) for k in range(n)] for number, bits in ((0, "1100"), (1, "1111")))
    write(tmp_path / "relations-tiny-paper", first + second)
    write(tmp_path / "relations-tiny-half_gate", [split(members, k, 0, "1000") for k in range(n)])
    write(tmp_path / "relations-tiny-attn_lrp", [split(members, 0, 0, "1111")])
    paper, half = members.relation_tables(tmp_path).splitlines()[-2:]
    assert paper.startswith(f"| the paper's | {n} | {2 * n} | 0.750 [0.750, 0.750] |  |")
    assert half.startswith(f"| gate halved | {n} | {n} | 0.250 [0.250, 0.250] | -0.250 [-0.250, -0.250] |")


def test_errors_are_parts_of_the_change(members, tmp_path):
    curves = {"sizes": [0.001, 0.3], "tensor": [1.0, 3.0], "jacobian": [0.1, 8.0], "nothing": [2.0, 4.0]}
    directions = [{"kind": "random", "natural_size": None} | curves, {"kind": "token", "natural_size": 0.3} | curves]
    record = {"norms": {"frobenius": {"relative": 0.97}}, "directions": directions}
    write(tmp_path / "fidelity-tiny-paper", [record])
    assert (
        members.fidelity_table(tmp_path).splitlines()[-1]
        == "| tiny | the paper's | 1 | 0.97 | 0.50 | 0.50 | 0.75 | 2.00 |"
    )
