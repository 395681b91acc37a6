"""Reactions whose reacting atoms are known: which atoms does a classifier of reactions go by?

    python -m bench templates rxnfp --judge reactions --out lines.jsonl

Reactions (SMILES) are made by template: in each the atoms whose bonds change are marked, and the rest are fragments
drawn at random. The atoms before the arrow are ranked, for the class that the model predicts. Templates are never
split between the halves.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import tensorlens as tl
from bench.passages.scores import RULES
from tensorlens.errors import TensorLensError
from tensorlens.maps.methods import METHODS as ALL_METHODS
from tensorlens.maps.targets import Target

TEMPLATES = {
    "ester": "{R}«C»(=O)«O».«O»{S}>>{R}C(=O)O{S}",
    "amide": "{R}«C»(=O)«O».«N»{S}>>{R}C(=O)N{S}",
    "acyl chloride": "{R}«C»(=O)«Cl».«N»{S}>>{R}C(=O)N{S}",
    "sulfonamide": "{R}«S»(=O)(=O)«Cl».«N»{S}>>{R}S(=O)(=O)N{S}",
    "alkylation": "{R}«C»«Br».«N»{S}>>{R}CN{S}",
    "ether": "{R}«C»«Br».«O»c1ccc(F)cc1>>{R}COc1ccc(F)cc1",
    "reductive amination": "{R}«C»=«O».«N»{S}>>{R}CN{S}",
    "Suzuki": "«Br»«c»2ccc({R})cc2.O«B»(O)«c»1ccccc1>>c2ccc({R})cc2-c1ccccc1",
    "nitro": "«O»=«[N+]»(«[O-]»)c2ccc({R})cc2>>Nc2ccc({R})cc2",
    "hydrolysis": "{R}«C»(=O)«O»C>>{R}C(=O)O",
    "Boc off": "CC(C)(C)O«C»(=O)«N»{S}>>N{S}",
    "alcohol": "{R}«C»=«O»>>{R}CO",
}
"""By name; « and » mark the atoms that react."""
FRAGMENTS = ("CC", "CCC", "C1CCCC1", "C1CCCCC1", "c1ccccc1", "CCc1ccccc1", "c1ccc(C)cc1", "c1ccc(OC)cc1", "c1ccncc1")
ATOM = re.compile(r"\[[^\]]+\]|Br|Cl|[BCNOPSFIbcnops]")
"""An atom of a SMILES."""
METHODS = ("mean.attn", "rollout.attn", "mean.w_attn_res_ln", "control.position", "control.embedding_norm")


class Reaction(NamedTuple):
    """A reaction, the characters of its atoms before the arrow, and which of them react."""

    template: str
    text: str
    atoms: tuple[tuple[int, int], ...]
    reacts: tuple[bool, ...]


def reactions(n: int, seed: int = 0) -> Iterator[Reaction]:
    """So many of each template."""
    for name, template in TEMPLATES.items():
        draw = random.Random(f"{seed} {name}")
        for _ in range(n):
            parts = re.split("[«»]", template.format(R=draw.choice(FRAGMENTS), S=draw.choice(FRAGMENTS)))
            marks = [k % 2 == 1 for k, part in enumerate(parts) for _ in part]
            text = "".join(parts)
            atoms = [found.span() for found in ATOM.finditer(text[: text.index(">>")])]
            yield Reaction(name, text, tuple(atoms), tuple(marks[start] for start, _ in atoms))


def lines(lens: tl.Lens, n: int, rules: Sequence[str] = RULES, methods: Sequence[str] = METHODS) -> Iterator[Any]:
    """One line per reaction: by method a score for each atom; reactions whose atoms are not tokens are left out."""
    names = list(TEMPLATES)
    for k, one in enumerate(reactions(n)):
        units = _tokens(lens, one)
        if units is None:
            continue
        texts = [one.text[start:stop] for start, stop in one.atoms]
        found = {"control.not_carbon": [float(text not in "Cc") for text in texts]}
        found |= scores_of(lens, one.text, [[token] for token in units], rules, methods)
        item = f"reactions:{names.index(one.template)}:{k}"
        yield {"judge": "reactions", "set": one.template, "item": item, "truth": list(map(float, one.reacts))} | {
            "scores": found
        }


def scores_of(
    lens: tl.Lens,
    text: str,
    units: Sequence[Sequence[int]],
    rules: Sequence[str],
    methods: Sequence[str],
    out_token: int | None = None,
    target: Target | None = None,
) -> dict[str, list[float]]:
    """In+Class by each rule set and the other methods: a score for the tokens of each unit, added up."""
    found = {}
    for name in (*(f"tensor.in_class@{rule}" for rule in rules), *methods):
        base, _, rule = name.partition("@")
        try:
            asked = target if base in ALL_METHODS and ALL_METHODS[base].takes_target else None
            scores = lens.with_rules(rule or "paper")(text).map(base, out_token, asked).scores[0].tolist()
        except TensorLensError:  # it does not apply to this model
            continue
        sums = (sum(scores[token] for token in unit) for unit in units)
        found[name.removesuffix("@paper")] = [float(f"{one:.5g}") for one in sums]
    return found


def _tokens(lens: tl.Lens, one: Reaction) -> list[int] | None:
    """The token of each atom: tokens are read along the text, since this tokenizer tells no places."""
    place, by_start = 0, dict[int, int]()
    for number, token in enumerate(lens(one.text).tokens):
        if one.text.startswith(token, place):
            by_start[place], place = number, place + len(token)
    return [by_start[start] for start, _ in one.atoms] if all(start in by_start for start, _ in one.atoms) else None
