"""Samples of a perturbation run: which texts or images it sees, and copies with some tokens replaced.

A random draw takes one sample from each label, class or article in turn, so a small one is not all of one kind: the
test part of IMDB is sorted by label, ImageNet's folders by class, and windows of WikiText lie side by side.
`Texts` and `Images` know one model each. They offer samples, the tokens of each that may be replaced, and copies.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.models.inputs import ModelInput, forward_parameters, max_tokens
from tensorlens.models.texts import check_unicode, tokenizer_of
from tensorlens.studies.datasets import Dataset, LazyImage, Row
from tensorlens.studies.options import PerturbationOptions
from tensorlens.studies.plain_model import PlainModel
from tensorlens.tolerances import in_float64

TITLE = re.compile(r"\s*= (?!=).*(?<!=) =\s*")
"""The title of an article of WikiText; headings within it have several signs on each side."""


@dataclass(frozen=True, kw_only=True)
class SamplePiece:
    """A sample before the model sees it.

    Attributes:
        name: Where it came from.
        content: Token ids without special tokens, or an image.
        label: Its label; for a window, the token that follows it.
        unit: The unit drawn as a whole when means are resampled, such as an article; None for the sample itself.
        columns: The other columns of its row.
    """

    name: str
    content: Any
    label: Any = None
    unit: str | None = None
    columns: Row | None = None


def drawn_order(strata: Sequence[Hashable] | None, n: int, seed: int) -> list[int]:
    """Places of all n samples in random order, in turn from each stratum."""
    shuffled = np.random.default_rng(seed).permutation(n).tolist()
    if strata is None:
        return shuffled
    groups: dict[str, list[int]] = {}
    for place in shuffled:
        groups.setdefault(str(strata[place]), []).append(place)
    return list(_in_turn(groups[name] for name in sorted(groups)))


def _in_turn(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    """One of each group, then the next of each, until all are empty."""
    waiting = [iter(group) for group in groups]
    while waiting:
        for group in tuple(waiting):
            try:
                yield next(group)
            except StopIteration:
                waiting.remove(group)


def text_pieces(
    tokenizer: Any, data: Dataset, options: PerturbationOptions, n_tokens: int
) -> tuple[list[SamplePiece], int]:
    """The texts or windows that a study sees, in order, and how many were looked at; needs a tokenizer and no model."""
    n_special, n_seen = sum(map(len, wrapping(tokenizer))), 0
    if (room := n_tokens - n_special) <= 0:
        raise InputError(f"Expected `n_tokens` above the {n_special} special tokens of every text; got {n_tokens}.")
    each = (_piece(data, place, _encode(tokenizer, data.items[place])[:room]) for place in _order(data, options))
    found: list[SamplePiece] = []
    for piece in _windows(tokenizer, data, room, options) if options.cut == "windows" else each:
        n_seen += 1
        found += [piece] if len(piece.content) + n_special >= options.min_tokens else []
        if len(found) == options.limit:
            break
    if not n_seen:
        raise InputError("Expected texts; got none. Is the file empty?")
    if not found:
        least = options.min_tokens
        raise InputError(
            f"Expected texts of at least {least} tokens; none of {n_seen} is that long. Lower `min_tokens`."
        )
    return found, n_seen


def wrapping(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that a tokenizer puts before and after a text."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _order(data: Dataset, options: PerturbationOptions) -> Sequence[int]:
    return drawn_order(data.labels, len(data), options.seed) if options.draw == "random" else range(len(data))


def _piece(data: Dataset, place: int, content: Any) -> SamplePiece:
    label, columns = data.labels and data.labels[place], data.columns[place] if data.columns else None
    return SamplePiece(name=data.names[place], content=content, label=label, columns=columns)


def _windows(tokenizer: Any, data: Dataset, room: int, options: PerturbationOptions) -> Iterator[SamplePiece]:
    """Windows side by side over all texts; drawn ones lie in one article each, one of each article in turn."""
    if options.draw == "file":
        lines = (text.strip() + "\n" for text in data.items if not _is_heading(text))
        return _cut(tokenizer, lines, room, "window", None)
    articles = _articles(data.items)
    chance = np.random.default_rng(options.seed)
    order = chance.permutation(len(articles)).tolist()
    seeds = chance.integers(2**31, size=len(articles)).tolist()

    def of_article(place: int) -> Iterator[SamplePiece]:
        title, lines = articles[place]
        found = list(_cut(tokenizer, lines, room, f"{title}, window", title))
        yield from (found[k] for k in np.random.default_rng(seeds[place]).permutation(len(found)))

    return _in_turn(map(of_article, order))


def _cut(tokenizer: Any, lines: Iterable[str], room: int, name: str, unit: str | None) -> Iterator[SamplePiece]:
    """Windows of `room` tokens; the label of each is the token that follows it."""
    ids: list[int] = []
    n_windows = 0
    for line in lines:
        ids += _encode(tokenizer, line)
        while len(ids) > room:
            yield SamplePiece(name=f"{name} {n_windows}", content=ids[:room], label=ids[room], unit=unit)
            ids, n_windows = ids[room:], n_windows + 1
    if len(ids) == room:
        yield SamplePiece(name=f"{name} {n_windows}", content=ids, unit=unit)


def _articles(texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Title and lines of each article of WikiText; without titles each text is one."""
    if not any(map(TITLE.fullmatch, texts)):
        return [(f"text {place}", [text.strip() + "\n"]) for place, text in enumerate(texts)]
    found: list[tuple[str, list[str]]] = []
    for text in texts:
        if TITLE.fullmatch(text):
            found.append((f"{text.strip(' =') or 'article'} ({len(found)})", []))
        elif found and not _is_heading(text):
            found[-1][1].append(text.strip() + "\n")
    return found


def _is_heading(text: str) -> bool:
    return text.strip().startswith("=") and text.strip().endswith("=")


def _encode(tokenizer: Any, text: str) -> list[int]:
    check_unicode(text)
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


# Samples and copies ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One input, prepared.

    Attributes:
        prepared: The input for a lens.
        inputs: The plain model's arguments, a batch of one.
        n_tokens: Tokens that enter the first block.
        fixed: Tokens that are never replaced under any preset.
        label: The class that it is labelled with, by its number in the model; None if that is not known.
    """

    prepared: ModelInput
    inputs: dict[str, Tensor]
    n_tokens: int
    fixed: frozenset[int]
    label: int | None = None


def maskable(sample: Sample, is_causal: bool, preset: str, keep_first: int = 0) -> list[int]:
    """The tokens that may be replaced.

    Convention: special tokens never. The last token of a decoder, whose state is watched, is replaced under
    ``paper-like``, as the paper's numbers suggest, and kept under ``strict``.
    """
    stop = sample.n_tokens - (is_causal and preset == "strict")
    return [token for token in range(keep_first, stop) if token not in sample.fixed]


SENTIMENTS = {"neg": 0, "negative": 0, "pos": 1, "positive": 1}


def class_index(label: Any, model: Any, every: Sequence[str]) -> int | None:
    """The number that a model gives to a label: the same number, its own name for it, or a sentiment of two.

    Where data have as many labels as the model has classes, it is the label's place in alphabetical order, as class
    folders are counted.

    Args:
        label: As it is in the data.
        model: Has the names of its classes in its configuration.
        every: The different labels of the data, sorted.
    """
    names: dict[Any, str] = getattr(getattr(model, "config", None), "id2label", None) or {}
    if isinstance(label, bool) or label is None:
        return None
    if isinstance(label, int) or str(label).isdecimal():
        return int(label)
    text, known = str(label).strip().lower(), SENTIMENTS if max(len(every), len(names)) == 2 else {}
    known = known | {name.lower(): int(number) for number, name in names.items()}
    if text in known:
        return known[text]
    return every.index(str(label)) if len(every) == len(names) and str(label) in every else None


class _Samples:
    """The common part of texts and images."""

    replacements: tuple[str, ...]
    is_causal = False

    def __init__(self, lens: Lens, data: Dataset, options: PerturbationOptions) -> None:
        self.lens, self.options, self.plain = lens, options, PlainModel(lens, options.batch_size)
        self.pieces: list[SamplePiece] = []
        self._labels = sorted(set(map(str, data.labels or ())))

    def __len__(self) -> int:
        return len(self.pieces)

    def length(self, index: int) -> int:
        """Tokens of one sample, where that is known before it is read."""
        return 0

    def settings(self) -> dict[str, Any]:
        """The settings of a run that describe its samples."""
        return {}

    def check(self, replacements: Sequence[str]) -> None:
        """Refuse a replacement that on this model does not do what it says."""

    def _class(self, label: Any) -> int | None:
        return class_index(label, self.lens.model, self._labels)


class Texts(_Samples):
    """Texts as token ids, cut to one length."""

    replacements = ("token", "zero", "mean", "attention", "delete")

    def __init__(self, lens: Lens, data: Dataset, options: PerturbationOptions) -> None:
        super().__init__(lens, data, options)
        self.tokenizer = tokenizer_of(lens.processor)
        if self.tokenizer is None:
            raise InputError(
                "Expected a lens with a tokenizer for texts; got none. Use `tensorlens.Lens(model, tokenizer)`."
            )
        self.n_tokens = min(options.n_tokens, max_tokens(lens.model) or options.n_tokens)
        self.before, self.after = wrapping(self.tokenizer)
        self.pieces, self._n_seen = text_pieces(self.tokenizer, data, options, self.n_tokens)
        self.ids = [[*self.before, *piece.content, *self.after] for piece in self.pieces]
        self.is_causal = _is_causal(self.plain, self.ids)

    def load(self, index: int) -> Sample:
        """The token ids of one text between its special tokens."""
        ids, label = self.ids[index], self.pieces[index].label
        n_tokens = len(ids)
        fixed = frozenset([*range(len(self.before)), *range(n_tokens - len(self.after), n_tokens)])
        inputs = {"input_ids": torch.tensor([ids], device=self.plain.device)}
        label = label if self.options.cut == "windows" else self._class(label)  # of a window, the next token
        prepared = self.lens.prepare(inputs)
        return Sample(prepared=prepared, inputs=inputs, n_tokens=n_tokens, fixed=fixed, label=label)

    def length(self, index: int) -> int:
        """Tokens of one text."""
        return len(self.ids[index])

    def shapes(self, sample: Sample, masks: Tensor, replacement: str) -> list[int]:
        """For each copy its number of tokens: copies with the same number fit into one batch."""
        if replacement == "delete":
            if bool(masks.all(1).any()):
                raise InputError(
                    "Deleting every token leaves no input. End the grid below 1, or choose another replacement."
                )
            return (sample.n_tokens - masks.sum(1)).tolist()
        if replacement == "token":
            _ = self.replacement_id  # raises where there is none
        return [sample.n_tokens] * len(masks)

    def copies(self, sample: Sample, masks: Tensor, replacement: str) -> dict[str, Tensor]:
        """Ids with the mask token, embeddings without the word, a mask over the attention, or fewer tokens.

        The copies are of one shape, see `shapes`.
        """
        ids = sample.inputs["input_ids"]
        masks, many = masks.to(ids.device), ids.expand(len(masks), -1)
        if replacement == "token":
            return {"input_ids": torch.where(masks, self.replacement_id, many)}
        if replacement == "attention":
            return {"input_ids": many, "attention_mask": (~masks).long()} | self._positions(many)
        if replacement == "delete":
            return {"input_ids": many[~masks].reshape(len(masks), -1)}
        words = self.lens.model.get_input_embeddings()(many)  # type: ignore[operator]
        filler = torch.zeros_like(words[0, 0]) if replacement == "zero" else self._mean_word.to(words)
        return {"inputs_embeds": torch.where(masks[..., None], filler, words)}

    @property
    def replacement_id(self) -> int:
        """The mask token, or the nearest to it that exists: unknown, padding, end of text."""
        for name in ("mask_token_id", "unk_token_id", "pad_token_id", "eos_token_id"):
            found = getattr(self.tokenizer, name, None)
            if found is not None:
                return found
        raise InputError(
            f"`{type(self.tokenizer).__name__}` has no mask, unknown, padding or end-of-text token to put in a token's "
            "place. Choose another replacement: zero, mean, attention or delete."
        )

    def settings(self) -> dict[str, Any]:
        """Lengths, cut, and what the replacement `token` is."""
        try:
            token = self.tokenizer.convert_ids_to_tokens(self.replacement_id)  # type: ignore[union-attr]
        except InputError:
            token = None
        lengths = {"n_tokens": self.n_tokens, "min_tokens": self.options.min_tokens}
        lengths |= {"n_short": self._n_seen - len(self.ids)}
        return lengths | {"cut": self.options.cut, "replacement_token": token}

    def check(self, replacements: Sequence[str]) -> None:
        """Refuse `attention` where positions close the gap that a hidden token leaves: it is deletion there."""
        sample = self.load(max(range(len(self)), key=self.length))
        if "attention" not in replacements or not self.is_causal or self._positions(sample.inputs["input_ids"]):
            return
        mask = torch.arange(sample.n_tokens)[None] == sample.n_tokens // 2
        hidden, deleted = (self.plain.run(self.copies(sample, mask, how)).states[0] for how in ("attention", "delete"))
        if bool((hidden - deleted).abs().max() <= 1e-5 * hidden.abs().max()):
            raise InputError(
                f"On `{type(self.lens.model).__name__}` the replacement `attention` closes the gap that a hidden token "
                "leaves, since positions are counted from the attention mask, and is the same as `delete`. Use that or "
                "a replacement that keeps positions: token, zero, mean."
            )

    def _positions(self, ids: Tensor) -> dict[str, Tensor]:
        """Positions as they were, for models that would count them from the attention mask."""
        if not self.is_causal or "position_ids" not in forward_parameters(self.lens.model):
            return {}
        return {"position_ids": torch.arange(ids.shape[1], device=ids.device).expand_as(ids)}

    @cached_property
    def _mean_word(self) -> Tensor:
        embedding: Any = self.lens.model.get_input_embeddings()  # type: ignore[operator]
        with torch.no_grad():
            ids = torch.arange(embedding.num_embeddings, device=embedding.weight.device)
            sums = (in_float64(embedding(part)).sum(0) for part in ids.split(8192))
            return sum(sums, torch.zeros((), dtype=torch.float64)) / len(ids)


def _is_causal(plain: PlainModel, samples: Sequence[list[int]]) -> bool:
    """Whether the first output ignores all later tokens: tried, not read from the configuration."""
    ids = next((ids for ids in samples if len(ids) > 2), None)
    if ids is None:
        raise InputError("Expected a text of more than two tokens; got none. Pass longer texts.")
    # All other tokens change: one of many may be lost in a first output that averages over them.
    other = ids[0] if set(ids) != {ids[0]} else ids[0] - 1 if ids[0] else 1
    pair = torch.tensor([ids, [ids[0], *[other] * (len(ids) - 1)]], device=plain.device)
    states = plain.run({"input_ids": pair}, "first").states
    return bool((states[0] - states[1]).abs().max() <= 1e-4 * states[0].abs().max())


class Images(_Samples):
    """Images as patches."""

    replacements = ("black", "mean", "blur")

    def __init__(self, lens: Lens, data: Dataset, options: PerturbationOptions) -> None:
        super().__init__(lens, data, options)
        self.pieces = [_piece(data, place, data.items[place]) for place in islice(_order(data, options), options.limit)]
        self._n_special: int | None = None

    def load(self, index: int) -> Sample:
        """The pixels of one image."""
        piece = self.pieces[index]
        image = piece.content.load() if isinstance(piece.content, LazyImage) else piece.content
        prepared = self.lens.prepare(image)
        grid, pixels = prepared.grid(self.lens.model), prepared.arguments.get("pixel_values")
        if grid is None or pixels is None:
            raise InputError(
                f"Expected a model that cuts images into patches; `{type(self.lens.model).__name__}` does not."
            )
        if self._n_special is None:
            self._n_special = self.plain.n_tokens({"pixel_values": pixels}) - grid[0] * grid[1]
        return Sample(
            prepared=prepared,
            inputs={"pixel_values": pixels},
            n_tokens=self._n_special + grid[0] * grid[1],
            fixed=frozenset(range(self._n_special)),
            label=self._class(piece.label),
        )

    def shapes(self, sample: Sample, masks: Tensor, replacement: str) -> list[tuple[int, ...]]:
        """For each copy the size of the picture: copies of the same size fit into one batch."""
        return [tuple(sample.inputs["pixel_values"].shape[1:])] * len(masks)

    def copies(self, sample: Sample, masks: Tensor, replacement: str) -> dict[str, Tensor]:
        """Pixels of whole patches replaced, before the model cuts them."""
        pixels = sample.inputs["pixel_values"]
        patch: Any = self.lens.model.config.patch_size  # type: ignore[union-attr]
        height, width = (patch, patch) if isinstance(patch, int) else tuple(patch)
        rows, columns = pixels.shape[-2] // height, pixels.shape[-1] // width
        cells = masks[:, sample.n_tokens - rows * columns :].reshape(-1, 1, rows, columns).to(pixels.device)
        covered = cells.repeat_interleave(height, 2).repeat_interleave(width, 3)
        window = pixels[..., : rows * height, : columns * width]
        return {"pixel_values": torch.where(covered, self._filler(window, replacement), window)}

    def _filler(self, pixels: Tensor, replacement: str) -> Tensor:
        if replacement == "mean":
            return pixels.mean((-2, -1), keepdim=True)
        if replacement == "blur":
            return torch.nn.functional.avg_pool2d(pixels, 31, stride=1, padding=15, count_include_pad=False)
        processor = self.lens.processor
        mean, std = (getattr(processor, name, None) for name in ("image_mean", "image_std"))
        if mean is None or std is None or not getattr(processor, "do_normalize", True):
            return pixels.new_zeros(1, pixels.shape[1], 1, 1)
        black = -torch.tensor(mean) / torch.tensor(std)  # what pixel 0 becomes by normalisation
        return black.to(pixels).reshape(1, -1, 1, 1)


Samples = Texts | Images
"""Samples that the study can perturb."""
