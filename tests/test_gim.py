"""`Rules.gim()` is the package gim-explain on models without gates, for which the package has no rule."""

from __future__ import annotations

import importlib.util
import math

import laws
import pytest
import torch
import zoo
from torch.nn import functional as F

import tensorlens as tl

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(importlib.util.find_spec("gim") is None, reason="gim-explain comes with `make test-all`"),
]


def spelled_out(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Fused attention step by step: the package scales gradients at this function, and finds its softmax inside."""
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return F.softmax(scores, dim=-1) @ v


@pytest.mark.parametrize("family", ["gpt2", "neox-parallel", "opt"])
def test_gim_is_the_package_of_its_authors(monkeypatch, family):
    import gim

    model, ids = zoo.build(family, "sdpa"), zoo.sample(family)
    T = tl.Lens(model, rules=tl.Rules.gim())(ids)
    ours = T.map("tensor.in_class", out_token=-1, target=5).scores[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", spelled_out)
    x = model.get_input_embeddings()(torch.tensor([ids])).detach().requires_grad_()
    with gim.GIM(model):
        model(inputs_embeds=x, use_cache=False).logits[0, -1, 5].backward()
    assert x.grad is not None
    theirs = (x.grad[0] * T.input).sum(-1)  # where positions are added to the words, the gradient is that of both
    assert laws.relative(ours - theirs, theirs) <= laws.TOLERANCE
