r"""Why a head looked there: one attention score before softmax, as a sum over pairs of input tokens.

With norms held, $q_i$ and $k_j$ of a block are affine in X⁰, so their product is bilinear in it:

    s = c·q_iᵀk_j + m = Σ_a Σ_b c·U_aᵀV_b + m,   U_a = (∂q_i/∂x_a) x_a,   V_b = (∂k_j/∂x_b) x_b,

with one further row and column for the constants of q and k, and m what the model adds (position biases). q and k are
taken where they meet, so rotations by position and norms of queries and keys are inside. `score_components` takes
both apart by earlier component instead of by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.inside.block import StreamPass
from tensorlens.inside.score_components import named, written
from tensorlens.inside.scores import Place, affine, meetings_of, sizes
from tensorlens.maps.groups import Group, group_sums
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import fitting
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.program.marks import Meeting
from tensorlens.program.pieces import Cotangents
from tensorlens.program.several import of_each
from tensorlens.recording.recording import Recording, Span

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
    maps, labels = question.by_token(tokens) if by == "token" else question.by_component(start + block)
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
        self.operator, recording = operator, operator.recording
        self.attention, meeting = _chosen(recording, asked)
        span = Span(operator.span.start, asked.block + 1)
        also = {meeting.query, meeting.key, *([] if meeting.end is None else [meeting.end])}
        pieces = recording.pieces(span, operator.heads, also=also)
        self.run = StreamPass(FrozenOperator(recording, span, operator.heads), pieces)
        block, (n_heads, n_queries, n_keys) = self.run.block(asked.block), sizes(recording.program, meeting)
        if type(asked.head) is not int or not 0 <= asked.head < n_heads:
            raise InputError(f"Block {asked.block} has heads 0 to {n_heads - 1}; got {asked.head!r}.")
        i, keys = check_token(asked.query, n_queries), [check_token(key, n_keys) for key in asked.keys]
        self.at_x = block.values_of([meeting.query, meeting.key])
        self.affine = [affine(block, meeting, Place(asked.head, i, j)) for j in keys]
        for j, one in zip(keys, self.affine, strict=True):
            if one.is_masked:
                raise InputError(
                    f"Head {asked.head} cannot look from token {i} to token {j}: the key is masked. Choose another key."
                )
        n_key_heads = math.prod(self.at_x[meeting.key].shape[:-2])  # several heads may share a key
        of_key = asked.head // (n_heads // n_key_heads)
        self.vectors = [
            Vector(meeting.query, asked.head, i, False),
            *(Vector(meeting.key, of_key, j, not meeting.is_fused) for j in keys),
        ]

    def by_token(self, tokens: tuple[str, ...]) -> Pairs:
        """Over pairs of tokens: what each gives of the query and the keys, and what they are at zero."""
        program = self.run.pieces.program
        at_zero = program.part(program.inputs, [*self.at_x]).observe(program.zeros(), [*self.at_x])
        parts = [torch.cat([self._by_token(v), v.of(at_zero[v.slot])[:, None]], 1) for v in self.vectors]
        return Pairs(self._pairs(parts), (*tokens, "bias"))

    def _by_token(self, vector: Vector) -> Tensor:
        """(channel of the head, token): what each token gives of a query or key, by a cotangent for each channel."""
        units = unit_cotangents(vector, self.at_x[vector.slot])
        n_rows = fitting(8 * self.operator.input.nbytes, len(units), self.operator.device)
        return torch.cat([self._pulled({vector.slot: rows}) for rows in units.split(n_rows)])

    def _pulled(self, waiting: Cotangents) -> Tensor:
        """Rows of cotangents down to the input, times the input: (row, token)."""
        pieces, n_rows = self.run.pieces, len(next(iter(waiting.values())))
        for n in reversed(range(len(pieces.programs))):
            pieces.programs[n].load()
            waiting = of_each(lambda one, n=n: pieces.pull(n, one)[1], waiting)
        found = []
        for slot in pieces.program.inputs:
            value = pieces.at_cuts[slot]
            u = waiting.get(slot, value.new_zeros(1))
            found.append((u * value).expand(n_rows, *value.shape)[:, 0].sum(-1))
        return torch.cat(found, 1)

    def by_component(self, block: int) -> Pairs:
        """Over pairs of components: what each wrote of the query and the keys."""
        values = torch.stack([vector.of(self.at_x[vector.slot]) for vector in self.vectors])
        rows = torch.arange(values.numel(), device=values.device).split(values.shape[1])
        starts: Cotangents = {}
        for vector, place in zip(self.vectors, rows, strict=True):
            x = self.at_x[vector.slot]
            starts.setdefault(vector.slot, x.new_zeros(values.numel(), *x.shape))[place] = unit_cotangents(vector, x)
        found = written(self.run, block, self.attention, starts, values)
        return Pairs(self._pairs([*found.parts]), named(found.components))

    def _pairs(self, parts: list[Tensor]) -> list[Tensor]:
        """For each key c·UᵀV, and in the corner what the model adds."""
        found = []
        for v, (factor, added, _) in zip(parts[1:], self.affine, strict=True):
            found.append(factor * parts[0].T @ v)
            found[-1][-1, -1] += added
        return found


def unit_cotangents(vector: Vector, x: Tensor) -> Tensor:
    """A cotangent (channel, …) of the slot for each channel of a query or key."""
    width = len(vector.of(x))
    units = x.new_zeros(width, *x.shape)
    for channel in range(width):
        vector.of(units[channel])[channel] = 1
    return units


def _chosen(recording: Recording, asked: Asked) -> tuple[int, Meeting]:
    found, wanted = meetings_of(recording, asked.block), asked.attention or 0
    if len(found) > 1 and not (asked.attention is not None and wanted < len(found)):
        raise MethodError(
            f"Block {asked.block} of `{recording.name}` has {len(found)} attention layers; pass `attention=0` to "
            f"`attention={len(found) - 1}`."
        )
    if wanted >= len(found):
        raise MethodError(
            f"In block {asked.block} of `{recording.name}`, queries and keys meet before a softmax {len(found)} times "
            f"in a way that can be followed; expected attention {wanted}. Use `tensor.in_class`."
        )
    return wanted, found[wanted]
