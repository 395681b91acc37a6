r"""Why a head attended there: one attention score before softmax, as a sum over pairs of input tokens.

With norms held, $q_i$ and $k_j$ of a block are affine in X⁰, so their product is bilinear in it:

    s = c·q_iᵀk_j + m = Σ_a Σ_b c·U_aᵀV_b + m,   U_a = (∂q_i/∂x_a) x_a,   V_b = (∂k_j/∂x_b) x_b,

with one further row and column for the constants of q and k, and m the model's own term (position biases). q and k are
taken at their product, so rotations by position and norms of queries and keys are included.

By earlier component instead of by token: where attention reads the stream, it is a sum of outputs of components,
so that

    q_i = Σ_b U_b + u,   U_b = (∂q_i/∂s) y_b along the stream alone,   k_j = Σ_b V_b + v.

The steps from $q_iᵀk_j$ to the softmax are read from the program. A fused kernel has scale and mask as
arguments of its step. If attention is written out, c is the derivative of the softmax's input by the product,
and m the softmax's input at a product of zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from msgspec.structs import replace
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_choice, check_whole
from tensorlens.inside.block import Block, StreamPass
from tensorlens.inside.stream import Component
from tensorlens.inside.walk import Joining, Read, Walk
from tensorlens.maps.groups import Group, group_sums
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import fitting
from tensorlens.operators.attention_matrices import fused_attention
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.program.marks import Meeting
from tensorlens.program.program import Cotangents, Program, SideChannelError, of_each
from tensorlens.program.steps import Held, Step
from tensorlens.recording.recording import Recording, Span

By = Literal["token", "component"]

ROUNDING = 64
"""Components below this many rounding errors of the largest are dropped: an output projection without a bias."""


class Vector(NamedTuple):
    """A query or a key: the slot that contains it, and its index there; its channels are the open axis."""

    slot: int
    head: int
    token: int
    is_turned: bool

    def of(self, x: Tensor) -> Tensor:
        """Its channels, a view of the slot's value."""
        by_head = x.flatten(0, -3)[self.head]  # (token, channel), or (channel, token) for a transposed key
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
    check_choice(by, "by", get_args(By))
    start, stop = operator.span
    if type(block) is not int or not 0 <= block < stop - start:
        raise InputError(f"This operator has no block {block!r}; expected one of 0 to {stop - start - 1}.")
    attention = attention if attention is None else check_whole(attention, "attention")
    question = _Score(operator, start + block, head, query, keys, attention)
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


class _Score:
    """One score of one block: the blocks up to it, and the query and keys."""

    def __init__(
        self, operator: FrozenOperator, n: int, head: int, query: int, keys: tuple[int, ...], attention: int | None
    ) -> None:
        recording = operator.recording
        self.attention, meeting = _chosen(recording, n, attention)
        span = Span(operator.span.start, n + 1)
        also = {meeting.query, meeting.key, *([] if meeting.end is None else [meeting.end])}
        self.run = StreamPass(operator.but(span=span), recording.pieces(span, operator.heads, also=also))
        self.block, (n_heads, n_queries, n_keys) = self.run.block(n), sizes(recording.program, meeting)
        if type(head) is not int or not 0 <= head < n_heads:
            raise InputError(f"Block {n} has heads 0 to {n_heads - 1}; got {head!r}.")
        i, keys = check_token(query, n_queries), tuple(check_token(key, n_keys) for key in keys)
        self.at_x = self.block.values_of([meeting.query, meeting.key])
        line = _fused if meeting.is_fused else _spelled_out
        self.affine = [line(self.block, meeting, Place(head, i, j)) for j in keys]
        for j, one in zip(keys, self.affine, strict=True):
            if one.is_masked:
                raise InputError(
                    f"Head {head} cannot look from token {i} to token {j}: the key is masked. Choose another key."
                )
        n_key_heads = math.prod(self.at_x[meeting.key].shape[:-2])  # several heads may share a key
        of_key = head // (n_heads // n_key_heads)
        self.vectors = [
            Vector(meeting.query, head, i, False),
            *(Vector(meeting.key, of_key, j, not meeting.is_fused) for j in keys),
        ]

    def by_token(self, tokens: tuple[str, ...]) -> tuple[list[Tensor], tuple[str, ...]]:
        """The pair map of each key over pairs of tokens, the constants of query and key last; and its labels."""
        program = self.run.pieces.program
        at_zero = program.part(program.inputs, [*self.at_x]).observe(program.zeros(), [*self.at_x])
        # For the query and each key (channel, token and constant): columns add up to the vector.
        parts = [torch.cat([self._by_token(v), v.of(at_zero[v.slot])[:, None]], 1) for v in self.vectors]
        return self._pairs(parts), (*tokens, "bias")

    def _by_token(self, vector: Vector) -> Tensor:
        """(channel of the head, token): the part of a query or key from each token, by one cotangent per channel."""
        units, operator = unit_cotangents(vector, self.at_x[vector.slot]), self.run.operator
        n_rows = fitting(8 * operator.input.nbytes, len(units), operator.device)
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
            found.append((u * value).expand(n_rows, *value.shape)[:, 0].sum(-1))  # (row, token)
        return torch.cat(found, 1)

    def by_component(self) -> tuple[list[Tensor], tuple[str, ...]]:
        """The same over pairs of components: what each contributed to the query and the keys."""
        # A row of cotangents for each channel of each vector, all in one walk down the stream.
        values = torch.stack([vector.of(self.at_x[vector.slot]) for vector in self.vectors])  # (vector, channel)
        rows = torch.arange(values.numel(), device=values.device).split(values.shape[1])
        starts: Cotangents = {}
        for vector, place in zip(self.vectors, rows, strict=True):
            x = self.at_x[vector.slot]
            starts.setdefault(vector.slot, x.new_zeros(values.numel(), *x.shape))[place] = unit_cotangents(vector, x)
        found: dict[Component, Tensor] = {}
        for component, scores in self._walk(starts).all_the_way(self.block.n):
            by_channel = scores.sum(-1)
            found[component] = found[component] + by_channel if component in found else by_channel
        least = ROUNDING * torch.finfo(values.dtype).eps * torch.stack([*found.values()]).abs().max()
        found = {component: one for component, one in found.items() if bool((one.abs() > least).any())}
        parts = torch.stack([*found.values()], 1) if found else values.new_zeros(values.numel(), 0)
        constant = values.flatten() - parts.sum(1)  # (vector · channel,): the part that no component wrote
        parts = torch.cat([parts, constant[:, None]], 1).unflatten(0, values.shape)  # (vector, channel, component)
        return self._pairs([*parts]), (*map(str, found), "bias")

    def _walk(self, starts: Cotangents) -> Walk:
        """A walk down from where the attention reads the stream, a row for each channel."""
        block, sums = self.block, self.block.sums or []
        at_entry = Read(block.n, len(sums))
        writes = [write for write, _ in block.writes if write.mixtures][self.attention : self.attention + 1]
        # An attention whose write cannot be told apart reads the state that enters the block.
        read = next((Read(block.n, place) for place, one in enumerate(sums) if {*writes} & {*one.writes}), at_entry)
        stream = block.entry if read == at_entry else sums[read.place].stream
        memory = None if block.is_encoder else self.run.memory
        ends = {block.entry, stream, *([] if memory is None else [memory])}
        at, joining = block.cotangents_at(starts, ends, (stream,)), Joining()
        for row in range(len(at[stream])):
            joining.add(row, read, at[stream][row], None if memory is None else at[memory][row])
            if stream != block.entry:  # its reads besides the stream of its own sum
                joining.add(row, at_entry, at[block.entry][row], None)
        return Walk.from_zero(self.run, block.n, len(at[stream]), joining)

    def _pairs(self, parts: list[Tensor]) -> list[Tensor]:
        """For each key c·UᵀV, with the model's own term in the corner."""
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


def _chosen(recording: Recording, n: int, attention: int | None) -> tuple[int, Meeting]:
    meetings = [one for one in recording.meetings if one.block == n]
    found, wanted = [one for one in meetings if one.is_fused or _ends(recording.program, one)], attention or 0
    if len(found) > 1 and not (attention is not None and wanted < len(found)):
        raise MethodError(
            f"Block {n} of `{recording.name}` has {len(found)} attention layers; pass `attention=0` to "
            f"`attention={len(found) - 1}`."
        )
    if wanted >= len(found):
        raise MethodError(
            f"In block {n} of `{recording.name}`, {len(found)} attention layers could be followed "
            f"from queries and keys to a softmax; expected attention {wanted}. Use `tensor.in_class`."
        )
    return wanted, found[wanted]


# From the product to the softmax --------------------------------------------------------------------------------------


class Place(NamedTuple):
    """The head, query and key of a look."""

    head: int
    query: int
    key: int

    def of(self, x: Tensor) -> Tensor:
        """Its entry of scores (…, head, query, key). A view."""
        return x.flatten(0, -3)[self.head, self.query, self.key]


class ScoreLine(NamedTuple):
    """A score $c·q_iᵀk_j + m$ before any soft cap: c, m, and whether the key is masked."""

    factor: float
    added: float
    is_masked: bool


def _ends(program: Program, meeting: Meeting) -> bool:
    """Whether the input of the softmax may come from the product."""
    if meeting.end is None or meeting.slot not in program.makers:
        return False
    first, last = (program.specs[slot].shape for slot in (meeting.slot, meeting.end))
    return first[-2:] == last[-2:] and math.prod(first) == math.prod(last)


def sizes(program: Program, meeting: Meeting) -> tuple[int, int, int]:
    """Numbers of heads, queries and keys."""
    query, key = (program.specs[slot].shape for slot in (meeting.query, meeting.key))
    return math.prod(query[:-2]), query[-2], key[-2 if meeting.is_fused else -1]


def _fused(block: Block, meeting: Meeting, place: Place) -> ScoreLine:
    query, key, mask, causal, scale, _ = fused_attention(block.recording, meeting.slot)
    added, is_masked = 0.0, causal and place.key > place.query
    if mask is not None:
        entry = place.of(mask.broadcast_to(*query.shape[:-1], key.shape[-2]))
        is_masked |= not bool(entry) if entry.dtype == torch.bool else _is_lowest(entry)
        added = 0.0 if entry.dtype == torch.bool else float(entry)
    return ScoreLine(scale, added, is_masked)


def _spelled_out(block: Block, meeting: Meeting, place: Place) -> ScoreLine:
    """Refused if what enters the softmax at a place does not come from the product at that place alone."""
    assert meeting.end is not None, "a product that enters a softmax"
    program = _between(block.program, meeting.slot, meeting.end)
    at_x = list(block.values_of(program.inputs).values())
    at_zero = place.of(program.run(torch.zeros_like(at_x[0]), *at_x[1:])[0])
    unit = torch.zeros_like(program.run(*at_x)[0])
    place.of(unit).fill_(1)
    by_product = program.cotangents({meeting.end: unit}, (meeting.slot,))[meeting.slot]
    factor = float(place.of(by_product))
    if int(by_product.count_nonzero()) != (factor != 0):
        raise MethodError(
            f"In block {block.n} of `{block.recording.name}`, no attention layer could be followed from queries "
            f"and keys to a softmax. Use `tensor.in_class`."
        )
    cap = _cap(program, at_x, place)
    if cap is None:
        # If a mask replaces a number, nothing is left of the product.
        return ScoreLine(factor, float(at_zero), factor == 0 or _is_lowest(at_zero))
    # Around the cap, not through it: where a tanh is saturated, its derivative is zero.
    after = float(place.of(program.cotangents({meeting.end: unit}, (cap.out,))[cap.out]))
    before = torch.zeros_like(program.observe(at_x, cap.slots)[cap.slots[0]])
    place.of(before).fill_(1)
    factor = after * float(place.of(program.cotangents({cap.slots[0]: before}, (meeting.slot,))[meeting.slot]))
    return ScoreLine(factor, 0.0, after == 0 or _is_lowest(at_zero))


def _between(program: Program, start: int, end: int) -> Program:
    """From the product, and from any live term added to it, to the softmax's input."""
    try:
        return program.part((start,), (end,))
    except SideChannelError as error:
        return program.part((start, *sorted(error.slots)), (end,))


def _cap(program: Program, at_x: list[Tensor], place: Place) -> Step | None:
    """The step that multiplies one score by the factor of a soft cap, a tanh; None without a soft cap."""
    for step in program.steps:
        factors = [arg for arg in step.args[1:] if type(arg) is Held and step.operation in ("mul", "gain")]
        shape = program.specs[step.out].shape
        if factors and program.constants[factors[0].index].shape[-2:] == shape[-2:]:
            slope = place.of(program.constants[factors[0].index].broadcast_to(shape))
            z = place.of(program.observe(at_x, step.slots)[step.slots[0]])
            tanh = z.tanh()
            if any(torch.isclose(slope.to(z), one, rtol=1e-2) for one in (tanh / z, 1 - tanh.square())):
                return step
    return None


def _is_lowest(entry: Tensor) -> bool:
    """Whether an added term is so low that the softmax gives zero."""
    return bool(entry <= torch.finfo(entry.dtype).min / 2)
