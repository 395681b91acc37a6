"""`Rules.of`: rule sets by name and by pairs, wherever rules are taken."""

from __future__ import annotations

import pytest
from zoo import build

import tensorlens as tl
from tensorlens.recording.conventions import RULE_SETS


@pytest.mark.parametrize("name", RULE_SETS)
def test_a_name_is_the_constructor_of_that_name(name):
    assert tl.Rules.of(name) == getattr(tl.Rules, name)()
    assert tl.Rules.of(name, include_final_norm=False) == getattr(tl.Rules, name)(include_final_norm=False)


def test_pairs_change_the_default_or_the_set_before_them():
    assert tl.Rules.of("gate=half,attention=hold") == tl.Rules(gate="half")
    assert tl.Rules.of("attn_lrp, gate=freeze_up") == tl.Rules(attention="half", gate="freeze_up")
    assert tl.Rules.of(None) == tl.Rules()
    given = tl.Rules(norm="taylor", include_final_norm=False)
    assert tl.Rules.of(given) is given


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("royal", "TensorLens has no rule set 'royal'. Choose paper, cp_lrp"),
        ("", "TensorLens has no rule set ''"),
        ("gate=half,attn_lrp", "no option 'attn_lrp'"),
        ("door=half", "Choose among attention, gate, norm, activation"),
        ("gate=shut", "`gate` must be one of freeze_gate"),
        ("include_final_norm=True", "no option 'include_final_norm'"),
        (3, "by name or a `tensorlens.Rules`; got 3"),
    ],
)
def test_what_is_not_a_rule_set_is_refused(wrong, said):
    with pytest.raises(tl.InputError, match=said.replace("(", r"\(")):
        tl.Rules.of(wrong)


def test_names_are_taken_by_a_lens_and_by_load(tmp_path):
    model = build("gpt2")
    lens = tl.Lens(model, rules="half_gate")
    assert lens.rules == tl.Rules.half_gate()
    other = lens.with_rules("attn_lrp")
    assert other.rules == tl.Rules.attn_lrp() and other.model is model
    before_norm = tl.Lens(model, rules=tl.Rules(include_final_norm=False))
    assert before_norm.with_rules("jacobian").rules == tl.Rules.jacobian(include_final_norm=False)
    model.float().save_pretrained(tmp_path)
    assert tl.load(str(tmp_path), rules="attn_lrp").rules == tl.Rules.attn_lrp()
    with pytest.raises(tl.InputError, match="royal"):
        tl.load("a-model-that-is-not-looked-for", rules="royal")
