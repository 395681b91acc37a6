"""Reactions: marked atoms are those whose bonds change, and each atom has the score of its own token."""

from __future__ import annotations

import re
from collections import Counter

from bench.judges.reactions import ATOM, TEMPLATES, lines, reactions
from tiny_language import tiny_lens


def test_atoms_that_react_are_marked_and_no_ring_is_closed_by_another():
    made = list(reactions(4))
    assert Counter(one.template for one in made) == dict.fromkeys(TEMPLATES, 4) and made == list(reactions(4))
    for one in made:
        before, _, after = one.text.partition(">>")
        names = [before[start:stop] for start, stop in one.atoms]
        assert names == ATOM.findall(before) and 0 < sum(one.reacts) < len(one.reacts)
        for part in (before, after):
            assert all(part.count(digit) % 2 == 0 for digit in "12") and part.count("(") == part.count(")")
            assert not re.search(r"2[^2]*2[^2]*2[^2]*2", part.split(".")[0])
    ester = next(one for one in made if one.template == "ester")
    acid, alcohol = ester.text.partition(">>")[0].split(".")
    reacting = [start for (start, _), reacts in zip(ester.atoms, ester.reacts, strict=True) if reacts]
    assert reacting == [len(acid) - 6, len(acid) - 1, len(acid) + 1] and alcohol.startswith("O")


def test_a_line_has_the_score_of_the_token_of_each_atom():
    lens = tiny_lens()
    found = next(lines(lens, 1, ("paper",), ("control.position", "alti_of_nothing")), None)
    assert found is not None and len(found["truth"]) == len(found["scores"]["control.not_carbon"])
    one = next(one for one in reactions(1) if one.template == found["set"])
    scores = lens(one.text).map("tensor.in_class").scores[0].tolist()  # a token per character
    assert len(scores) == len(one.text) and "alti_of_nothing" not in found["scores"]
    assert found["scores"]["tensor.in_class"] == [float(f"{scores[start]:.5g}") for start, _ in one.atoms]
