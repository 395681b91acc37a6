"""Members beside the paper's, on the splits and texts that both have."""

from __future__ import annotations

from typing import Any

from bench.studies import pages


def split(relation: int, number: int, bits: str) -> dict[str, Any]:
    methods = {name: {"agreement": bits} for name in pages.OPERATORS}
    return {"relation": f"r{relation}", "split": number, "methods": methods}


def test_a_member_is_compared_on_the_splits_that_it_has():
    first, second = ([split(k, number, bits) for k in range(9)] for number, bits in ((0, "1100"), (1, "1111")))
    paper, half = pages.agreement_rows({"paper": first + second, "half_gate": [split(k, 0, "1000") for k in range(9)]})
    assert (paper["splits"], paper["whole prompt"]) == (18, "0.750 [0.750, 0.750]")
    assert (half["splits"], half["whole prompt"]) == (9, "0.250 [0.250, 0.250]")
    assert half["whole prompt, less the paper's"] == "-0.250 [-0.250, -0.250]"


def test_errors_are_parts_of_the_change():
    curves = {"sizes": [0.001, 0.3], "tensor": [1.0, 3.0], "jacobian": [0.1, 8.0], "nothing": [2.0, 4.0]}
    directions = [{"kind": "random", "natural_size": None} | curves, {"kind": "token", "natural_size": 0.3} | curves]
    record = {"norms": {"frobenius": {"relative": 0.97}}, "directions": directions}
    (row,) = pages.nearness_rows({"paper": [record]})
    assert list(row.values()) == ["the paper's", 1, "0.97", "0.50", "0.50", "0.75", "2.00"]


def test_hiding_is_compared_in_per_cent_with_the_papers_rules():
    def cell(area: float) -> dict[str, Any]:
        return {"most": {"hs_mse": [0.0, area]}}

    methods = {"tensor.in_class@paper": 1.0, "tensor.in_class@half_gate": 1.5, "tensor.in_class@attn_lrp": 0.5}
    methods |= {"tensor.in_class@jacobian": 1.0} | dict.fromkeys(pages.OTHERS, 1.0)
    records = [
        {"index": k, "conditions": {"token": {name: cell(one) for name, one in methods.items()}}} for k in range(4)
    ]
    first, every = pages.hiding_rows({"records": records, "summary": {"grid": [0.0, 1.0]}}, "tensor.in_class")
    assert first["gate halved"] == "**+50 [+50, +50]**" and first["AttnLRP"] == "*-50 [-50, -50]*"
    assert first["Jacobian"] == "+0 [+0, +0]" and every["In+Class"] == "all of them"
