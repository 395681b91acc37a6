"""The .pt format of published Jacobian lenses, which TransformerLens reads and writes too.

`J[layer]` maps the output of block `layer` to the output of the last block, so it is the matrix of the state that
enters block `layer` + 1. A fit that was interrupted holds sums instead (`jacobian_sum`, `n_done`). What that format has
no place for (the state that enters the first block, a bias) is stored under a key of our own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import InputError

OWN = "tensorlens"


def lens_payload(matrices: Tensor, bias: Tensor, first: int, n_texts: int, meta: dict[str, Any], more: Any) -> Any:
    """The content of a lens file.

    Args:
        matrices: (block, channel, channel).
        bias: (block, channel).
        first: The block of the first matrix.
        n_texts: Number of texts in the mean.
        meta: Its origin, as far as known.
        more: Plain values that are restored when the file is read here.
    """
    jacobians = {first + i - 1: matrix.clone() for i, matrix in enumerate(matrices) if first + i > 0}
    rules = meta.get("rules")
    said = {
        "fitted_by": "tensorlens",
        "model": str(meta.get("model")),
        "rules": ", ".join(f"{key}={value}" for key, value in rules.items()) if isinstance(rules, dict) else "",
    }
    return {
        "J": jacobians,
        "n_prompts": n_texts,
        "source_layers": sorted(jacobians),
        "d_model": matrices.shape[-1],
        "metadata": said,
        OWN: {"first": first, "bias": bias.clone(), "before": matrices[: 1 if first == 0 else 0].clone(), **more},
    }


def read_lens(path: Path) -> dict[str, Any]:
    """The fields of a `CorpusTensor` from a file of `save` or of another package.

    Raises:
        InputError: the file is not there, or is not a lens.
    """
    if not path.is_file():
        raise InputError(f"Expected the file of a lens; {str(path)!r} does not exist.")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        n_texts = int(held.get("n_prompts", held.get("n_done", 0)))
        found = held["J"] if "J" in held else held["jacobian_sum"]
        scale = 1 if "J" in held else max(1, n_texts)
        layers = sorted(int(layer) for layer in found)
        matrices = torch.stack([torch.as_tensor(found[layer]) / scale for layer in layers])
        matrices = matrices if matrices.dtype == torch.float64 else matrices.float()
        if layers != list(range(layers[0], layers[-1] + 1)) or matrices.dim() != 3:
            raise ValueError(f"layers {layers[:8]} with matrices of {matrices.dim() - 1} axes")
        own = held.get(OWN) or {}
        first = layers[0] + 1
        if own and len(own["before"]):
            matrices, first = torch.cat([own["before"].to(matrices), matrices]), 0
        bias = own["bias"].to(matrices) if own else torch.zeros(matrices.shape[:2], dtype=matrices.dtype)
        said = held.get("metadata") if isinstance(held.get("metadata"), dict) else {}
        meta = json.loads(own["meta"]) if own else {"rules": {"include_final_norm": False}} | said
        more = {name: own[name].to(matrices) for name in ("middle", "middle_bias") if name in own}
        outputs = own["outputs"] if own else "later"
    except Exception as error:
        raise InputError(
            f"Could not read {path.name!r} as a lens: expected `J` (or `jacobian_sum`), one matrix per layer "
            f"for consecutive layers, as TransformerLens saves them ({type(error).__name__}: {str(error)[:200]})."
        ) from error
    found = {"matrices": matrices, "bias": bias, "first": first, "n_texts": n_texts, "meta": meta, "outputs": outputs}
    return found | more
