"""Weights inside ONNX files of bundled packages, as checkpoints of transformers.

An export keeps the names of biases, norms and tables, but folds each linear weight into an anonymous, transposed
initialiser. The name of the node that multiplies with it is the path of the module that it belongs to. Whole numbers q
become $(q - z) s$ in float32; the activations, which such files round as well, are not rounded here.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tensorlens.errors import missing_extra
from tensorlens.files import write_json
from tensorlens.models.bundled import Installed, Recipe
from tensorlens.models.foreign_files import check_complete

Weights = dict[str, Any]
"""Torch tensors by the names that transformers gives them."""


def _complete_dinov2(weights: Weights, graph: Any) -> None:
    """Add what was exported in another form."""
    import torch

    width = weights["embeddings.cls_token"].shape[-1]
    stored = {item.name: item for item in graph.initializer}
    positions: Weights = {}
    for node in graph.node:
        anonymous = [name for name in node.input if name in stored and name.startswith("onnx::")]
        is_position = node.name.startswith("/backbone/embeddings/") and node.name.count("/") == 3
        if anonymous and is_position and list(stored[anonymous[0]].dims[-1:]) == [width]:
            positions[node.op_type] = _tensor(stored[anonymous[0]])
    # The class token's position is concatenated to the patches', which are reshaped to be interpolated.
    weights["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    # Used for masked pre-training only, and so not exported.
    weights["embeddings.mask_token"] = torch.zeros(1, width)


def convert_onnx(source: Installed, target: Path) -> None:
    """Write the model in the ONNX files of a package as a folder.

    Raises:
        MissingExtraError: `onnx` is not installed.
        LoadError: The files hold other weights than expected.
    """
    import transformers
    from safetensors.torch import save_file

    recipe = source.bundled.recipe
    graphs = [path for path in source.paths if path.suffix == ".onnx"]
    save_file(read_weights(recipe, graphs), target / "model.safetensors", metadata={"format": "pt"})
    kind: Any = getattr(transformers, recipe.model)
    kind.config_class(**recipe.config, **_labels(source), architectures=[recipe.model]).save_pretrained(target)
    _save_processor(source, target)
    model, info = kind.from_pretrained(target, output_loading_info=True)
    check_complete(source.bundled.name, model, {*info["missing_keys"], *info["unexpected_keys"]})


def _labels(source: Installed) -> dict[str, Any]:
    for path in source.paths:
        if path.name == source.bundled.recipe.labels:
            tags = json.loads(path.read_text("utf-8"))["tags"]
            return {"id2label": dict(enumerate(tags)), "label2id": {tag: i for i, tag in enumerate(tags)}}
    return {}


def _save_processor(source: Installed, target: Path) -> None:
    recipe = source.bundled.recipe
    if recipe.settings:
        write_json(target / "preprocessor_config.json", recipe.settings)
    for path in source.paths:
        if path.name == "tokenizer.json":
            from tokenizers import Tokenizer
            from transformers import PreTrainedTokenizerFast

            backend = Tokenizer.from_file(str(path))
            backend.no_truncation()  # the package cuts texts without a word
            backend.no_padding()
            PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=512, **recipe.tokens).save_pretrained(
                target
            )


# Weights -------------------------------------------------------------------------------------------------------------

_PRODUCT = re.compile(r"^/(.+)/MatMul(_quant)?$")


def _tensor(item: Any) -> Any:
    import torch
    from onnx import numpy_helper

    return torch.from_numpy(numpy_helper.to_array(item).copy())


def read_weights(recipe: Recipe, files: list[Path]) -> Weights:
    """The weights of a model in ONNX files, by the names that transformers gives them."""
    try:
        import onnx
    except ImportError:
        raise missing_extra("Converting an ONNX file", "onnx", "demo") from None
    weights: Weights = {}
    for file in files:
        graph = onnx.load(file, load_external_data=False).graph  # nothing outside the file belongs to it
        for name, weight in _named_weights(graph).items():
            for begins, ours in recipe.names.items():
                if name.startswith(begins):
                    weights[ours + name[len(begins) :]] = weight
                    break
        if recipe.model == "Dinov2Model":
            _complete_dinov2(weights, graph)
    return weights


def _named_weights(graph: Any) -> Weights:
    stored = {item.name: item for item in graph.initializer}

    def value(name: str) -> Any:
        if name in stored:
            return _tensor(stored[name])
        scale, zero = _tensor(stored[f"{name}_scale"]), _tensor(stored[f"{name}_zero_point"])
        return (_tensor(stored[f"{name}_quantized"]).float() - zero.float()) * scale

    bases = {name.removesuffix("_quantized") for name in stored if not name.endswith(("_scale", "_zero_point"))}
    weights = {name: value(name) for name in bases if "::" not in name and "/" not in name}
    for node in graph.node:
        product = _PRODUCT.match(node.name)
        for name in node.input if product else ():
            base = name.removesuffix("_DequantizeLinear_Output").removesuffix("_quantized")
            if product and base in bases and "::" in base:
                weights[product[1].replace("/", ".") + ".weight"] = value(base).T.contiguous()
    return weights
