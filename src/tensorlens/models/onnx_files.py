"""Weights inside ONNX files of bundled packages, as checkpoints of transformers.

An export keeps the names of biases, norms and tables, but folds each linear weight into an anonymous, transposed
initialiser. The name of the node that multiplies with it is the path of the module that it belongs to. Whole numbers q
become $(q - z) s$ in float32; the activations, which such files round as well, are not rounded here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorlens.errors import LoadError, missing_extra
from tensorlens.models.bundled import Installed
from tensorlens.models.cache import cache_key, convert_once
from tensorlens.models.foreign_files import foreign_reader

Weights = dict[str, Any]
"""Torch tensors by the names that transformers gives them."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a file does not say of its model.

    Attributes:
        model: Class of transformers.
        config: What differs from its defaults.
        names: Where a name in the file begins as the key does, it begins here as the value does; other names are not
            weights of the model.
        complete: Adds what was exported in another form, given the weights and everything that the file stores.
        tokens: Special tokens by their role, for a package with a ``tokenizer.json``.
        settings: ``preprocessor_config.json`` of an image model.
        labels: The file of the package that lists the classes.
    """

    model: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    complete: Callable[[Weights, Any], None] = lambda weights, graph: None
    tokens: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    labels: str = ""


def _dinov2_rest(weights: Weights, graph: Any) -> None:
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


_RECIPES = {
    "dinov2-small-saliency": Recipe(
        model="Dinov2Model",
        # The grid of the position table (37 × 37) is that of 518 pixels; the detector feeds 224 and interpolates.
        config={
            "hidden_size": 384,
            "num_hidden_layers": 12,
            "num_attention_heads": 6,
            "image_size": 518,
            "patch_size": 14,
            "layerscale_value": 1.0,
        },
        names={"backbone.": ""},
        complete=_dinov2_rest,
        # Mean, deviation and size of the detector. It pads to a square; we crop one, so that every patch shows the
        # picture.
        settings={
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
        },
    ),
    "distilbert-edits": Recipe(
        model="DistilBertForTokenClassification",
        config={"vocab_size": 28996, "n_layers": 6, "dim": 768, "hidden_dim": 3072, "n_heads": 12},
        names={"distilbert.": "distilbert.", "classifier.": "classifier."},
        tokens={f"{word}_token": f"[{word.upper()}]" for word in ("unk", "cls", "sep", "pad", "mask")},
        labels="tag_vocab.json",
    ),
    "t5-titles": Recipe(
        model="T5ForConditionalGeneration",
        config={
            "vocab_size": 32128,
            "d_model": 512,
            "d_kv": 64,
            "d_ff": 1024,
            "num_layers": 8,
            "num_heads": 6,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
            "decoder_start_token_id": 0,
        },
        # The encoder's table is the shared one, once more.
        names={"enc.block.": "encoder.block.", "enc.final": "encoder.final", "m.": ""},
        tokens={"unk_token": "<unk>", "pad_token": "<pad>", "eos_token": "</s>"},
    ),
}


def convert_onnx(source: Installed) -> Path:
    """The folder of the model in the ONNX files of a package, made on first use.

    Raises:
        MissingExtraError: `onnx` is not installed.
        LoadError: The files hold other weights than expected.
    """
    name, recipe = source.bundled.name, _RECIPES[source.bundled.name]
    graphs = [path for path in source.paths if path.suffix == ".onnx"]

    def make(target: Path) -> None:
        import transformers
        from safetensors.torch import save_file

        with foreign_reader(lambda said: _unreadable(name, graphs, said)):
            save_file(read_weights(recipe, graphs), target / "model.safetensors", metadata={"format": "pt"})
            model: Any = getattr(transformers, recipe.model)
            config = model.config_class(**recipe.config, **_labels(recipe, source), architectures=[recipe.model])
            config.save_pretrained(target)
            _save_processor(recipe, source, target)
            _, info = model.from_pretrained(target, output_loading_info=True)
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        if wrong:
            raise LoadError(
                f"{name}: the weights of a {recipe.model} were expected in {_named(graphs)}, but {wrong[:5]} do not "
                f"fit ({len(wrong)} in all). Install the package of the pinned version again."
            )

    return convert_once(cache_key(name, source.paths, version=source.version), make)


def _named(files: list[Path]) -> str:
    return " and ".join(file.name for file in files)


def _unreadable(name: str, files: list[Path], said: str) -> str:
    model = _RECIPES[name].model
    return f"{name}: a {model} was expected in {_named(files)}, which could not be read ({said}). Install it again."


def _labels(recipe: Recipe, source: Installed) -> dict[str, Any]:
    for path in source.paths:
        if recipe.labels and path.name == recipe.labels:
            tags = json.loads(path.read_text("utf-8"))["tags"]
            return {"id2label": dict(enumerate(tags)), "label2id": {tag: i for i, tag in enumerate(tags)}}
    return {}


def _save_processor(recipe: Recipe, source: Installed, target: Path) -> None:
    if recipe.settings:
        (target / "preprocessor_config.json").write_text(json.dumps(recipe.settings, indent=2, allow_nan=False) + "\n")
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
        recipe.complete(weights, graph)
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
