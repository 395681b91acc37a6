"""Module calls of a recording: where in the model it is, and adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from tensorlens import cancel
from tensorlens.models.module_calls import forward_replaced
from tensorlens.recording.live import found_in
from tensorlens.recording.rules.modules import find_adapter
from tensorlens.recording.rules.recurrences import with_kernels
from tensorlens.recording.tape import Tape
from tensorlens.recording.writes import address_of

Forward = Callable[..., Any]


class ModulePlaces:
    """Where modules and weights are in a model.

    Attributes:
        names: Paths of the modules, by identity.
        parents: For each module the class of its parent and the name it has there.
        weights: Parameters and buffers by their paths; one that modules share comes once for each.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model = model
        named = dict(model.named_modules(prefix=prefix))
        self.weights: dict[str, Tensor] = {
            f"{path}.{name}" if path else name: weight
            for path, module in named.items()
            for kind in (module._parameters, module._buffers)
            for name, weight in kind.items()
            if weight is not None
        }
        self.names = {id(module): name for name, module in named.items()}
        self.parents = {
            id(child): f"{type(parent).__module__}.{type(parent).__qualname__}.{name}"
            for parent in named.values()
            for name, child in parent._modules.items()
        }

    def names_of(self, constants: Sequence[Tensor | None]) -> dict[int, str]:
        """Which constants lie in the memory of the model's weights, and what these are called."""
        by_address = {address_of(weight): name for name, weight in self.weights.items()}
        by_address.pop(0, None)
        places = {n: address_of(value) for n, value in enumerate(constants) if value is not None}
        return {n: by_address[address] for n, address in places.items() if address in by_address}


class ModuleCalls:
    """What a recording does at the modules it meets.

    Args:
        places: Where modules are.
        run: The tape.
        at: What to do at a module: takes the module, its path, its forward, and the arguments of the call.
    """

    def __init__(self, places: ModulePlaces, run: Tape, at: Forward) -> None:
        self.places, self.run, self.at = places, run, at

    def __call__(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module was called."""
        name = self.places.names.get(id(module))
        if name is None:
            return call(module, *args, **kwargs)
        cancel.check()
        path = self.run.path
        path.append(name)
        try:
            return self.at(module, name, functools.partial(self._forward, module, call), args, kwargs)
        finally:
            path.pop()

    def _forward(self, module: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a module: by its adapter if it has one and something live comes in."""
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        if found_in(args, kwargs):
            adapter = find_adapter(module, self.places.parents.get(id(module)))
            if adapter is not None:
                forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with forward_replaced(module, forward):
            return call(module, *args, **kwargs)


def straight(module: nn.Module, name: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Nothing but the module's own forward."""
    return forward(*args, **kwargs)
