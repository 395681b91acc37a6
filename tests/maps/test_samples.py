"""One sample of a shared recording answers as it does alone."""

from __future__ import annotations

import pytest
import torch
import zoo

import tensorlens as tl

SAME = [[3, 4, 5, 6, 7], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5]]
PADDED = [[3, 4, 5], [9, 8, 7, 6, 5], [1, 2, 3, 4, 5]]


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier"])
@pytest.mark.parametrize("ids", [SAME, PADDED], ids=["same length", "padded"])
def test_every_method_together_and_of_one_of_them_is_as_alone(name, ids):
    lens = tl.Lens(zoo.build(name))
    batch, alone = lens.batch(ids), [lens(one) for one in ids]
    for method in tl.METHODS:
        of_class = name == "bert-classifier" and method in ("tensor.in_class", "gradient.times_input")
        for i, together in enumerate(batch.maps(method, 0)):
            expected = alone[i].map(method, None if of_class else 0)
            torch.testing.assert_close(together.scores, expected.scores[:1], rtol=1e-8, atol=1e-10, msg=method)
            each, expected = batch[i].map(method), alone[i].map(method)
            torch.testing.assert_close(each.scores, expected.scores, rtol=1e-8, atol=1e-10, msg=method)
            torch.testing.assert_close(each.bias_share, expected.bias_share, rtol=1e-6, atol=1e-8, equal_nan=True)


def test_other_questions_of_one_of_them_are_as_alone():
    lens = tl.Lens(zoo.build("gpt2"))
    one, alone = lens.batch(SAME)[1], lens(SAME[1])
    assert one.certificate().passed
    torch.testing.assert_close(one.bias, alone.bias)
    torch.testing.assert_close(one.rows(2), alone.rows(2))
    torch.testing.assert_close(one.blocks(1, 2).dense(), alone.blocks(1, 2).dense())
    torch.testing.assert_close(one.heads({0: [1]}).dense(), alone.heads({0: [1]}).dense())
    assert one.predictions() == alone.predictions()
    torch.testing.assert_close(one.components(-1).scores, alone.components(-1).scores)
