"""The DINOv2 backbone inside the ONNX file of a saliency detector, as a checkpoint of transformers.

The export kept the names of biases and norms, but folded each linear weight into an anonymous, transposed
initialiser. The name of the node that uses it is the path of the module it belongs to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tensorlens.errors import LoadError, missing_extra
from tensorlens.models.bundled import Installed
from tensorlens.models.cache import cache_key, convert_once
from tensorlens.models.foreign_files import foreign_reader

_BACKBONE = "backbone."

# The grid of the position table (37 × 37) is that of 518 pixels; the detector feeds 224 and interpolates.
_CONFIG = {
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "patch_size": 14,
    "layerscale_value": 1.0,
}

# Mean, deviation and size of the detector. It pads to a square; we crop one, so that every patch shows the picture.
_PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}


def convert_dinov2(source: Installed) -> Path:
    """The folder of the backbone in a bundled file, made on first use.

    Raises:
        MissingExtraError: `onnx` is not installed.
        LoadError: The file holds other weights than expected.
    """
    name, file = source.bundled.name, source.paths[0]

    def make(target: Path) -> None:
        from safetensors.torch import save_file
        from transformers import Dinov2Config, Dinov2Model

        with foreign_reader(lambda said: _unreadable(name, file, said)):
            weights = read_backbone(file)
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        Dinov2Config(**_CONFIG, architectures=["Dinov2Model"]).save_pretrained(target)
        (target / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=2) + "\n")
        reader: Any = Dinov2Model
        with foreign_reader(lambda said: _unreadable(name, file, said)):
            _, info = reader.from_pretrained(target, output_loading_info=True)
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        if wrong:
            raise LoadError(
                f"{name}: the weights of a Dinov2Model were expected in {file.name}, but {wrong[:5]} do not fit "
                f"({len(wrong)} in all). Install the package of the pinned version again."
            )

    return convert_once(cache_key(name, [file], version=source.version), make)


def _unreadable(name: str, file: Path, said: str) -> str:
    return f"{name}: a DINOv2 backbone was expected in {file.name}, which could not be read ({said}). Install it again."


def read_backbone(file: Path) -> dict[str, Any]:
    """The backbone's weights by the names transformers gives them, as torch tensors."""
    import torch

    try:
        import onnx
        from onnx import numpy_helper
    except ImportError:
        raise missing_extra("Converting an ONNX file", "onnx", "demo") from None
    graph = onnx.load(file, load_external_data=False).graph  # nothing outside the file belongs to it
    stored = {item.name: item for item in graph.initializer}

    def tensor(name: str) -> torch.Tensor:
        return torch.from_numpy(numpy_helper.to_array(stored[name]).copy())

    weights = {name[len(_BACKBONE) :]: tensor(name) for name in stored if name.startswith(_BACKBONE)}
    positions: dict[str, torch.Tensor] = {}
    for node in graph.node:
        anonymous = [name for name in node.input if name in stored and name.startswith("onnx::")]
        # Node names look like /backbone/encoder/layer.0/mlp/fc1/MatMul.
        *path, operation = node.name.strip("/").split("/")
        if anonymous and operation == "MatMul" and path[0] == "backbone":
            weights[".".join([*path[1:], "weight"])] = tensor(anonymous[0]).T.contiguous()
        elif anonymous and path == ["backbone", "embeddings"] and stored[anonymous[0]].dims[-1:] == [384]:
            positions[node.op_type] = tensor(anonymous[0])
    # The class token's position is concatenated to the patches', which are reshaped to be interpolated.
    weights["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    # Used for masked pre-training only, and so not exported.
    weights["embeddings.mask_token"] = torch.zeros(1, _CONFIG["hidden_size"])
    return weights
