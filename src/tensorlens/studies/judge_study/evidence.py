"""Known evidence: a prefix, two continuations, and the word that decides between them.

A set is a .csv file with a head line or a .jsonl file with one object per line. Columns:

| column                | holds                                                                    |
|-----------------------|--------------------------------------------------------------------------|
| `prefix`              | the text that is continued                                               |
| `target` (or `good`)  | the right continuation                                                   |
| `against` (or `bad`)  | the wrong one; may be left out, and the right one is then explained alone |
| `evidence`            | the words of the prefix that decide; several with ; between them         |
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.studies.judge_study.items import Item, Judge
from tensorlens.studies.judge_study.prompts import Prompt, whole_words
from tensorlens.studies.judge_study.set_files import cell_of, items_of

MEASURES = ("reciprocal_rank", "top_1", "reciprocal_rank_by_magnitude")
OTHER_NAMES = {"good": "target", "bad": "against"}
SUFFIXES = (".csv", ".jsonl")


def evidence(lens: Lens, folder: Path, *, limit: int | None = None) -> Judge:
    """The judge of a folder of sets.

    Args:
        lens: The model, with its tokenizer.
        folder: Where the sets are; each file is one.
        limit: Rows that can be used, of each set, at most.
    """
    files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES)
    if not files:
        raise InputError(f"Expected .csv or .jsonl files in {str(folder)!r}; there are none.")
    items, problems = items_of(files, partial(_item, lens), limit)
    return Judge(name="evidence", question="word", measures=MEASURES, items=items, problems=problems)


def _item(lens: Lens, name: str, row: int, values: Mapping[str, Any]) -> Item:
    cells = {OTHER_NAMES.get(key, key): value for key, value in values.items() if isinstance(key, str)}
    prefix, target, wanted = (cell_of(cells, column) for column in ("prefix", "target", "evidence"))
    prompt = Prompt(lens, prefix)
    good, against = prompt.next_token(target), cells.get("against")
    bad = prompt.next_token(cell_of(cells, "against")) if against not in (None, "") else None
    if good == bad:
        raise InputError(f"{target!r} and {against!r} begin with the same token, so that nothing decides between them.")
    spans = []
    for words in (part.strip() for part in wanted.split(";")):
        found = whole_words(prefix, words)
        if not words or not found:
            raise InputError(f"The evidence {words!r} is not in the prefix {prefix!r:.80}.")
        spans += found
    units, labels = prompt.groups("words")
    tokens = prompt.tokens_at(spans)
    truth = tuple(float(bool(tokens & set(unit))) for unit in units)
    if len(units) < 2:
        raise InputError("A prefix of one word leaves nothing to decide.")
    return Item(
        judge="evidence",
        set=name,
        name=f"{name}:{row}",
        ids=prompt.ids,
        target=good if bad is None else (good, bad),
        units=units,
        labels=labels,
        truth=truth,
        right="first" if bad is None else "contrast",
        overlap=target,
    )
