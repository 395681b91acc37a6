"""Apply a function of one value to several at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import _set_vmap_fallback_warning_enabled  # type: ignore[import-not-found]
from torch.utils._pytree import tree_map

from tensorlens.memory import is_out_of_memory


def of_each(function: Callable[[Any], Any], items: Any) -> Any:
    """A function applied to each item, (item, …): together if torch can, otherwise one by one.

    Args:
        function: Takes one tensor, or a dictionary of them.
        items: The same with an axis more in front.
    """
    n_items = len(next(iter(items.values()))) if isinstance(items, dict) else len(items)
    if n_items > 1:
        try:
            return _together(function, items)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            if is_out_of_memory(error):
                raise
    found = [function(_one(items, n)) for n in range(n_items)]
    return tree_map(lambda *each: torch.stack(each), *found)


def _together(function: Callable[[Any], Any], items: Any) -> Any:
    # torch warns of operations that it takes one by one; we would do no better.
    _set_vmap_fallback_warning_enabled(False)
    try:
        return torch.vmap(function)(items)
    finally:
        _set_vmap_fallback_warning_enabled(True)


def _one(items: Any, n: int) -> Any:
    return tree_map(lambda tensor: tensor[n] if isinstance(tensor, Tensor) else tensor, items)
