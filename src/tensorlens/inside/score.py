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
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import InputError, MethodError, check_whole
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.places import Span
from tensorlens.freezing.replay import gradients
from tensorlens.freezing.replayed import replayed
from tensorlens.freezing.traced import constant, is_live, plain
from tensorlens.inside.score_components import named, written
from tensorlens.inside.stream import StreamObserver, by_head
from tensorlens.inside.target import StreamPass, sums_of
from tensorlens.maps.groups import Group, group_sums
from tensorlens.maps.token_map import TokenMap
from tensorlens.operators.base import check_token
from tensorlens.operators.operator import FrozenOperator

By = Literal["token", "component"]

MOVES = frozenset(
    ["to", "float", "double", "view", "reshape", "contiguous", "clone", "dropout", "unflatten", "flatten"]
)
"""Functions after which scores are the same scores."""


@dataclass
class Meeting:
    """Queries meeting keys: both as (head, token, channel), and what becomes of the product before softmax.

    `scaled`: factors in order; `added`: what the model adds before any soft cap; `masks`: what hides keys, of any kind.
    """

    query: Tensor
    key: Tensor
    shape: tuple[int, ...]
    scaled: list[Any] = field(default_factory=list)
    added: list[Tensor] = field(default_factory=list)
    masks: list[tuple[Tensor, bool]] = field(default_factory=list)
    is_causal: bool = False
    is_capped: bool = False


class ScoreObserver:
    """Watches where queries and keys of one block meet, fused or spelled out."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.found: list[Meeting] = []
        self._open: Meeting | None = None
        self._scores: Tensor | None = None

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Nothing to learn."""

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep queries and keys, and follow their product to the softmax."""
        if run.block != self.block:
            return
        if name == "scaled_dot_product_attention":
            self.found.append(_fused(*args, **kwargs))
        elif name in ("matmul", "bmm") and all(map(is_live, args[:2])) and args[0].role != "attention":
            query, key = plain(args[0]), plain(args[1]).transpose(-1, -2)
            self._open, self._scores = Meeting(by_head(query), by_head(key), tuple(result.shape)), result
        elif self._open is not None and any(value is self._scores for value in (*args[:2], kwargs.get("input"))):
            self._follow(self._open, name.rstrip("_"), [*args, *kwargs.values()], result)

    def _follow(self, met: Meeting, name: str, args: list[Any], result: Any) -> None:
        others = [value for value in args if value is not self._scores]
        if name == "softmax":
            self.found.append(met)
            self._open = self._scores = None
            return
        if name in ("mul", "div") and others and not met.is_capped:
            met.scaled.append(others[0] if name == "mul" else 1 / others[0])
        elif name == "add" and others and isinstance(others[0], Tensor):
            met.masks.append((constant(others[0]), True))
            if not met.is_capped:
                met.added.append(constant(others[0]))
        elif name == "tanh":
            met.is_capped = True
            met.scaled = met.scaled[:-1]  # the division by the cap itself
        elif name == "masked_fill":
            met.masks.append((~constant(others[0]), False))
        elif name == "where":
            met.masks.append((constant(args[0]), False))
        elif name not in MOVES and not (name == "mul" and met.is_capped):
            self._open = self._scores = None
            return
        self._scores = result


def _fused(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
           is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Meeting:  # fmt: skip
    q, k = plain(query), plain(key)
    met = Meeting(by_head(q), by_head(k), (*q.shape[:-1], k.shape[-2]), is_causal=is_causal)
    met.scaled.append(1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if attn_mask is not None:
        mask = constant(attn_mask)
        met.masks.append((mask, mask.dtype != torch.bool))
        met.added += [mask] if mask.dtype != torch.bool else []
    return met


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


def score_map(
    operator: FrozenOperator, block: int, head: int, query: int, key: int | tuple[int, int], *,
    by: By = "token", attention: int | None = None, tokens: tuple[str, ...], meta: dict[str, Any],
) -> TokenMap:  # fmt: skip
    """The pair map of one score, or of the difference of two scores of one query.

    Raises:
        MethodError: the block has no such attention whose queries and keys meet, or the input is long.
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
    if operator.is_streamed:
        raise MethodError("The input is so long that no factors are kept; scores need them. Expected a shorter input.")
    asked = Asked(start + block, head, query, keys, attention)
    maps, labels = _by_token(operator, asked, tokens) if by == "token" else _by_component(operator, asked)
    scores = maps[0] if len(maps) == 1 else maps[0] - maps[1]
    asks = {"block": block, "head": head, "query": query, "key": key, "by": by, "score": float(scores.sum())}
    return TokenMap(
        scores=scores, out_tokens=labels, in_tokens=labels, method="score",
        bias_share=torch.full((len(labels),), float("nan")), meta=meta | asks,
    )  # fmt: skip


def grouped(made: TokenMap, groups: Sequence[Group]) -> TokenMap:
    """A pair map by token with the rows and the columns of each group summed, the bias apart."""
    every = (*groups, Group(made.in_tokens[-1], (len(made.in_tokens) - 1,)))
    labels, scores = tuple(group.label for group in every), group_sums(group_sums(made.scores, every).T, every).T
    return replace(made, scores=scores, out_tokens=labels, in_tokens=labels, bias_share=made.bias_share[: len(labels)])


def _by_token(operator: FrozenOperator, asked: Asked, tokens: tuple[str, ...]) -> Pairs:
    with own_precision(), torch.enable_grad():
        x = operator.recording.states[operator.span.start].detach().clone().requires_grad_()
        met = _meet(operator, x, asked, grad=True)
        with torch.no_grad():
            zero = _meet(operator, torch.zeros_like(x), asked, grad=False)
        u, *vs = (_parts(*ends, x) for ends in zip(_vectors(met, asked), _vectors(zero, asked), strict=True))
        return Pairs(
            [_met_pairs(met, asked, key, u, v) for key, v in zip(asked.keys, vs, strict=True)], (*tokens, "bias")
        )


def _by_component(operator: FrozenOperator, asked: Asked) -> Pairs:
    with own_precision(), torch.enable_grad():
        x = operator.recording.states[operator.span.start].detach().clone().requires_grad_()
        seen = StreamObserver(operator.recording)
        met = _meet(operator, x, asked, seen, grad=True)
        end = seen.outputs[asked.block][0].node
        sums = sums_of(operator, seen, x, end, range(operator.span.start, asked.block + 1))
        run = StreamPass(operator=operator, x=x, seen=seen, sums=sums)
        found = written(run, asked.block, asked.attention or 0, torch.stack(_vectors(met, asked)))
        u, *vs = found.parts
        maps = [_met_pairs(met, asked, key, u, v) for key, v in zip(asked.keys, vs, strict=True)]
        return Pairs(maps, named(found.components))


def _vectors(met: Meeting, asked: Asked) -> list[Tensor]:
    """The query and the keys."""
    n_heads, n_queries = met.query.shape[:2]
    if type(asked.head) is not int or not 0 <= asked.head < n_heads:
        raise InputError(f"Block {asked.block} has heads 0 to {n_heads - 1}; got {asked.head!r}.")
    of_key = asked.head // (n_heads // met.key.shape[0])
    i = check_token(asked.query, n_queries)
    keys = [check_token(key, met.key.shape[1]) for key in asked.keys]
    for j in keys:
        _refuse_masked(met, asked.head, i, j)
    return [met.query[asked.head, i], *(met.key[of_key, j] for j in keys)]


def _met_pairs(met: Meeting, asked: Asked, key: int, u: Tensor, v: Tensor) -> Tensor:
    """c·UᵀV, and in the corner what the model adds."""
    place = asked.head, asked.query % met.query.shape[1], key % met.key.shape[1]
    pairs = math.prod(float(_at(met, factor, *place)) for factor in met.scaled) * u.T @ v
    pairs[-1, -1] += sum(float(_at(met, one, *place)) for one in met.added)
    return pairs


def _meet(operator: FrozenOperator, x: Tensor, asked: Asked, *others: Any, grad: bool) -> Meeting:
    seen = ScoreObserver(asked.block)
    span = Span(operator.span.start, asked.block + 1)
    replayed(operator.recording, x, span, operator.heads, grad=grad, observers=(seen, *others))
    n_found, wanted = len(seen.found), asked.attention or 0
    if not 0 <= wanted < n_found or n_found > 1 and asked.attention is None:
        advice = f"Choose one by `attention=0` to `{n_found - 1}`." if n_found > 1 else "Use `tensor.in_class`."
        raise MethodError(
            f"In block {asked.block} of `{type(operator.recording.model).__name__}`, queries and keys meet before a "
            f"softmax {n_found} times in a way that can be followed; expected {'once' if n_found < 2 else 'a choice'}. "
            f"{advice}"
        )
    return seen.found[wanted]


def _parts(vector: Tensor, at_zero: Tensor, x: Tensor) -> Tensor:
    """(channel of the head, token and bias): what each token gives of a query or key, and the constant."""
    units = torch.eye(len(vector), dtype=vector.dtype, device=vector.device)
    pulled = gradients(vector, (x,), units, len(vector))[:, 0]
    return torch.cat([(pulled * x[0].detach()).sum(-1), at_zero.detach()[:, None]], 1)


def _at(met: Meeting, value: Any, head: int, i: int, j: int) -> Any:
    """One entry of what meets the scores, by the rules of broadcasting."""
    if not isinstance(value, Tensor):
        return value
    return constant(value).broadcast_to(met.shape).flatten(0, -3)[head, i, j]


def _refuse_masked(met: Meeting, head: int, i: int, j: int) -> None:
    hidden = met.is_causal and j > i
    for mask, is_added in met.masks:
        one = _at(met, mask, head, i, j)
        hidden |= bool(one <= torch.finfo(mask.dtype).min / 2) if is_added else not bool(one)
    if hidden:
        raise InputError(f"Head {head} cannot look from token {i} to token {j}: the key is masked. Choose another key.")
