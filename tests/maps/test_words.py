from __future__ import annotations

import pytest
import torch

from tensorlens.errors import InputError
from tensorlens.maps.groups import find_words
from tensorlens.maps.token_map import TokenMap

PARIS = ("The", " E", "iff", "el", " Tower", ",", " isn", "'t", " in", " Par", "is", ".")


def labels(tokens, **meta) -> list[str]:
    return [word.label for word in find_words(tokens, meta)]


def token_map(in_tokens, scores=None, **meta) -> TokenMap:
    scores = torch.arange(2.0 * len(in_tokens)).reshape(2, -1) if scores is None else scores
    out = tuple(f"out{k}" for k in range(len(scores)))
    return TokenMap(
        scores=scores,
        out_tokens=out,
        in_tokens=in_tokens,
        method="tensor.in_out",
        bias_share=torch.zeros(len(scores)),
        meta=meta,
    )


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (PARIS, ["The", " Eiffel", " Tower", ",", " isn't", " in", " Paris", "."]),
        (("[CLS]", "world", "##liness", "good", "[SEP]"), ["[CLS]", "worldliness", "good", "[SEP]"]),
        (
            ("⟨E4⟩⟨BD⟩", "⟨A0⟩", "⟨E5⟩⟨A5⟩", "⟨BD⟩", "⟨20⟩⟨F0⟩⟨9F⟩", "⟨9A⟩", "⟨80⟩", " world"),
            ["你", "好", " 🚀", " world"],
        ),
        (("⟨FF⟩", "⟨FE⟩", " a"), ["⟨FF⟩", " a"]),
        ((" 你好", "世界", " x"), [" 你好", "世界", " x"]),
        ((), []),
    ],
)
def test_labels_are_joined_where_no_offsets_are_known(tokens, expected):
    assert labels(tokens) == expected


@pytest.mark.parametrize(
    ("tokens", "offsets", "text", "expected"),
    [
        (
            ("[CLS]", "don", "'", "t", "stop", ".", "[SEP]"),
            [None, [0, 3], [3, 4], [4, 5], [6, 10], [10, 11], None],
            "don't stop.",
            ["[CLS]", "don't", "stop", ".", "[SEP]"],
        ),
        (
            ("⟨E4⟩⟨BD⟩", "⟨A0⟩", "⟨E5⟩⟨A5⟩", "⟨BD⟩", "⟨20⟩⟨F0⟩⟨9F⟩", "⟨9A⟩", "⟨80⟩", " world"),
            [[0, 1], [0, 1], [1, 2], [1, 2], [2, 4], [3, 4], [3, 4], [4, 10]],
            "你好 🚀 world",
            ["你", "好", " 🚀", " world"],
        ),
        (("👩", "\u200d", "🚀", " x"), [[0, 1], [1, 2], [2, 3], [3, 5]], "👩\u200d🚀 x", ["👩\u200d🚀", " x"]),
        (("a", "b"), [[0, 1], [2, 3]], "a b", ["a", "b"]),
        ((" ab", "c", " d"), [[1, 3], [3, 4], [4, 6]], " abc d", [" abc", " d"]),
        (("1", " ", "2", "\n", "3"), [[0, 1], [1, 2], [2, 3], [3, 4], [4, 5]], "1 2\n3", ["1", " 2", "\n", "3"]),
        (("[CLS]", "EV", "QL", "[SEP]"), [None, [0, 2], [2, 4], None], "EVQL", ["[CLS]", "EV", "QL", "[SEP]"]),
        (("⟨E4⟩⟨BD⟩", "⟨A0⟩"), [[0, 1], [0, 1]], "你", ["你"]),
    ],
)
def test_offsets_say_where_words_are(tokens, offsets, text, expected):
    assert labels(tokens, offsets=offsets, text=text) == expected


@pytest.mark.parametrize("offsets", [3, [1, 2], [[0, 9], [9, 99]], [[0, "1"], [1, 2]], [[2, 1], [0, 1]], [None]])
def test_foreign_offsets_are_not_believed(offsets):
    assert labels((" a", "b", " c"), offsets=offsets, text="ab c") == [" ab", " c"]
    token_map((" a", "b", " c"), offsets=offsets, text="ab c").words()


def test_columns_are_summed_and_rows_kept():
    whole = token_map(PARIS, torch.randn(3, 12, dtype=torch.float64), set_aside=[2])
    found = whole.words()
    assert found.shape == (3, 8)
    assert torch.equal(found.scores[:, 1], whole.scores[:, 1:4].sum(1))
    assert torch.allclose(found.scores.sum(1), whole.scores.sum(1), rtol=1e-14)
    assert found.out_tokens == whole.out_tokens and torch.equal(found.bias_share, whole.bias_share)
    assert found.meta["set_aside"] == [1] and found.meta["grouped"] == "words"
    assert found.words().in_tokens == found.in_tokens


def test_offsets_of_words_span_their_tokens():
    found = token_map(("<s>", "a", "b", " c"), offsets=[None, [0, 1], [1, 2], [2, 4]], text="ab c").words()
    assert found.in_tokens == ("<s>", "ab", " c")
    assert found.meta["offsets"] == [None, [0, 2], [2, 4]]


def test_patches_have_no_words():
    with pytest.raises(InputError, match="picture"):
        token_map(("a", "b"), grid={"rows": 1, "columns": 2, "first": 0}).words()
