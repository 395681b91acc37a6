"""Text encoders in `.gguf` files, which transformers does not read: names, configuration and tokenizer of each.

A name map says which tensor of the file is which weight of a model of transformers. The pooling, which the header gives
as a number, becomes a ``modules.json`` as sentence-transformers writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorlens.errors import LoadError
from tensorlens.files import write_json
from tensorlens.models.foreign_files import check_complete

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

Ask = Callable[[str, Any], Any]
"""The value of a key of the header, or what it is otherwise."""

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
"""Architectures that are read here."""

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


def nomic_bert_weights(read: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file by the names of a `NomicBertModel`."""
    weights = dict[str, Any]()
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


def nomic_bert_config(ask: Ask, read: Mapping[str, Tensor]) -> Any:
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
    """The tokenizer of a header that marks beginnings of words, where BERT's vocabulary marks what continues one."""
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
