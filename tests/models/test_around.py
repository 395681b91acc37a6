"""What goes beside the one state of a model is said."""

from __future__ import annotations

import pytest
import torch
from strangers.models import Block, D
from torch import nn

from tensorlens.models.anatomy import Anatomy, observe

STATE = torch.randn(1, 5, D)


class TwoTowers(nn.Module):
    """The second input reaches the first tower's states behind a block of it, or the output alone."""

    def __init__(self, is_late: bool) -> None:
        super().__init__()
        self.blocks, self.is_late = nn.ModuleList([Block() for _ in range(3)]), is_late
        self.other = nn.ModuleDict({"embed": nn.Embedding(9, D), "first": Block()})

    def forward(self, x, ids=None):
        other = 0.0 if ids is None else self.other["first"](self.other["embed"](ids)).mean(1, keepdim=True)
        for n, block in enumerate(self.blocks):
            x = block(x if self.is_late or n != 2 else x + other)
        return x * other if self.is_late else x


def at(model: nn.Module, **arguments: torch.Tensor) -> Anatomy:
    return observe(model, arguments)[0]


@pytest.mark.parametrize("is_late", [False, True])
def test_what_comes_around_the_first_state_is_said(is_late: bool):
    model, ids = TwoTowers(is_late), torch.tensor([[3, 5]])
    assert at(model, x=STATE, ids=ids).around == ("other.embed",)
    assert at(model, x=STATE).around == ()


class Skips(nn.Module):
    """Embeddings that later blocks are given again, as in speed runs of small GPTs; `value` is a second one."""

    def __init__(self, has_value: bool) -> None:
        super().__init__()
        self.embed, self.value = nn.Embedding(9, D), nn.Embedding(9, D) if has_value else None
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, input_ids):
        x = first = nn.functional.rms_norm(self.embed(input_ids), (D,))
        for block in self.blocks:
            x = block(0.7 * x + 0.3 * first + (0 if self.value is None else self.value(input_ids)))
        return x


def test_a_way_around_is_said_of_what_also_leads_to_the_first_state():
    ids = torch.tensor([[3, 5, 1]])
    assert at(Skips(has_value=True), input_ids=ids).around == ("embed", "value")
    alone = at(Skips(has_value=False), input_ids=ids)
    assert alone.starts_early and alone.around == ()


def test_what_holds_the_blocks_did_not_run_beside_them():
    last = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
    anatomy = at(nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), last)), input=STATE)
    assert nn.Sequential in [type(block) for block in anatomy.blocks] and anatomy.beside == ()
