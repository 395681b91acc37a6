"""The tokenizer inside a `.gguf` file, where transformers alone would read it differently than it was meant.

Two repairs: the beginning and end tokens a file asks for, and the merges of Gemma in older versions of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Kinds of token in a GGUF vocabulary.
_CONTROL, _USER_DEFINED = 3, 4


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `file`, framing its input as the file says."""
    from tokenizers.models import Unigram
    from transformers import AutoTokenizer

    metadata = Metadata(file)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    is_gemma = metadata.get("general.architecture", "").startswith("gemma")
    if is_gemma and isinstance(tokenizer.backend_tokenizer.model, Unigram):
        tokenizer = _gemma_tokenizer(metadata)
    return _framed(tokenizer, metadata)


class Metadata:
    """Values of a GGUF file by key, each decoded when asked for."""

    def __init__(self, file: Path) -> None:
        from gguf import GGUFReader

        self._fields = GGUFReader(file).fields

    def get(self, key: str, default: Any) -> Any:
        """The value of `key`, or `default` if the file has none."""
        return self._fields[key].contents() if key in self._fields else default


def _gemma_tokenizer(metadata: Metadata) -> Any:
    """Gemma's byte-pair encoding; versions of transformers before 5.22 may take it for a unigram model.

    The file lists no merges. They follow from the vocabulary, whose order is the order of merging.
    """
    from transformers import AddedToken, GemmaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    # Runs of spaces are stored as spaces, but looked up as the visible mark.
    tokens = ["▁" * len(t) if " " in t and not t.strip() else t for t in metadata.get("tokenizer.ggml.tokens", [])]
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges: Any = generate_merges(vocabulary, {token: -i for i, token in enumerate(tokens)})
    tokenizer = GemmaTokenizer(vocab=vocabulary, merges=merges)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        found = [token for token, kind in zip(tokens, kinds, strict=False) if kind == wanted]
        tokenizer.add_tokens([AddedToken(t, normalized=False, special=special) for t in found], special_tokens=special)
    return tokenizer


def _framed(tokenizer: Any, metadata: Metadata) -> PreTrainedTokenizerBase:
    """The tokenizer with the first and last token the file asks for, which transformers leaves out."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    # Convention: as in llama.cpp, a sentencepiece vocabulary has a beginning token unless the file denies it.
    is_sentencepiece = metadata.get("tokenizer.ggml.model", "") == "llama"
    wants_bos = metadata.get("tokenizer.ggml.add_bos_token", is_sentencepiece)
    wants_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    bos = [tokenizer.bos_token] if wants_bos and tokenizer.bos_token else []
    eos = [tokenizer.eos_token] if wants_eos and tokenizer.eos_token else []
    backend = tokenizer.backend_tokenizer
    if bos or eos:
        backend.post_processor = processors.TemplateProcessing(
            single=[*bos, "$A", *eos],
            pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
            special_tokens=[(token, backend.token_to_id(token)) for token in (*bos, *eos)],
        )
    # The plain class: a class of the family would build its own frame again on loading.
    framed = PreTrainedTokenizerFast(tokenizer_object=backend, **tokenizer.special_tokens_map)
    framed.chat_template = tokenizer.chat_template
    return framed
