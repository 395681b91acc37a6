"""Edits: the marked words are where they should be, and each word has the score of its own tokens."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers as hf
import zoo
from bench.judges import concepts, edits
from tiny_language import tokenizer

import tensorlens as tl


def test_one_word_is_wrong_and_another_decides():
    made = list(edits.mistakes(3))
    assert Counter(one.template for one in made) == dict.fromkeys(edits.TEMPLATES, 3) and made == list(
        edits.mistakes(3)
    )
    for one in made:
        assert not set("«»‹›") & set(one.text) and sum(one.decides) == 1 and one.wrong not in one.words
        template = edits.TEMPLATES[one.template][0]
        wrong = template[template.index("‹") + 1 : template.index("›")]
        assert one.text[slice(*one.wrong)] == wrong and one.edit != f"$REPLACE_{wrong}"
        (decides,) = (one.text[slice(*span)] for span, it in zip(one.words, one.decides, strict=True) if it)
        marked = template[template.index("«") + 1 : template.index("»")]
        assert decides in edits.WORDS[marked[1:-1]].split(",") if marked[0] == "{" else decides == marked
        assert [one.text[slice(*span)] for span in sorted((*one.words, one.wrong))] == one.text.rstrip(".").split()


def test_a_line_has_the_scores_of_words_for_the_edit(monkeypatch):
    torch.manual_seed(0)
    names = ["$KEEP", "$REPLACE_have"]
    config = hf.DistilBertConfig(vocab_size=len(tokenizer()), dim=16, hidden_dim=24, n_layers=2, n_heads=4)
    config.id2label, config.label2id = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    model = zoo.randomise(hf.DistilBertForTokenClassification(config)).eval()
    lens = tl.Lens(model, tokenizer())
    for bias, n in ((100.0, 1), (-100.0, 0)):  # it makes the edit, or leaves everything as it is
        model.classifier.bias.data = torch.tensor([0.0, bias])
        found = [one for one in edits.lines(lens, 1, ("paper",), ("mean.attn",)) if one["set"] == "they have"]
        assert len(found) == n
        if found:
            (line,), one = found, next(edits.mistakes(1))
            rows = lens(one.text).map("tensor.in_class", one.wrong[0], (1, 0)).scores[0]
            expected = [float(rows[start:stop].sum()) for start, stop in one.words]  # a token per character
            assert line["scores"]["tensor.in_class"] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            assert line["truth"] == list(map(float, one.decides)) and line["item"] == "edits:0:0"
            nearest = line["scores"]["control.nearest"]
            assert one.text[slice(*one.words[nearest.index(max(nearest))])] in ("a", one.text.split()[4])


def test_a_line_of_concepts_has_the_size_of_each_pair_of_words():
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=len(tokenizer()), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4
    )
    words = zoo.randomise(hf.BertModel(config)).eval()
    lens = tl.Lens(words, tokenizer())
    found, pair = next(concepts.lines(lens, 1, ("paper",))), next(concepts.pairs(0, 1))
    made = tl.similarity(lens, pair.first, pair.second, pooling="mean")  # a token per character
    row, column = (f" {word}" for word in pair.known)  # a space belongs to the word after it
    i, j = pair.first.index(row), pair.second.index(column)
    block = made.scores[i : i + len(row), j : j + len(column)]
    scores = found["scores"]["pairs@paper"]
    assert found["item"] == "concepts:0:0" and len(scores) == len(found["truth"]) and sum(found["truth"]) == 1
    assert scores[found["truth"].index(1.0)] == pytest.approx(abs(float(block.sum())), rel=1e-3)
    assert {*found["scores"]} == {"pairs@paper", *concepts.BASELINES}
