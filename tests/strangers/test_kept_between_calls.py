"""What a model keeps from one call to the next is left as it was found; its parts are found again when it changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from strangers.cases import Stranger, ids, judge_tensor
from strangers.models import Block, D, Plain, WithHead, randomised
from strangers.oracle import Places, Witness, gap
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import tensorlens as tl
from tensorlens.models.runner import evaluating


class MemoryOfOutputs(Plain):
    """Gives what it gave before."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: dict[Any, Tensor] = {}

    def forward(self, input_ids: Tensor) -> Tensor:
        key = tuple(input_ids.flatten().tolist())
        if key not in self._kept:
            self._kept[key] = super().forward(input_ids)
        return self._kept[key]


class MemoryOfPositions(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, Tensor] = {}

    def embedded(self, input_ids: Tensor) -> Tensor:
        n = input_ids.shape[1]
        self.kept.setdefault(n, torch.linspace(0, 1, n, dtype=torch.float64)[:, None])
        return super().embedded(input_ids) + self.kept[n]


class CountingBlock(Block):
    """Gives other numbers with each call, by the length of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x.shape[1])
        return super().forward(x) * (1 + 0.1 * len(self.calls))


@pytest.mark.parametrize("build", [MemoryOfOutputs, MemoryOfPositions, lambda: Plain(CountingBlock)])
def test_lists_and_dictionaries_of_a_model_are_left_as_they_were(build: Any) -> None:
    model = randomised(build())
    lens = tl.Lens(model)
    T = lens(ids())
    lens([4, 5, 6])
    assert gap(T @ T.input + T.bias, T.output) < 1e-12, "an operator from before is still good"
    assert T.certificate().passed
    kept = [
        value for part in model.modules() for name, value in vars(part).items() if name.strip("_") in ("kept", "calls")
    ]
    assert kept
    assert not any(kept)
    model(ids())
    if build is MemoryOfOutputs:
        with pytest.raises(tl.AnatomyError, match="without returning a cached result"):
            tl.Lens(model)(ids())


class Switched(WithHead):
    """Ends in another norm and head, by a word."""

    def __init__(self) -> None:
        super().__init__()
        self.other_norm, self.other_head, self.ending = nn.LayerNorm(D), nn.Linear(D, 7), "first"

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.ending == "first" else self.other_head(self.other_norm(x))


def replace_head(model: Any) -> None:
    layer = model.head
    layer.forward = lambda x: 2 * nn.functional.linear(x, layer.weight) + x.sum(-1, keepdim=True)


def end_otherwise(model: Any) -> None:
    model.ending = "second"


def hook_all_layers(_: Any) -> Any:
    return register_module_forward_hook(lambda module, args, y: 1.5 * y if isinstance(module, nn.Linear) else None)


@pytest.mark.parametrize("change", [replace_head, end_otherwise, hook_all_layers])
def test_parts_are_found_again_when_the_model_changed(change: Any) -> None:
    model = randomised(Switched())
    lens = tl.Lens(model)
    lens(ids()).map("tensor.in_class", out_token=-1, target=2)
    hook = change(model)
    places = Places(end="other_norm", head="other_head") if model.ending != "first" else Places(head="head")
    try:
        witness = Witness(model, lambda model: model(ids()), places)
        found = judge_tensor(lambda: lens(ids()), [witness], Stranger(name="changed", places=places))
    finally:
        if hook is not None:
            hook.remove()
    assert found.outcome == "exact", found


def test_what_a_pass_puts_in_the_place_of_a_key_is_taken_out_again() -> None:
    module = nn.Module()
    module.seen = {"before": True}  # type: ignore[assignment]
    with evaluating([module]):
        module.seen.clear()
        module.seen["after"] = True
    assert module.seen == {"before": True}
