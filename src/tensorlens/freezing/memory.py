"""How much memory is free, and making it so."""

from __future__ import annotations

import gc
import os

import torch


def free_bytes(device: torch.device) -> int:
    """Memory that is free on a device, what torch holds in reserve included."""
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + reserved
    try:
        with open("/proc/meminfo") as lines:  # noqa: PTH123
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def clear_memory() -> None:
    """Let go of what nobody uses, after memory ran out. To be called outside the handler, which holds the tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
