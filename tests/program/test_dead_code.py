"""What an answer does not need is not computed: held attention leaves no queries and keys in a backward pass."""

from __future__ import annotations

import pytest
from tiny_language import tiny_lens

from tensorlens.program.program import Program

TEXTS = ["the cat sat", "it sat on it"]
QUESTIONS = {
    "one": lambda lens: lens(TEXTS[0]).map("tensor.in_class", -1),
    "in_out": lambda lens: lens(TEXTS[0]).map("tensor.in_out", -1),
    "a data set": lambda lens: list(lens.maps(TEXTS, "tensor.in_class", out_token=-1)),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize(
    ("rules", "is_live"), [("paper", False), ("half_gate", False), ("attn_lrp", True), ("jacobian", True)]
)
def test_queries_and_keys_are_pulled_only_where_attention_is_live(question, rules, is_live, monkeypatch):
    pulled = []
    backwards = Program._backwards

    def counted(self, waiting, places, *rest):
        pulled.extend(self.steps[n].module for n in places)
        return backwards(self, waiting, places, *rest)

    monkeypatch.setattr(Program, "_backwards", counted)
    QUESTIONS[question](tiny_lens("llama").with_rules(rules))
    count = {name: sum(module.endswith(name) for module in pulled) for name in ("q_proj", "k_proj", "v_proj")}
    assert count["v_proj"] > 0
    assert count["q_proj"] == count["k_proj"] == (count["v_proj"] if is_live else 0)
