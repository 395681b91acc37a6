"""Needles: a sentence hidden among others, asked for at the end. Which sentence did the answer come from?

The prompt ends with the question and with the needle's own words up to the answer, so that the answer's first token is
the target. Where the model's first choice is another, the item is left out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.judges.engine import BenchItem, Judge
from bench.passages.items import hidden, sentences_of
from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import from_json
from tensorlens.lens import Lens
from tensorlens.studies.judge_study import WORD_OVERLAP, PrefixText, whole_words, with_members

MEASURES = ("reciprocal_rank", "top_1")
AFFORDABLE = (
    "tensor.in_class",
    "tensor.in_out",
    "mean.attn",
    "rollout.attn",
    "control.recency",
    "control.position",
    "control.embedding_norm",
    *with_members(("tensor.in_class", "tensor.in_out")),
    WORD_OVERLAP,
)
"""Maps whose cost does not grow with the square of the input, and the attention that everybody looks at."""


def needles(
    lens: Lens, folder: Path, haystack: Path, *, limit: int | None = None, lengths: Sequence[int] = (512,)
) -> Judge:
    """The judge of a folder of needles.

    Args:
        lens: The model, with its tokenizer.
        folder: .json files: lists of objects with `question`, `needles` and `gt_answers`.
        haystack: A text whose sentences they are hidden among.
        limit: Items of each file and length, at most.
        lengths: About how many tokens a prompt is to have.
    """
    hay = sentences_of(haystack)
    items: list[BenchItem] = []
    problems: list[str] = []
    for path in sorted(folder.glob("*.json")):
        for length in lengths:
            for row, record in enumerate(_records(path, problems)[:limit], 1):
                try:
                    items.append(_item(lens, f"{path.stem}-{length}", row, record, hay, length))
                except TensorLensError as error:
                    problems.append(f"{path.name}, row {row}, {length} tokens: {error}")
    return Judge(
        name="needles",
        measures=MEASURES,
        items=tuple(items),
        problems=tuple(problems),
        methods=AFFORDABLE,
    )


def _records(path: Path, problems: list[str]) -> list[Any]:
    try:
        records = from_json(path.read_text("utf-8"))
        if isinstance(records, list):
            return records
        problems.append(f"{path.name}: expected a list of objects; got {type(records).__name__}.")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name}: not JSON ({error}).")
    return []


def _item(lens: Lens, name: str, row: int, record: Any, hay: Sequence[str], length: int) -> BenchItem:
    try:
        question, needle, answer = str(record["question"]), str(record["needles"][0]), str(record["gt_answers"][0])
    except (KeyError, IndexError, TypeError):
        raise InputError("Expected an object with `question`, `needles` and `gt_answers`.") from None
    found = whole_words(needle, answer)
    if not found:
        raise InputError(f"The answer {answer!r} is not in its needle.")
    ending = f" Question: {question} Answer: {needle[: found[0][0]]}".rstrip()

    def count(text: str) -> int:
        return len(lens.prepare(text).arguments["input_ids"][0])

    room = length - count(ending) - count(needle)
    passages, right = hidden(needle, hay, room, random.Random(f"{length} {row}"), count)
    start, n_context = sum(len(one) + 1 for one in passages[:right]), len(" ".join(passages))
    prompt = PrefixText(lens, " ".join(passages) + ending)
    units, labels = prompt.groups("sentences")
    kept = [k for k, unit in enumerate(units) if prompt.offsets[unit[0]][0] < n_context]  # type: ignore[index]
    tokens = prompt.tokens_at([(start, start + len(needle))])
    units, labels = tuple(units[k] for k in kept), tuple(labels[k] for k in kept)
    return BenchItem(
        judge="needles",
        set=name,
        name=f"{name}:{row}",
        ids=prompt.ids,
        target=prompt.next_token(answer),
        units=units,
        labels=labels,
        truth=tuple(float(len(tokens & set(unit)) > len(unit) / 2) for unit in units),
        overlap=question,
    )
