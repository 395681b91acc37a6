"""Models whose number of blocks depends on the input: loops over one block, early exits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strangers.models import Block, D, randomised
from strangers.oracle import gap
from torch import Tensor, nn

import tensorlens as tl


class Looping(nn.Module):
    """Its blocks again and again, as often as there are tokens."""

    def __init__(self, n_blocks: int, *, has_norm: bool) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(50, D), nn.ModuleList(Block() for _ in range(n_blocks))
        self.norm, self.head = nn.LayerNorm(D) if has_norm else nn.Identity(), nn.Linear(D, 9)

    def n_rounds(self, x: Tensor) -> int:
        return x.shape[1]

    def body(self, x: Tensor) -> Tensor:
        for _ in range(self.n_rounds(x)):
            for block in self.blocks:
                x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(input_ids)))


class Leaving(Looping):
    """Stops as soon as it is sure."""

    def body(self, x: Tensor) -> Tensor:
        for n, block in enumerate(self.blocks):
            x = block(x)
            if n and self.head(x).softmax(-1).max() > 0.5:
                break
        return self.norm(x)


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("kind", [Looping, Leaving])
def test_the_operator_goes_to_where_the_model_went(kind: Any, has_norm: bool) -> None:
    model = randomised(kind(1 if kind is Looping else 4, has_norm=has_norm))
    lens, depths = tl.Lens(model, rules=tl.Rules.jacobian()), set()
    for tokens in ([44, 39, 33, 10], [45, 39, 24], [48, 37, 1, 44], [36, 48, 37, 17]):
        T = lens(tokens)
        depths.add(T.n_blocks)
        assert gap(T.output[None], model.body(T.input[None]).detach()) < 1e-12
        jacobian: Any = torch.autograd.functional.jacobian(lambda x: model.body(x)[0], T.input[None])
        assert gap(T.dense(), jacobian[:, :, 0]) < 1e-12
    assert len(depths) > 1, "the inputs must differ in depth"


def test_a_sample_that_sends_others_another_way_is_noticed() -> None:
    model = randomised(Leaving(4, has_norm=True))
    deep, flat = [48, 37, 1, 44], [[44, 39, 33, 10], [45, 39, 24, 18], [36, 48, 37, 17], [30, 44, 31, 23]]
    lens, rows = tl.Lens(model), [*flat[:2], deep, *flat[1:]]
    for tokens, found in zip(rows, lens.maps(rows, batch_size=2, progress=False), strict=True):
        assert gap(found.scores, lens(tokens).map("tensor.in_out", out_token=-1).scores) < 1e-6
