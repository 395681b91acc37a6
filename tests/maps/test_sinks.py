from __future__ import annotations

import pytest
import torch
from zoo import build, sample

import tensorlens as tl
from tensorlens.errors import InputError
from tensorlens.maps.token_map import TokenMap


def token_map(scores, **meta) -> TokenMap:
    scores = torch.tensor(scores, dtype=torch.float64)
    n_out, n_in = scores.shape
    return TokenMap(
        scores=scores,
        out_tokens=tuple(f"o{k}" for k in range(n_out)),
        in_tokens=tuple(f"i{k}" for k in range(n_in)),
        method="tensor.in_class",
        bias_share=torch.zeros(n_out),
        meta=meta,
    )


SINK = [[6.1, 0.1, 2.7, -0.5]]
CAUSAL = [[1.0, 0.0, 0.0], [5.0, 1.0, 0.0], [4.0, 1.0, -2.0]]


@pytest.mark.parametrize(
    ("scores", "meta", "expected"),
    [
        (SINK, {"causal": True}, (0,)),
        (SINK, {}, ()),
        (SINK, {"causal": False}, ()),
        (SINK, {"causal": "yes"}, ()),
        ([[2.0, 0.1, 2.7, -0.5]], {"causal": True}, ()),
        ([[-6.1, 0.1, 2.7, -0.5]], {"causal": True}, (0,)),
        (CAUSAL, {}, (0,)),
        (CAUSAL, {"causal": False}, ()),
        ([[1.0, 0.5, 0.0], [5.0, 1.0, 0.0], [4.0, 1.0, -2.0]], {}, ()),
        ([[1.0, 0.0, 0.0], [5.0, 1.0, 0.0], [1.0, 3.0, -2.0]], {}, ()),
        (SINK, {"causal": True, "set_aside": []}, ()),
        (SINK, {"set_aside": [2, 99, "x", True]}, (2,)),
        (SINK, {"causal": True, "grid": {"rows": 1, "columns": 3, "first": 1}}, ()),  # a picture: beside it, see views
        ([[float("nan"), 1.0, 2.0]], {"causal": True}, ()),
        (SINK, {"causal": True, "grouped": "sentences"}, ()),
        ([], {"causal": True}, ()),
    ],
)
def test_a_decoders_first_token_is_set_aside_where_it_exceeds_the_rest(scores, meta, expected):
    found = token_map(scores or [[]], **meta)
    assert found.view().set_aside == expected


def test_maps_of_a_decoder_say_so_wherever_they_are_made():
    assert tl.Lens(build("llama"))(sample("llama")).map(out_token=-1).meta["causal"] is True
    assert "causal" not in tl.Lens(build("bert"))(sample("bert")).map(out_token=-1).meta


def test_set_aside_changes_colours_and_nothing_else():
    whole = token_map(SINK, causal=True)
    found = whole.set_aside(-2, 0)
    assert found.meta["set_aside"] == [0, 2] and found.view().limit == 0.5
    assert torch.equal(found.scores, whole.scores) and found.top(1) == whole.top(1)
    assert found.set_aside().view().set_aside == ()
    for wrong in (4, -5, True):
        with pytest.raises(InputError, match="from -4 to 3"):
            whole.set_aside(wrong)
