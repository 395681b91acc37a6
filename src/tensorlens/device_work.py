"""Work that a GPU goes on with by itself: copies that are under way, and small work beside the large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Numbers on a device, without waiting for it: a copy from ordinary memory waits for all work under way."""
    found = torch.tensor(numbers)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found.to(device)


def on_its_way(values: Tensor) -> Callable[[], Tensor]:
    """A copy for the CPU that is begun now; a call waits for it, and for nothing that was begun later."""
    if not values.is_cuda:
        return lambda: values.cpu()
    copy, done = values.to("cpu", non_blocking=True), torch.cuda.Event()
    done.record(torch.cuda.current_stream(values.device))

    def wait() -> Tensor:
        done.synchronize()
        return copy

    return wait


@contextmanager
def beside(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Do some work on a stream from `aside`."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(stream.device).wait_stream(stream)  # whose memory others may have from now on


def aside(device: torch.device) -> torch.cuda.Stream | None:
    """A second line of work for a GPU, beside all that it is given from now on; None for another device."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream
