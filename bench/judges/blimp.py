"""Further sets of evidence from BLiMP itself (github.com/alexwarstadt/blimp, CC BY 4.0), where a rule marks the word.

    python -m bench.judges.blimp FOLDER_OF_BLIMP_DATA OUT

BLiMP gives a prefix with a right and a wrong next word. In these sets the word that decides stands at a known place:
the last determiner, the subject before *of* or before its relative clause, or the subject right before the verb.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

DETERMINER, SUBJECT_OF, SUBJECT_WHO, LAST = (
    r"\b(this|that|these|those)\b(?!.*\b(?:this|that|these|those)\b)",
    r"(\w+) of\b",
    r"(\w+) (?:who|that|which)\b",
    r"\s(\w+)$",
)
SETS = {
    "determiner_noun_agreement_irregular_1": DETERMINER,
    "determiner_noun_agreement_with_adj_irregular_1": DETERMINER,
    "distractor_agreement_relational_noun": SUBJECT_OF,
    "distractor_agreement_relative_clause": SUBJECT_WHO,
    "irregular_plural_subject_verb_agreement_1": LAST,
    "regular_plural_subject_verb_agreement_1": LAST,
}
"""By set, the first group is the word that decides."""


def rows(lines: list[str], rule: str) -> list[tuple[str, str, str, str]]:
    """Prefix, right word, wrong word, evidence; sentences in which the word stands twice are left out."""
    found = []
    for line in map(json.loads, lines):
        prefix, match = line["one_prefix_prefix"], re.search(rule, line["one_prefix_prefix"])
        if match is not None and len(re.findall(rf"\b{match[1]}\b", prefix)) == 1:
            found.append((prefix, line["one_prefix_word_good"], line["one_prefix_word_bad"], match[1]))
    return found


def main(folder: str, out: str) -> None:
    """Write a .csv for each set."""
    Path(out).mkdir(parents=True, exist_ok=True)
    for name, rule in SETS.items():
        lines = (Path(folder) / f"{name}.jsonl").read_text("utf-8").splitlines()
        with (Path(out) / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("prefix", "good", "bad", "evidence"), *rows(lines, rule)])


if __name__ == "__main__":
    main(*sys.argv[1:])
