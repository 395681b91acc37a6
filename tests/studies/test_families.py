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

from tensorlens.freezing import functions
from tensorlens.freezing.adapters import ADAPTERS
from tensorlens.freezing.functions import RULES
from tensorlens.freezing.kernels import KERNELS
from tensorlens.studies.families import Case, FamilyRecord, examine, sweep
from tensorlens.studies.families_table import read_table, write_table

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
    Case("audio", "wav2vec2", "eager"),
]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("case", SAMPLE, ids=lambda case: "-".join(case))
def test_sample_is_certified(case: Case):
    record = examine(case)
    assert record.status == "certified", record.reason
    laws = {"value", "linearity", "adjoint", "completeness"}
    assert laws <= set(record.errors) and max(record.errors.values()) <= record.tolerance


def test_what_is_not_certified_says_why():
    record = examine(Case("vision", "timm_backbone", "eager"))
    assert record.status == "not_built" and "timm" in record.reason


# The certificate has teeth -------------------------------------------------------------------------------------------

MUTANTS = {
    "softmax": ["softmax"],
    "fused attention": ["scaled_dot_product_attention"],
    "attention layer": ["multi_head_attention_forward"],
    "values held": ["sigmoid", "softplus", "exp", "rsqrt"],
    "closed-form activations": ["gelu", "silu", "relu"],
    "other activations": ["tanh"],
    "powers": ["pow", "square"],
    "products": ["mul"],
    "matrix products": ["matmul", "bmm", "mm"],
    "einsum": ["einsum"],
    "quotients": ["div"],
    "layer norm": ["layer_norm"],
    "clamp": ["clamp"],
    "maximum": ["maximum"],
    "selection": ["topk", "sort", "max"],
    "solve": ["linalg_solve_triangular"],
}
WITNESSES = [case for case in SAMPLE if case.model_type not in ("hrm_text",)]


def _some_witness_objects() -> bool:
    for case in WITNESSES:
        try:
            if examine(case).status != "certified":
                return True
        except Exception:  # noqa: BLE001  a model that cannot even run under the wrong rule objects too
            return True
    return False


@pytest.mark.parametrize("names", MUTANTS.values(), ids=MUTANTS.keys())
def test_a_rule_that_lets_things_pass_is_noticed(names: list[str], monkeypatch: pytest.MonkeyPatch):
    for name in names:
        monkeypatch.setitem(RULES, name, functions.linear)
    assert _some_witness_objects()


@pytest.mark.parametrize("rule", sorted({rule.__name__ for rule in RULES.values()}))
def test_a_rule_that_is_missing_is_noticed_or_not_needed(rule: str, monkeypatch: pytest.MonkeyPatch):
    gone = [name for name, found in RULES.items() if found.__name__ == rule]
    used: set[str] = set()
    find = functions.find_rule

    def watch(name: str) -> Any:
        used.add(name)
        return find(name)

    monkeypatch.setattr("tensorlens.freezing.passes.find_rule", watch)
    for name in gone:
        monkeypatch.delitem(RULES, name)
    noticed = _some_witness_objects()
    assert noticed or not {name for name in gone if name in used or f"{name}_" in used}


@pytest.mark.parametrize("class_name", ["NewGELUActivation", "BloomGelu", "GELUActivation"])
def test_an_adapter_that_lets_things_pass_is_noticed(class_name: str, monkeypatch: pytest.MonkeyPatch):
    def let_pass(run: Any, module: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        from tensorlens.freezing.traced import mark, plain, raw

        output = raw(forward, *(plain(a) if isinstance(a, torch.Tensor) else a for a in args), **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        live = mark(first.clone(), live=True)
        return (live, *output[1:]) if isinstance(output, tuple) else live

    name = next(key for key in ADAPTERS if key.endswith(class_name))
    monkeypatch.setitem(ADAPTERS, name, let_pass)
    assert _some_witness_objects()


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
        time.sleep(60)
    if case.model_type == "raise":
        raise ValueError("a reason")
    return FamilyRecord(**case._asdict(), status="certified", errors={"value": 0.0})


def test_a_sweep_survives_a_crash_a_hang_and_an_error(tmp_path: Path):
    table = [Case("causal", name, "eager") for name in ("fine", "crash", "slow", "raise", "fine-too")]
    records = {r.model_type: r for r in sweep(table, workers=2, limit_seconds=15, work=_stand_in)}
    assert records["fine"].status == records["fine-too"].status == "certified"
    assert "code 3" in records["crash"].reason
    assert "out of time" in records["slow"].reason
    assert "a reason" in records["raise"].reason
    write_table(records.values(), tmp_path / "table.json")
    assert {r.model_type for r in read_table(tmp_path / "table.json")} == set(records)
    assert "| causal | eager | 2 | 3 | 0 |" in (tmp_path / "table.md").read_text()
    assert json.loads((tmp_path / "table.json").read_text())["versions"]["transformers"]
