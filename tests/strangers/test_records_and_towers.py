"""States that travel in records, and stacks of blocks side by side: exact, and it is said which one was looked at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from strangers.cases import ids
from strangers.models import DEPTH, Block, D, Plain, randomised
from strangers.oracle import Places, Witness, against, gap
from torch import Tensor, nn

import tensorlens as tl


@dataclass(frozen=True)
class Record:
    weights: Tensor
    state: Tensor


class Named(NamedTuple):
    step: int
    state: Tensor


class Box:
    def __init__(self, state: Tensor) -> None:
        self.state = state


RECORDS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a dataclass, the state second": (lambda y: Record(torch.ones(D), y), lambda one: one.state),
    "a named tuple": (lambda y: Named(1, y), lambda one: one.state),
    "a dictionary": (lambda y: {"state": y}, lambda one: one["state"]),
    "a list": (lambda y: [y], lambda one: one[0]),
    "an object": (Box, lambda one: one.state),
}


class Wrapping(Plain):
    """The state travels in a record from block to block, or is taken out of it after each."""

    def __init__(self, kind: str, *, takes: bool) -> None:
        self.wrap, self.unwrap = RECORDS[kind]
        self.takes, wrap, unwrap = takes, self.wrap, self.unwrap

        class Wrapped(Block):
            def forward(self, x: Any) -> Any:
                return wrap(super().forward(unwrap(x) if takes else x))

        super().__init__(Wrapped)

    def body(self, input_ids: Tensor) -> Tensor:
        x: Any = self.embedded(input_ids)
        x = self.wrap(x) if self.takes else x
        for block in self.blocks:
            x = block(x) if self.takes else self.unwrap(block(x))
        return self.norm(self.unwrap(x) if self.takes else x)


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("kind", RECORDS)
def test_a_state_in_a_record(kind: str, takes: bool) -> None:
    model, twin = randomised(Wrapping(kind, takes=takes)), randomised(Plain())
    twin.load_state_dict(model.state_dict())
    if kind == "an object":
        with pytest.raises(tl.AnatomyError, match=f"no state was seen to {'enter' if takes else 'leave'} it"):
            tl.Lens(model)(ids())
        return
    errors = against(tl.Lens(model)(ids()), Witness(twin, lambda m: m(ids()), Places()))
    assert max(errors.values()) < 1e-6, errors


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(DEPTH)), nn.LayerNorm(D)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


class Towers(nn.Module):
    """One input through two towers, or through one of them twice."""

    def __init__(self, *, shared: bool) -> None:
        super().__init__()
        self.embed, self.one = nn.Embedding(50, D), Tower()
        self.other = self.one if shared else Tower()

    def states(self, x: Tensor) -> Tensor:
        return self.one(x) + self.other(x.flip(1))

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.states(self.embed(input_ids))


@pytest.mark.parametrize(("shared", "said"), [(False, '`blocks="other.blocks"`'), (True, "describes the first call")])
def test_it_is_said_which_of_two_towers_was_looked_at(shared: bool, said: str) -> None:
    model = randomised(Towers(shared=shared))
    T = tl.Lens(model, rules=tl.Rules.jacobian())(ids())
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: model.states(x)[0], T.input[None])
    assert gap(T.dense(), jacobian[:, :, 0]) < 1e-12
    assert T.n_blocks == DEPTH
    assert said in T.map("tensor.in_out", out_token=-1).meta["beside"]
    assert any(said in one for one in T.certificate().reservations)
    if not shared:
        other = tl.Lens(model, blocks="other.blocks")(ids())
        assert '`blocks="one.blocks"`' in other.meta()["beside"]


def test_one_tower_for_two_inputs() -> None:
    class Siamese(Towers):
        def forward(self, input_ids: Tensor, others: Tensor) -> Tensor:  # type: ignore[override]
            return self.one(self.embed(input_ids)) - self.one(self.embed(others)).mean(1, keepdim=True)

    model = randomised(Siamese(shared=True))
    others = torch.tensor([[4, 5, 6]])
    T = tl.Lens(model, rules=tl.Rules.jacobian())({"input_ids": ids(), "others": others})
    jacobian: Any = torch.autograd.functional.jacobian(lambda x: model.one(x)[0], T.input[None])
    assert gap(T.dense(), jacobian[:, :, 0]) < 1e-12
    assert T.certificate().passed


class HandsOn(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class ByPlace(HandsOn):
    def forward(self, *args: Any) -> Any:  # type: ignore[override]
        return self.inner(*args)


def test_a_wrapper_that_names_no_argument() -> None:
    model = randomised(Plain())
    assert torch.equal(tl.Lens(HandsOn(HandsOn(model)))(ids()).output, tl.Lens(model)(ids()).output)
    with pytest.raises(tl.InputError, match="Pass the inner module to the lens"):
        tl.Lens(ByPlace(model))(ids())
