"""Rows of a data set: what is no input is named or left out, and the others are read as they are alone."""

from __future__ import annotations

import pytest
import torch
from tiny_language import tiny_lens

import tensorlens as tl

pytestmark = pytest.mark.usefixtures("unchecked")
TEXTS = ("the cat sat", "a dog", "rain fell on the roof all day", "so", "a bird")
ROWS = ["a cat", "", "x" * 500, None, "a dog"]


def test_one_input_is_not_taken_for_several():
    lens = tiny_lens("neox")
    for ask in (lens.batch, lens.maps, lambda one: tl.CorpusTensor.fit(lens, one)):
        for one in ("the cat", {"input_ids": [[1, 2]]}):
            with pytest.raises(tl.InputError, match="several inputs in a list"):
                ask(one)
    assert repr(lens.batch(["the cat", "it"])) == "Batch(2 inputs of 2 to 7 tokens)"


def test_a_bad_row_raises_with_its_number():
    for bad, reason in ((ROWS[1], "no words"), (ROWS[2], "at most 400"), (ROWS[3], "Expected a text")):
        with pytest.raises(tl.InputError, match=f"Row 1: .*{reason}"):
            list(tiny_lens().maps(["a cat", bad]))


def test_bad_rows_are_skipped_and_collected():
    skipped: list[tuple[int, str]] = []
    found = list(tiny_lens().maps(ROWS, on_error="skip", skipped=skipped))
    assert [one.meta["text"] for one in found] == ["a cat", "a dog"]
    assert [row for row, _ in skipped] == [1, 2, 3] and "500" in skipped[1][1]


def test_long_texts_are_cut_if_asked():
    lens = tiny_lens()
    (found,) = lens.maps(["x" * 500], truncate=True)
    assert torch.allclose(found.scores, lens("x" * 400).map("tensor.in_out", -1).scores, atol=1e-6)
    assert len(found.in_tokens) == 400


def test_texts_are_tokenised_as_alone():
    lens = tiny_lens()
    for text, one in zip(TEXTS, lens.maps(TEXTS), strict=True):
        other = lens(text).map("tensor.in_out", -1)
        assert one.meta["text"] == text and one.meta["offsets"] == other.meta["offsets"]
        assert one.in_tokens == other.in_tokens


def test_a_map_of_a_batch_comes_back_equal(tmp_path):
    (found, _) = tiny_lens().maps(TEXTS[:2], "tensor.in_class")
    again = tl.TokenMap.load(found.save(tmp_path / "map.json"))
    assert again.meta == found.meta and torch.equal(again.scores, found.scores)


@pytest.mark.parametrize("method", ["tensor.in_out", "tensor.norm"])
def test_an_output_before_the_final_norm_is_mapped_in_batches_too(method: str):
    lens = tl.Lens(tiny_lens().model, tiny_lens().processor, rules=tl.Rules(include_final_norm=False))
    for text, one in zip(TEXTS, lens.maps(TEXTS, method, probes=4 if method == "tensor.norm" else None), strict=True):
        other = lens(text).map(method, -1, probes=4 if method == "tensor.norm" else None)
        assert "batches" not in one.meta
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-4, atol=1e-5)
