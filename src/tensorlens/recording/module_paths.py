"""Module calls of a recording: the path of the running module, adapters, and the weights as they were."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from tensorlens.errors import InputError
from tensorlens.models.layouts import main_tensor
from tensorlens.models.module_calls import forward_replaced, module_tree
from tensorlens.program.marks import Choice
from tensorlens.program.nodes import versions_of
from tensorlens.recording.live import Live, found_in, raw
from tensorlens.recording.rules.modules import (
    adapted_places,
    calls_kernels,
    find_adapter,
    has_adapter,
    qualified,
    with_kernels,
)
from tensorlens.recording.tape import Tape
from tensorlens.recording.writes import address_of

Forward = Callable[..., Any]
At = Callable[[nn.Module, str, Forward, tuple[Any, ...], dict[str, Any]], Any]
"""An action at a module: takes the module, its path, its forward and the arguments of the call."""


class ModuleOutput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The output of a module: its slot, or None if all of it is held."""

    path: str
    slot: int | None


class ModulePlaces:
    """Where modules and weights are in a model.

    Attributes:
        names: Paths of the modules, by identity.
        weights: Parameters and buffers by their paths; a shared one has an entry for each path.
    """

    def __init__(self, model: nn.Module, prefix: str = "") -> None:
        self.model, self.tree = model, module_tree(model, prefix)
        self.names = {id(module): path for path, module in self.tree.items()}
        self.weights: dict[str, Tensor] = {}
        for path, module in self.tree.items():
            for kind in (module._parameters, module._buffers):
                for name, weight in kind.items():
                    full = f"{path}.{name}" if path else name
                    if type(weight) is nn.Parameter or type(weight) is Tensor:
                        self.weights[full] = weight
                    elif weight is not None:
                        self.weights |= _parts(full, weight)

    def adapted(self) -> dict[int, str]:
        """The modules that have an adapter because of their place in their parent: that place, by identity."""
        places = adapted_places()
        parents = {kind: qualified(kind) for kind in set(map(type, self.tree.values()))}
        wanted = {kind: name for kind, name in parents.items() if name in places}
        return {
            id(child): f"{wanted[type(parent)]}.{name}"
            for parent in (self.tree.values() if wanted else ())
            if type(parent) in wanted
            for name, child in parent._modules.items()
        }


def _parts(name: str, weight: Any) -> dict[str, Tensor]:
    """A weight by its name, or, for a packed weight, its parts by their names."""
    if not hasattr(weight, "__tensor_flatten__"):
        return {name: weight}
    return {f"{name}.{part}": getattr(weight, part) for part in weight.__tensor_flatten__()[0]}


class ModuleCalls:
    """The actions of a recording at each module.

    Args:
        places: Where modules are.
        run: The tape.
        at: What to do at modules that are watched.
        watched: The modules that are watched, by identity.

    Attributes:
        outputs: The output of each module, in the order in which they returned, recorded while `is_noting` is set.
        choices: The experts whose numbers were passed to modules.
    """

    def __init__(
        self,
        places: ModulePlaces,
        run: Tape,
        at: At | None = None,
        watched: Collection[int] = (),
    ) -> None:
        self.run, self.at, self.watched = run, at, watched
        self.is_noting = False
        self.outputs: list[ModuleOutput] = []
        self.choices: list[Choice] = []
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
            if self.is_noting:
                self.note(name, args, kwargs, output)
            return output
        finally:
            path.pop()

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the output of a module, and the numbers of the experts that were passed to it."""
        state = output[0] if type(output) is tuple and output else output
        state = state if type(state) is Live else raw(main_tensor, output)
        if type(state) is Live:
            self.outputs.append(ModuleOutput(name, self.run.slot_of(state)))
        elif state is not None and found_in(args, kwargs):
            self.outputs.append(ModuleOutput(name, None))
        if len(args) > 1 and self.run.block is not None:
            given = (x for x in args[1:] if isinstance(x, Tensor) and x.dim() == 2)
            chosen = next((x for x in given if x.dtype in (torch.int64, torch.int32)), None)
            if chosen is not None:
                self.choices.append(Choice(self.run.block, name, raw(Tensor.clone, chosen)))

    def _forward(self, module: nn.Module, call: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a module, by its adapter if it has one and a live tensor comes in."""
        kind = type(module)
        if kind not in self._plain:
            self._plain[kind] = not has_adapter(kind) and not calls_kernels(kind.forward)
        own = module.__dict__.get("forward", module.forward)
        forward = with_kernels(self.run, own)
        adapter = find_adapter(module, self._adapted.get(id(module)))
        if adapter is not None and found_in(args, kwargs):
            forward = functools.partial(adapter, self.run, module, forward)
        if forward is own:
            return call(module, *args, **kwargs)
        with forward_replaced(module, forward):
            return call(module, *args, **kwargs)


class Weights:
    """Where the weights of a model were in memory, and how often that memory had been written to.

    Args:
        places: Where the parts of the model are.
    """

    def __init__(self, places: ModulePlaces) -> None:
        self._model, self._then = places.model, _memory(places)

    def check(self, what: str) -> None:
        """Refuse a question that runs the model again if its weights have changed.

        Args:
            what: The question.

        Raises:
            InputError: says which weight.
        """
        now = _memory(ModulePlaces(self._model))
        changed = next((name for name, then in self._then.items() if now.get(name) != then), None)
        if changed is not None:
            raise InputError(
                f"`{changed}` was modified or replaced after this input was recorded. {what} needs the model as it "
                "was: call the lens on the input again."
            )


def _memory(places: ModulePlaces) -> dict[str, tuple[int, int | None]]:
    """The storage of each weight, and how often it was written to."""
    weights = {name: one for name, one in places.weights.items() if isinstance(one, nn.Parameter)}
    found = {}
    for (name, one), version in zip(weights.items(), versions_of(weights.values()), strict=True):
        # Not the address: `share_memory` moves it. An off-loaded weight has a new, empty storage after each use.
        is_plain = type(one) is nn.Parameter and not one.is_meta
        found[name] = one.untyped_storage()._cdata if is_plain else address_of(one), version
    return found
