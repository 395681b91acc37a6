"""Models whose code comes with their weights, built in real memory.

transformers builds a model without memory first, and gives it memory and weights later. Code written for an older
version may not survive that: it lacks the call of `post_init` that the loader relies on, or makes a table (of rotary
angles) that no file holds and that would stay empty. So such a model is built as its code says, and then takes its
weights from the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

WEIGHTS = ("*.safetensors", "*.bin")


def remote_class(config: Any, auto_class: str, folder: Path) -> type[nn.Module] | None:
    """The class that a checkpoint brings for an auto class of transformers, or None. Runs its code: only if trusted."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto_class)
    if reference is None:
        return None
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    return get_class_from_dynamic_module(reference, folder)


def build(kind: type[nn.Module], config: Any, folder: Path, dtype: torch.dtype) -> tuple[nn.Module, list[str]] | None:
    """The model with its weights, and those that no file holds; None where the files name weights that it has not.

    Those are checkpoints whose weights transformers renames while loading. Weights are cast to `dtype`;
    tables that no file holds stay as the code made them: complex angles are not real numbers.
    """
    model = kind(config)
    wanted, found = model.state_dict(), set()
    for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
        weights = _weights(file)
        if not set(weights) <= set(wanted):
            return None
        found |= set(weights)
        model.load_state_dict(weights, strict=False)
    if hasattr(model, "all_tied_weights_keys"):  # which `post_init` made
        model.tie_weights()  # type: ignore[operator]
    wanted = model.state_dict()
    shared = {wanted[name].data_ptr() for name in found}
    missing = sorted(name for name, weight in wanted.items() if name not in found and weight.data_ptr() not in shared)
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)
    return model, missing


def _weights(file: Path) -> dict[str, torch.Tensor]:
    if file.suffix == ".bin":
        return torch.load(file, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(file)
