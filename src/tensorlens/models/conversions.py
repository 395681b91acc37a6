"""Bundled weights in other forms, written as folders that transformers reads.

*Pieces*: files that were cut to fit into packages are joined while they are read.

*Torch folders* hold a pickled state dict and a vocabulary. Their tokenizers are Python classes inside packages that we
do not run. These consist of one split and one table, which a `tokenizer.json` can express.

*ONNX files* keep the names of biases, norms and tables, but each linear weight is an anonymous, transposed initialiser.
The name of the node that multiplies with it is the path of the module that it belongs to. Whole numbers q become
$(q - z) s$ in float32; the activations, which such files round as well, are not rounded here.
"""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from tensorlens.errors import missing_extra
from tensorlens.files import write_json
from tensorlens.models.bundled import Installed, Recipe
from tensorlens.models.foreign_files import check_complete, check_config_file, check_zip

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Weights = dict[str, Any]
"""Torch tensors by the names that transformers gives them."""


# Pieces ---------------------------------------------------------------------------------------------------------------

_KEPT = (".json", ".txt", ".safetensors", ".model")


@contextmanager
def one_file(parts: Sequence[Path], beside: Path, inside: str = "") -> Iterator[Path]:
    """The file itself, or its pieces joined in the folder `beside` while it is read.

    Args:
        parts: The file, or its pieces in order.
        beside: A folder that can be written.
        inside: If the pieces are those of a zip archive, the wanted file in it. Pieces at the beginning
            may be missing: an archive lists its files, with the start of each, at its end.
    """
    if len(parts) == 1 and not inside:
        yield parts[0]
        return
    whole = beside / f"assembled{PurePosixPath(inside).suffix or parts[0].suffix}"
    pieces = beside / "assembled.zip" if inside else whole
    with pieces.open("wb") as out:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, out, 1 << 20)
    if inside:
        with zipfile.ZipFile(pieces) as archive, archive.open(inside) as packed, whole.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
        pieces.unlink()
    yield whole
    whole.unlink()


def unpack_folder(source: Installed, target: Path) -> None:
    """Unpack the model folder inside a zip archive in pieces."""
    folder = PurePosixPath(source.bundled.inside)
    with one_file(source.paths, target) as whole, zipfile.ZipFile(whole) as archive:
        for entry in archive.infolist():
            place = PurePosixPath(entry.filename)
            if entry.is_dir() or place.suffix not in _KEPT or not place.is_relative_to(folder):
                continue
            entry.filename = str(place.relative_to(folder))
            archive.extract(entry, target)


# Torch folders --------------------------------------------------------------------------------------------------------


def convert_torch_folder(source: Installed, target: Path) -> None:
    """Write a bundled torch folder as a folder that transformers reads."""
    import transformers

    folder, name, recipe = source.paths[0], source.bundled.name, source.bundled.recipe
    vocabulary = source.paths[1] if len(source.paths) > 1 else folder / "vocab.txt"
    check_config_file(name, folder / "config.json")
    check_zip(name, folder / "pytorch_model.bin")
    model, info = getattr(transformers, recipe.model).from_pretrained(folder, output_loading_info=True)
    check_complete(name, model, info["missing_keys"])
    # The configs of 2020 hold sampling settings, which a masked-token model refuses to save.
    model.generation_config = None
    model.save_pretrained(target)
    build_tokenizer(vocabulary, recipe.token, model.config.max_position_embeddings).save_pretrained(target)


def build_tokenizer(vocabulary: Path, pattern: str, max_length: int) -> PreTrainedTokenizerBase:
    """A tokenizer that cuts text by `pattern`, looks the pieces up, and frames them with [CLS] and [SEP].

    Args:
        vocabulary: One token per line; the number of its line is its id.
        pattern: Regular expression of one token. White space is dropped; anything else that does not match
            becomes [UNK], so that it shows.
        max_length: Longest input of the model.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary.read_text(encoding="utf-8").splitlines())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s+"), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", ids["[SEP]"]), ("[CLS]", ids["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        **{f"{word}_token": f"[{word.upper()}]" for word in ("unk", "cls", "sep", "pad", "mask")},
    )


# ONNX files -----------------------------------------------------------------------------------------------------------


def convert_onnx(source: Installed, target: Path) -> None:
    """Write the model in the ONNX files of a package as a folder.

    Raises:
        MissingExtraError: `onnx` is not installed.
        LoadError: The files do not hold the expected weights.
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
            from transformers import PreTrainedTokenizerFast

            made = PreTrainedTokenizerFast(tokenizer_file=str(path), model_max_length=512, **recipe.tokens)
            made.backend_tokenizer.no_truncation()  # the package would truncate texts without notice
            made.backend_tokenizer.no_padding()
            made.save_pretrained(target)


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
        graph = onnx.load(file, load_external_data=False).graph  # the file refers to no other file
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


def _complete_dinov2(weights: Weights, graph: Any) -> None:
    """Add the weights that were exported in a different form."""
    import torch

    width = weights["embeddings.cls_token"].shape[-1]
    stored = {item.name: item for item in graph.initializer}
    positions: Weights = {}
    for node in graph.node:
        anonymous = [name for name in node.input if name in stored and name.startswith("onnx::")]
        is_position = node.name.startswith("/backbone/embeddings/") and node.name.count("/") == 3
        if anonymous and is_position and list(stored[anonymous[0]].dims[-1:]) == [width]:
            positions[node.op_type] = _tensor(stored[anonymous[0]])
    # The position of the class token is concatenated to those of the patches, which are reshaped for interpolation.
    weights["embeddings.position_embeddings"] = torch.cat([positions["Concat"], positions["Reshape"]], dim=1)
    # Used for masked pre-training only, and so not exported.
    weights["embeddings.mask_token"] = torch.zeros(1, width)
