"""`attn_lrp` with In+Class is AttnLRP of the package lxt, to float32 rounding. It runs in a process of its own:
the package changes the classes of transformers for good."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(importlib.util.find_spec("lxt") is None, reason="lxt comes with `make test-all`"),
]

COMMON = """
import sys, types
from functools import partial
sys.path.insert(0, {tests!r})
import torch, transformers, transformers.pytorch_utils
import tensorlens as tl
import zoo
transformers.pytorch_utils.find_pruneable_heads_and_indices = None  # a name that is gone
vision = types.ModuleType("torchvision"); models = types.ModuleType("torchvision.models")
inner = types.ModuleType("torchvision.models.vision_transformer"); inner.nn = torch.nn
vision.models, models.vision_transformer = models, inner  # for models that are not asked for here
sys.modules.update({{"torchvision": vision, "torchvision.models": models, inner.__name__: inner}})

def ours(lens, ids, target):
    return lens(ids).map("tensor.in_class", out_token=-1, target=target).scores[0]

def theirs(model, ids, target):
    x = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    model(inputs_embeds=x).logits[0, -1, target].backward()
    return (x * x.grad).sum(-1)[0].detach()

def gap(a, b):
    print(float((a - b).norm() / b.norm()))

class Functions(dict):  # the package puts a plain dict where transformers now asks for an interface
    def get_interface(self, name, default):
        return self.get(name, default)

def patch(modeling, maps):
    from lxt.efficient import monkey_patch
    monkey_patch(modeling, maps)
    modeling.ALL_ATTENTION_FUNCTIONS = Functions(modeling.ALL_ATTENTION_FUNCTIONS)
"""

TINY = """
model = zoo.build({name!r}, {attention!r}, torch.float32)
lens = tl.Lens(model, rules=tl.Rules.attn_lrp())
ids = zoo.sample({name!r})
a = ours(lens, ids, 5)
from transformers.models.{kind} import modeling_{kind} as modeling
from lxt.efficient.models.{kind} import attnLRP
patch(modeling, attnLRP)
gap(a, theirs(model, ids, 5))
"""

REAL = """
from transformers.models.llama import modeling_llama
lens = tl.load("smollm2-135m", device="cpu", rules=tl.Rules.attn_lrp())
ids = lens.processor("The Eiffel Tower is located in the city of")["input_ids"]
target = lens.processor(" Paris", add_special_tokens=False)["input_ids"][0]
a = ours(lens, ids, target)
from lxt.efficient.models.llama import attnLRP
patch(modeling_llama, attnLRP)
gap(a, theirs(lens.model, ids, target))
"""

# Of BERT the package replaces the whole file by one of an older transformers; its parts fit today's, as a patch map of
# one's own, which it asks for. Inputs are the states behind the embeddings' norm, where T begins.
BERT = """
from transformers.models.bert import modeling_bert
model = zoo.build("bert", {attention!r}, torch.float32)
head = transformers.BertForMaskedLM._from_config(model.config, attn_implementation={attention!r})
model = zoo.randomise(head).float().eval()
lens = tl.Lens(model, rules=tl.Rules.attn_lrp())
ids = zoo.sample("bert")
tensor = lens(ids)
a = tensor.map("tensor.in_class", out_token=-1, target=5).scores[0]
from lxt.efficient.patches import layer_norm_forward, non_linear_forward, patch_attention, patch_method
kinds = {{type(one) for one in model.modules() if "GELU" in type(one).__name__}}
maps = {{torch.nn.LayerNorm: partial(patch_method, layer_norm_forward), modeling_bert: patch_attention}}
maps |= {{kind: partial(patch_method, non_linear_forward, keep_original=True) for kind in kinds}}
patch(modeling_bert, maps)
seen = []
def enter(module, args, kwargs):
    seen.append(args[0].detach().requires_grad_())
    return (seen[0], *args[1:]), kwargs
model.bert.encoder.layer[0].register_forward_pre_hook(enter, with_kwargs=True)
model(torch.tensor([ids])).logits[0, -1, 5].backward()
gap(a, (seen[0] * seen[0].grad).sum(-1)[0].detach())
"""


def gap_of(script: str) -> float:
    whole = COMMON.format(tests=str(Path(__file__).parent)) + script
    found = subprocess.run([sys.executable, "-W", "ignore", "-c", whole], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return float(found.stdout.split()[-1])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2", "qwen3", "llama"])
def test_tiny_models(name, attention):
    assert gap_of(TINY.format(name=name, kind=name, attention=attention)) < 2e-5


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_tiny_bert(attention):
    assert gap_of(BERT.format(attention=attention)) < 2e-5


def test_smollm2_with_its_real_weights():
    assert gap_of(REAL) < 1e-4
