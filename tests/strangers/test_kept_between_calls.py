"""What a model keeps from one call to the next is left as it was found, and makes no operator stale."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from strangers.cases import Stranger, ids, judge_tensor
from strangers.models import Block, D, Plain, WithHead, randomised
from strangers.oracle import Places, Witness, gap
from tensorlens.freezing import recorder
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

import tensorlens as tl
from tensorlens.models.modes import containers_of, empty_again, own_attributes


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
        with pytest.raises(tl.AnatomyError, match="no answer from memory"):
            tl.Lens(model)(ids())


class ScaledBlock(Block):
    """Multiplies by a buffer, and by a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(1))
        self.other = torch.ones((), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain * self.other


@pytest.mark.parametrize("name", ["gain", "other"])
def test_a_tensor_written_through_data_makes_an_operator_stale(name: str) -> None:
    model = randomised(Plain(ScaledBlock))
    T = tl.Lens(model)(ids())
    getattr(model.blocks[1], name).data.fill_(3.0)  # type: ignore[index]
    with pytest.raises(tl.TensorLensError, match=r"through `\.data`"):
        T.apply(T.input)


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


SETTINGS = SimpleNamespace(gain=SimpleNamespace(of_blocks=1.0))


class ConfiguredBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SETTINGS.gain.of_blocks


def test_a_setting_of_a_global_object_makes_an_operator_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    T = tl.Lens(randomised(Plain(ConfiguredBlock)))(ids())
    T.apply(T.input)
    monkeypatch.setattr(SETTINGS.gain, "of_blocks", 3.0)
    with pytest.raises(tl.TensorLensError, match="changed"):
        T.apply(T.input)


def test_a_recording_is_compared_with_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(recorder, "refuse_other_numbers", compared.append)
    lens = tl.Lens(randomised(Plain()))
    for tokens in ([1, 2, 3, 4], [4, 3, 2], [1, 2, 3, 4, 5]):
        lens(tokens)
    list(lens.maps([[1, 2], [3, 4], [5, 6, 7]], progress=False))
    assert len(compared) == 1


def test_a_key_put_in_the_place_of_another_is_noticed() -> None:
    module = nn.Module()
    module.seen = {"before": True}  # type: ignore[assignment]
    kept = containers_of(own_attributes(module))
    module.seen.clear()
    module.seen["after"] = True
    empty_again(kept)
    assert module.seen == {"before": True}
