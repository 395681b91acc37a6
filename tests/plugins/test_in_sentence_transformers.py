"""The quick start of sentence-transformers with one line changed. Run by `make plugins`."""

from __future__ import annotations

import pytest
import torch
from plugin_samples import PAIR, encoder
from tiny_language import tokenizer

import tensorlens as tl

pytest.importorskip("sentence_transformers", reason="sentence_transformers is not here; `make plugins` has it")
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from tensorlens.plugins.sentence_transformers import pair_maps


@pytest.fixture
def model(tmp_path):
    encoder().model.save_pretrained(tmp_path)
    padded = tokenizer()
    padded.pad_token = padded.eos_token
    padded.save_pretrained(tmp_path)
    inner = Transformer(str(tmp_path))
    return SentenceTransformer(modules=[inner, Pooling(16)], device="cpu")


def test_values_are_its_similarities(model, recorded):
    sentences = list(PAIR)
    embeddings = model.encode(sentences)
    similarities = model.similarity(embeddings, embeddings)
    found = pair_maps(model, sentences)
    values = torch.tensor([[one.value for one in row] for row in found])
    torch.testing.assert_close(values, similarities.to(values), rtol=1e-4, atol=1e-5)
    assert all(float(one.scores.sum()) == pytest.approx(one.value, abs=1e-5) for row in found for one in row)
    recorded("sentence_transformers", [found[0][1].value, *found[0][1].scores.sum(1).tolist()])


def test_a_distance_is_refused(model):
    model.similarity_fn_name = "euclidean"
    with pytest.raises(tl.InputError, match="compares by euclidean"):
        pair_maps(model, list(PAIR))
