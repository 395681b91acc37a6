"""Needles: a sentence hidden among others, asked for at the end. Which sentence did the answer come from?

The prompt ends with the question and with the needle's own words up to the answer, so that the answer's first token is
the target. Where the model's first choice is another, the item is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.judges.engine import BenchItem, Judge
from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import from_json
from tensorlens.lens import Lens
from tensorlens.maps.groups import sentences
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
    hay = _hay(haystack)
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


def _hay(path: Path) -> list[str]:
    """The sentences of a text that are neither headings nor scraps."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise InputError(f"Expected text in UTF-8 in {str(path)!r}; got {error}. Convert the file.") from error
    text = " ".join(line.strip() for line in lines if not line.strip().startswith("="))
    found = (span.label for span in sentences(" ".join(text.split())))
    kept = [one for one in found if 40 <= len(one) <= 300]
    if not kept:
        raise InputError(f"Expected sentences of 40 to 300 characters in {str(path)!r}; there are none.")
    return kept


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
        question, hidden = str(record["question"]), [str(one) for one in record["needles"]]
        answer, needle = str(record["gt_answers"][0]), hidden[0]
    except (KeyError, IndexError, TypeError):
        raise InputError("Expected an object with `question`, `needles` and `gt_answers`.") from None
    found = whole_words(needle, answer)
    if not found:
        raise InputError(f"The answer {answer!r} is not in its needle.")
    ending = f" Question: {question} Answer: {needle[: found[0][0]]}".rstrip()
    text, spans, n_context = _context(lens, hidden, hay, length - _n_tokens(lens, ending), row)
    prompt = PrefixText(lens, text + ending)
    units, labels = prompt.groups("sentences")
    kept = [k for k, unit in enumerate(units) if prompt.offsets[unit[0]][0] < n_context]  # type: ignore[index]
    tokens = prompt.tokens_at(spans)
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


def _context(
    lens: Lens, hidden: Sequence[str], hay: Sequence[str], n_tokens: int, row: int
) -> tuple[str, list[tuple[int, int]], int]:
    """Sentences with the needles among them, where the one with the answer stands, and where the context ends."""
    chosen: list[str] = []
    used = sum(_n_tokens(lens, one) for one in hidden)
    place = row * 37
    while used < n_tokens:
        chosen.append(hay[place % len(hay)])
        used += _n_tokens(lens, chosen[-1])
        place += 1
    for k, needle in enumerate(hidden):  # from a fifth to four fifths of the way, another place in each row
        share = 0.2 + 0.6 * ((row * 0.618 + k / max(1, len(hidden))) % 1)
        chosen.insert(int(share * len(chosen)), needle)
    text, spans = "", []
    for one in chosen:
        start = len(text) + bool(text)
        text = f"{text} {one}" if text else one
        if one == hidden[0]:
            spans.append((start, len(text)))
    return text, spans, len(text)


def _n_tokens(lens: Lens, text: str) -> int:
    return len(lens.prepare(text).arguments["input_ids"][0])
