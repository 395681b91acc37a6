"""A device without float64, pretended on the CPU: what Python sees of it is `mps`, and float64 on it is refused.

Two modes work together. Above, where Python calls torch, tensors of the device say that they are on it, and what is
asked for there is made on the CPU and remembered by its memory. Below, at the dispatcher, what a kernel makes of the
device's tensors is on the device too; a kernel that reads or makes float64 there is refused as Apple's GPUs refuse it,
and so is one that mixes the device with the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEVICE, HOST = torch.device("mps"), torch.device("cpu")
WIDE = (torch.float64, torch.complex128)
MIXING = ("aten::index", "aten::_index", "aten::copy_", "aten::index_put", "aten::_to_copy")
"""Kernels that take tensors of both."""


class Memory:
    """Which memory is the device's and which the CPU's; kept, so that no address is used twice.

    Of what torch makes by itself, as in a backward pass, neither is known: it goes with whatever it meets. `is_unheard`
    while the code of a subclass of tensors runs: what it moves to the device is not heard of.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, torch.device]] = {}
        self.is_unheard = False

    def put(self, values: Any, device: torch.device) -> None:
        for tensor in _tensors(values):
            storage = tensor.untyped_storage()
            self._kept[storage._cdata] = storage, device

    def place(self, tensor: Tensor) -> torch.device | None:
        return self._kept.get(tensor.untyped_storage()._cdata, (None, None))[1]

    def on_device(self, tensor: Tensor) -> bool:
        return self.place(tensor) == DEVICE


class Kernels(TorchDispatchMode):
    """Below: where results are, and what is refused."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory
        self.n_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = _tensors((args, kwargs))
        places = {self.memory.place(tensor) for tensor in taken if tensor.dim()}
        places = places or {self.memory.place(tensor) for tensor in taken}
        if {DEVICE, HOST} <= places:
            if not func.name().startswith(MIXING) and not self.memory.is_unheard:
                raise RuntimeError(f"{func}: expected all tensors on one device, got some on {DEVICE} and some on cpu")
            places = {DEVICE} if self.memory.is_unheard else {self.memory.place(taken[0])}
            self.memory.put(taken if self.memory.is_unheard else (), DEVICE)
        made = func(*args, **kwargs or {})
        if DEVICE in places:
            self.n_seen += 1
            check([*(tensor for tensor in taken if self.memory.place(tensor) != HOST), *_tensors(made)], func)
            self.memory.put(made, DEVICE)
        elif HOST in places:
            self.memory.put(made, HOST)
        return made


class Calls(TorchFunctionMode):
    """Above: what Python asks of torch."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not self.memory.is_unheard and any(kind not in (Tensor, nn.Parameter) for kind in types):
            self.memory.is_unheard = True
            try:
                return func(*args, **kwargs)
            finally:
                self.memory.is_unheard = False
        if func == Tensor.device.__get__:  # type: ignore[attr-defined]
            return DEVICE if self.memory.on_device(args[0]) else func(*args)
        if func is Tensor.numpy and self.memory.on_device(args[0]):
            raise TypeError(f"a tensor on {DEVICE} has no numpy array")
        if func in (Tensor.to, Tensor.cpu):
            return self._moved(func, args, kwargs)
        device = kwargs.pop("device", None)
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and (device is not None or not _tensors((args, kwargs))):
            goes = torch.device(device or HOST)
            check([made] if goes == DEVICE else [], func)
            self.memory.put(made, goes)
        return made

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        source, *rest = args
        was, goes, dtype = self.memory.place(source), HOST if func is Tensor.cpu else None, source.dtype
        for one in (*rest, *(kwargs.pop(name, None) for name in ("device", "dtype", "other"))):
            if isinstance(one, Tensor):
                goes, dtype = self.memory.place(one), one.dtype
            elif isinstance(one, torch.dtype):
                dtype = one
            elif isinstance(one, str | torch.device):
                goes = torch.device(one)
        if goes is None or goes == was:
            return source.to(dtype, **kwargs)
        if dtype in WIDE and DEVICE in (was, goes):  # numbers change their type on the device, whichever way they go
            raise TypeError(f"Cannot convert to {dtype} on {DEVICE}: move to the CPU first")
        moved = source.to(dtype).clone()
        self.memory.put(moved, goes)
        return moved


def check(tensors: list[Tensor], func: Any) -> None:
    """Refuse float64 on the device."""
    if any(tensor.dtype in WIDE for tensor in tensors):
        raise TypeError(f"{func}: {DEVICE} has no float64")


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


@contextmanager
def pretended(model: nn.Module) -> Iterator[Kernels]:
    """The model on the device for as long as this lasts."""
    memory = Memory()
    memory.put([*model.parameters(), *model.buffers()], DEVICE)
    kernels = Kernels(memory)
    with kernels, Calls(memory):
        yield kernels
