"""Real weights in float32: the certificate, the sums, and an independent implementation of the same numbers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import tensorlens as tl

SMALL = {"minilm": "The quick brown fox jumps over the lazy dog.", "rxnmapper": "CC(=O)O.OCC>>CC(=O)OCC"}
LARGE = {
    "smollm2-135m": "The Eiffel Tower is located in the city of",
    "gemma3-270m": "The Eiffel Tower is located in the city of",
}


def check(name: str, text: str) -> tl.AttentionTensor:
    T = tl.load(name, device="cpu")(text)
    certificate = T.certificate()
    assert certificate.passed, str(certificate)
    assert certificate.errors["completeness"] <= 1e-4
    found = T.map("tensor.in_out").scores.sum(1)
    expected = (T.output * (T.output - T.bias)).sum(1)
    assert torch.allclose(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
    return T


@pytest.mark.parametrize("name", SMALL)
def test_small_bundled_models(name):
    check(name, SMALL[name])


@pytest.mark.large
@pytest.mark.parametrize("name", LARGE)
def test_large_bundled_models(name):
    T = check(name, LARGE[name])
    best = T.predictions(k=1)[0]
    found = T.map("tensor.in_class", out_token=-1)
    by_bias = float(T.operator.logits_at_zero(T.n_tokens - 1)[best.index])
    assert float(found.scores.sum()) == pytest.approx(best.logit - by_bias, rel=1e-3)
    assert best.name.strip() == "Paris"
    assert T.tokens[0] == ("<bos>" if name == "gemma3-270m" else "The")


@pytest.mark.large
def test_the_sink_of_smollm2():
    lens = tl.load("smollm2-135m", device="cpu")
    live, held = (
        lens.with_rules(rules)(LARGE["smollm2-135m"]).map("tensor.in_class", -1, " Paris")
        for rules in ("paper", "paper,sink=hold")
    )
    assert held.meta["rules"]["sink"] == 5
    assert float(live.scores[0, 0]) == pytest.approx(6.13, abs=0.01) and "sink_gives" not in live.meta
    assert float(held.scores[0, 0]) == pytest.approx(0.53, abs=0.01)
    assert held.meta["sink_gives"] == [pytest.approx(5.59, abs=0.01)]
    assert torch.allclose(held.scores[:, 1:], live.scores[:, 1:], atol=1e-4)
    assert float(held.scores.sum()) + held.meta["sink_gives"][0] == pytest.approx(held.meta["logit"][0], abs=1e-3)


@pytest.mark.large
def test_dinov2_layout_with_real_weights():
    T = tl.load("dinov2-small-saliency", device="cpu")(
        torch.randn(3, 98, 98, generator=torch.Generator().manual_seed(0))
    )
    assert T.certificate().passed, str(T.certificate())
    assert T.tokens[0] == "[CLS]" and T.map("tensor.in_out", out_token=0).meta["grid"]["rows"] == 7


# In a process of its own: the package changes the classes of transformers for good, looks for a name that is gone, and
# imports torchvision for models that are not asked for here.
ORACLE = """
import sys, types, torch, transformers, transformers.pytorch_utils
transformers.pytorch_utils.find_pruneable_heads_and_indices = None
from transformers.models.llama import modeling_llama
import tensorlens as tl
text = "The Eiffel Tower is located in the city of"
lens = tl.load("smollm2-135m", device="cpu")
T = lens(text)
ours = T.map("tensor.in_class", out_token=-1, target=" Paris").scores[0]
sys.modules["torchvision"] = types.ModuleType("torchvision")
sys.modules["torchvision.models"] = models = types.ModuleType("torchvision.models")
models.vision_transformer = types.ModuleType("vision_transformer")
models.vision_transformer.nn = torch.nn
from lxt.efficient import monkey_patch
from lxt.efficient.models.llama import cp_LRP
monkey_patch(modeling_llama, cp_LRP)
model, target = lens.model, lens.processor(" Paris", add_special_tokens=False)["input_ids"][0]
x = model.get_input_embeddings()(torch.tensor([lens.processor(text)["input_ids"]])).detach().requires_grad_()
model(inputs_embeds=x, use_cache=False).logits[0, -1, target].backward()
theirs = (x * x.grad).sum(-1)[0].detach()
print(float((ours - theirs).norm() / theirs.norm()), float(ours.sum()))
"""


@pytest.mark.large
def test_in_class_equals_cp_lrp_of_an_independent_package():
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", ORACLE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    print(found.stdout)
    difference, total = map(float, found.stdout.split()[-2:])
    assert difference < 2e-5
    assert total == pytest.approx(12.8419, abs=2e-3)
