"""Groups of tokens: words, sentences, lines, or groups that the user names.

Bounds are characters of the text if there is one, positions of tokens otherwise. A token is never cut: it belongs to
the group that it overlaps most, the first on ties.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import InputError, check_whole
from tensorlens.models.pictures import WHOLE, Box, cells

REST = "rest"
"""The group of all tokens that are not in any other group."""

NAMED = ("tokens", "words", "sentences", "lines")
"""Names of groups that are found in the text."""

Groups = str | Sequence[tuple[str, int, int] | str] | Mapping[str, Any]
"""A name in `NAMED`; groups as (label, start, stop), or as passages to look for; ``{"separator": "###"}``; or, for the
patches of a picture, ``{"regions": (rows, columns)}`` or ``{"regions": {"sky": (left, top, right, bottom)}}``."""

_BYTES = re.compile(r"(?:⟨[0-9A-F]{2}⟩)+")
_INSIDE = "'’_"
_JOINER = "\u200d"
_UNSPACED = ("CJK", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")

_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s)|[。！？]+[”’」』）]*|\n\s*\n|\n(?=\s*[-*•#\d])")
_SHORT = re.compile(
    r"(?:^|[\s(\"“])(?:[A-Za-z]|[A-Za-z](?:\.[A-Za-z])+|Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|No|vs|cf|etc|Fig|Eq)\.$"
)


class Group(NamedTuple):
    """Some tokens as one."""

    label: str
    tokens: tuple[int, ...]


class Passage(NamedTuple):
    """Characters, or tokens, `start` … `stop` - 1 under a label."""

    label: str
    start: int
    stop: int


def find_groups(groups: Groups, labels: Sequence[str], meta: Mapping[str, Any]) -> tuple[Group, ...]:
    """Groups of some tokens; every token is in exactly one.

    Args:
        groups: ``"words"``, ``"sentences"``, ``"lines"``, ``"tokens"``, a list of (label, start, stop) or of
            passages of the text, or ``{"separator": …}`` for the passages between its occurrences.
        labels: One for each token.
        meta: The map's `meta`: `text`, and `offsets`, the place of each token in it.

    Raises:
        InputError: Groups overlap, are empty, lie outside of the text, or are not found in it.
    """
    if isinstance(groups, Mapping) and "regions" in groups:
        return _by_region(groups["regions"], labels, meta)
    if isinstance(groups, str) and groups not in NAMED:
        raise _not_groups(groups)
    if isinstance(groups, str) and groups == "tokens":
        return tuple(Group(label, (k,)) for k, label in enumerate(labels))
    if isinstance(groups, str) and groups == "words":
        return tuple(Group(word.label, tuple(range(word.start, word.stop))) for word in find_words(labels, meta))
    text, offsets = _text_of(labels, meta)
    if isinstance(groups, str):
        return _assigned(sentences(text) if groups == "sentences" else lines(text), offsets)
    if isinstance(groups, Mapping):
        return _assigned(_separated(text, groups), offsets)
    if not isinstance(meta.get("text"), str):  # the input was ids: bounds are positions
        return _assigned(_checked(groups, len(labels), None), [[k, k + 1] for k in range(len(labels))])
    if not fits(meta.get("offsets"), len(labels), len(text)):
        raise InputError("This tokenizer does not report where its tokens are in the text. Pass token ids instead.")
    return _assigned(_checked(groups, len(text), text), offsets, all_needed=True)


def with_beside(groups: Sequence[Group], alone: Sequence[int], labels: Sequence[str]) -> tuple[Group, ...]:
    """The groups without some tokens; each of these becomes a group of its own, placed first."""
    rest = [group._replace(tokens=tuple(j for j in group.tokens if j not in alone)) for group in groups]
    return (*(Group(labels[j], (j,)) for j in alone), *(group for group in rest if group.tokens))


def group_sums(scores: Tensor, groups: Sequence[Group]) -> Tensor:
    """The sum of the columns of each group: (row, group)."""
    # (in_token,): the group of each token, so that one sum goes over all columns.
    index = torch.zeros(scores.shape[1], dtype=torch.long, device=scores.device)
    for k, group in enumerate(groups):
        index[list(group.tokens)] = k
    return scores.new_zeros(len(scores), len(groups)).index_add_(1, index, scores)


def grouped_meta(meta: Mapping[str, Any], groups: Sequence[Group], name: str, aside: Sequence[int]) -> dict[str, Any]:
    """The `meta` of a map whose tokens were grouped.

    Args:
        meta: The `meta` of the map by tokens.
        groups: The groups.
        name: The name of the grouping.
        aside: Tokens that were set aside by choice; groups that contain one are set aside too.
    """
    offsets, text = meta.get("offsets"), meta.get("text")
    made = {key: value for key, value in meta.items() if key != "offsets"} | {"grouped": name}
    if "set_aside" in meta:
        made["set_aside"] = [k for k, group in enumerate(groups) if set(aside) & set(group.tokens)]
    if isinstance(text, str) and fits(offsets, sum(len(group.tokens) for group in groups), len(text)):
        assert offsets is not None
        runs = [group.tokens if _is_run(group.tokens) else () for group in groups]  # others stand in several places
        spans = [[offsets[j] for j in run if offsets[j]] for run in runs]
        made["offsets"] = [[span[0][0], max(stop for _, stop in span)] if span else None for span in spans]
    return made


def _is_run(tokens: Sequence[int]) -> bool:
    return bool(tokens) and tokens[-1] - tokens[0] + 1 == len(tokens)


def sentences(text: str) -> list[Passage]:
    """The sentences of a text; together they cover it.

    A sentence ends at a sentence mark before white space, at an empty line, and before an item of a list, but not at
    initials and a few abbreviations. A space between two sentences belongs to the second, as in tokenizers.
    """
    ends = [
        found.end() for found in _END.finditer(text) if not _SHORT.search(text[max(0, found.end() - 12) : found.end()])
    ]
    return _between(text, ends)


def lines(text: str) -> list[Passage]:
    """The lines of a text; empty ones belong to the line before."""
    return _between(text, [found.end() for found in re.finditer(r"\n+", text)])


# Regions of pictures --------------------------------------------------------------------------------------------------


def _by_region(regions: Any, labels: Sequence[str], meta: Mapping[str, Any]) -> tuple[Group, ...]:
    """Patches by region; a token that is not a patch is a group of its own."""
    grid = meta.get("grid")
    if not isinstance(grid, Mapping):
        raise InputError("Regions need a picture with a grid of patches, and this input has none.")
    seen = meta.get("seen", WHOLE)  # pixels given as numbers are the whole picture
    if seen is None:
        raise InputError(
            "The processor does more than scale and crop the picture, so the places of the patches are not known. Pass "
            "the processor's pixels instead; regions are then parts of these."
        )
    rows, columns, first = (grid[key] for key in ("rows", "columns", "first"))
    boxes = cells(rows, columns, tuple(seen))
    beside = [Group(label, (k,)) for k, label in enumerate(labels) if not first <= k < first + len(boxes)]
    found = [Group(one.label, tuple(first + k for k in one.tokens)) for one in find_regions(regions, boxes)]
    return tuple(sorted([*beside, *found], key=lambda group: group.tokens[0]))


def find_regions(regions: Any, boxes: Sequence[Box | None]) -> tuple[Group, ...]:
    """Patches by the region that contains the middle of each; patches in none form the rest.

    Args:
        regions: (rows, columns) of equal regions, or a box for each label.
        boxes: The part of the picture that each patch covers; None for a patch that covers nothing.

    Raises:
        InputError: Regions are neither, or overlap on a patch.
    """
    if isinstance(regions, (tuple, list)) and len(regions) == 2 and all(type(n) is int and n > 0 for n in regions):
        places = [f"region {r},{c}" for r in range(regions[0]) for c in range(regions[1])]
        named = dict(zip(places, cells(*regions), strict=True))
    elif isinstance(regions, Mapping) and regions and all(_is_box(box) for box in regions.values()):
        named = {str(label): tuple(map(float, box)) for label, box in regions.items()}
    else:
        raise InputError(
            "Regions are (rows, columns), or by label (left, top, right, bottom) as parts of the picture, such as "
            f'{{"sky": (0, 0, 1, 0.5)}}; got {regions!r:.60}.'
        )
    members: dict[str, list[int]] = {label: [] for label in (*named, REST)}
    for k, box in enumerate(boxes):
        inside = [label for label, region in named.items() if box is not None and _holds(region, box)]
        if len(inside) > 1:
            raise InputError(f"Regions must not overlap; {inside[0]!r} and {inside[1]!r} do.")
        members[inside[0] if inside else REST].append(k)
    return tuple(Group(label, tuple(some)) for label, some in members.items() if some)


def _is_box(box: Any) -> bool:
    is_box = isinstance(box, (tuple, list)) and len(box) == 4 and all(isinstance(edge, (int, float)) for edge in box)
    return is_box and 0 <= box[0] < box[2] <= 1 and 0 <= box[1] < box[3] <= 1


def _holds(region: Sequence[float], box: Sequence[float]) -> bool:
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    return region[0] <= x < region[2] and region[1] <= y < region[3]


def _separated(text: str, groups: Mapping[str, str]) -> list[Passage]:
    """The passages between the occurrences of a separator, which belongs to the passage before it."""
    separator = groups.get("separator")
    if list(groups) != ["separator"] or not isinstance(separator, str) or not separator:
        raise InputError(
            f'Passages are a list of their texts, or between a separator {{"separator": "###"}}; got {groups!r:.60}.'
        )
    if separator not in text:
        raise InputError(
            f"The separator {separator!r} does not occur in the text. Pass it exactly as it is written there."
        )
    spans = _between(text, [found.end() for found in re.finditer(re.escape(separator), text)])
    return [span._replace(label=span.label.removesuffix(separator).strip() or span.label) for span in spans]


def _between(text: str, ends: Sequence[int]) -> list[Passage]:
    spans: list[Passage] = []
    start = 0
    for end in (*ends, len(text)):
        stop = end + len(text[end:]) - len(text[end:].lstrip())  # white space after it
        stop -= stop > end and stop < len(text) and text[stop - 1] == " "
        if text[start:stop].strip():
            spans.append(Passage(text[start:stop].strip(), start, stop))
            start = stop
    if spans and start < len(text):
        spans[-1] = spans[-1]._replace(stop=len(text))
    return spans


def _text_of(labels: Sequence[str], meta: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """The text and the place of each token in it; without offsets, from the labels."""
    text, offsets = meta.get("text"), meta.get("offsets")
    if isinstance(text, str) and isinstance(offsets, list) and fits(offsets, len(labels), len(text)):
        return text, offsets
    is_spaced = any(label.startswith(" ") for label in labels)  # word pieces carry no spaces: each begins a word
    text, places, pieces = "", list[list[int]](), b""  # the bytes so far of a character that is not complete
    first = start = 0  # the token and the place at which it begins
    for k, label in enumerate(labels):
        raw = _raw(label)
        if raw is None or not pieces:
            first, pieces = k, b""
            text += "" if is_spaced or not text or label.startswith("##") else " "
            start = len(text)
        pieces += raw or b""
        said = label.removeprefix("##") if raw is None else _decoded(pieces)
        if said is not None or first == k:
            text = text[:start] + (label if said is None else said)
        places[first:] = [[start, len(text)]] * (k + 1 - first)
        pieces = pieces if said is None else b""
    return text, places


def _assigned(spans: Sequence[Passage], offsets: Sequence[Any], *, all_needed: bool = False) -> tuple[Group, ...]:
    """Assign each token to the span it overlaps most; leave out spans without a token, unless all are needed."""
    members: list[list[int]] = [[] for _ in spans]
    rest = []
    order = sorted(range(len(spans)), key=lambda k: spans[k].start)
    starts = [spans[k].start for k in order]
    for j, pair in enumerate(offsets):
        holder = _overlapped_most(pair, spans, order, starts) if pair else None
        (rest if holder is None else members[holder]).append(j)
    for span, some in zip(spans, members, strict=True):
        if all_needed and not some:
            raise InputError(f"The group {span.label!r} ({span.start}:{span.stop}) has no token of its own. Widen it.")
    found = [Group(span.label, tuple(some)) for span, some in zip(spans, members, strict=True) if some]
    return (*found, Group(REST, tuple(rest))) if rest else tuple(found)


def _overlapped_most(pair: Any, spans: Sequence[Passage], order: Sequence[int], starts: Sequence[int]) -> int | None:
    """The span that a token overlaps most, the first on ties; spans that begin after its end are not considered."""
    start, stop = pair
    near = order[max(0, bisect_right(starts, start) - 1) : bisect_left(starts, stop)]
    overlaps = {k: min(stop, spans[k].stop) - max(start, spans[k].start) for k in sorted(near)}
    most = max(overlaps, key=lambda k: overlaps[k], default=None)
    return most if most is not None and overlaps[most] > 0 else None


def _checked(groups: Any, length: int, text: str | None) -> list[Passage]:
    """The user's groups, as passages of the text or ranges of tokens."""
    if not isinstance(groups, Sequence) or not groups:
        raise _not_groups(groups)
    spans = [_passage(one, text) if isinstance(one, str) else _triple(one) for one in groups]
    of_what = "tokens" if text is None else "characters"
    for span in spans:
        if span.start >= span.stop:
            raise InputError(f"The group {span.label!r} is empty: {span.start}:{span.stop}. Pass start < stop.")
        if span.stop > length:
            raise InputError(
                f"The group {span.label!r} ({span.start}:{span.stop}) must lie within the input's {length} {of_what}."
            )
    for one, other in pairwise(sorted(spans, key=lambda span: span.start)):
        if other.start < one.stop:
            raise InputError(
                f"Groups must not overlap; {one.label!r} ({one.start}:{one.stop}) and {other.label!r} "
                f"({other.start}:{other.stop}) do."
            )
    return spans


def _not_groups(groups: Any) -> InputError:
    return InputError(
        f"`groups` must be one of {', '.join(NAMED)}, or a list of passages' texts or of (label, start, stop) with at "
        f"least one; got {groups!r:.60}."
    )


def _triple(one: Any) -> Passage:
    if not isinstance(one, (tuple, list)) or len(one) != 3 or not isinstance(one[0], str):
        raise InputError(f"A group is (label, start, stop) with whole numbers, or a passage; got {one!r}.")
    return Passage(one[0], check_whole(one[1], "start"), check_whole(one[2], "stop"))


def _passage(passage: str, text: str | None) -> Passage:
    if text is None:
        raise InputError(
            f"The input was token ids, without a text to find {passage!r:.60} in. Pass positions of tokens."
        )
    start = text.find(passage) if passage else -1
    if start < 0:
        raise InputError(
            f"The passage {passage!r:.60} does not occur in the text. Pass it exactly as it is written there."
        )
    if text.find(passage, start + 1) >= 0:
        raise InputError(f"The passage {passage!r:.60} occurs in the text twice. Pass (label, start, stop) instead.")
    return Passage(passage, start, start + len(passage))


# Words ----------------------------------------------------------------------------------------------------------------


def find_words(labels: Sequence[str], meta: Mapping[str, Any]) -> tuple[Passage, ...]:
    """The words of some tokens, in order, as ranges of tokens; every token is in exactly one.

    A word ends at white space, between letters and punctuation, and, in scripts that write no spaces, at each token.
    Pieces of one character always stay together. The words of a text of one word, such as a protein, are its tokens.

    Args:
        labels: One for each token, as `token_labels` writes them.
        meta: The map's. `offsets` (for each token its [start, stop) in the text, or None for one that is not text) and
            `text` give the exact place of a token; without them the labels are read.
    """
    text, offsets = _text_of(labels, meta)
    words = _joined(labels, text, offsets, is_one_word)
    if sum(offsets[word.start] is not None for word in words) == 1:
        words = _joined(labels, text, offsets, lambda before, after: False)
    return tuple(
        word._replace(label=labels[k]) if word.stop == k + 1 and not _BYTES.search(labels[k]) else word
        for word in words
        for k in [word.start]
    )


def _joined(
    labels: Sequence[str], text: str, offsets: Sequence[Any], is_one: Callable[[str, str], bool]
) -> list[Passage]:
    """Ranges of tokens that share a character, or that `is_one` joins by the characters where they meet."""
    found: list[Passage] = []
    begin = end = -1  # of the last word in the text; -1 after a token that is not text
    for k, pair in enumerate(offsets):
        if pair is None or pair[0] == pair[1]:
            found.append(Passage(labels[k], k, k + 1))
            begin = end = -1
            continue
        start, stop = pair
        if end >= 0 and (start < end or start == end and is_one(text[begin:end], text[start:stop])):
            end = max(end, stop)
            found[-1] = Passage(text[begin:end], found[-1].start, k + 1)
        else:
            begin, end = (start - 1 if start and labels[k].startswith(" ") and text[start] != " " else start), stop
            found.append(Passage(text[begin:end], k, k + 1))
    return found


def fits(offsets: Any, n_tokens: int, n_characters: int) -> bool:
    """Whether these are offsets of this text: files may come from anywhere."""
    if not isinstance(offsets, list) or len(offsets) != n_tokens:
        return False
    pairs = [pair for pair in offsets if pair is not None]
    return all(
        isinstance(pair, list)
        and len(pair) == 2
        and all(type(end) is int for end in pair)
        and 0 <= pair[0] <= pair[1] <= n_characters
        for pair in pairs
    )


def is_one_word(before: str, after: str) -> bool:
    """Whether a word that begins with `before` continues with `after`; a space belongs to the word after it."""
    if not before or not after or after[0].isspace():
        return False
    if before[-1].isspace():
        return before == " "
    if _JOINER in (before[-1], after[0]) or unicodedata.category(after[0]) in ("Mn", "Me", "Sk"):
        return True
    return all(_is_of_word(character) for character in (before[-1], after[0]))


def _is_of_word(character: str) -> bool:
    is_letter = character.isalnum() or character in _INSIDE or unicodedata.category(character).startswith("M")
    return is_letter and not unicodedata.name(character, "").startswith(_UNSPACED)


def _raw(label: str) -> bytes | None:
    """The bytes of a label such as ⟨E4⟩⟨BD⟩, or None."""
    return bytes.fromhex(re.sub("[⟨⟩]", "", label)) if _BYTES.fullmatch(label) else None


def _decoded(pieces: bytes) -> str | None:
    """The text of some bytes; None while a character is not complete."""
    try:
        return pieces.decode("utf-8")
    except UnicodeDecodeError:
        return None
