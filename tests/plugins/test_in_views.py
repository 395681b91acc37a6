"""bertviz and circuitsvis draw what `T.attentions` and maps give. Run by `make plugins`."""

from __future__ import annotations

import pytest
from plugin_samples import PROMPT, TARGET, lens

bertviz = pytest.importorskip("bertviz", reason="bertviz is not here; `make plugins` has it")
attention = pytest.importorskip("circuitsvis.attention", reason="circuitsvis is not here; `make plugins` has it")
colours = pytest.importorskip("circuitsvis.tokens", reason="circuitsvis is not here; `make plugins` has it")


def test_the_views_hold_the_tokens():
    T = lens()(PROMPT)
    matrices, tokens = T.attentions("tensor.contribution", per_head=True), list(T.tokens)
    for view in (bertviz.head_view, bertviz.model_view):
        assert f'"left_text": ["{tokens[0]}"' in view(matrices, tokens, html_action="return").data
    assert "AttentionHeads" in str(attention.attention_heads(matrices[1][0], tokens))
    found = T.map("tensor.in_class", -1, TARGET)
    assert "ColoredTokens" in str(colours.colored_tokens(list(found.in_tokens), found.scores[0]))
