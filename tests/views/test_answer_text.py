"""Prompt and answer as text: pieces that are the whole text, and files of strangers that say it wrongly."""

from __future__ import annotations

import numpy as np
import pytest

from tensorlens.views.record import answer_text

META = {
    "text": "One. Two é👩‍🚀. Yes. No.",
    "answer": " Yes. No.",
    "offsets": [[0, 4], [4, 14], [14, 23], None],
    "answer_parts": [[0, 5], [5, 9]],
    "logit": [2.0, 4.0],
    "against": " Perhaps.",
}
BIAS = np.array([0.5, 0.25])


def test_pieces_are_the_whole_text_and_know_their_inputs_and_outputs():
    found = answer_text(META, 2, 4, BIAS)
    assert found is not None
    assert found.prompt == (("One.", 0), (" Two é👩‍🚀.", 1))
    assert found.answer == ((" Yes.", 0, 2), (" No.", 1, 2))
    assert found.values == (2.0, 4.0) and found.bias == (1.0, 1.0) and found.against == " Perhaps."


def test_what_stands_between_passages_is_kept_and_belongs_to_none():
    found = answer_text(META | {"offsets": [[0, 2], [5, 8], None, None]}, 2, 4, BIAS)
    assert found is not None
    assert found.prompt == (("On", 0), ("e. ", None), ("Two", 1), (" é👩‍🚀.", None))
    assert found.answer == ((" Yes.", 0, None), (" No.", 1, None))


def test_rows_that_sum_to_nothing_have_no_values():
    found = answer_text({name: value for name, value in META.items() if name != "logit"}, 2, 4, BIAS * np.nan)
    assert found is not None and found.values is None and found.bias is None
    found = answer_text(META | {"logit": [10**400, 1.0]}, 2, 4, BIAS)
    assert found is not None and found.values is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": None},
        {"text": 3},
        {"answer": ""},
        {"answer": "other"},
        {"offsets": None},
        {"offsets": [[0, 4]]},
        {"offsets": [[0, 4], [4, 99], None, None]},
        {"offsets": [[2, 1], None, None, None]},
        {"answer_parts": None},
        {"offsets": [[0.5, 1], None, None, None]},
        {"offsets": [[True, 2], None, None, None]},
        {"offsets": "abcd"},
        {"answer_parts": [[0, 5], [5, 10]]},
        {"answer_parts": [[-1, 5], None]},
        {"answer_parts": [[0, 5, 6], None]},
    ],
)
def test_a_file_that_says_it_wrongly_is_shown_as_a_map_alone(wrong):
    assert answer_text(META | wrong, 2, 4, BIAS) is None
