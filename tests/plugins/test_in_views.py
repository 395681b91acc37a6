"""Views of bertviz and circuitsvis. Run by `make plugins`."""

from __future__ import annotations

import pytest
from plugin_samples import PROMPT, TARGET, lens

import tensorlens as tl

pytest.importorskip("bertviz", reason="bertviz is not here; `make plugins` has it")
pytest.importorskip("circuitsvis", reason="circuitsvis is not here; `make plugins` has it")
from tensorlens.plugins.attention_views import (
    bertviz_head_view,
    bertviz_model_view,
    circuitsvis_heads,
    circuitsvis_tokens,
)


def test_the_views_hold_the_tokens():
    T = lens()(PROMPT)
    for view in (bertviz_head_view, bertviz_model_view):
        html = view(T, html_action="return").data
        assert f'"left_text": ["{T.tokens[0]}"' in html
    assert "AttentionHeads" in str(circuitsvis_heads(T, 1))
    assert "ColoredTokens" in str(circuitsvis_tokens(T.map("tensor.in_class", -1, TARGET)))


def test_a_map_of_many_rows_is_refused():
    with pytest.raises(tl.InputError, match="a map of one output"):
        circuitsvis_tokens(lens()(PROMPT).map("tensor.in_out"))
