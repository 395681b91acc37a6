"""The anatomies of a model: one for each kind of input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from tensorlens.models.anatomy import Anatomy, observe
from tensorlens.models.evidence import Evidence
from tensorlens.models.module_tree import walk


class Anatomies:
    """The anatomy of a model at each kind of input, found by one plain pass the first time.

    Args:
        model: The model.
        blocks: As for `find_anatomy`.
    """

    def __init__(self, model: nn.Module, blocks: str | None = None) -> None:
        self._model, self._blocks = model, blocks
        self._known: dict[Any, Anatomy] = {}
        self.seen: Evidence | None = None
        """The plain pass of the last input that was new, until somebody has compared it with its recording."""

    def at(self, arguments: Mapping[str, Any]) -> Anatomy:
        """The anatomy for a forward pass with these keyword arguments."""
        key = self._modules(), kind_of(arguments)
        if key not in self._known:
            self._known[key], self.seen = observe(self._model, arguments, blocks=self._blocks)
        return self._known[key]

    def learn(self, arguments: Mapping[str, Any], found: Anatomy) -> None:
        """A recording has shown more than a plain pass did."""
        self._known[self._modules(), kind_of(arguments)] = found

    def _modules(self) -> tuple[Any, ...]:
        """Which modules the model has, and whether hooks or a forward of their own change what they do."""
        every = len(module_hooks._global_forward_hooks), len(module_hooks._global_forward_pre_hooks)
        return every + tuple(
            (id(module), len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in module.__dict__)
            for module in walk(self._model)
        )

    def __getstate__(self) -> dict[str, Any]:
        """Without what was found: identities mean nothing in another process."""
        return {"_model": self._model, "_blocks": self._blocks, "_known": {}, "seen": None}


def kind_of(value: Any) -> Any:
    """What an anatomy depends on in an input: its names, types, axes and which of them are single."""
    if isinstance(value, Mapping):
        return tuple((name, kind_of(item)) for name, item in sorted(value.items(), key=lambda pair: str(pair[0])))
    if isinstance(value, Tensor):
        return value.dtype, tuple(size == 1 for size in value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(kind_of(item) for item in value)
    return value if isinstance(value, (bool, int, str, torch.dtype, type(None))) else type(value)
