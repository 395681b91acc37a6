"""A tokenizer of bytes and a tiny random language model, and a folder of relations that it can read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import transformers as hf
import zoo
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import tensorlens as tl

START = "<|endoftext|>"
COLOURS = {
    "apple": "red",
    "grape": "blue",
    "lemon": "gold",
    "peach": "pink",
    "mango": "gold",
    "olive": "grey",
    "berry": "blue",
    "melon": "pink",
    "plums": "blue",
    "limes": "gold",
}


@cache
def tokenizer() -> hf.PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate([START, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=START, eos_token=START)


def tiny_lens(kind: str = "llama") -> tl.Lens:
    """A lens on a random model with the byte tokenizer; `llama` has no biases, `neox` has them everywhere."""
    sizes = zoo.TEXT | {"vocab_size": len(tokenizer()), "max_position_embeddings": 400}
    config = hf.LlamaConfig(**sizes, num_key_value_heads=2) if kind == "llama" else hf.GPTNeoXConfig(**sizes)
    family = hf.LlamaForCausalLM if kind == "llama" else hf.GPTNeoXForCausalLM
    model = zoo.randomise(family._from_config(config, attn_implementation="sdpa")).eval()
    return tl.Lens(model, tokenizer(), name=f"tiny-{kind}")


def write_relation(path: Path, **changes: object) -> Path:
    """A relation file that is right unless `changes` says otherwise; None removes a key."""
    document: dict[str, object] = {
        "name": "fruit colour",
        "prompt_templates": ["{} are"],
        "properties": {"relation_type": "commonsense"},
        "samples": [{"subject": fruit, "object": colour} for fruit, colour in COLOURS.items()],
    }
    document |= changes
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}), "utf-8")
    return path


def save_tiny(folder: Path, name: str) -> str:
    """The folder of a tiny model with its tokenizer, for what takes a name."""
    lens = tiny_lens(name)
    lens.model.save_pretrained(folder)
    lens.processor.save_pretrained(folder)
    return str(folder)
