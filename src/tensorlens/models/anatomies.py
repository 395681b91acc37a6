"""The anatomies of a model: one for each kind of input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.models.anatomy import Anatomy, find_anatomy
from tensorlens.models.evidence import watch
from tensorlens.models.fingerprint import Fingerprint, fingerprint, moved


class Anatomies:
    """The anatomy of a model at each kind of input, found by one plain pass the first time.

    Args:
        model: The model.
        blocks: As for `find_anatomy`.
    """

    def __init__(self, model: nn.Module, blocks: str | None = None) -> None:
        self._model, self._blocks = model, blocks
        self._known: dict[Any, Anatomy] = {}
        self._moving: frozenset[tuple[int, str]] = frozenset()

    def at(self, arguments: Mapping[str, Any]) -> Anatomy:
        """The anatomy for a forward pass with these keyword arguments."""
        state, kind = self._state(), kind_of(arguments)
        if (state, kind) not in self._known:
            found = find_anatomy(self._model, watch(self._model, arguments), blocks=self._blocks)
            # What the pass changed by itself, such as a list that a hook appends to, says nothing of the model.
            self._moving |= moved(state, self._state(), self._model)
            now = self._state()
            self._known = {key: value for key, value in self._known.items() if key[0] == now} | {(now, kind): found}
            return found
        return self._known[state, kind]

    def _state(self) -> Fingerprint | None:
        """All but the weights: which parts a model has is for its code, flags and hooks to say."""
        return fingerprint(self._model, self._moving, weights=False)


def kind_of(value: Any) -> Any:
    """What an anatomy depends on in an input: its names, types, axes and which of them are single."""
    if isinstance(value, Mapping):
        return tuple((name, kind_of(item)) for name, item in sorted(value.items(), key=lambda pair: str(pair[0])))
    if isinstance(value, Tensor):
        return value.dtype, tuple(size == 1 for size in value.shape)
    if isinstance(value, (tuple, list)):
        return tuple(kind_of(item) for item in value)
    return value if isinstance(value, (bool, int, str, torch.dtype, type(None))) else type(value)
