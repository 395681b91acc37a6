"""Hooks, layers replaced, adapters, weights changed: the next answer is of the model as it is now, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from strangers.cases import Verdict, ids
from strangers.habits import HABITS, KINDS, LoRA, cold_verdict, lora_in_place, warm, warm_verdicts
from strangers.models import IDS
from strangers.oracle import randn

import tensorlens as tl

HOOKS = [name for name in HABITS if "hook on a block" in name]
SAMPLE = {
    ("hand-written", "hook on a block: scale"), ("BERT", "hook on a feed-forward"), ("hand-written", "norm replaced"),
    ("hand-written", "activation replaced"), ("Llama", "LoRA in place"), ("hand-written", "weights changed by data"),
}  # fmt: skip


def pairs(habits: list[str]) -> list[Any]:
    every = [(kind, habit) for habit in habits for kind in KINDS]
    return [pytest.param(*one, marks=[] if one in SAMPLE else [pytest.mark.large], id=", ".join(one)) for one in every]


def assert_exact(where: str, verdict: Verdict) -> None:
    assert verdict.outcome == "exact", f"{where}: {verdict}"


@pytest.mark.parametrize(("kind", "habit"), pairs(HOOKS))
def test_a_hook_is_part_of_the_model(kind: str, habit: str):
    assert_exact(habit, cold_verdict(KINDS[kind], habit))


@pytest.mark.parametrize(("kind", "habit"), pairs(list(HABITS)))
def test_nothing_stale_is_used_after_a_change(kind: str, habit: str):
    verdicts = warm_verdicts(KINDS[kind], habit)
    assert_exact("new lens", verdicts["new lens"])
    assert_exact("same lens", verdicts["same lens"])
    assert verdicts["old tensor"].outcome in ("exact", "refused"), f"old tensor: {verdicts['old tensor']}"


@pytest.mark.parametrize("kind", ["hand-written", pytest.param("Llama", marks=pytest.mark.large)])
def test_a_tensor_refuses_once_an_adapter_is_switched(kind: str):
    model = KINDS[kind].model()
    lora_in_place(model, KINDS[kind])
    T = tl.Lens(model)(list(IDS))
    warm(T)
    for module in model.modules():
        if isinstance(module, LoRA):
            module.enabled = False
    for ask in (lambda: T @ T.input, lambda: T.T @ T.output, lambda: T.rows(1), lambda: T.map("tensor.norm")):
        with pytest.raises(tl.TensorLensError, match="(?i)chang"):
            ask()


@pytest.mark.large
def test_adapters_of_peft():
    peft = pytest.importorskip("peft")
    kind = KINDS["Llama"]
    model = kind.model()
    before = kind.witness(model)
    warm(tl.Lens(model)(list(IDS)))
    config = peft.LoraConfig(r=2, target_modules=["down_proj", "v_proj"], init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config).double().eval()
    inner = kind.witness(wrapped.base_model.model)
    u = randn(20, *before.output.shape, seed=5)
    for given in (wrapped, wrapped.base_model.model):
        T = tl.Lens(given)(list(IDS))
        for n in (1, 20):
            assert float((T.T @ u[:n] - inner.pull(u[:n], 0, inner.n_blocks)).norm()) < 1e-5 * float(u[:n].norm())
    with wrapped.disable_adapter(), pytest.raises(tl.TensorLensError):
        _ = T.T @ u
    assert wrapped(ids()) is not None
