"""What people do to a model: hooks, layers replaced, code between blocks. Folding follows, or gives way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import zoo
from tensorlens.folding.search import block_parts
from torch import Tensor, nn

import tensorlens as tl


def by_backward(T: tl.AttentionTensor, out_token: int) -> Tensor:
    """T[i] by autograd through the replay, one cotangent at a time."""
    found = []
    with T.operator.replay.graph(T.operator.span) as (x, y, _):
        for channel in range(T.shape[1]):
            found.append(torch.autograd.grad(y[0, out_token, channel], x, retain_graph=True)[0][0])
    return torch.stack(found)


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def scale_output(block: Any) -> None:
    block.register_forward_hook(lambda _, __, out: (1.5 * out[0], *out[1:]) if isinstance(out, tuple) else 1.5 * out)


def project_input(block: Any) -> None:
    direction = torch.nn.functional.normalize(torch.ones(16, dtype=torch.float64), dim=0)
    block.register_forward_pre_hook(lambda _, args: (args[0] - (args[0] @ direction)[..., None] * direction, *args[1:]))


def hook_mlp(block: Any) -> None:
    block.mlp.register_forward_hook(lambda _, __, out: 0.5 * out)


def replace_norm(block: Any) -> None:
    block.ln_2 = nn.LayerNorm(16, elementwise_affine=False).double()


def replace_linear(block: Any) -> None:
    other = zoo.build("gpt2", seed=5)
    block.attn.c_proj = other.transformer.h[0].attn.c_proj  # type: ignore[union-attr,index]


def replace_activation(block: Any) -> None:
    block.mlp.act = nn.ReLU()


HABITS: dict[str, Callable[[Any], None]] = {
    "hook": scale_output,
    "pre-hook": project_input,
    "hook inside": hook_mlp,
    "norm": replace_norm,
    "linear": replace_linear,
    "activation": replace_activation,
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("habit", HABITS)
def test_what_was_learnt_of_a_model_is_learnt_again_after_a_change(habit: str, n: int) -> None:
    model: Any = zoo.build("gpt2")
    tl.Lens(model)(zoo.sample("gpt2")).rows(3)
    HABITS[habit](model.transformer.h[n])
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert gap(T.rows(3), by_backward(T, 3)) < 1e-9
    u = torch.randn(9, *T.shape[:2], dtype=T.dtype)
    assert gap(T.adjoint(u)[:7], T.adjoint(u[:7])) < 1e-9


def test_blocks_in_another_order_are_other_blocks() -> None:
    model: Any = zoo.build("gpt2")
    tl.Lens(model)(zoo.sample("gpt2")).rows(3)
    blocks = model.transformer.h
    blocks[0], blocks[2] = blocks[2], blocks[0]
    T = tl.Lens(model)(zoo.sample("gpt2"))
    assert gap(T.rows(3), by_backward(T, 3)) < 1e-9
    assert block_parts(T.operator.recording, 0).out.module is blocks[0].attn.c_proj


def test_parts_are_remembered_for_few_states_of_a_model() -> None:
    from tensorlens.folding import search

    model: Any = zoo.build("gpt2")
    for _ in range(search.MOST_STATES + 2):
        with torch.no_grad():
            model.transformer.h[0].ln_1.weight.mul_(1)
        block_parts(tl.Lens(model)(zoo.sample("gpt2")).operator.recording, 0)
    assert len(search._known[model]) == search.MOST_STATES
