"""A fixed sample of the compatibility table, and proof that its certificates have teeth."""

from __future__ import annotations

import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.families.run import Case, FamilyRecord, examine, sweep
from bench.families.table import read_table, write_table

from tensorlens.recording.live import found_in, raw, value_of
from tensorlens.recording.rules.modules import ADAPTERS, KERNELS
from tensorlens.recording.tape import RULES

SAMPLE = [
    Case("causal", name, "eager")
    for name in [
        "llama",
        "gpt2",
        "bloom",
        "gemma2",
        "gpt_oss",
        "mixtral",
        "deepseek_v3",
        "mamba",
        "mamba2",
        "qwen3_next",
        "rwkv",
        "recurrent_gemma",
        "zamba2",
        "gemma3n_text",
        "hrm_text",
        "xlnet",
        "minimax",
        "falcon",
    ]
] + [
    Case("masked", "bert", "sdpa"),
    Case("masked", "deberta-v2", "eager"),
    Case("masked", "xlm", "eager"),
    Case("masked", "yoso", "eager"),
    Case("masked", "fnet", "eager"),
    Case("masked", "albert", "sdpa"),
    Case("seq2seq", "t5", "eager"),
    Case("seq2seq", "bart", "sdpa"),
    Case("seq2seq", "switch_transformers", "eager"),
    Case("vision", "vit", "sdpa"),
    Case("vision", "siglip_vision_model", "eager"),
    Case("vision", "swin", "eager"),
    Case("vision", "convnext", "eager"),
    Case("vision", "mobilenet_v2", "eager"),
    Case("audio", "wavlm", "eager"),
]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture(scope="module")
def records() -> list[FamilyRecord]:
    return list(sweep(SAMPLE, workers=2, limit_seconds=900.0))


def test_the_sample_is_certified(records: list[FamilyRecord]):
    assert len(records) == len(SAMPLE)
    for record in records:
        assert record.status == "certified", f"{record.model_type}: {record.reason}"
        assert {"value", "linearity", "adjoint", "completeness"} <= set(record.errors)
        assert record.tolerance is not None and record.errors["value"] <= record.tolerance


def test_what_is_not_certified_says_why():
    record = examine(Case("vision", "timm_backbone", "eager"))
    assert record.status == "not_built" and "timm" in record.reason


# The certificate has teeth -------------------------------------------------------------------------------------------

LOST = {
    "scaled_dot_product_attention": Case("masked", "bert", "sdpa"),
    "layer_norm": Case("causal", "gpt2", "eager"),
    "silu": Case("causal", "llama", "eager"),
    "matmul": Case("causal", "llama", "eager"),
    "softmax": Case("causal", "llama", "eager"),
    "mul": Case("causal", "llama", "eager"),
    "bmm": Case("causal", "bloom", "eager"),
}
"""Rules whose results are held in silence, and a model that needs them."""


def hold(run: Any, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A path that is lost: the value is right, and no step says where it came from."""
    plain = {id(live): value_of(live) for live in found_in(args, kwargs)}
    args = tuple([plain.get(id(value), value) for value in args])
    return raw(function, *args, **{key: plain.get(id(value), value) for key, value in kwargs.items()})


@pytest.mark.parametrize("name", LOST)
def test_a_rule_that_loses_its_path_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, name, hold)
    assert examine(LOST[name]).status == "refused"


@pytest.mark.parametrize(
    ("class_name", "witness"),
    [
        ("NewGELUActivation", Case("causal", "gpt2", "eager")),
        ("BloomGelu", Case("causal", "bloom", "eager")),
        (".GELUActivation", Case("masked", "bert", "sdpa")),
    ],
)
def test_an_adapter_that_loses_its_path_is_noticed(class_name: str, witness: Case, monkeypatch: pytest.MonkeyPatch):
    def run_plain(run: Any, module: Any, forward: Any, z: torch.Tensor) -> Any:
        return raw(forward, value_of(z)).clone()

    monkeypatch.setitem(ADAPTERS, next(key for key in ADAPTERS if key.endswith(class_name)), run_plain)
    found = examine(witness)
    assert found.status == "refused" and "capture" in found.reason, found.reason


def test_recurrences_without_their_roles_fall_back_to_conventions_that_are_named(monkeypatch: pytest.MonkeyPatch):
    assert not examine(Case("causal", "mamba", "eager")).conventions
    for name in KERNELS:
        monkeypatch.setitem(KERNELS, name, ())
    assert examine(Case("causal", "mamba", "eager")).conventions


# The sweep -----------------------------------------------------------------------------------------------------------


def _stand_in(case: Case) -> FamilyRecord:
    if case.model_type == "crash":
        os._exit(3)
    if case.model_type == "slow":
        time.sleep(3600)
    if case.model_type == "raise":
        raise ValueError("a reason")
    return FamilyRecord(**case._asdict(), status="certified", errors={"value": 0.0})


def test_a_sweep_survives_a_crash_a_hang_and_an_error(tmp_path: Path):
    table = [Case("causal", name, "eager") for name in ("fine", "crash", "slow", "raise", "fine-too")]
    records = {r.model_type: r for r in sweep(table, workers=2, limit_seconds=5.0, work=_stand_in)}
    assert records["fine"].status == records["fine-too"].status == "certified"
    assert "code 3" in records["crash"].reason
    assert "out of time" in records["slow"].reason
    assert "a reason" in records["raise"].reason
    write_table(records.values(), tmp_path / "table.json")
    assert {r.model_type for r in read_table(tmp_path / "table.json")} == set(records)
    assert "| causal | eager | 2 | 3 | 0 |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())["versions"]["transformers"]
