"""A tiny model in a folder, as commands take it."""

from __future__ import annotations

import pytest
from tiny_language import tiny_lens, tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny language model with the tokenizer of bytes."""
    path = tmp_path_factory.mktemp("tiny-model")
    tiny_lens().model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)
