"""Hooks, layers replaced, adapters, weights changed: the next answer is of the model as it is now, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strangers.cases import Verdict
from strangers.habits import HABITS, KINDS, LoRA, cold_verdict, lora_in_place, warm, warm_verdicts
from strangers.models import IDS, Block, FeedForward, Plain, WithHead, randomised
from strangers.oracle import gap, randn
from torch import Tensor
from torch.nn.utils import prune

import tensorlens as tl

HOOKS = [name for name in HABITS if "hook on a block" in name]
SAMPLE = {
    ("hand-written", "hook on a block: scale"),
    ("BERT", "hook on a feed-forward"),
    ("hand-written", "norm replaced"),
    ("hand-written", "activation replaced"),
    ("Llama", "LoRA in place"),
    ("hand-written", "weights swapped by data"),
}


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


def test_a_tensor_is_what_it_was_once_an_adapter_is_switched():
    model = KINDS["hand-written"].model()
    lora_in_place(model, KINDS["hand-written"])
    T = tl.Lens(model)(list(IDS))
    questions = (lambda: T @ T.input, lambda: T.T @ T.output, lambda: T.rows(1), lambda: T.map("tensor.norm").scores)
    before = [ask() for ask in questions]
    for module in model.modules():
        if isinstance(module, LoRA):
            module.enabled = False
    assert all(gap(ask(), was) == 0 for ask, was in zip(questions, before, strict=True))


@pytest.mark.large
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Llama", "BERT"])
def test_adapters_of_peft(kind: str):
    peft = pytest.importorskip("peft")
    here = KINDS[kind]
    model = here.model()
    warm(tl.Lens(model)(list(IDS)))
    layers = {"Llama": ["q_proj", "v_proj", "down_proj"], "BERT": ["query", "value", "dense"]}[kind]
    config = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
    wrapped = peft.get_peft_model(model, config, adapter_name="one")
    wrapped.add_adapter("other", config)
    wrapped = wrapped.double().eval()

    def now(given: Any = wrapped) -> Any:
        witness = here.witness(wrapped.base_model.model)
        u, T = randn(20, *witness.output.shape, seed=5), tl.Lens(given)(list(IDS))
        for n in (1, 20):
            assert gap(T.T @ u[:n], witness.pull(u[:n], 0, witness.n_blocks)) < 1e-5
        return T

    wrapped.set_adapter("one")
    T = now()
    u = T.output[None]
    pulled = T.T @ u
    now(wrapped.base_model.model)
    wrapped.set_adapter("other")
    assert gap(T.T @ u, pulled) == 0, "T is what it was"
    T = now()
    with wrapped.disable_adapter():
        now()
    wrapped.merge_adapter()
    with pytest.raises(tl.TensorLensError, match="changed"):
        _ = T.T @ u
    now()
    wrapped.unmerge_adapter()
    wrapped.base_model.set_adapter(["one", "other"])
    now()


def test_a_tensor_of_pruned_weights_is_what_it_was():
    model: Any = randomised(WithHead())
    pruned = model.blocks[1].mlp.up
    prune.l1_unstructured(pruned, "weight", 0.5)  # its hook makes the weight anew at each call
    T = tl.Lens(model)(list(IDS))
    u = randn(2, *T.output.shape)
    pulled = T.T @ u
    model(torch.tensor([IDS]))
    assert gap(T.T @ u, pulled) == 0
    pruned.weight_mask.fill_(1)
    assert gap(T.T @ u, pulled) == 0, "what a hook made is held"


mT = 1
"""A name that the code below reads of tensors, and not from here."""


class Turning(FeedForward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mT.mT)


def test_a_name_of_the_callers_is_not_what_a_model_reads_of_tensors(monkeypatch: pytest.MonkeyPatch):
    T = tl.Lens(randomised(Plain(lambda: Block(mlp=Turning()))))(list(IDS))
    pulled = T.T @ T.output
    monkeypatch.setitem(globals(), "mT", T.input)
    assert gap(T.T @ T.output, pulled) == 0
