"""What is written to after a recording: a weight is named, the caller's own input does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from strangers.cases import ids
from strangers.models import WithHead, randomised

import tensorlens as tl


def test_an_input_that_the_caller_writes_over() -> None:
    given = ids()
    T = tl.Lens(randomised(WithHead()))(given)
    given.fill_(1)
    assert T.certificate().passed


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}])
def test_a_training_step_is_named(options: dict[str, Any]) -> None:
    model: Any = randomised(WithHead())
    T = tl.Lens(model)(ids())
    optimizer = torch.optim.AdamW(model.blocks[1].mlp.down.parameters(), **options)
    model(ids()).sum().backward()
    optimizer.step()
    questions: list[Callable[[], Any]] = [
        lambda: T.T @ T.output,
        lambda: T.rows(1),
        lambda: T.map("tensor.in_out"),
        T.certificate,
    ]
    for question in questions:
        with pytest.raises(tl.InputError, match=r"`blocks\.1\.mlp\.down\.weight` was modified"):
            question()
    assert tl.Lens(model)(ids()).certificate().passed


def test_a_part_that_is_added_is_not_a_changed_weight() -> None:
    model: Any = randomised(WithHead())
    T = tl.Lens(model)(ids())
    model.probe = torch.nn.Linear(2, 2)
    assert T.certificate().passed
