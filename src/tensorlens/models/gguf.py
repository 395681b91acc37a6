"""Quantised `.gguf` files, dequantised once into a folder of safetensors.

The copy is float32: the blocks of a quantised file are products of a half-precision scale and small integers, which
neither float16 nor bfloat16 holds without rounding again.

Text encoders (`ENCODERS`), which transformers does not read, are converted here: a name map says which tensor of the
file is which weight of a model; the pooling, a number in the header, becomes a ``modules.json`` as
sentence-transformers writes it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from tensorlens.errors import LoadError, missing_extra
from tensorlens.files import write_json
from tensorlens.models.cache import cache_key, convert_once
from tensorlens.models.conversions import Weights, one_file
from tensorlens.models.foreign_files import MOST_BLOCKS, check_complete, check_proportion, foreign_reader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
