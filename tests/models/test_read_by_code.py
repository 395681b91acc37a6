"""Whatever a model's code reads, wherever it stands, is part of what the model is."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zoo
from tensorlens.models.fingerprint import Samples, fingerprint
from torch import nn

import tensorlens as tl


class Switched:
    gain = 1.0


class Slotted:
    __slots__ = ("gain",)

    def __init__(self) -> None:
        self.gain = 1.0


class Reading(nn.Module):
    """Its factor is read from one of many places."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.read, self.linear, self.slots = read, nn.Linear(2, 2), Slotted()
        self.many, self.named, self.numbers = [1.0] * 100, dict.fromkeys(range(100), 1.0), np.ones(500)
        self.bytes, self.unregistered = bytearray(b"\x01\x01"), [nn.Linear(1, 1)]
        self.register_buffer("buffer", torch.ones(1))
        self.plain = torch.ones(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.read(self) * self.linear(x)


SHARED, STATED = SimpleNamespace(gain=1.0), ContextVar("STATED", default=1.0)


def write_through_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2)


def write_weight(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight.mul_(2)


READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "a long list": (lambda m: m.many[70], lambda m: m.many.__setitem__(70, 2.0)),
    "a long dictionary": (lambda m: m.named[70], lambda m: m.named.__setitem__(70, 2.0)),
    "a long array": (lambda m: float(m.numbers[3]), lambda m: m.numbers.__setitem__(3, 2.0)),
    "bytes": (lambda m: m.bytes[1], lambda m: m.bytes.__setitem__(1, 2)),
    "an object with slots": (lambda m: m.slots.gain, lambda m: setattr(m.slots, "gain", 2.0)),
    "a module that is no part": (lambda m: m.unregistered[0].weight, lambda m: write_weight(m.unregistered[0])),
    "a global object": (lambda m: SHARED.gain, lambda m: setattr(SHARED, "gain", SHARED.gain + 1)),
    "a module's attribute": (lambda m: pytest.gain, lambda m: setattr(pytest, "gain", 2.0)),  # type: ignore[attr-defined]
    "a class's attribute": (lambda m: Switched.gain, lambda m: setattr(Switched, "gain", 2.0)),
    "a context variable": (lambda m: STATED.get(), lambda m: STATED.set(2.0)),
    "a buffer's data": (lambda m: m.buffer, lambda m: write_through_data(m.buffer)),
    "a tensor's data": (lambda m: m.plain, lambda m: write_through_data(m.plain)),
}


@pytest.mark.parametrize("place", READ)
def test_whatever_code_reads_is_part_of_the_model(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest, "gain", 1.0, raising=False)
    monkeypatch.setattr(Switched, "gain", 1.0)
    read, change = READ[place]
    model = Reading(read)
    before, samples = fingerprint(model), Samples(model)
    assert before == fingerprint(model) and samples.same()
    change(model)
    assert before != fingerprint(model) or not samples.same()


def test_an_object_that_a_pass_counts_in_is_ignored_and_the_rest_of_it_is_not() -> None:
    model: Any = zoo.build("gpt2")
    model.seen = SimpleNamespace(count=0, scale=1.0)

    def count(module: Any, args: Any, output: Any) -> Any:
        model.seen.count += 1
        return model.seen.scale * output

    model.transformer.h[1].register_forward_hook(count)
    T = tl.Lens(model)(zoo.sample("gpt2"))
    for _ in range(3):
        T @ T.input
    model.seen.scale = 2.0
    with pytest.raises(tl.InputError, match="a configuration changed"):
        T @ T.input


@pytest.mark.parametrize("method", ["gradient.integrated", "gradient.times_input"])
def test_gradients_of_the_model_are_of_the_one_that_was_recorded(method: str) -> None:
    model = zoo.build("gpt2")
    T, batch = (ask(zoo.sample("gpt2")) for ask in (tl.Lens(model), lambda ids: tl.Lens(model).batch([ids, ids[:4]])))
    write_weight(model.lm_head)
    with pytest.raises(tl.InputError, match="has changed since"):
        T.map(method, out_token=-1)
    with pytest.raises(tl.InputError, match="has changed since"):
        batch.maps(method)
