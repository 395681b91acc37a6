"""The one walk over nested values: the tensors in arguments and results of modules, and how to replace them.

`torch.utils._pytree` opens tuples, lists, dictionaries and the named outputs of transformers. This file also opens
other mappings (the output of a tokenizer) and dataclasses (blocks that pass on a record of their state).

Three walkers are separate: they run for every function or step of a recording and see only plain tuples, lists and
dictionaries: `program.steps.leaves` with `mapped`, and `recording.live.found_in`.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])
"""Types of most values that are not tensors; pytree would look at each several times."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested values, in order."""
    kind = type(value)
    if isinstance(value, Tensor):
        yield value
    elif kind is tuple or kind is list or kind is dict:
        for part in value.values() if kind is dict else value:
            yield from tensors_in(part)
    elif kind not in _PLAIN:
        for leaf in tree_leaves(value):
            parts = leaf if leaf is not value else _parts(leaf)
            if parts is not None:
                yield from tensors_in(parts)


def map_tensors(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same nested values with different tensors; a container without tensors is shared, not copied."""
    kind = type(value)
    if isinstance(value, Tensor):
        return change(value)
    if kind in _PLAIN:
        return value
    if kind is tuple or kind is list or kind is dict:
        parts, new, holds_some = value.values() if kind is dict else value, list[Any](), False
        for part in parts:
            new.append(map_tensors(change, part))
            holds_some |= new[-1] is not part or isinstance(part, Tensor)
        return (dict(zip(value, new, strict=True)) if kind is dict else kind(new)) if holds_some else value
    if _holds_none(value):
        return value
    return tree_map(lambda leaf: _changed(leaf, change), value, is_leaf=_holds_none)


def _parts(leaf: Any) -> dict[Any, Any] | None:
    """The content of a mapping or dataclass that pytree takes for a leaf; None for any other leaf."""
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
