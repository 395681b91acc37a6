"""The tiny models and the question that every plug-in is tried with."""

from __future__ import annotations

from functools import cache

import transformers as hf
import zoo
from tiny_language import tiny_lens, tokenizer

import tensorlens as tl

PROMPT, TARGET, AGAINST = "The cat sat there. Who", 40, 41
PAIR = ("The cat sat.", "A dog ran away.")


@cache
def lens(kind: str = "neox") -> tl.Lens:
    return tiny_lens(kind)


def ids_of(text: str) -> list[int]:
    return tokenizer()(text)["input_ids"]


@cache
def encoder() -> tl.Lens:
    config = hf.BertConfig(**zoo.TEXT | {"vocab_size": len(tokenizer())})
    return tl.Lens(zoo.randomise(hf.BertModel(config)).eval(), tokenizer())
