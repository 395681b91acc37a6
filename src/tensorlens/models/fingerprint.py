"""`fingerprint`: everything that a model's behaviour depends on, as one value to compare.

What is remembered of a model (a recording, the parts of its blocks, a proof) is valid for one fingerprint. It changes
with a module replaced, moved or re-wired, a hook, an adapter switched on or off, another activation, a weight written
to. It costs one walk over the modules, a few microseconds each. Writes through `.data` alone escape it, as they escape
torch's own version counter: `Samples` notices those.
"""

from __future__ import annotations

import dis
import inspect
import threading
import weakref
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from tensorlens.models.comparable import (
    SIMPLE,
    Objects,
    comparable,
    of_callable,
    of_class,
    of_objects,
    of_tensor,
    reference,
)
from tensorlens.models.module_tree import named_modules, parameters, walk

SAMPLED, ALL = 64, 2**17
"""Elements of each parameter that a sampled checksum reads; every one of a model that has no more than `ALL`."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_NO_STATE = frozenset(
    (*_HOOKS, "training", "_parameters", "_buffers", "_modules", "_compiled_call_impl", "_non_persistent_buffers_set")
    + ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
    + ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    + ("_is_full_backward_hook", "_is_hf_initialized", "_output_capturing_hooks_installed")
)
_NO_HOOKS = ((),) * len(_HOOKS)
_HEAD = ("identity", "class", "training mode", "hooks")
_READ = ("what its hooks read", "what its code reads")
_PLAIN = frozenset((nn.Parameter, Tensor))
_GLOBAL_HOOKS = tuple(
    getattr(torch_modules, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
)


class Fingerprint:
    """A model's state; two are equal where the model would do the same. Hashable; holds nothing of the model alive.

    Attributes:
        modules: For each module in order its identity, class, training mode and hooks, then names and values of
            parameters, buffers, parts and attributes in turn. In one row, which is faster to make than a tree.
        starts: Where each module begins in it.
        shared: What belongs to no single module: global hooks, the code of classes, configurations and other objects.
    """

    __slots__ = ("_hash", "modules", "shared", "starts")

    def __init__(self, modules: tuple[Any, ...], starts: list[int], shared: tuple[Any, ...]) -> None:
        self.modules, self.starts, self.shared = modules, starts, shared
        self._hash = hash((modules, shared))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Fingerprint):
            return NotImplemented
        return self._hash == other._hash and self.modules == other.modules and self.shared == other.shared

    def of_modules(self) -> Iterator[dict[str, Any]]:
        """The state of each module by name."""
        for start, stop in zip(self.starts, [*self.starts[1:], len(self.modules)], strict=True):
            row = self.modules[start:stop]
            head = dict(zip(_HEAD, row, strict=False))
            yield head | dict(zip(row[len(_HEAD) :: 2], row[len(_HEAD) + 1 :: 2], strict=True))


def fingerprint(
    model: nn.Module, ignoring: frozenset[tuple[int, str]] = frozenset(), *, weights: bool = True
) -> Fingerprint | None:
    """The model's state; None where parameters come and go with off-loading.

    Args:
        model: The model.
        ignoring: Attributes and buffers, by identity of the module and name, that a pass changes by itself: see
            `moved`.
        weights: Whether parameters count by what they hold; otherwise only their names do.
    """
    row: list[Any] = []
    starts: list[int] = []
    kinds: dict[type, None] = {}
    modules = list(walk(model))
    objects: Objects = dict.fromkeys(map(id, modules))
    for module in modules:
        starts.append(len(row))
        if not _add_state(row, module, objects, ignoring, weights):
            return None
        kind = type(module)
        if kind not in kinds and not issubclass(kind, torch.jit.ScriptModule):  # said once, at the first of its modules
            kinds[kind] = None
            read = of_class(kind, objects)
            if read and not (ignoring and (id(module), _READ[1]) in ignoring):
                row += (_READ[1], read)
    code = tuple([(kind, reference(kind.forward)) for kind in kinds])
    return Fingerprint(tuple(row), starts, (global_hooks(), code, of_objects(objects, ignoring)))


def moved(before: Fingerprint | None, after: Fingerprint | None, model: nn.Module) -> frozenset[tuple[int, str]]:
    """Attributes and buffers that differ though only a pass lay between: a counter, a cache. No sign of a change."""
    if before is None or after is None or before == after or len(before.starts) != len(after.starts):
        return frozenset()
    found = []
    for module, was, now in zip(walk(model), before.of_modules(), after.of_modules(), strict=True):
        kept = module._parameters.keys() | module._modules.keys() | set(_HEAD)
        names = (was.keys() | now.keys()) - kept
        found += [(id(module), name) for name in names if was.get(name) != now.get(name)]
    known = dict(before.shared[-1])
    for key, items in after.shared[-1]:  # an object that a pass counts or collects in
        was = dict(known.get(key, ()))
        found += [(key, name) for name, value in items if was.get(name) != value]
    return frozenset(found)


def what_changed(before: Fingerprint | None, after: Fingerprint | None, model: nn.Module) -> str:
    """The first difference between two states of a model, as a clause: which module, and what of it."""
    if before is None or after is None:
        return "its weights went off the device or came back"
    names = {id(module): name for name, module in named_modules(model).items()}
    for module, was, now in zip(walk(model), before.of_modules(), after.of_modules(), strict=False):
        if was != now:
            name = next(name for name in was | now if was.get(name, was) != now.get(name, now))
            what = f"the {name}" if name in _HEAD else name if name in _READ else f"`{name}`"
            return f"{what} of `{names[id(module)] or type(model).__name__}` changed"
    if len(before.starts) != len(after.starts):
        return f"it has {len(after.starts)} modules and had {len(before.starts)}"
    words = ("a global hook was added or removed", "the code of a class changed", "a configuration changed")
    changed = (word for word, old, new in zip(words, before.shared, after.shared, strict=True) if old != new)
    return next(changed, "nothing that a fingerprint sees changed")


def _add_state(
    row: list[Any], module: nn.Module, objects: Objects, ignoring: frozenset[tuple[int, str]], weights: bool
) -> bool:
    """Append what one module's behaviour depends on; False where its parameters are elsewhere."""
    inside = module.__dict__
    if isinstance(module, torch.jit.ScriptModule):  # its code cannot be changed
        row += [weakref.ref(module), type(module), module.training, ()]
        for name, p in module.named_parameters(recurse=False):
            row += (name, of_tensor(p) if weights else True)
        return True
    hooks = _hooks(inside)
    row += [weakref.ref(module), type(module), module.training, hooks]
    if (hooks[0] or hooks[1]) and not (ignoring and (id(module), _READ[0]) in ignoring):
        row += (_READ[0], _read_by_hooks(inside, objects))
    for name, p in inside["_parameters"].items():
        if not weights:
            row += (name, p is not None)
        elif p is not None:
            if p.is_meta:
                return False
            row += (
                name,
                (id(p), -1 if p.is_inference() else p._version, p.dtype, p.data_ptr() if type(p) in _PLAIN else 0),
            )
    for name, part in inside["_modules"].items():
        row += (name, part is not None)
    for name, buffer in inside["_buffers"].items():
        if buffer is not None and not (ignoring and (id(module), name) in ignoring):
            row += (name, of_tensor(buffer))
    set_by_passes = _set_by_passes(type(module))
    for name, value in inside.items():
        if name in _NO_STATE or name in set_by_passes or ignoring and (id(module), name) in ignoring:
            continue
        if type(value) in SIMPLE:
            row += (name, value)
        else:
            row += (name, comparable(value, objects))
    return True


@cache
def _set_by_passes(kind: type) -> frozenset[str]:
    """Attributes that the code of a forward assigns: what one pass leaves for the next, and no change of the model."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    found = () if code is None else dis.get_instructions(code)
    return frozenset(step.argval for step in found if step.opname == "STORE_ATTR")


def _hooks(inside: dict[str, Any]) -> tuple[Any, ...]:
    """The numbers of the hooks, which torch never gives again; those that only look on are left out."""
    if inside["_forward_hooks"] or inside["_forward_pre_hooks"] or inside["_backward_hooks"]:
        return tuple([tuple([n for n, hook in inside[name].items() if not looks_on(hook)]) for name in _HOOKS])
    return (*_NO_HOOKS[:-1], tuple(inside["_backward_pre_hooks"])) if inside["_backward_pre_hooks"] else _NO_HOOKS


def global_hooks() -> tuple[Any, ...]:
    """The numbers of the hooks that torch runs for every module."""
    return tuple([tuple([n for n, hook in list(hooks.items()) if not looks_on(hook)]) for hooks in _GLOBAL_HOOKS])


def _read_by_hooks(inside: dict[str, Any], objects: Objects) -> tuple[Any, ...]:
    hooks = [hook for name in _HOOKS[:2] for hook in inside[name].values() if not looks_on(hook)]
    return tuple([of_callable(hook, objects) for hook in hooks])


def in_this_thread(hook: Any) -> Any:
    """A hook for one pass of the library's own: other threads neither run it nor take it for a change of the model."""
    thread = threading.get_ident()

    def mine(*arguments: Any) -> Any:
        return hook(*arguments) if threading.get_ident() == thread else None

    mine.is_for_one_pass = True  # type: ignore[attr-defined]
    return mine


def looks_on(hook: Any) -> bool:
    """Whether it is one of ours, or of those with which transformers collects hidden states once it was asked to."""
    return (
        getattr(hook, "is_for_one_pass", False)
        or getattr(hook, "__module__", None) == "transformers.utils.output_capturing"
    )


class Samples:
    """A checksum of a few elements of each weight and buffer: notices most writes through `.data`, without a version.

    Args:
        model: Whose tensors; views of them are kept, so that a reading is one copy of a few thousand numbers.
        ignoring: Buffers, by identity of the module and name, that a pass writes to itself.
    """

    def __init__(self, model: nn.Module, ignoring: frozenset[tuple[int, str]] = frozenset()) -> None:
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        few = sum(parameter.numel() for parameter in model.parameters()) <= ALL
        for tensor in (*model.parameters(), *_data(model, ignoring)):
            flat = tensor.detach()
            if not flat.is_meta and flat.numel() and flat.layout is torch.strided and flat.is_contiguous():
                flat = flat.view(-1)
                step = 1 if few else max(1, -(-flat.numel() // SAMPLED))
                by_kind.setdefault((flat.device, flat.dtype), []).append(flat[::step])
        self._views = list(by_kind.values())
        self._before = self._read()

    def _read(self) -> list[Tensor]:
        return [torch.cat(views).view(torch.uint8) for views in self._views]  # as bytes: NaN is no change

    def same(self) -> bool:
        """Whether the elements are what they were."""
        return all(map(torch.equal, self._before, self._read()))


def _data(model: nn.Module, ignoring: frozenset[tuple[int, str]]) -> Iterator[Tensor]:
    """Buffers, and other tensors that modules hold; not the copies that a pass in another thread works with."""
    for module in walk(model):
        found = [pair for pair in module.__dict__.items() if type(pair[1]) is Tensor]
        for name, value in (*module._buffers.items(), *found) if found or module._buffers else ():
            if value is None or value.device.type != "cpu" or hasattr(value, "stands_in"):
                continue
            if (id(module), name) not in ignoring:
                yield value


def samples_of(model: nn.Module, ignoring: frozenset[tuple[int, str]] = frozenset()) -> Samples | None:
    """A checksum of a model whose parameters are all on the CPU; to read a few of a GPU would wait for all its work."""
    return Samples(model, ignoring) if all(weight.device.type == "cpu" for weight in parameters(model)) else None
