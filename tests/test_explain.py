"""The front door: one question, one sentence, one map."""

from __future__ import annotations

import dataclasses
import io
import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from explorer_samples import load
from PIL import Image
from rich.console import Console
from tiny_language import tiny_lens
from tiny_study import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from zoo import build

import tensorlens as tl
from tensorlens import recommendations
from tensorlens.app import cli, explain_command, printing
from tensorlens.maps.targets import Classes, MapQuestion
from tensorlens.recommendations import QUESTIONS
from tensorlens.recording.conventions import RULE_SETS
from tensorlens.views.captions import after, badge, sum_lines, why_headline

TEXT = "Red and blue. Big dogs bark"
runner = CliRunner()


@pytest.fixture(scope="module")
def lens() -> tl.Lens:
    return tiny_lens()


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lens) -> str:
    path = tmp_path_factory.mktemp("decoder")
    lens.model.save_pretrained(path)
    lens.processor.save_pretrained(path)
    return str(path)


def printed(e: tl.Explanation) -> str:
    console = Console(file=io.StringIO(), width=120)
    e.show(console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# The table ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_recommended_exists_and_has_a_reason(question):
    found = tl.recommended(question)
    assert found.question == question and found.rules.name in RULE_SETS
    assert found.method == "components" or tl.METHODS[found.method].takes_target
    assert found.target == ("runner_up" if question == "passage" else "logit")
    assert re.search(r"docs/[a-z-]+\.md\)\.$", found.because)
    assert question == "paper" or re.search(r"\d", found.because)


def test_what_is_recommended_is_taken(lens):
    e = lens.explain(TEXT)
    assert (e.rules, e.because) == (tl.recommended("word").rules, tl.recommended().because)
    with pytest.raises(tl.InputError, match="word, passage, component, paper"):
        tl.recommended("sentence")


# The explanation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("question", ["word", "passage", "paper"])
def test_an_explanation_is_the_recommended_map_put_together(lens, question):
    e = lens.explain(TEXT, question)
    asked = tl.recommended(question)
    T = lens.with_rules(asked.rules)(TEXT)
    first, second = T.predictions(2)
    plain = T.map(asked.method, -1, (first.index, second.index) if asked.target == "runner_up" else None)
    torch.testing.assert_close(e.map.scores.sum(), plain.scores.sum())
    assert e.map.method == asked.method
    assert e.map.meta["rules"] == asked.rules.as_dict() == e.rules.as_dict()
    grouped = {"passage": "sentences"}.get(question, "words")
    assert e.map.meta["grouped"] == grouped
    whole = plain.group(grouped)
    assert e.map.in_tokens == whole.in_tokens
    np.testing.assert_array_equal(e.map.scores, whole.scores)
    assert lens.explain(TEXT, question, tokens=True).map.in_tokens == plain.in_tokens


def test_another_method_in_the_table_gives_another_map(lens, monkeypatch):
    other = dataclasses.replace(tl.recommended("word"), method="gradient.times_input")
    monkeypatch.setitem(recommendations._TABLE, "word", other)
    e, T = lens.explain(TEXT, tokens=True), lens.with_rules(other.rules)(TEXT)
    assert e.map.method == other.method and e.map.headline == e.headline
    np.testing.assert_array_equal(e.map.scores, T.map(other.method, -1).scores)


def test_the_headline_asks_why_with_the_models_own_probability(lens):
    T = lens(TEXT)
    first, second = T.predictions(2)
    e = lens.explain(TEXT)
    assert e.prediction == first
    assert e.headline == why_headline(first.name, first.probability, None, "after “… blue. Big dogs bark”")
    assert e.headline.startswith("Why “") and e.map.headline == e.headline == e.map.view().title
    contrast = lens.explain(TEXT, against=second.index)
    assert " rather than “" in contrast.headline
    assert contrast.map.meta["logit"][0] == pytest.approx(first.logit - second.logit, abs=1e-4)
    with pytest.raises(tl.InputError, match="must differ"):
        lens.explain(TEXT, against=first.index)


def test_a_passage_is_asked_for_against_the_likeliest_other(lens):
    first, second = lens(TEXT).predictions(2)
    e = lens.explain(TEXT, "passage")
    assert e.map.meta["logit"][0] == pytest.approx(first.logit - second.logit, abs=1e-4)
    assert " rather than “" in e.headline
    e = lens.explain(TEXT, "passage", target=second.index)
    assert e.map.meta["logit"][0] == pytest.approx(second.logit - first.logit, abs=1e-4)


def test_the_words_of_a_headline():
    asked = why_headline(" Paris", 0.7, " London", after("The Eiffel Tower is located in the city of"))
    assert asked == "Why “ Paris” (70 %) rather than “ London” after “… in the city of”?"
    assert why_headline("cat", None, None, "") == "Why “cat”?"
    assert after("one two") == "after “one two”"


def test_a_map_of_one_target_has_a_headline_too(lens):
    T = lens(TEXT)
    assert T.map("tensor.in_class", -1, ("a", "b")).headline == "Why “a” rather than “b”?"
    assert T.map("tensor.in_out", -1).headline == "tensor.in_out"
    assert T.map("tensor.in_class").headline == "tensor.in_class"  # of every output


def test_a_target_of_several_tokens_is_the_sum_of_their_logits(lens):
    T = lens.with_rules("half_gate")(TEXT)
    e = lens.explain(TEXT, target="ab")
    one, other = (T.map("tensor.in_class", -1, letter).meta["logit"][0] for letter in "ab")
    assert e.map.meta["logit"][0] == pytest.approx(one + other, abs=1e-4)
    assert e.note == e.map.meta["note"] == "“ab” is 2 tokens; their logits are added up."
    assert e.headline.startswith("Why “ab” after") and e.note in printed(e)


def test_components_are_those_of_the_recommended_rules(lens, tmp_path):
    e = lens.explain(TEXT, "component", target="a", against="b")
    T = lens.with_rules("jacobian")(TEXT)
    assert isinstance(e.map, tl.ComponentMap)
    np.testing.assert_allclose(e.map.scores, T.components(-1, ("a", "b")).scores, atol=1e-5)
    page = e.save(tmp_path / "e.html").read_text("utf-8")
    assert 'data-tensorlens="inside"' in page and "rather than \\u201cb\\u201d" in page
    assert e.headline in printed(e) and e.headline.split("”")[0] in e._repr_html_()


def test_the_certificate_comes_when_it_is_asked_for_and_stays_with_the_map(lens, tmp_path):
    e = lens.explain(TEXT)
    assert e.map.meta["certificate"] is None
    assert e.certificate().passed and e.map.meta["certificate"]["passed"]
    assert tl.TokenMap.load(e.save(tmp_path / "e.json")).headline == e.headline
    assert "Why “" in e.save(tmp_path / "e.html").read_text("utf-8") and "Why “" in e._repr_html_()


def test_models_without_a_next_token():
    e: Any = tl.Lens(build("bert")).explain([5, 7, 9])
    assert e.prediction is None and e.headline.startswith("Why these outputs in “") and e.because == ""
    assert e.map.headline == e.headline
    assert e.map.method == "tensor.in_out" and e.map.shape[0] == 3
    with pytest.raises(tl.MethodError, match="no head"):
        tl.Lens(build("bert")).explain([5, 7, 9], target=3)
    with pytest.raises(tl.MethodError, match="no head"):
        tl.Lens(build("bert")).explain([5, 7, 9], "component")


def test_an_encoder_with_a_head_says_at_which_token():
    lens = tl.Lens(build("bert-mlm"), tokenizer(wrapped=True))
    e = lens.explain("the cat sat")
    assert e.out_token == 3 and " at “sat” in “the cat sat”?" in e.headline
    assert e.note == e.lines()[-1] == "To explain a masked token, write [MASK] in its place."
    e = lens.explain("the cat [MASK]")
    assert " at “[MASK]” in “the cat [MASK]”?" in e.headline and e.note == ""
    assert "[SEP]" not in tl.Lens(build("bert"), tokenizer(wrapped=True)).explain("the cat").headline


def test_what_is_inside_is_asked_in_the_same_words(lens):
    e = lens.explain(TEXT, "component", target="a", against="b")
    weights = {index: 1.0 if name == "a" else -1.0 for name in "ab" for index in lens.processor(name)["input_ids"]}
    T = lens.with_rules(e.rules)(TEXT)
    assert re.fullmatch(r"Why “a” \(.+ %\) rather than “b” after “… blue\. Big dogs bark”\?", e.headline)
    for found in (
        e.map,
        T.components(-1, weights),
        T.graph(-1, weights, max_nodes=3),
        T.inside(-1, weights, max_nodes=3),
    ):
        assert found.headline == e.headline


def test_one_sentence_is_explained_by_its_words(lens):
    assert lens.explain("Red and blue", "passage").map.meta["grouped"] == "words"
    assert lens.explain("Red. And blue", "passage").map.meta["grouped"] == "sentences"


def test_a_piece_of_a_character_is_named_by_its_bytes():
    inner = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(ALPHABET)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    classes = Classes(n_classes=256, tokenizer=PreTrainedTokenizerFast(tokenizer_object=inner))
    ids = classes.tokenizer("は")["input_ids"]
    assert [classes.name(i) for i in ids] == ["⟨E3⟩", "⟨81⟩", "⟨AF⟩"]
    assert classes.name(ALPHABET.index("a")) == "a"


def test_a_picture_without_a_head_is_asked_about_the_state_that_stands_for_it(tmp_path):
    lens = load("dinov2")
    e = lens.explain(Image.new("RGB", (40, 30), (200, 90, 40)))
    assert e.headline == e.map.headline == "Why the output “[CLS]” for this picture?" and "Because" not in printed(e)
    T = lens(Image.new("RGB", (40, 30), (200, 90, 40)))
    asked = MapQuestion.complete(T, None, None, is_one=True)
    assert asked.answered(T, asked.headlined(T), T.map).headline == e.headline


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


# The sink -------------------------------------------------------------------------------------------------------------


def drowned(n: int = 5) -> tl.TokenMap:
    scores = torch.tensor([[6.0, 1.0, -0.5, 2.0, 0.5]])[:, :n]
    tokens = ("Th", "ese", " two", " red", " cars")[:n]
    meta = {"causal": True, "target": " go", "logit": [9.5]}
    return tl.TokenMap(
        scores=scores,
        out_tokens=(" cars",),
        in_tokens=tokens,
        method="tensor.in_class",
        bias_share=torch.tensor([0.5 / 9.5]),
        meta=meta,
    )


def test_a_sink_is_told_with_the_sum():
    said = drowned().view().sums[0]
    assert said == "the tokens shown give 3.00 of 9.50, the logit; “Th”, the first token, 6.00 (63 %); the bias 0.50"
    chosen = drowned().set_aside(1).view().sums[0]
    assert "“ese”, set aside, 1.00 (11 %)" in chosen and "sink" not in chosen
    assert "sink" not in drowned().set_aside().view().sums[0]


def test_a_sink_inside_a_word_is_counted_beside_it():
    words = drowned().group("words")
    assert words.in_tokens == ("Th", "These", " two", " red", " cars")
    assert words.scores.tolist() == [[6.0, 1.0, -0.5, 2.0, 0.5]]
    assert words.view().set_aside == (0,) and "the words shown give 3.00" in words.view().sums[0]
    assert drowned().set_aside().group("words").scores.tolist() == [[7.0, -0.5, 2.0, 0.5]]


def test_a_share_that_would_mislead_is_not_said():
    said = sum_lines(np.array([0.3]), np.array([0.0]), {"logit": [0.3]}, [("The", np.array([-2.6]))])
    assert said == ("the tokens shown give 2.90 of 0.30, the logit; “The”, the first token, −2.60",)


# The command ----------------------------------------------------------------------------------------------------------


def asked(*words: str):
    return runner.invoke(cli.app, ["explain", *words])


def test_the_answer_is_printed_before_the_certificate(folder, lens, tmp_path):
    found = asked(folder, TEXT, "--out", str(tmp_path / "e.html"))
    assert found.exit_code == 0, found.output
    e = lens.explain(TEXT)
    places = [found.stdout.index(part) for part in (e.headline, "The model says", "um to", "certificate passed: value")]
    assert places == sorted(places) and places[0] == 0
    assert (tmp_path / "e.html").is_file()
    quick = asked(folder, TEXT, "--no-certify", "--for", "passage")
    assert quick.exit_code == 0 and "certificate" not in quick.stdout


def test_json_holds_what_was_said(folder, lens):
    found = json.loads(asked(folder, TEXT, "--json", "--no-certify", "--tokens").stdout)
    e = lens.explain(TEXT, tokens=True)
    assert (found["headline"], found["because"]) == (e.headline, e.because)
    assert found["map"]["in_tokens"] == list(e.map.in_tokens)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["smollm2-135m", "The", "cat"], 'Put the text in quotes: tensorlens explain smollm2-135m "The cat"'),
        (["The cat sat"], 'Name a model before the text: tensorlens explain smollm2-135m "The cat sat"'),
        (["smollm2-135m"], "Expected a text after the model"),
        (["smollm2-135m", "The cat", "York"], "Expected one text after the model; got 2: 'The cat', 'York'."),
        (["minilm", "The cat", "--for", "sentence"], "one of word, passage, component, paper; got 'sentence'"),
        (["minilm", "The cat", "--for", "component", "--out", "e.png"], "one of .html .json .safetensors"),
    ],
)
def test_a_mistake_is_answered_with_the_line_that_works(words, answer):
    found = asked(*words)
    assert found.exit_code != 0 and answer in str(found.exception)


def test_a_stage_is_said_only_when_it_lasts(monkeypatch, capsys):
    with printing.while_waiting("Short"):
        pass
    monkeypatch.setattr(printing, "PATIENCE_SECONDS", 0.0)
    with printing.while_waiting("Long"):
        import time

        time.sleep(0.3)
    said = capsys.readouterr().err
    assert "Long" in said and "Short" not in said


def test_a_badge_is_one_line():
    said = badge(True, {"value": 8.1e-7, "capture": 3e-4, "structure": 0.0})
    assert said == "certificate passed: value 8e-7, capture 3e-4, structure 0"
    assert explain_command.one_text("m", ["a"]) == "a"


def test_a_long_input_is_cut_in_a_notebook():
    long, short = (tiny_lens()("ab" * n)._repr_html_() for n in (190, 4))
    assert "…" in long and len(long) < 1000 and "…" not in short
