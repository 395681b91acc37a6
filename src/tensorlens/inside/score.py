r"""Why a head looked there: one attention score before softmax, as a sum over pairs of input tokens.

With norms held, $q_i$ and $k_j$ of a block are affine in X⁰, so their product is bilinear in it:

    s = c·q_iᵀk_j + m = Σ_a Σ_b c·U_aᵀV_b + m,   U_a = (∂q_i/∂x_a) x_a,   V_b = (∂k_j/∂x_b) x_b,

with one further row and column for the constants of q and k, and m what the model adds (position biases). q and k are
taken where they meet, so rotations by position and norms of queries and keys are inside. `score_components` takes
both apart by earlier component instead of by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.inside.score_components import named, written
from tensorlens.inside.scores import Scores, find_scores
from tensorlens.inside.target import StreamPass
from tensorlens.maps.groups import Group, group_sums
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import fitting
from tensorlens.operators.base import check_token
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.pieces import Cotangents, by_row
from tensorlens.recording.recording import Span

By = Literal["token", "component"]


class Asked(NamedTuple):
    """One score: of which attention of which block, by which head, from where to where; two keys for a contrast."""

    block: int
    head: int
    query: int
    keys: tuple[int, ...]
    attention: int | None = None


class Pairs(NamedTuple):
    """The pair map of each key, and the labels of rows and columns."""

    maps: list[Tensor]
    labels: tuple[str, ...]


class Vector(NamedTuple):
    """A query or a key: the slot it is in, and where; its channels are the axis that is left open."""

    slot: int
    head: int
    token: int
    is_turned: bool

    def of(self, x: Tensor) -> Tensor:
        """Its channels, a view of what the slot holds."""
        by_head = x.flatten(0, -3)[self.head]
        return by_head[:, self.token] if self.is_turned else by_head[self.token]


def score_map(
    operator: FrozenOperator,
    block: int,
    head: int,
    query: int,
    key: int | tuple[int, int],
    *,
    by: By = "token",
    attention: int | None = None,
    tokens: tuple[str, ...],
    meta: dict[str, Any],
) -> TokenMap:
    """The pair map of one score, or of the difference of two scores of one query.

    Raises:
        MethodError: the block has no such attention whose queries and keys meet.
        InputError: no such block, head or token, or a masked key.
    """
    keys = tuple(key) if isinstance(key, (tuple, list)) else (key,)
    if len(keys) not in (1, 2):
        raise InputError(f"`key` must be a position or a pair of positions for a contrast; got {key!r}.")
    if by not in ("token", "component"):
        raise InputError(f"`by` must be 'token' or 'component'; got {by!r}.")
    start, stop = operator.span
    if type(block) is not int or not 0 <= block < stop - start:
        raise InputError(f"There is no block {block!r}; expected one of 0 to {stop - start - 1}.")
    attention = attention if attention is None else check_whole(attention, "attention")
    question = _Question(operator, Asked(start + block, head, query, keys, attention))
    maps, labels = question.by_token(tokens) if by == "token" else question.by_component()
    scores = maps[0] if len(maps) == 1 else maps[0] - maps[1]
    asks = {"block": block, "head": head, "query": query, "key": key, "by": by, "score": float(scores.sum())}
    return TokenMap(
        scores=scores,
        out_tokens=labels,
        in_tokens=labels,
        method="score",
        bias_share=torch.full((len(labels),), float("nan")),
        meta=meta | asks,
    )


def grouped(made: TokenMap, groups: Sequence[Group]) -> TokenMap:
    """A pair map by token with the rows and the columns of each group summed, the bias apart."""
    every = (*groups, Group(made.in_tokens[-1], (len(made.in_tokens) - 1,)))
    labels, scores = tuple(group.label for group in every), group_sums(group_sums(made.scores, every).T, every).T
    return replace(made, scores=scores, out_tokens=labels, in_tokens=labels, bias_share=made.bias_share[: len(labels)])


class _Question:
    """One score of one block: the blocks up to it, and the vectors that meet."""

    def __init__(self, operator: FrozenOperator, asked: Asked) -> None:
        self.operator, self.asked, recording = operator, asked, operator.recording
        self.scores = _chosen(operator, asked)
        query, key = self.scores.meeting.query, self.scores.meeting.key
        span = Span(operator.span.start, asked.block + 1)
        pieces = recording.pieces(span, operator.heads, also={query, key, *self.scores.slots})
        self.run = StreamPass(FrozenOperator(recording, span, operator.heads), pieces)
        self.at_x = pieces.values(asked.block - span.start, [query, key, *self.scores.slots])
        self.places = self._places()
        self.vectors = self._vectors()

    def _places(self) -> tuple[int, list[int]]:
        """The query and the keys as numbers from 0."""
        asked, (n_heads, n_queries, n_keys) = self.asked, self.scores.sizes
        if type(asked.head) is not int or not 0 <= asked.head < n_heads:
            raise InputError(f"Block {asked.block} has heads 0 to {n_heads - 1}; got {asked.head!r}.")
        i, keys = check_token(asked.query, n_queries), [check_token(key, n_keys) for key in asked.keys]
        for j in keys:
            if self.scores.hides(self.at_x, asked.head, i, j):
                raise InputError(
                    f"Head {asked.head} cannot look from token {i} to token {j}: the key is masked. Choose another key."
                )
        return i, keys

    def _vectors(self) -> list[Vector]:
        """The query, then the keys; several heads may share a key."""
        (i, keys), meeting, is_turned = self.places, self.scores.meeting, not self.scores.meeting.is_fused
        n_key_heads = self.at_x[meeting.key].flatten(0, -3).shape[0]
        of_key = self.asked.head // (self.scores.sizes[0] // n_key_heads)
        return [
            Vector(meeting.query, self.asked.head, i, False),
            *(Vector(meeting.key, of_key, j, is_turned) for j in keys),
        ]

    def by_token(self, tokens: tuple[str, ...]) -> Pairs:
        """Over pairs of tokens: what each gives of the query and the keys, and what they are at zero."""
        program = self.run.pieces.program
        slots = {vector.slot for vector in self.vectors}
        at_zero = program.part(program.inputs, sorted(slots)).observe(program.zeros(), slots)
        u, *vs = (torch.cat([self._by_token(v), v.of(at_zero[v.slot])[:, None]], 1) for v in self.vectors)
        return Pairs([self._pairs(j, u, v) for j, v in zip(self.places[1], vs, strict=True)], (*tokens, "bias"))

    def _by_token(self, vector: Vector) -> Tensor:
        """(channel of the head, token): what each token gives of a query or key, by a cotangent for each channel."""
        units = unit_cotangents(vector, self.at_x[vector.slot])
        n_rows = fitting(8 * self.operator.input.nbytes, len(units), self.operator.device)
        return torch.cat([self._pulled({vector.slot: rows}) for rows in units.split(n_rows)])

    def _pulled(self, waiting: Cotangents) -> Tensor:
        """Rows of cotangents down to the input, times the input: (row, token)."""
        run = self.run
        for n in reversed(range(len(run.pieces.programs))):
            run.pieces.programs[n].load()
            waiting = by_row(lambda one, n=n: run.pieces.pull(n, one)[1], waiting)
        n_rows, values = len(next(iter(waiting.values()))), run.pieces.at_cuts
        zeros = {
            s: values[s].new_zeros(n_rows, *values[s].shape) for s in run.pieces.program.inputs if s not in waiting
        }
        return torch.cat([((waiting | zeros)[s] * values[s])[:, 0].sum(-1) for s in run.pieces.program.inputs], 1)

    def by_component(self) -> Pairs:
        """Over pairs of components: what each wrote of the query and the keys."""
        values = torch.stack([vector.of(self.at_x[vector.slot]) for vector in self.vectors])
        rows = torch.arange(values.numel(), device=values.device).split(values.shape[1])
        starts: Cotangents = {}
        for vector, place in zip(self.vectors, rows, strict=True):
            x = self.at_x[vector.slot]
            starts.setdefault(vector.slot, x.new_zeros(values.numel(), *x.shape))[place] = unit_cotangents(vector, x)
        found = written(self.run, self.asked.block, self.asked.attention or 0, starts, values)
        u, *vs = found.parts
        maps = [self._pairs(j, u, v) for j, v in zip(self.places[1], vs, strict=True)]
        return Pairs(maps, named(found.components))

    def _pairs(self, j: int, u: Tensor, v: Tensor) -> Tensor:
        """c·UᵀV, and in the corner what the model adds."""
        factor, added = self.scores.affine(self.at_x, self.asked.head, self.places[0], j)
        pairs = factor * u.T @ v
        pairs[-1, -1] += added
        return pairs


def unit_cotangents(vector: Vector, x: Tensor) -> Tensor:
    """A cotangent (channel, …) of the slot for each channel of a query or key."""
    width = len(vector.of(x))
    units = x.new_zeros(width, *x.shape)
    for channel in range(width):
        vector.of(units[channel])[channel] = 1
    return units


def _chosen(operator: FrozenOperator, asked: Asked) -> Scores:
    found, wanted = find_scores(operator.recording, asked.block), asked.attention or 0
    if 0 <= wanted < len(found) and (len(found) == 1 or asked.attention is not None):
        return found[wanted]
    name = operator.recording.name
    if len(found) > 1:
        raise MethodError(
            f"Block {asked.block} of `{name}` has {len(found)} attention layers; pass `attention=0` to "
            f"`attention={len(found) - 1}`."
        )
    raise MethodError(
        f"In block {asked.block} of `{name}`, queries and keys meet before a softmax {len(found)} times in a way that "
        f"can be followed; expected attention {wanted}. Use `tensor.in_class`."
    )
