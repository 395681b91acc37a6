"""Walks over the modules of a model that cost microseconds.

The ones of `nn.Module` are generators inside generators, one for each level of the tree; a recording needs several
walks and would spend a tenth of its time in them.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def named_modules(model: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """Every module once by the first path to it, depth first: what `model.named_modules` gives."""
    found: dict[str, nn.Module] = {}
    waiting, seen = [(prefix, model)], set[int]()
    while waiting:
        path, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found[path] = module
        parts = module._modules
        if parts:
            start = f"{path}." if path else ""
            waiting += [(start + name, part) for name, part in reversed(parts.items()) if part is not None]
    return found


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, depth first."""
    waiting, seen = [model], set[int]()
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        if module._modules:
            waiting += [part for part in reversed(module._modules.values()) if part is not None]


def parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter; one that modules share comes once for each."""
    for module in walk(model):
        for parameter in module._parameters.values():
            if parameter is not None:
                yield parameter
