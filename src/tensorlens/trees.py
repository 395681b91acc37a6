"""The one walk over nested values: the tensors in what modules take and give, and the same values with others in them.

`torch.utils._pytree` opens tuples, lists, dictionaries and the named outputs of transformers. Opened here besides:
other mappings (what a tokenizer returns) and dataclasses (blocks that hand on a record of their state).

Three walkers stay apart, since they run for every function or step of a recording and see plain tuples, lists and
dictionaries alone: `program.nodes.leaves` with `mapped`, and `recording.live.found_in`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested values, in order."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif (parts := _parts(leaf)) is not None:
            yield from tensors_in(parts)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested values with other tensors; a container that holds none is not copied, so that it stays shared."""
    return tree_map(lambda leaf: _changed(leaf, change), value, is_leaf=_holds_none)


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """What is in a mapping or dataclass that pytree takes for a leaf; None for any other leaf."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    names = getattr(type(leaf), "__dataclass_fields__", None)
    return None if names is None else {name: getattr(leaf, name, None) for name in names}


def _changed(leaf: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(leaf, Tensor):
        return change(leaf)
    if _holds_none(leaf):
        return leaf
    parts = map_tensors(change, _parts(leaf))
    if isinstance(leaf, Mapping):
        return type(leaf)(parts) if isinstance(leaf, UserDict) else parts
    made = copy(leaf)
    for name, part in parts.items():
        object.__setattr__(made, name, part)  # it may be frozen
    return made


def _holds_none(value: Any) -> bool:
    return next(tensors_in(value), None) is None
