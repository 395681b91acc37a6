"""What a value is, as something to compare: small things by value, functions by what they read, others by identity.

A hook that scales by what is in a dictionary, a forward replaced by a closure, a global switch: the model's behaviour
depends on each, and none is an attribute of a module.
"""

from __future__ import annotations

import dis
import functools
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

MOST_ITEMS = 64
"""Containers of at most so many items are compared by what is in them, longer ones by their length and identity."""

DEEPEST = 3
"""How far functions are followed that functions call."""

SIMPLE = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_CONTAINERS = (list, tuple, set, frozenset, dict)
_LIBRARIES = ("torch", "transformers", "timm", "diffusers", "tensorlens")
"""Packages whose functions and classes read nothing that a user switches behind a model's back."""

Objects = dict[int, Any]
"""Things with attributes that were met on the way, to be looked into later."""


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
    if issubclass(kind, np.ndarray) and value.dtype != object:
        return id(value), value.ravel()[:: max(1, value.size // MOST_ITEMS)].tobytes()
    if callable(value):
        return of_callable(value, objects, depth)
    if hasattr(value, "__dict__"):
        objects[id(value)] = value
    return id(value)


def of_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """A tensor: which one, how often it was written to, and a few of its numbers, since `.data` counts no writes."""
    return id(tensor), -1 if tensor.is_inference() else tensor._version, _sampled(tensor)


def _sampled(tensor: Tensor) -> bytes | None:
    """Some numbers of a plain tensor on the CPU; to read a few of a GPU would wait for all its work."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.device.type != "cpu" or not tensor.numel():
        return None
    if tensor.layout is not torch.strided or not tensor.is_contiguous() or tensor.is_quantized or tensor.is_conj():
        return None
    flat = tensor.detach().view(-1)
    return flat[:: max(1, flat.numel() // MOST_ITEMS)].contiguous().view(torch.uint8).numpy().tobytes()


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
    for name in _names(function.__code__):
        value = function.__globals__.get(name, found)
        if type(value) in SIMPLE or isinstance(value, (*_CONTAINERS, np.ndarray, Tensor)) and value is not found:
            found.append((name, comparable(value, objects, depth + 1)))
        elif type(value) is FunctionType and value is not function:
            found.append((name, of_callable(value, objects, depth + 1)))
        elif value is not found and not _is_of_library(getattr(value, "__name__", None) or type(value).__module__):
            found += _attributes(value, _attribute_names(function.__code__), objects, depth + 1)
    return tuple(found)


def _attributes(value: Any, names: tuple[str, ...], objects: Objects, depth: int) -> Iterator[Any]:
    """Simple values of a global object, class or module, of the names that code asks it for, and of parts of it."""
    inside = getattr(value, "__dict__", None)
    if depth > DEEPEST or inside is None or isinstance(value, nn.Module):
        return
    for name in names:
        item = inside.get(name, type(value).__dict__.get(name))
        if type(item) in SIMPLE or isinstance(item, (*_CONTAINERS, np.ndarray, Tensor)):
            yield name, comparable(item, objects, depth + 1)
        elif item is not None and not callable(item):
            yield from _attributes(item, names, objects, depth + 1)


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


def of_objects(objects: Objects) -> tuple[Any, ...]:
    """Simple values of each object that modules refer to, such as a configuration, and of those inside it."""
    found, waiting, seen = [], list(objects.values()), set(objects)
    while waiting and len(found) < MOST_ITEMS:
        inner: Objects = {}
        value = waiting.pop()
        found.append(tuple((name, comparable(item, inner, DEEPEST)) for name, item in value.__dict__.items()))
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
def _attribute_names(code: CodeType) -> tuple[str, ...]:
    inner = [name for part in code.co_consts if isinstance(part, CodeType) for name in _attribute_names(part)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_names_in(code)))


def _names_in(code: CodeType) -> Iterator[str]:
    # Not `co_names`, which has attributes too: a global `T` is nothing to code that reads `x.T`.
    yield from (step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from _names_in(part)
