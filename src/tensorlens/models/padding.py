"""A processor's output taken apart: samples one by one, their padding dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def batch_size(processed: Mapping[str, Any]) -> int:
    """How many samples a processor's output holds."""
    for name in ("input_ids", "inputs_embeds", "attention_mask", "pixel_values", "input_values", "input_features"):
        value = processed.get(name)
        if value is not None:
            dims = torch.as_tensor(value).dim()
            return len(value) if dims > 1 and not (name == "inputs_embeds" and dims == 2) else 1
    return 1


def split_batch(processed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The samples of a processor's output one by one, padding dropped, on whichever side it was."""
    size = batch_size(processed)
    tensors = {
        name: torch.as_tensor(value) if isinstance(value, (Tensor, np.ndarray, list)) else value
        for name, value in processed.items()
    }
    return [drop_padding({name: _row(value, i, size) for name, value in tensors.items()}) for i in range(size)]


def _row(value: Any, i: int, size: int) -> Any:
    return value[i : i + 1] if isinstance(value, Tensor) and value.dim() and len(value) == size else value


def drop_padding(arguments: dict[str, Any]) -> dict[str, Any]:
    """One sample without the padding before and after it, as if it were alone.

    A mask with a hole is no padding: tokens behind it keep their places, and the mask stays. So does one beside given
    positions, since transformers reads positions alone as several texts in a row.
    """
    arguments = dict(arguments)
    for prefix in ("", "decoder_"):
        mask = arguments.get(f"{prefix}attention_mask")
        ids = arguments.get(f"{prefix}input_ids", arguments.get(f"{prefix}inputs_embeds"))
        has_positions = arguments.get(f"{prefix}position_ids") is not None
        if mask is None and has_positions and isinstance(ids, Tensor) and ids.dim() >= 2:
            arguments[f"{prefix}attention_mask"] = torch.ones(ids.shape[:2], dtype=torch.long, device=ids.device)
            continue
        if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != 1:
            continue
        if ids is None or ids.shape[:2] != mask.shape or not mask.any():
            continue
        places = mask[0].nonzero()[:, 0]
        kept = slice(int(places[0]), int(places[-1]) + 1)
        aligned = [
            name
            for name, value in arguments.items()
            if isinstance(value, Tensor)
            and value.dim() >= 2
            and value.shape[:2] == mask.shape
            and name.startswith("decoder_") == bool(prefix)
        ]
        arguments |= {name: arguments[name][:, kept] for name in aligned}
        if not has_positions and len(places) == kept.stop - kept.start:
            del arguments[f"{prefix}attention_mask"]
    return arguments
