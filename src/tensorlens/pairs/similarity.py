r"""Why are two inputs similar? The pair map of their vectors, exact.

With norms held, the vector of a text is affine in its input: $y_a = Σ_i y_{a,i} + P B$ with $y_{a,i} = P T (e_i ⊙ X)$.
So a dot product of two is a sum over pairs, $⟨y_a, y_b⟩ = Σ_{ij} ⟨y_{a,i}, y_{b,j}⟩$, biases as one more index.

The $y_{a,i}$ take one push per group of tokens. Once those of one side are known, the other side need not be split: a
pull of each $y_{a,i}$ gives $⟨y_{a,i}, y_{b,j}⟩$ for all j. The way with the fewest passes is used; so the words of a
short query are pulled through long passages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, get_args

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from tensorlens.batches import Batch, InBatches, Results
from tensorlens.errors import InputError, check_choice, check_iterable, check_whole
from tensorlens.lens import Lens
from tensorlens.maps.groups import Group, Groups, find_groups
from tensorlens.memory import fitting, in_parts
from tensorlens.models.inputs import ModelInput
from tensorlens.models.pictures import cells
from tensorlens.models.runner import own_modes
from tensorlens.operators.operator import FrozenOperator
from tensorlens.pairs.pair_map import BIAS, Measure, PairMap
from tensorlens.pairs.pooling import Around, Pooling, around_of, find_pooling
from tensorlens.program.program import of_each
from tensorlens.recording.recording import Span
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
            those found in a for the rows and those found in b for the columns; for patches of a picture
            ``{"regions": (rows, columns)}`` or ``{"regions": {"sky": (0, 0, 1, 0.5)}}`` (left, top, right and bottom as
            fractions of the whole picture), with words on a side of text.
        measure: ``"cosine"``, with the norms held, or ``"dot"``.
        against: A third input c for the columns: why is b closer to a than c is? Scores are those of a and b, then
            those of a and c with the opposite sign, and sum to the difference of the two similarities.

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
        top: Make maps only of this many passages, the most similar, best first; ``meta["passage"]`` is the
            index of each in `passages`. The others are recorded but not split, which is the expensive part.
    """
    passages = check_iterable(passages, "passages", "texts or other inputs")
    top = None if top is None else check_whole(top, "top", 1)
    named = {f"passages[{k}]": one for k, one in enumerate(passages)}
    comparing = _Comparing(lens, other, query, named, pooling, groups, measure)
    return comparing.maps() if top is None else comparing.nearest(top)


AT_A_TIME = {"cuda": 2048, "cpu": 64}
"""Inputs of a batch times groups pushed, or vectors pulled, before they are pooled."""


class Vectors:
    """The vector of each input of a batch, `whole` (sample, place, channel), split over groups of tokens.

    There is one place, or one per token with late interaction. Vectors are float64 on the CPU.

    Args:
        batch: The inputs.
        pooling: How states become a vector.
        groups: The groups of each input.
    """

    def __init__(self, batch: Batch, pooling: Pooling, groups: Sequence[Sequence[Group]]) -> None:
        self.batch, self.pooling, self.groups = batch, pooling, groups
        self.recording = recording = batch.recording
        self.input = recording.states[0]
        self.members = torch.zeros(max(map(len, groups)), *self.input.shape[:2], dtype=torch.bool)
        """(group, sample, token): the tokens of each group."""
        for i, of_sample in enumerate(groups):
            for k, group in enumerate(of_sample):
                self.members[k, i, list(group.tokens)] = True
        if pooling.slot is None:
            self.program = recording.part(Span(0, recording.n_blocks))
            self.states = recording.states[-1]
        else:
            self.program = recording.program.part(recording.slots[0], (pooling.slot,))
            self.states = self.program.run(self.input)[0]
        self.mask = self._mask().to(self.states.device)
        self.weights = pooling.weights(self.states, self.mask)
        self.whole, self.gains = self._pooled(self.states), list[Tensor]()
        for projection in pooling.projections:
            self.whole, gain = projection(self.whole)
            self.gains.append(gain)

    def _mask(self) -> Tensor:
        """(sample, token): the outputs that take part: all but padding, or fewer by an attention mask."""
        n_out = self.recording.states[-1].shape[1]
        mask = torch.zeros(len(self.batch), n_out, dtype=torch.bool)
        for i, one in enumerate(self.batch.prepared):
            n = self.batch.lengths[i] if n_out == self.input.shape[1] else n_out
            given = one.arguments.get("attention_mask")
            mask[i, :n] = True
            if isinstance(given, Tensor) and given.shape == (1, n) and bool(given.any()):
                mask[i, :n] = given[0].cpu() != 0
        return mask

    def labels(self, i: int) -> tuple[str, ...]:
        """The groups of one input, and the bias."""
        return (*(group.label for group in self.groups[i]), BIAS)

    def pictures(self, i: int) -> list[dict[str, Any]]:
        """The picture of one input, with the group and the box of each patch; empty for a text."""
        meta = self.batch.context(i).meta
        grid = meta.get("grid")
        if not isinstance(grid, dict):
            return []
        group_of = self.members[:, i].double().argmax(0).tolist()
        boxes = cells(grid["rows"], grid["columns"])
        places = [[group_of[grid["first"] + k], *box] for k, box in enumerate(boxes)]
        return [{"image": meta.get("image"), "places": places}]

    def norms(self, by_norm: bool) -> Tensor:
        """(sample, place, 1): the held norms that vectors are divided by."""
        if not by_norm and not self.pooling.normalised:
            return torch.ones_like(self.whole[..., :1])
        norms = self.whole.norm(dim=-1, keepdim=True)
        if not bool((norms > 0).all()):
            raise InputError('The vector of an input is zero and has no cosine. Pass `measure="dot"`.')
        return norms

    # Taking vectors apart ---------------------------------------------------------------------------------------------

    @property
    def n_pushes(self) -> int:
        """Number of pushes for the parts of an input."""
        return 0 if "parts" in self.__dict__ else len(self.members)

    @cached_property
    def parts(self) -> Tensor:
        """(group + 1, sample, place, channel): the contribution of each group, and last the bias."""
        parts = self._projected(self._pushed())
        bias = self.whole - parts.sum(0) if self.bias is None else self.bias
        return torch.cat([parts, bias[None]])

    @cached_property
    def bias(self) -> Tensor | None:
        """(sample, place, channel): the bias; None if it is the remainder, so that rounding cancels."""
        if self.states.dtype is not torch.float64:
            return None
        at_zero = self._pooled(self.program.run(*self.program.zeros())[0])
        return self.whole - self._projected(self._pooled(self.states) - at_zero)

    def _projected(self, parts: Tensor) -> Tensor:
        """Parts (…, sample, place, channel) of pooled states as parts of vectors."""
        for projection, gain in zip(self.pooling.projections, self.gains, strict=True):
            parts = parts @ projection.weight.to(parts).T * gain
        return parts

    def carried(self, u: Tensor) -> Tensor:
        """(group + 1, vector, sample): products of some vectors (vector, sample, place, channel) with each part."""
        pulled = u
        for projection, gain in zip(reversed(self.pooling.projections), reversed(self.gains), strict=True):
            pulled = pulled * gain @ projection.weight.to(u)
        found = torch.einsum("kst,vst->kvs", self.members.double(), self._pull_back(pulled))
        of_bias = (u * (self.whole if self.bias is None else self.bias)).sum((2, 3))
        return torch.cat([found, (of_bias - found.sum(0) if self.bias is None else of_bias)[None]])

    def _pooled(self, states: Tensor) -> Tensor:
        """(…, token, channel) to (…, place, channel), in float64 on the CPU."""
        if self.weights is not None:
            states = (states * self.weights).sum(-2, keepdim=True, dtype=_exact(states))
        elif self.pooling.kind == "late":
            states = states[..., self.mask[0], :]
        else:
            states = states[..., None, :]
        return states.cpu().double()

    def _pushed(self) -> Tensor:
        """One push per group."""

        def push(some: Tensor) -> Tensor:
            alone = self.input * some[..., None].to(self.input)
            return self._pooled(self._several(self.program.linear.run_each, alone))

        return self._some_at_a_time(self.members, push)

    def _pull_back(self, u: Tensor) -> Tensor:
        """(vector, sample, token): the part of ⟨u, y⟩ that each token carries, for u (vector, sample, …)."""

        def pull(some: Tensor) -> Tensor:
            some = some.to(self.states)
            if self.weights is not None:
                some = some * self.weights
            elif self.pooling.kind == "late":
                some = some.new_zeros(len(some), *self.states.shape).index_copy_(2, self.mask[0].nonzero()[:, 0], some)
            else:
                some = some[:, :, 0]
            pulled = self._several(self.program.pull_each, some)
            return (pulled * self.input).sum(-1, dtype=_exact(pulled)).cpu().double()

        return self._some_at_a_time(u, pull)

    def _several(self, each: Callable[[Any], list[tuple[Tensor, ...]]], items: Tensor) -> Tensor:
        """Several states or cotangents through the program: block by block in a long input, otherwise together."""
        if self.recording.is_streamed:
            return torch.stack([found for (found,) in each([(item,) for item in items])])
        return of_each(lambda item: each([(item,)])[0][0], items)

    def _some_at_a_time(self, items: Tensor, work: Callable[[Tensor], Tensor]) -> Tensor:
        device, n = self.input.device, len(self.batch)
        most = max(1, AT_A_TIME.get(device.type, 64) // n)
        each = 4 * n * FrozenOperator(self.recording).bytes_per_cotangent
        return torch.cat(in_parts(items.to(device), fitting(each, most, device), work))


def _exact(x: Tensor) -> torch.dtype:
    """The type of sums: float64 if the device has it."""
    return torch.float32 if x.device.type == "mps" else torch.float64


class _Close(msgspec.Struct, frozen=True):
    """The similarity of one input, and its vector."""

    scores: Tensor
    value: float
    meta: dict[str, Any] = {}


class _Comparing(InBatches):
    """Compares one input with others, which share recordings; the options are those of `similarity`."""

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
        check_choice(measure, "measure", get_args(Measure))
        for one in (value, *others.values()):
            if isinstance(one, (list, tuple)) and one and not isinstance(one[0], int):
                raise InputError("Expected one input on each side, got a list. Use `similarities` for several.")
        first = _encoder(lens, "lens")
        self.encoders = encoders = (first, first if other is None else _encoder(other, "other"))
        # A batch is worth its check from four inputs on. With late interaction every token has a vector: too many.
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
        """The pair maps with each of the others, in their order."""
        return [found["pairs"] for found in self.window(self.others)]

    def nearest(self, top: int) -> list[PairMap]:
        """The pair maps with the most similar inputs, best first."""
        self.names = ("value",)
        values = [found["value"].value for found in self.window(self.others)]
        best = sorted(range(len(values)), key=values.__getitem__, reverse=True)[:top]
        self.names = ("pairs",)
        maps = [found["pairs"] for found in self.window([self.others[k] for k in best])]
        return [replace(one, meta=one.meta | {"passage": k}) for one, k in zip(maps, best, strict=True)]

    def begin_batch(self, batch: Batch) -> dict[str, Callable[[], list[Any]]]:
        """The pair maps of a batch, or the similarity of each of its inputs."""
        b = self._vectors(batch, self.encoders[1])
        made = self.compare(self.first, b) if self.names == ("pairs",) else self._closeness(self.first, b)
        return {self.names[0]: lambda: made}

    def make_alone(self, prepared: ModelInput) -> Results:
        """The same for one input."""
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
        if isinstance(chosen, (list, tuple)) and isinstance(text, str):  # a passage is in one of the texts
            chosen = [one for one in chosen if not isinstance(one, str) or one in text] or "tokens"
        if _are_regions(chosen) and "grid" not in context.meta:
            chosen = "words"  # regions belong to the other side
        return find_groups("tokens" if chosen is None else chosen, context.tokens, context.meta)

    def _met(self, a: Vectors, b: Vectors) -> tuple[Tensor, Tensor, list[float]]:
        """The place of b that each place of a meets (sample, place of a, channel), products of norms, similarities."""
        if a.whole.shape[-1] != b.whole.shape[-1]:
            raise InputError(
                f"The two sides must have vectors of the same width; {self.encoders[0][0].name} gives "
                f"{a.whole.shape[-1]} channels and {self.encoders[1][0].name} {b.whole.shape[-1]}."
            )
        by_norm = self.measure == "cosine"
        first, second = a.whole / a.norms(by_norm), b.whole / b.norms(by_norm)
        met = (first @ second.mT).argmax(-1)  # the only place, or the most similar one
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
    """(sample of b, group of a + 1, group of b + 1): products of parts divided by norms, in the fewest passes."""
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
    """Columns of b, those of c with the opposite sign, and one of both biases."""
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
    """The model's arguments for some inputs; an error names the input."""
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
