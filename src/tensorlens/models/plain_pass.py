"""The user's model run as it is, and left as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout; afterwards each module is in the mode it was in, and its data are what they were.

    Meanwhile its buffers are copies: a model may write into them, and the next pass is to find what this one found.
    """
    training = [module for module in model.modules() if module.training]
    kept = [(module, _data_of(module), dict(module.__dict__)) for module in model.modules()]
    copies: dict[int, Tensor] = {}
    try:
        for module in training:
            module.training = False
        for _, data, _ in kept:
            for place, key, value in data:
                place[key] = copy_once(value, copies)
        yield
    finally:
        for module, data, before in kept:
            for place, key, value in data:
                if is_data(place.get(key)):
                    place[key] = value
            put_back(module, before)
        for module in training:
            module.training = True


@contextmanager
def in_own_precision() -> Iterator[None]:
    """Away from a caller's autocast and inference mode: T is the model's in its own dtype, with gradients."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def random_state(device: torch.device) -> tuple[bytes, ...]:
    """Where the random numbers are, to notice a pass that draws some."""
    states = [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
    return tuple(state.numpy().tobytes() for state in states)


# What a pass may change ----------------------------------------------------------------------------------------------


def is_data(value: Any) -> TypeGuard[Tensor]:
    """A tensor of a module's own that is no parameter and may be written to."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.is_meta and value.is_leaf


def copy_once(tensor: Tensor, copies: dict[int, Tensor]) -> Tensor:
    """A copy of a tensor, the same one for all modules that share it."""
    if id(tensor) not in copies:
        with torch.inference_mode(False), torch.no_grad():
            copies[id(tensor)] = tensor.clone()
    return copies[id(tensor)]


def put_back(module: nn.Module, before: dict[str, Any]) -> None:
    """Undo what a pass made of a module's attributes: numbers that count calls, and tensors left for the next.

    Args:
        module: The module.
        before: Its own attributes before the pass.
    """
    own = module.__dict__
    changed = [(key, value) for key, value in own.items() if value is not before.get(key)]
    for key in [key for key, value in changed if isinstance(value, Tensor) or type(value) in (int, float)]:
        if key in before:
            own[key] = before[key]
        else:
            del own[key]


def _data_of(module: nn.Module) -> list[tuple[dict[str, Any], str, Tensor]]:
    """Where a module has tensors of its own: among its buffers and its attributes."""
    places: tuple[dict[str, Any], ...] = (module._buffers, module.__dict__)
    return [(place, key, value) for place in places for key, value in place.items() if is_data(value)]
