"""The one table of memory shares; how much memory is free, work cut into portions that fit, copies without waiting."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from tensorlens.axes import Range
from tensorlens.errors import LoadError, SizeError
from tensorlens.progress import bar, check_cancelled

# The one table of memory. Each share is a part of the memory that is free at that moment, so that what was taken before
# is already subtracted; the shares need not add up to one.

SHARE_OF_WORK = 0.5
"""One computation that is cut into pieces (`fitting`): a piece holds inputs and results at the same time."""

SHARE_OF_BATCH = 0.25
"""The recording of a batch of `lens.maps`: the methods and the next batch need memory beside it."""

SHARE_OF_RECORDING = 0.3
"""The constants of one recording; blocks beyond it are recorded again when they are needed."""

SHARE_OF_VALUES = 0.1
"""Values of the blocks between two questions about the inside, and as much again for their cotangents."""

SHARE_OF_FOLDED = 0.25
"""The matrices of folded blocks; those beyond it are folded again when they are needed."""

SHARE_OF_TOKEN_MATRICES = 0.3
"""The matrices of single tokens that several pieces of a slice can share."""

SHARE_OF_DENSE = 0.8
"""A dense T that the user asked for: nothing else needs the memory, but the machine must not stall."""

BYTES_OF_SCALED = {"cuda": 2**29, "cpu": 2**25}
"""By device: scaled weights while tokens are folded: enough for a large product, on a CPU as much as caches hold."""

BYTES_OF_SCORES = {"cuda": 2**29, "cpu": 2**26}
"""By device: attention scores formed at a time. Each chunk adds to all keys, which a GPU does slowly."""

BYTES_OF_VECTORS = {"cuda": 2**29, "cpu": 2**26}
"""By device: one chunk of the vectors of a decomposition; all would be L²·D numbers per sample."""

ALWAYS_FITS = 2**28
"""Bytes used without checking how much memory is free: the check takes longer than small work."""

UNKNOWN = 2**32
"""Bytes assumed free on a system that does not report it."""

Result = TypeVar("Result")


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, including torch's reserve."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    if device.type == "xpu":
        return torch.xpu.mem_get_info(device)[0]
    if device.type == "mps" and torch.backends.mps.is_available():
        return torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory()
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return _free_elsewhere()


def _free_elsewhere() -> int:
    """Free memory if no file reports it: from psutil, which accelerate installs, otherwise a guess."""
    try:
        import psutil  # pyright: ignore[reportMissingModuleSource]
    except ImportError:
        return UNKNOWN
    return int(psutil.virtual_memory().available)


def chosen_device(device: str | torch.device | None) -> torch.device:
    """The device that was asked for; the accelerator, if there is one, for None."""
    if device is None:
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise LoadError(f'device= takes names such as "cpu", "cuda", "cuda:1" or "mps"; got {device!r}.') from error
    here = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count() if here is not None and here.type == chosen.type else 0
    if chosen.type not in ("cpu", "meta") and (chosen.index or 0) >= count:
        raise LoadError(
            f"device={str(device)!r} was asked for, but torch sees {count} GPUs of this kind. "
            'Use device="cpu", or install a torch build for your GPU.'
        )
    return chosen


def bytes_on(device: torch.device, table: Mapping[str, int]) -> int:
    """An entry of a table by device; other accelerators use the entry of the CPU."""
    return table.get(device.type, table["cpu"])


def clear_memory() -> None:
    """Free unused memory after an out-of-memory error. Call it outside the handler, which holds the tensors."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def fitting(bytes_each: int, wanted: int, device: torch.device, share: float = SHARE_OF_WORK) -> int:
    """How many of `wanted` things of `bytes_each` bytes fit into the usable part of the free memory."""
    if bytes_each * wanted <= ALWAYS_FITS:
        return wanted
    return max(1, min(wanted, int(share * free_bytes(device) / max(1, bytes_each))))


class Portions:
    """Work on cotangents of outputs, cut into pieces with a maximum width, with a progress bar if it takes long.

    Iterating gives a range of outputs and a range of their cotangents. When `attempt` runs out of memory, the piece is
    given again at half the size.

    Args:
        n_outputs: How many outputs.
        n_cotangents: How many cotangents for each.
        most: How many columns a piece may have.
        unit: Name of a column in the progress bar.
    """

    def __init__(self, n_outputs: int, n_cotangents: int, most: int, unit: str = "cotangent") -> None:
        self.n_outputs, self.n_cotangents, self.unit = n_outputs, n_cotangents, unit
        self.width = max(1, min(n_cotangents, most))
        self.group = max(1, min(n_outputs, most // max(1, n_cotangents)))
        self._failed = False
        self._part: float | None = None

    @property
    def n_passes(self) -> int:
        """How many pieces there are."""
        return -(-self.n_outputs // self.group) * -(-self.n_cotangents // self.width)

    def __iter__(self) -> Iterator[tuple[Range, Range]]:
        output = cotangent = 0
        total = self.n_outputs * self.n_cotangents
        shown = None
        if self.n_passes > 1:  # one piece has no progress to show, and a bar takes longer than a sketch's block
            shown = bar(total=total, unit=self.unit, delay=3, leave=False)
        with shown or nullcontext():
            while output < self.n_outputs:
                outputs = Range(output, min(output + self.group, self.n_outputs))
                cotangents = Range(cotangent, min(cotangent + self.width, self.n_cotangents))
                if shown is not None:
                    self._part = (output * self.n_cotangents + cotangent * outputs.size) / total
                yield outputs, cotangents
                if self._failed:
                    self._failed = False
                    continue
                if shown is not None:
                    shown.update(outputs.size * cotangents.size)
                cotangent = cotangents.stop % self.n_cotangents
                output = outputs.stop if cotangent == 0 else output

    def attempt(self, work: Callable[[], Result]) -> Result | None:
        """The result of `work`, or None if memory ran out; then the piece is repeated in smaller ones."""
        check_cancelled(self._part)
        try:
            return work()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._halve(error)
        clear_memory()
        return None

    def _halve(self, error: BaseException) -> None:
        self._failed = True
        if self.group > 1:
            self.group = (self.group + 1) // 2
        elif self.width > 1:
            self.width = (self.width + 1) // 2
        else:
            raise SizeError(
                f"Out of memory even with the smallest piece of work, one {self.unit}. Use a "
                "shorter input, `precision='bfloat16'`, or a device with more memory."
            ) from error


def in_parts(items: Tensor, most: int, work: Callable[[Tensor], Result]) -> list[Result]:
    """The results of `work` for the items, a limited number at a time; half as many when memory runs out."""
    pieces = Portions(len(items), 1, most, unit="state")
    tried = (pieces.attempt(partial(work, items[slice(*some)])) for some, _ in pieces)
    return [result for result in tried if result is not None]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch ran out of memory; on the CPU only the error's text shows it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


# Copies between host and device -------------------------------------------------------------------------------------


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for it: a copy from ordinary memory waits for all work under way."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def on_its_way(values: Tensor) -> Callable[[], Tensor]:
    """A copy to the CPU that starts now; calling it waits for the copy, but not for later work."""
    if not values.is_cuda:
        return lambda: values.cpu()
    copy, done = values.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait
