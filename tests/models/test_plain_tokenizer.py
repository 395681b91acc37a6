"""Tokenizers that have `encode` and `decode` and nothing else, and labels without a tokenizer."""

from __future__ import annotations

import pytest
import torch
import transformers

import tensorlens as tl

TEXT = "a cat, a bat"
CHARACTERS = sorted({*TEXT, "z"})


class Characters:
    """As in nanoGPT's first example."""

    def encode(self, text: str) -> list[int]:
        return [CHARACTERS.index(character) if character in CHARACTERS else {}[character] for character in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(CHARACTERS[i] for i in ids)


class Bytes:
    """Pieces of characters, as byte-level vocabularies have them; arrays instead of lists."""

    def encode(self, text: str) -> torch.Tensor:
        return torch.tensor(list(text.encode()))

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")


def model(n: int) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=n, n_positions=32)
    return transformers.GPT2LMHeadModel(config).eval()


def test_texts_words_and_targets_by_encode_and_decode():
    lens = tl.Lens(model(len(CHARACTERS)), Characters())
    T = lens(TEXT)
    assert "".join(T.tokens) == TEXT
    found = T.map("tensor.in_class", -1, ("c", "b"))
    assert found.meta["target"] == "c − b"
    by_ids = lens(Characters().encode(TEXT)).map("tensor.in_class", -1, tuple(map(CHARACTERS.index, "cb")))
    assert torch.equal(found.scores, by_ids.scores)
    told = lens.explain(TEXT)
    assert [word.strip() for word in told.map.in_tokens if word.strip()] == ["a", "cat", ",", "a", "bat"]
    assert torch.allclose(told.map.scores.sum(), told.tensor.map("tensor.in_class", -1).scores.sum(), rtol=1e-4)
    assert lens.answer(TEXT, " a").text == " a"


def test_what_it_cannot_encode_is_one_sentence():
    with pytest.raises(tl.InputError, match="cannot encode 'q': KeyError"):
        tl.Lens(model(len(CHARACTERS)), Characters())("q")
    with pytest.raises(tl.InputError, match="cannot encode 'q': KeyError"):
        tl.Lens(model(len(CHARACTERS)), Characters()).explain(TEXT, target="q")


def test_several_texts_are_not_one():
    with pytest.raises(tl.InputError, match=r"got 2\. .*`lens\.maps`"):
        tl.Lens(model(len(CHARACTERS)), Characters()).explain(["a cat", "a bat"])


def test_pieces_of_a_character_stay_together():
    lens = tl.Lens(model(256), Bytes())
    T = lens("né à")
    assert T.n_tokens == 6 and T.tokens[0] == "n"
    words = T.map("tensor.in_class", -1, groups="words")
    assert [word.strip() for word in words.in_tokens if word.strip()] == ["né", "à"]


def test_labels_alone_name_tokens_and_targets_and_read_no_text():
    lens = tl.Lens(model(len(CHARACTERS)), labels=lambda i: f"<{CHARACTERS[i]}>")
    T = lens([1, 2, 3])
    assert T.tokens == tuple(f"<{CHARACTERS[i]}>" for i in (1, 2, 3))
    assert T.map("tensor.in_class", -1, "<z>").meta["target"] == "<z>" and lens.explain([1, 2], target="<z>").headline
    with pytest.raises(tl.InputError, match="labels and no tokenizer"):
        lens("a cat")
    with pytest.raises(tl.InputError, match="0 of 7 tokens have the label"):
        T.map("tensor.in_class", -1, "nothing")
    with pytest.raises(tl.InputError, match="`labels` must be a function"):
        tl.Lens(model(8), Characters(), labels=str)
