"""Module calls of a recording: where in the model it is, and adapters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from tensorlens.models.module_calls import forward_replaced, module_tree
from tensorlens.recording.live import found_in
from tensorlens.recording.rules.modules import adapted_places, find_adapter, has_adapter, qualified
from tensorlens.recording.rules.recurrences import calls_kernels, with_kernels
from tensorlens.recording.tape import Tape
from tensorlens.recording.writes import address_of

Forward = Callable[..., Any]
At = Callable[[nn.Module, str, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""What to do at a module: takes it, its path, its forward, and the arguments of the call."""
After = Callable[[str, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with the path of a module, its arguments and its result."""


class ModulePlaces:
    """Where modules and weights are in a model.

    Attributes:
        names: Paths of the modules, by identity.
        weights: Parameters and buffers by their paths; one that modules share comes once for each.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model, self.tree = model, module_tree(model, prefix)
        self.names = {id(module): path for path, module in self.tree.items()}
        self.weights: dict[str, Tensor] = {}
        for path, module in self.tree.items():
            for kind in (module._parameters, module._buffers):
                for name, weight in kind.items():
                    if weight is not None:
                        self.weights[f"{path}.{name}" if path else name] = weight

    def adapted(self) -> dict[int, str]:
        """Modules that an adapter means by their place in their parent, by identity, and those places."""
        places = adapted_places()
        parents = {kind: qualified(kind) for kind in set(map(type, self.tree.values()))}
        wanted = {kind: name for kind, name in parents.items() if name in places}
        return {
            id(child): f"{wanted[type(parent)]}.{name}"
            for parent in (self.tree.values() if wanted else ())
            if type(parent) in wanted
            for name, child in parent._modules.items()
        }

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Where the memory of each weight begins."""
        return {name: address_of(weight) for name, weight in self.weights.items()}

    def names_of(self, constants: Sequence[Tensor | None]) -> dict[int, str]:
        """Which constants lie in the memory of the model's weights, and what these are called."""
        by_address = {address: name for name, address in self.addresses.items()}
        by_address.pop(0, None)
        places = {n: address_of(value) for n, value in enumerate(constants) if value is not None}
        return {n: by_address[address] for n, address in places.items() if address in by_address}


class ModuleCalls:
    """What a recording does at each module.

    Args:
        places: Where modules are.
        run: The tape.
        at: What to do at modules that are watched.
        watched: These, by identity.
        after: Is told what any other module gave.
    """

    def __init__(
        self,
        places: ModulePlaces,
        run: Tape,
        at: At | None = None,
        watched: Collection[int] = (),
        after: After | None = None,
    ) -> None:
        self.run, self.at, self.watched, self.after = run, at, watched, after
        self._names, self._adapted = places.names, places.adapted()
        self._plain: dict[type, bool] = {}

    def __call__(self, module: nn.Module, call: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module was called."""
        name = self._names.get(id(module))
        if name is None:
            return call(module, *args, **kwargs)
        path = self.run.path
        path.append(name)
        try:
            if id(module) in self.watched and self.at is not None:
                return self.at(module, name, functools.partial(self._forward, module, call), args, kwargs)
            is_plain = self._plain.get(type(module))
            if is_plain and "forward" not in module.__dict__ and id(module) not in self._adapted:
                output = call(module, *args, **kwargs)
            else:
                output = self._forward(module, call, *args, **kwargs)
            if self.after is not None:
                self.after(name, args, kwargs, output)
            return output
        finally:
            path.pop()

    def _forward(self, module: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a module: by its adapter if it has one and something live comes in."""
        kind = type(module)
        if kind not in self._plain:
            self._plain[kind] = not has_adapter(kind) and not calls_kernels(kind.forward)
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        if found_in(args, kwargs):
            adapter = find_adapter(module, self._adapted.get(id(module)))
            if adapter is not None:
                forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with forward_replaced(module, forward):
            return call(module, *args, **kwargs)
