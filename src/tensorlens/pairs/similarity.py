r"""Why are two inputs similar? The pair map of their vectors, exact.

With norms held, the vector of a text is affine in its input: $y_a = Σ_i y_{a,i} + P B$ with $y_{a,i} = P T (e_i ⊙ X)$.
So a dot product of two is a sum over pairs, $⟨y_a, y_b⟩ = Σ_{ij} ⟨y_{a,i}, y_{b,j}⟩$, biases as one more index.

The $y_{a,i}$ are one push per group of tokens. With those of one side known, the other side need not be taken apart: a
pull of each $y_{a,i}$ gives $⟨y_{a,i}, y_{b,j}⟩$ for all j. Whatever takes fewest passes is done; so the words of a
short query are pulled through long passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from tensorlens.batches import Batch, InBatches, Results
from tensorlens.errors import InputError, check_iterable, check_whole
from tensorlens.lens import Lens
from tensorlens.maps.groups import Group, Groups, find_groups
from tensorlens.models.inputs import ModelInput
from tensorlens.models.modes import own_modes
from tensorlens.pairs.pair_map import Measure, PairMap
from tensorlens.pairs.pooling import Around, around_of, find_pooling
from tensorlens.pairs.vectors import Vectors
from tensorlens.views.captions import UNSEEN

Encoder = tuple[Lens, Around | None]
"""A lens, and what is done around its model; None if that is to be looked for beside its weights."""


@own_modes
def similarity(
    lens: Any,
    a: Any,
    b: Any,
    *,
    other: Any = None,
    pooling: str | None = None,
    groups: Groups | None = None,
    measure: Measure = "cosine",
    against: Any = None,
) -> PairMap:
    """How much of the similarity of a and b each pair of their tokens carries.

    Args:
        lens: A lens on an encoder, or a `SentenceTransformer`.
        a: A text, or anything else that the lens takes: the rows.
        b: The same: the columns.
        other: The lens for b, for models with two towers; that of a if None.
        pooling: ``"mean"``, ``"cls"``, ``"last"``, ``"max"`` (its choice held); ``"attention"``: the model's own
            attention pooling, its weights held; ``"late"``: the sum over the tokens of a of the largest similarity with
            a token of b (the choices held); None for the model's own.
        groups: Sum the pairs over groups of tokens: ``"words"``, ``"sentences"``, ``"lines"``, or a list of passages,
            those that stand in a for the rows and those in b for the columns; for patches of a picture
            ``{"regions": (rows, columns)}`` or ``{"regions": {"sky": (0, 0, 1, 0.5)}}`` (left, top, right and bottom as
            fractions of the whole picture), with words on a side of text.
        measure: ``"cosine"``, with the norms held, or ``"dot"``.
        against: A third input c for the columns: why is b closer to a than c is? Scores are those of a and b, then
            those of a and c with the sign turned, and sum to the difference of the two similarities.

    Raises:
        InputError: A pooling that is not known, vectors of different widths, or a vector of norm zero.
    """
    others = {"b": b} if against is None else {"b": b, "against": against}
    found = _Comparing(lens, other, a, others, pooling, groups, measure).maps()
    return found[0] if against is None else _difference(*found)


@own_modes
def similarities(
    lens: Any,
    query: Any,
    passages: Sequence[Any],
    *,
    other: Any = None,
    pooling: str | None = None,
    groups: Groups | None = None,
    measure: Measure = "cosine",
    top: int | None = None,
) -> list[PairMap]:
    """One pair map per passage, in their order; the query is recorded once, and passages in batches.

    Args:
        lens: A lens on an encoder, or a `SentenceTransformer`.
        query: The rows of every map.
        passages: The columns, each as for `similarity`.
        other: The lens for passages; that of the query if None.
        pooling: As for `similarity`.
        groups: As for `similarity`.
        measure: As for `similarity`.
        top: The maps of only so many passages, those that are most similar, best first; ``meta["passage"]`` is the
            place of each among `passages`. The others are recorded and not taken apart, which costs most.
    """
    passages = check_iterable(passages, "passages", "texts or other inputs")
    top = None if top is None else check_whole(top, "top", 1)
    named = {f"passages[{k}]": one for k, one in enumerate(passages)}
    comparing = _Comparing(lens, other, query, named, pooling, groups, measure)
    return comparing.maps() if top is None else comparing.nearest(top)


class _Close(msgspec.Struct, frozen=True):
    """How similar one input is: its vector, and the similarity."""

    scores: Tensor
    value: float
    meta: dict[str, Any] = {}


class _Comparing(InBatches):
    """Compares one input with others, by name, which share recordings; the options are those of `similarity`."""

    def __init__(
        self,
        lens: Any,
        other: Any,
        value: Any,
        others: Mapping[str, Any],
        pooling: str | None,
        groups: Groups | None,
        measure: Any,
    ) -> None:
        if measure not in ("cosine", "dot"):
            raise InputError(f"`measure` must be cosine or dot; got {measure!r:.60}.")
        for one in (value, *others.values()):
            if isinstance(one, (list, tuple)) and one and not isinstance(one[0], int):
                raise InputError("Expected one input on each side, got a list. Use `similarities` for several.")
        first = _encoder(lens, "lens")
        self.encoders = encoders = (first, first if other is None else _encoder(other, "other"))
        # A batch is worth its check from four on. With late interaction every token has a vector, too much for many.
        super().__init__(encoders[1][0].specimen, ["pairs"], 1 if pooling == "late" or len(others) < 4 else None)
        self.pooling, self.groups = pooling, groups
        self.measure: Measure = measure
        (query,), self.others = _prepared(first[0], {"a": value}), _prepared(encoders[1][0], others)
        texts = [one.text for one in (query, *self.others) if one.text is not None]
        for passage in groups if texts and isinstance(groups, (list, tuple)) else ():
            if isinstance(passage, str) and not any(passage in text for text in texts):
                raise InputError(f"The passage {passage!r:.60} does not occur in any of the texts.")
        seen = [query.grid(first[0].model), *(one.grid(encoders[1][0].model) for one in self.others)]
        if _are_regions(groups) and not any(seen):
            raise InputError("Regions need a picture, and none of the inputs is one. Pass different groups.")
        self.first = self._vectors(Batch(first[0].specimen, [query]), first)

    def maps(self) -> list[PairMap]:
        """The pair map with each of the others, in their order."""
        return [found["pairs"] for found in self.window(self.others)]

    def nearest(self, top: int) -> list[PairMap]:
        """The pair maps with those that are most similar, best first."""
        self.names = ("value",)
        values = [found["value"].value for found in self.window(self.others)]
        best = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:top]
        self.names = ("pairs",)
        maps = [found["pairs"] for found in self.window([self.others[k] for k in best])]
        return [replace(one, meta=one.meta | {"passage": k}) for one, k in zip(maps, best, strict=True)]

    def begin_batch(self, batch: Batch) -> dict[str, Callable[[], list[Any]]]:
        """The pair maps of a batch, or how similar each of its inputs is."""
        b = self._vectors(batch, self.encoders[1])
        made = self.compare(self.first, b) if self.names == ("pairs",) else self._closeness(self.first, b)
        return {self.names[0]: lambda: made}

    def make_alone(self, prepared: ModelInput) -> Results:
        """The same of one input."""
        begun = self.begin_batch(Batch(self.encoders[1][0].specimen, [prepared]))
        return {name: made()[0] for name, made in begun.items()}

    def _vectors(self, batch: Batch, encoder: Encoder) -> Vectors:
        pooling = find_pooling(self.pooling, encoder[0].model, batch.recording, encoder[1])
        for one, n_tokens in zip(batch.prepared, batch.lengths, strict=True):
            if one.text is not None:
                pooling.check(one.text, n_tokens)
        return Vectors(batch, pooling, [self._groups(batch, i) for i in range(len(batch))])

    def _groups(self, batch: Batch, i: int) -> tuple[Group, ...]:
        """The groups of the input tokens of one sample."""
        chosen, context = self.groups, batch.context(i)
        text = context.meta.get("text")
        if isinstance(chosen, (list, tuple)) and isinstance(text, str):  # a passage stands in one of the texts
            chosen = [one for one in chosen if not isinstance(one, str) or one in text] or "tokens"
        if _are_regions(chosen) and "grid" not in context.meta:
            chosen = "words"  # regions are those of the other side
        return find_groups("tokens" if chosen is None else chosen, context.tokens, context.meta)

    def _met(self, a: Vectors, b: Vectors) -> tuple[Tensor, Tensor, list[float]]:
        """Which place of b each place of a meets (sample, place of a, channel), products of norms, and similarities."""
        if a.whole.shape[-1] != b.whole.shape[-1]:
            raise InputError(
                f"The two sides must have vectors of the same width; {self.encoders[0][0].name} gives "
                f"{a.whole.shape[-1]} channels and {self.encoders[1][0].name} {b.whole.shape[-1]}."
            )
        by_norm = self.measure == "cosine"
        first, second = a.whole / a.norms(by_norm), b.whole / b.norms(by_norm)
        met = (first @ second.mT).argmax(-1)  # the place there is, or the nearest
        meeting = met[..., None].expand(*met.shape, second.shape[-1])
        norms = a.norms(by_norm) * b.norms(by_norm).gather(1, met[..., None])
        return meeting, norms, (first * second.gather(1, meeting)).sum((1, 2)).tolist()

    def _closeness(self, a: Vectors, b: Vectors) -> list[_Close]:
        return [_Close(vector, value) for vector, value in zip(b.whole, self._met(a, b)[2], strict=True)]

    def compare(self, a: Vectors, b: Vectors) -> list[PairMap]:
        """The pair maps of one input with each of some others."""
        meeting, norms, values = self._met(a, b)
        scores = _products(a, b, norms, meeting)
        return [
            PairMap(
                scores=torch.cat([scores[i, :, : len(groups)], scores[i, :, -1:]], 1),
                out_tokens=a.labels(0),
                in_tokens=b.labels(i),
                measure=self.measure,
                value=values[i],
                meta=self._meta(a, b, i),
            )
            for i, groups in enumerate(b.groups)
        ]

    def _meta(self, a: Vectors, b: Vectors, i: int) -> dict[str, Any]:
        first, second = a.batch.context(0).meta, b.batch.context(i).meta
        groups = self.groups if isinstance(self.groups, str) else "by the user"
        other = {"other": second["model"], "other_rules": b.batch.recording.rules.as_dict()}
        pictures = {"a_pictures": a.pictures(0), "b_pictures": b.pictures(i)}
        return {
            "model": first["model"],
            **({} if self.encoders[0] is self.encoders[1] else other),
            "pooling": " and ".join(dict.fromkeys([a.pooling.name, b.pooling.name])),
            "groups": "tokens" if self.groups is None else groups,
            "rules": a.batch.recording.rules.as_dict(),
            "versions": first["versions"],
            "a": first.get("text"),
            "b": second.get("text"),
            **{name: found for name, found in pictures.items() if found},
            **({"seen": UNSEEN} if None in (first.get("seen", ""), second.get("seen", "")) else {}),
        }


def _products(a: Vectors, b: Vectors, norms: Tensor, meeting: Tensor) -> Tensor:
    """(sample of b, group of a + 1, group of b + 1): products of parts over norms, in the fewest passes."""
    n, n_a, n_b = len(b.batch), len(a.members) + 1, len(b.members) + 1
    passes = {"both": a.n_pushes + n * b.n_pushes, "b": a.n_pushes + n * n_a, "a": n * (b.n_pushes + n_b)}
    through = min(passes, key=passes.__getitem__)
    if 2 * passes[through] > passes["both"]:  # little to win, and a pull costs more than a push
        through = "both"
    if through == "b":
        u = b.whole.new_zeros(n_a, *b.whole.shape)
        return b.carried(u.scatter_add_(2, meeting.expand(n_a, *meeting.shape), a.parts / norms)).permute(2, 1, 0)
    at_met = b.parts.gather(2, meeting.expand(n_b, *meeting.shape)) / norms
    if through == "a":
        return a.carried(at_met.flatten(0, 1)[:, None]).reshape(n_a, n_b, n).permute(2, 0, 1)
    return torch.einsum("ipc,jspc->sij", a.parts[:, 0], at_met)


def _difference(closer: PairMap, third: PairMap) -> PairMap:
    """Columns of b, those of c with the sign turned, and one of both biases."""
    biases, n = closer.scores[:, -1:] - third.scores[:, -1:], len(closer.in_tokens) - 1
    shifted = [
        {**one, "places": [[place[0] + n, *place[1:]] for place in one["places"]]}
        for one in third.meta.get("b_pictures", ())
    ]
    return PairMap(
        scores=torch.cat([closer.scores[:, :-1], -third.scores[:, :-1], biases], 1),
        out_tokens=closer.out_tokens,
        in_tokens=(*closer.in_tokens[:-1], *third.in_tokens),
        measure=closer.measure,
        value=closer.value - third.value,
        n_against=len(third.in_tokens) - 1,
        meta=closer.meta
        | {"against": third.meta["b"]}
        | ({"against_pictures": shifted} if shifted else {})
        | {key: said for key, said in third.meta.items() if key == "seen"},
    )


def _are_regions(groups: Groups | None) -> bool:
    return isinstance(groups, Mapping) and "regions" in groups


def _prepared(lens: Lens, inputs: Mapping[str, Any]) -> list[ModelInput]:
    """What the model takes of some inputs; an error says which it is about."""
    found = list[ModelInput]()
    for name, one in zip(inputs, lens.specimen.prepare_all([*inputs.values()]), strict=True):
        if not isinstance(one, ModelInput):
            raise InputError(f"`{name}`: {one}") from one
        found.append(one)
    return found


def _encoder(model: Any, name: str) -> Encoder:
    """A lens, and what a `SentenceTransformer` does around its model where it came from one."""
    if isinstance(model, Lens):
        return model, None
    inner = getattr(model[0], "auto_model", None) if isinstance(model, nn.Sequential) and len(model) else None
    if not isinstance(inner, nn.Module):
        raise InputError(
            f"`{name}` must be a lens, or a SentenceTransformer that begins with a Transformer; got "
            f"{type(model).__name__}."
        )
    return Lens(inner, getattr(model, "tokenizer", None)), around_of(model)
