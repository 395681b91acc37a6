"""What a value is, as something to compare: small things by value, functions by what they read, others by identity.

A hook that scales by what is in a dictionary, a forward replaced by a closure, a global switch: the model's behaviour
depends on each, and none is an attribute of a module.
"""

from __future__ import annotations

import dis
import functools
import weakref
from array import array
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOST_ITEMS = 64
"""Containers of at most so many items are compared by what is in them, and what is in that; of longer ones and of
arrays the items alone."""

MOST_HASHED = 2**14
"""Items of a long container that are compared; of more the first ones, and of an array some all over it."""

DEEPEST = 3
"""How far functions are followed that functions call."""

SIMPLE = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_BYTES = (bytearray, memoryview, array)
_LIBRARIES = ("torch", "transformers", "timm", "diffusers", "tensorlens")
"""Packages whose functions and classes read nothing that a user switches behind a model's back."""

Objects = dict[int, Any]
"""Things with attributes that were met on the way, to be looked into later; None for what is compared in any case."""


def comparable(value: Any, objects: Objects, depth: int = 0, within: tuple[int, ...] = ()) -> Any:
    """A value as something to compare; `within` are the containers it was found in, one of which it may be itself."""
    kind = type(value)  # and not `isinstance`, which asks the object: slow for one with a `__getattribute__`
    if kind in SIMPLE:
        return value
    if id(value) in objects or id(value) in within:
        return id(value)
    if issubclass(kind, Tensor):
        return of_tensor(value)
    if issubclass(kind, _CONTAINERS) and len(value) <= MOST_ITEMS:
        inside = (objects, depth, (*within, id(value)))
        if issubclass(kind, dict):
            return tuple([(comparable(key, *inside), comparable(item, *inside)) for key, item in value.items()])
        return kind, tuple([comparable(item, *inside) for item in value])
    if issubclass(kind, _CONTAINERS):
        return id(value), len(value), _of_many(value)
    if issubclass(kind, np.ndarray) and value.dtype != object:
        return id(value), hash(value.ravel()[:: max(1, value.size // MOST_HASHED)].tobytes())
    if issubclass(kind, _BYTES):
        return id(value), hash(bytes(value))
    if kind is ContextVar:
        return id(value), comparable(value.get(None), objects, depth + 1, within)
    if callable(value) and not issubclass(kind, nn.Module):
        return of_callable(value, objects, depth)
    if has_attributes(value):
        objects[id(value)] = value
    return id(value)


def _of_many(value: Any) -> int:
    """A long container by its items, which are small or known by their identity; if they are neither, by their ids."""
    some = tuple(islice(value.items() if isinstance(value, dict) else value, MOST_HASHED))
    try:
        return hash(some)
    except TypeError:
        return hash(tuple(map(id, value.values() if isinstance(value, dict) else some)))


def of_tensor(tensor: Tensor) -> tuple[int, int]:
    """A tensor: which one, and how often it was written to."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version


def of_callable(value: Any, objects: Objects, depth: int = 0) -> Any:
    """A function with what it closed over and what it reads; an object that can be called with its attributes."""
    kind = type(value)
    if kind is functools.partial:
        return reference(value), comparable((value.func, value.args, value.keywords), objects, depth + 1)
    if kind is MethodType:
        if not isinstance(value.__self__, (nn.Module, type)) and hasattr(value.__self__, "__dict__"):
            objects[id(value.__self__)] = value.__self__
        return id(value.__self__), of_callable(value.__func__, objects, depth)
    if kind is FunctionType:
        return reference(value), of_function(value, objects, depth)
    if not issubclass(kind, (type, nn.Module)) and getattr(value, "__dict__", None):
        objects[id(value)] = value
    return reference(value)


def of_function(function: FunctionType, objects: Objects, depth: int) -> tuple[Any, ...]:
    """What a function of the user's reads beside its arguments."""
    if depth >= DEEPEST or _is_of_library(function.__module__):
        return ()
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    read = [cells, function.__defaults__, function.__kwdefaults__]
    found = [comparable(value, objects, depth + 1) for value in read]
    for name, attribute in _names(function.__code__):
        value = function.__globals__.get(name, function)
        if isinstance(value, (type, ModuleType)):  # of which the code reads what it names, and no more
            value = vars(value).get(attribute, function)
        if value is function or isinstance(value, (type, ModuleType)):
            continue
        if type(value) is FunctionType:
            found.append((name, attribute, of_callable(value, objects, depth + 1)))
        elif not callable(value) or isinstance(value, nn.Module):
            found.append((name, attribute, comparable(value, objects, depth + 1)))
    return tuple(found)


def of_class(kind: type, objects: Objects) -> tuple[Any, ...]:
    """What is common to the modules of a class and no library's: its methods, and its simple attributes."""
    found: list[Any] = []
    for one in kind.__mro__:
        if _is_of_library(one.__module__) or one is object:
            break
        for name, value in vars(one).items():
            value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if type(value) in SIMPLE and not name.startswith("__") or isinstance(value, (*_CONTAINERS, FunctionType)):
                found.append((name, comparable(value, objects, 1)))
    return tuple(found)


def reference(value: Any) -> Any:
    """Identity that outlasts the thing: a bare `id` may be given again to the next function that is made."""
    try:
        found = weakref.ref(value)
        hash(found)  # while it is there: afterwards it would have none
    except TypeError:
        return id(value)
    return found


def has_attributes(value: Any) -> bool:
    """Whether there is something to look into."""
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, of a module those that its behaviour depends on."""
    found = dict(getattr(value, "__dict__", ()))
    if isinstance(value, nn.Module):
        found = {name: item for name, item in found.items() if not name.endswith("_hooks") and name != "forward"}
    return found | {name: getattr(value, name) for name in _slots(type(value)) if hasattr(value, name)}


@functools.cache
def _slots(kind: type) -> tuple[str, ...]:
    each = [vars(one).get("__slots__", ()) for one in kind.__mro__]
    names = [name for some in each for name in ((some,) if isinstance(some, str) else some)]
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def of_objects(objects: Objects, ignoring: frozenset[tuple[int, str]] = frozenset()) -> tuple[Any, ...]:
    """Simple values of each object that modules refer to, such as a configuration, and of those inside it."""
    found, waiting, seen = [], [value for value in objects.values() if value is not None], set(objects)
    while waiting and len(found) < MOST_ITEMS:
        inner: Objects = {}
        value = waiting.pop()
        items = [pair for pair in attributes_of(value).items() if (id(value), pair[0]) not in ignoring]
        found.append((id(value), tuple([(name, comparable(item, inner, DEEPEST)) for name, item in items])))
        waiting += [item for key, item in inner.items() if key not in seen]
        seen |= inner.keys()
    return tuple(found)


def _is_of_library(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] in _LIBRARIES


def _is_filled(cell: Any) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


@functools.cache
def _names(code: CodeType) -> tuple[tuple[str, str], ...]:
    return tuple(dict.fromkeys(_names_in(code)))


def _names_in(code: CodeType) -> Iterator[tuple[str, str]]:
    """Globals that code reads, each with the attribute of it that is read at once, if one is."""
    # Not `co_names`, which has attributes too: a global `T` is nothing to code that reads `x.T`.
    steps = list(dis.get_instructions(code))
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            is_read = following is not None and following.opname in ("LOAD_ATTR", "LOAD_METHOD")
            yield step.argval, following.argval if is_read and following is not None else ""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_in(part)
