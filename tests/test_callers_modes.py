"""Whatever mode of torch the caller is in, every method gives the same numbers, or refuses clearly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import build, sample

import tensorlens as tl

MODEL = "neox-serial"

pytestmark = pytest.mark.usefixtures("unchecked")


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference mode": torch.inference_mode,
    "no gradients": torch.no_grad,
    "deterministic": deterministic,
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),  # as a GPU would be, with the model on the CPU
}


def tensor() -> tl.AttentionTensor:
    return tl.Lens(build(MODEL, "sdpa", torch.float32))(sample(MODEL))


def found(T: tl.AttentionTensor, name: str) -> list[Tensor]:
    """What one part of the library says: a method by its name, or one of those below."""
    if name in tl.METHODS:
        made = T.map(name, out_token=-1)
        return [made.scores, made.bias_share, T.map(name).scores]
    return OTHERS[name](T)


OTHERS: dict[str, Callable[[tl.AttentionTensor], list[Tensor]]] = {
    "rows": lambda T: [T.rows(-1), T.blocks(1, 3).rows(0)],
    "apply": lambda T: [T @ T.input, T.T @ T.output, T.bias],
    "sketch": lambda T: [T.map("tensor.norm", probes=3).scores],
    "spectral": lambda T: [T.map("tensor.norm", norm="spectral").scores],
    "heads": lambda T: [T.without_heads({0: [1]}).map("tensor.in_class", -1).scores],
    "components": lambda T: [T.components(effect=effect).scores for effect in ("total", "direct")],
    "score": lambda T: [T.score(block=1, head=1, query=-1, key=2).scores],
    "predictions": lambda T: [torch.tensor([one.logit for one in T.predictions()], dtype=torch.float64, device="cpu")],
    "certificate": lambda T: [torch.tensor([float(T.certificate().passed)], device="cpu")],
    "spectrum": lambda T: [tl.spectrum(T, k=2).values],
    "batch": lambda T: [
        tl.Lens(T.operator.recording.origin.anatomy.model).batch([[5, 9, 4], [7]])[0].map(out_token=-1).scores
    ],
    "patching": lambda T: [
        tl.patching(tl.Lens(T.operator.recording.origin.anatomy.model), [5, 9, 4], [5, 8, 4], verify=True).predicted
    ],
}


@cache
def plain() -> tl.AttentionTensor:
    return tensor()


@cache
def expected(name: str) -> list[Tensor]:
    return found(plain(), name)


@cache
def recorded_outside(mode: str) -> tl.AttentionTensor:
    """One for each mode: what it keeps of an answer was then made in that mode."""
    return tensor()


@cache
def met_inside(mode: str) -> nn.Module:
    """A model that a lens meets in one mode alone, so that what is learned of it is learned there."""
    return build(MODEL, "sdpa", torch.float32)


@pytest.mark.parametrize("name", [*tl.METHODS, *OTHERS])
@pytest.mark.parametrize("mode", MODES)
def test_the_same_numbers_in_every_mode(name: str, mode: str):
    wanted = expected(name)
    T, model, tokens = recorded_outside(mode), met_inside(mode), sample(MODEL)
    with MODES[mode]():
        asked_inside = found(T, name)
        all_inside = found(tl.Lens(model)(tokens), name)
    for numbers in (asked_inside, all_inside):
        for one, other in zip(numbers, wanted, strict=True):
            torch.testing.assert_close(one.detach().double(), other.double(), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_what_was_switched_off_is_said():
    T = tensor()
    with torch.autocast("cpu", torch.bfloat16):
        assert T.map(out_token=-1).meta["switched_off"] == ["autocast"]
    assert "switched_off" not in T.map(out_token=-1).meta


def test_between_two_maps_of_a_data_set_the_caller_has_their_own_modes():
    lens = tl.Lens(build(MODEL, "sdpa", torch.float32))
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        for _ in lens.maps([[5, 9, 4], [7, 8]], batch_size=1):
            assert torch.is_autocast_enabled("cpu") and torch.is_inference_mode_enabled()


def test_autocast_inside_a_model_is_part_of_the_model():
    """What the model's own forward switches on is not switched off."""
    model = build(MODEL, "sdpa", torch.float32)
    plain = tl.Lens(model)(sample(MODEL)).output
    block = model.gpt_neox.layers[1].mlp
    inner = block.forward

    def rounded(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(x).float()

    block.forward = rounded
    T = tl.Lens(model)(sample(MODEL))
    with torch.no_grad():
        expected = model.gpt_neox(torch.tensor([sample(MODEL)])).last_hidden_state[0]
    assert float((T.output - expected).norm()) < 1e-5 * float(expected.norm())
    assert float((T.output - plain).norm()) > 1e-4 * float(plain.norm())
