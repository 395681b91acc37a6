"""What users give by mistake: an error that says what was expected, never a crash and never an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from strangers.models import IDS, WithHead, randomised

import tensorlens as tl

FEW: dict[str, Callable[[tl.Lens, Any], Any]] = {
    "a head that is True": lambda lens, T: T.heads({0: [True]}),
    "a block that is True": lambda lens, T: T.heads({True: [0]}),
    "minus one prediction": lambda lens, T: T.predictions(-1),
    "half a prediction": lambda lens, T: T.predictions(2.5),
    "a mean of numbers": lambda lens, T: tl.MeanTensor([1]),  # type: ignore[list-item]
    "a mean of one tensor, not a list": lambda lens, T: tl.MeanTensor(T),
    "rules by name": lambda lens, T: tl.Lens(lens.model, rules="paper"),  # type: ignore[arg-type]
    "ids that are floats": lambda lens, T: lens([1.0, 2.0]),
    "a tensor of ids that are floats": lambda lens, T: lens(torch.tensor([[1.0, 2.0]])),
    "nothing in a dictionary": lambda lens, T: lens({}),
    "no batch": lambda lens, T: lens.batch([]),
    "sparse ids": lambda lens, T: lens(torch.tensor([[1, 2]]).to_sparse()),
    "ids without values": lambda lens, T: lens(torch.empty(1, 3, dtype=torch.long, device="meta")),
    "a sparse cotangent": lambda lens, T: T.T @ torch.zeros_like(T.output).to_sparse(),
}


@pytest.fixture(scope="module")
def lens() -> tl.Lens:
    return tl.Lens(randomised(WithHead()))


@pytest.mark.parametrize("mistake", FEW)
def test_a_mistake_is_named(lens: tl.Lens, mistake: str):
    T = lens(list(IDS))
    with pytest.raises(tl.InputError, match="[;.]"):  # what was wrong, and what to do
        FEW[mistake](lens, T)
