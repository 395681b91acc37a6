"""Copies between host and device that do not wait for other work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
