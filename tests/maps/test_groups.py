"""Groups of tokens: what belongs where, sums that are exact, and bounds that are refused."""

from __future__ import annotations

import pytest
import torch
from tiny_language import tiny_lens

from tensorlens.errors import InputError
from tensorlens.maps.groups import find_groups, lines, sentences
from tensorlens.maps.token_map import TokenMap

TEXT = "Dr. A. Bell came. It was late!\nWas it? Yes."


@pytest.fixture(scope="module")
def tensor():
    lens = tiny_lens()
    lens.model.double()
    return lens(TEXT)


def texts(spans) -> list[str]:
    return [span.label for span in spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (TEXT, ["Dr. A. Bell came.", "It was late!", "Was it?", "Yes."]),
        ('He said "go." Then left', ['He said "go."', "Then left"]),
        ("Pi is 3.14 today. Yes", ["Pi is 3.14 today.", "Yes"]),
        ("First\n\nSecond\n- item", ["First", "Second", "- item"]),
        ("你好。再见！", ["你好。", "再见！"]),
        ("  \n", []),
        ("no end", ["no end"]),
    ],
)
def test_sentences(text, expected):
    assert texts(sentences(text)) == expected


@pytest.mark.parametrize("text", [TEXT, "\n\n A b.  C d.\n \nE f. ", "x", "a\n\n\nb\n"])
def test_sentences_and_lines_cover_the_text_in_order(text):
    for spans in (sentences(text), lines(text)):
        assert spans[0].start == 0 and spans[-1].stop == len(text)
        assert all(one.stop == other.start for one, other in zip(spans, spans[1:], strict=False))


def test_the_space_before_a_sentence_is_its_own_and_a_token_is_never_cut():
    offsets = [[0, 2], [2, 3], [3, 5], [5, 6], [6, 7]]  # " I" begins the second sentence
    found = find_groups("sentences", ("Ab", ".", " I", "!", "\n"), {"text": "Ab. I!\n", "offsets": offsets})
    assert [group.tokens for group in found] == [(0, 1), (2, 3, 4)]


def test_a_token_belongs_to_what_it_overlaps_most_and_the_first_on_ties():
    meta = {"text": "abcdefgh", "offsets": [None, [0, 3], [3, 5], [5, 8]]}
    found = find_groups([("late", 4, 7), ("early", 1, 4)], ("<s>", "abc", "de", "fgh"), meta)
    assert found == (("late", (2, 3)), ("early", (1,)), ("rest", (0,)))


def test_bounds_are_tokens_where_the_input_was_ids():
    found = find_groups([("b", 2, 3), ("a", 0, 2)], ("p", "q", "r", "s"), {})
    assert found == (("b", (2,)), ("a", (0, 1)), ("rest", (3,)))


@pytest.mark.parametrize("groups", ["words", "sentences", "lines", "tokens", [("doc", 4, 12)], ["It was late!"]])
def test_a_grouped_map_is_the_map_with_columns_summed(tensor, groups):
    plain = tensor.map("tensor.in_class", out_token=[-1, 3])
    assert torch.equal(tensor.map("tensor.in_class", out_token=torch.tensor([-1, 3])).scores, plain.scores)
    found = tensor.map("tensor.in_class", out_token=[-1, 3], groups=groups)
    members = find_groups(groups, plain.in_tokens, plain.meta)
    assert sorted(j for group in members for j in group.tokens) == list(range(plain.shape[1]))
    expected = torch.stack([plain.scores[:, list(group.tokens)].sum(1) for group in members], 1)
    torch.testing.assert_close(found.scores, expected, rtol=1e-12, atol=1e-13)
    assert found.in_tokens == tuple(group.label for group in members)
    assert found.bias_share.equal(plain.bias_share) and found.meta["logit"] == plain.meta["logit"]


def test_grouped_maps_save_load_and_draw(tensor, tmp_path):
    found = tensor.map("tensor.in_class", out_token=-1, groups="sentences").set_aside(0)
    loaded = TokenMap.load(found.save(tmp_path / "map.json"))
    assert loaded.in_tokens == ("Dr. A. Bell came.", "It was late!", "Was it?", "Yes.")
    assert loaded.meta["grouped"] == "sentences" and loaded.meta["offsets"][1] == [17, 31]
    assert loaded.view().words == ()
    assert found.save(tmp_path / "map.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ("paragraphs", "must be one of tokens, words"),
        ([], "at least one"),
        ([("a", 0, 5), ("b", 4, 8)], "must not overlap"),
        ([("a", 3, 3)], "is empty"),
        ([("a", 0, 999)], "must lie within"),
        ([("a", "0", 3)], "whole number"),
        ([("a", 0)], "whole numbers"),
        (["nowhere"], "does not occur in the text"),
        ([""], "does not occur in the text"),
        (["a"], "twice"),
        ({"first": "Was it?"}, "a list of their texts"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_groups_that_are_none(tensor, groups, words):
    with pytest.raises(InputError, match=words):
        tensor.map("tensor.in_class", out_token=-1, groups=groups)


def test_a_group_within_a_token_of_another_has_none():
    with pytest.raises(InputError, match="no token of its own"):
        find_groups([("a", 0, 3), ("b", 3, 4)], ("abcd",), {"text": "abcd", "offsets": [[0, 4]]})


def test_a_passage_needs_a_text():
    with pytest.raises(InputError, match="token ids"):
        find_groups(["abc"], ("a", "b"), {})


# Several outputs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("several", "one_by_one"),
    [([5, 6, -1], [5, 6, -1]), (range(2, 6, 2), [2, 4]), (slice(-2, None), [-2, -1]), ((3,), [3])],
)
def test_several_outputs_are_rows_of_their_own(tensor, several, one_by_one):
    found = tensor.map("tensor.in_class", out_token=several, target="a")
    alone = torch.cat([tensor.map("tensor.in_class", out_token=i, target="a").scores for i in one_by_one])
    torch.testing.assert_close(found.scores, alone, rtol=1e-10, atol=1e-12)
    assert found.meta["out_positions"] == [i % tensor.n_tokens for i in one_by_one]


@pytest.mark.parametrize("out_token", [[], slice(5, 5), range(0), [0, 999], ["a"], True])
@pytest.mark.usefixtures("unchecked")
def test_outputs_that_are_none(tensor, out_token):
    with pytest.raises(InputError, match="out_token"):
        tensor.map("tensor.in_out", out_token=out_token)


def test_passages_between_a_separator():
    text = "One. A ### Two. B\n### Three."
    meta = {"text": text, "offsets": [[k, k + 1] for k in range(len(text))]}
    found = find_groups({"separator": "###"}, tuple(text), meta)
    assert [group.label for group in found] == ["One. A", "Two. B", "Three."]
    assert [j for group in found for j in group.tokens] == list(range(len(text)))
    assert text[found[1].tokens[0] : found[1].tokens[-1] + 1] == " Two. B\n###"
    for wrong, words in (
        ({"separator": "@@"}, "does not occur"),
        ({"separator": ""}, "separator {"),
        ({"mark": "#"}, "separator {"),
        ({}, "separator {"),
    ):
        with pytest.raises(InputError, match=words):
            find_groups(wrong, tuple(text), meta)


def test_labels_of_word_pieces_make_a_text_with_spaces():
    found = find_groups("sentences", ("a", "cat", "##s", "sat", ".", "it", "rain", "##ed", "."), {})
    assert [group.label for group in found] == ["a cats sat .", "it rained ."]
    assert [group.tokens for group in found] == [(0, 1, 2, 3, 4), (5, 6, 7, 8)]
