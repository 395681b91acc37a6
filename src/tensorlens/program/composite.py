r"""Operations recorded as one step: norms, softmax, attention. Each is several torch functions with one transpose.

`derivative` replaces any torch kernel by its derivative at X, for functions that are rare or have no simple form:
backwards by torch's backward pass, forwards by the derivative of that. Only the kernel's name is kept, so a program
with such a step is data like any other.

Where attention is live, let dx = x - x⁰ and w the weights of `Rules.attention` (1 for ``taylor``, ½ for ``half`` where
both factors of a product are live). Then

    dS = w_s (q⁰ dkᵀ + dq k⁰ᵀ) · scale,   dA = s ⊙ (dS - Σ s ⊙ dS),   y = y⁰ + w_v A⁰ dv + w_a dA v⁰

with s = softmax(S⁰/τ), which is A⁰ at temperature τ = 1. The transpose of this is the fused kernel's own backward
pass at X, with the gradients of q, k and v scaled; at another temperature a second kernel gives those of q and k,
since diag s - s sᵀ is the derivative of τ softmax(S/τ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_batchedtensor

from tensorlens.errors import NotLinearError
from tensorlens.memory import BYTES_OF_SCORES, bytes_on
from tensorlens.program.nodes import Axes, Spec, at_least_float32, mapped
from tensorlens.program.operations import operation

FORMED = 512
"""Up to this many keys, full-precision attention is formed as a matrix: fused kernels are fast in half precision."""


@operation(joint=(0, 3), optional=(3,))
def norm(
    x: Tensor,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    axes: Axes,
    centred: bool,
    unit: Tensor | None = None,
) -> Tensor:
    r"""γ ⊙ (x - mean(x)) / σ + β with 1/σ held; without the mean for a norm that does not centre.

    With `unit`, the normalised x̂ of the recording, σ is followed too: $dx̂ = (dx - x̂\,\mathrm{mean}(x̂ ⊙ dx))/σ$.
    """
    y = _normalised(at_least_float32(x), inverse, axes, centred, unit)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


@norm.transposed_by
def _(
    u: Tensor,
    x: Any,
    inverse: Tensor,
    weight: Tensor | None,
    bias: Any,
    axes: Axes,
    centred: bool,
    unit: Tensor | None = None,
) -> Tensor:
    # Scaling by a number per token commutes with centring, so the middle is its own transpose.
    u = at_least_float32(u)
    return _normalised(u if weight is None else u * weight, inverse, axes, centred, unit)


def _normalised(x: Tensor, inverse: Tensor, axes: Axes, centred: bool, unit: Tensor | None) -> Tensor:
    if centred:
        x = x - x.mean(axes, keepdim=True)
    if unit is not None:
        x = x - unit * (unit * x).mean(axes, keepdim=True)
    return x * inverse


@operation(joint=(0, 3), optional=(3,))
def softmax(x: Tensor, weights: Tensor, axis: int, added: Tensor | None = None) -> Tensor:
    """The derivative of a softmax with the result `weights`: A ⊙ (x - Σ A ⊙ x). Masked entries do not move."""
    found = _softmax(torch.where(weights == 0, 0, x).to(weights.dtype), weights, axis)
    return found if added is None else found + added


@softmax.transposed_by
def _(u: Tensor, x: Spec, weights: Tensor, axis: int, added: Any = None) -> Tensor:
    return _softmax(u, weights, axis)


def _softmax(x: Tensor, weights: Tensor, axis: int = -1) -> Tensor:
    weighted = weights * x
    return weighted - weights * weighted.sum(axis, keepdim=True)


@operation(joint=(2,))
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """A v with A = softmax(q kᵀ · scale + mask) held: q and k are constants, and A is never formed.

    For several v in `vmap`, which has no fused kernel, the rows of A are formed once for all of them.
    """
    if is_batchedtensor(value):
        q, k, factor = _for_rows(query, key, scale, grouped)

        def together(vs: Tensor) -> Tensor:
            vs = _repeated(vs, query.shape[-3]) if grouped else vs
            # (v, …, head, key, channel) as (…, head, key, v and channel): one product of A for all of them.
            side_by_side = vs.movedim(0, -2).flatten(-2)
            found = [
                rows_of_attention(q, k, mask, causal, factor, rows).to(vs.dtype) @ side_by_side
                for rows in _chunks(q, k)
            ]
            found = torch.cat(found, -2)
            return found.unflatten(-1, (len(vs), -1)).movedim(-2, 0)

        return _Several.apply(value, together)
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


@attention.transposed_by
def _(
    u: Tensor, query: Tensor, key: Tensor, value: Spec, mask: Any, causal: bool, scale: float | None, grouped: bool
) -> Any:
    """Aᵀu: by the rows of A, each formed once, or by the kernel's own backward pass where that is faster."""
    if not is_batchedtensor(u) and (key.shape[-2] > FORMED or query.dtype.itemsize < 4):

        def mix(v: Tensor) -> Tensor:
            return attention.run(query, key, v, mask, causal, scale, grouped)

        return _backward(mix, [torch.zeros(value.shape, dtype=value.dtype, device=value.device)], u)
    q, k, factor = _for_rows(query, key, scale, grouped)

    def together(us: Tensor) -> Tensor:
        # (u, …, head, query, channel) as (…, head, query, u and channel): one product of A for all of them.
        side_by_side = us.movedim(0, -2).flatten(-2)
        found = side_by_side.new_zeros(*us.shape[1:-2], k.shape[-2], side_by_side.shape[-1])
        for rows in _chunks(q, k):
            a = rows_of_attention(q, k, mask, causal, factor, rows)
            found += a.to(found.dtype).mT @ side_by_side[..., rows, :]
        found = found.unflatten(-1, (len(us), -1)).movedim(-2, 0)
        # (u, …, value head, query heads that share it, key, channel): what they share adds up.
        return found.unflatten(-3, (value.shape[-3], -1)).sum(-3) if grouped else found

    return _Several.apply(u, together) if is_batchedtensor(u) else together(u[None])[0]


def _backward(function: Callable[..., Tensor], point: Sequence[Tensor], u: Tensor) -> tuple[Tensor, ...]:
    """The kernel's own backward pass at a point: without the wrappers of `torch.func`, which cost ten launches."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in point]
        return torch.autograd.grad(function(*leaves), leaves, u)


def _for_rows(query: Tensor, key: Tensor, scale: float | None, grouped: bool) -> tuple[Tensor, Tensor, float]:
    """Queries, the key for each of them, in float32 or better, and the factor of their products."""
    k = _repeated(key, query.shape[-3]) if grouped else key
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return at_least_float32(query), at_least_float32(k), factor


class _Several(torch.autograd.Function):
    """Pass values or cotangents that `vmap` has separated to a function that takes all of them (u, …)."""

    @staticmethod
    def forward(u: Tensor, together: Callable[[Tensor], Any]) -> Any:
        return together(u[None])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        u, together = args
        found = together(u.movedim(in_dims[0], 0))
        return found, tuple([0] * len(found)) if type(found) is tuple else 0


def _chunks(query: Tensor, key: Tensor) -> list[slice]:
    """Queries in chunks, to limit how many scores (…, head, query, key) are formed at a time."""
    n_queries, n_scores = query.shape[-2], key.shape[-2] * math.prod(query.shape[:-2])
    step = max(1, bytes_on(query.device, BYTES_OF_SCORES) // max(1, n_scores * query.dtype.itemsize))
    return [slice(start, start + step) for start in range(0, n_queries, step)]


@operation(joint=(0, 1, 2, 3), optional=(3,))
def live_attention(
    query: Any,
    key: Any,
    value: Any,
    given: Tensor | None,
    at: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    shares: tuple[float, float, float],
    temperature: float = 1.0,
) -> Tensor:
    """Attention whose matrix is followed by its derivative, a chunk of queries at a time.

    Args:
        query: (…, head, query, channel), live or a constant.
        key: (…, head, key, channel).
        value: (…, head, key, channel).
        given: The recorded result; None in the linear part.
        at: Query, key and value in the recording.
        mask: Added to the scores, or True where a query sees a key.
        causal: Whether a query sees no later key.
        scale: Factor of the scores; one over the root of their channels if None.
        grouped: Whether several query heads share a key head.
        shares: The shares that follow the factors of the scores, the attention matrix and the values.
        temperature: Temperature of the softmax's derivative.
    """
    q0, k0, v0 = at
    q, k, v = (_moved(x, x0, given) for x, x0 in zip((query, key, value), at, strict=True))
    if grouped:
        k0, v0, k, v = (_repeated(x, q0.shape[-3]) for x in (k0, v0, k, v))
    scale = 1 / math.sqrt(q0.shape[-1]) if scale is None else scale
    of_scores, of_matrix, of_values = shares
    parts = []
    for rows in _chunks(q0, k0):  # each matrix here is (…, head, some queries, key)
        a0 = rows_of_attention(q0, k0, mask, causal, scale, rows)
        moved = of_scores * scale * (_times(q0[..., rows, :], k) + _times(None if q is None else q[..., rows, :], k0))
        s = a0 if temperature == 1 else rows_of_attention(*_cooled(q0, k0, mask, causal, scale, temperature), rows)
        change = of_matrix * (_softmax(moved, s) @ v0)
        parts.append(change if v is None else change + of_values * (a0 @ v))
    found = torch.cat(parts, -2)
    return found if given is None else given + found


def _cooled(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, temperature: float
) -> tuple[Tensor, Tensor, Tensor | None, bool, float]:
    """The factor that gives softmax(S/τ) instead of softmax(S), as `rows_of_attention` takes it."""
    if mask is not None and mask.dtype != torch.bool:
        mask = mask / temperature
    return query, key, mask, causal, scale / temperature


def _moved(x: Any, x0: Tensor, given: Tensor | None) -> Tensor | None:
    """The change of an argument: all of it in the linear part, from X in the affine one; None for a constant."""
    if x is None:
        return None
    return x if given is None else x - x0


def _repeated(x: Tensor | None, n_heads: int) -> Any:
    return None if x is None else x.repeat_interleave(n_heads // x.shape[-3], -3)


def _times(a: Tensor | None, b: Tensor | None) -> Any:
    """A bᵀ, or zero where one of them does not move."""
    return 0.0 if a is None or b is None else a @ b.transpose(-1, -2)


@live_attention.transposed_by
def _(
    u: Tensor,
    query: Any,
    key: Any,
    value: Any,
    given: Any,
    at: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
    shares: tuple[float, float, float],
    temperature: float = 1.0,
) -> tuple[Tensor, ...]:
    of_scores, of_matrix, of_values = shares
    weights = (of_scores * of_matrix, of_scores * of_matrix, of_values)
    live = [place for place, x in enumerate((query, key, value)) if type(x) is Spec]

    def attend(*moving: Tensor) -> Tensor:
        given = dict(zip(live, moving, strict=True))
        q, k, v = (given.get(place, x0) for place, x0 in enumerate(at))
        if temperature == 1:
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped)
        factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        _, _, cooled, _, factor = _cooled(q, k, mask, causal, factor, temperature)
        # The first term moves with q and k alone, the second with v alone. Only their derivatives are used.
        moved = F.scaled_dot_product_attention(q, k, at[2], cooled, is_causal=causal, scale=factor, enable_gqa=grouped)
        mixed = attention.run(*at[:2], v, mask, causal, scale, grouped)
        return temperature * moved + mixed

    point = [at[place] for place in live]

    def one_by_one(us: Tensor) -> tuple[Tensor, ...]:
        pull = torch.func.vjp(attend, *point)[1]
        return tuple(map(torch.stack, zip(*(pull(one) for one in us), strict=True)))

    pulled = _Several.apply(u, one_by_one) if is_batchedtensor(u) else _backward(attend, point, u)
    return tuple([g * weights[place] for place, g in zip(live, pulled, strict=True)])


def rows_of_attention(
    query: Tensor, key: Tensor, mask: Tensor | None, causal: bool, scale: float, rows: slice = slice(None)
) -> Tensor:
    """Some rows of the attention matrix; the row of a query that sees nothing is zero."""
    scores = (query[..., rows, :] * scale) @ key.transpose(-1, -2)
    if causal:
        n_queries, n_keys = query.shape[-2], key.shape[-2]
        hidden = torch.ones(n_queries, n_keys, dtype=torch.bool, device=query.device).triu(1)[rows]
        scores = scores.masked_fill(hidden, -torch.inf)
    if mask is None:
        return scores.softmax(-1)
    mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1).nan_to_num(0.0)


# Any kernel -----------------------------------------------------------------------------------------------------------


def kernel_named(name: str) -> Callable[..., Any]:
    """The kernel of a name such as ``aten.linalg_cross.default``."""
    found: Any = torch.ops
    parts = name.split(".")
    try:
        for part in parts:
            found = getattr(found, part)
    except AttributeError:
        found = None
    if parts[0] != "aten" or not isinstance(found, torch._ops.OpOverload):
        raise NotLinearError(f"Expected the name of a kernel of torch, such as `aten.hypot.default`; got `{name}`.")
    return found


def of_some(name: str, args: Any, places: Sequence[int], part: int | None) -> Callable[..., Any]:
    """A kernel as a function of some of its arguments.

    Args:
        name: The kernel's name.
        args: Its arguments, and named ones as pairs.
        places: The leaves of the arguments that move, in order.
        part: Which of several results is meant; None for a kernel with one.
    """

    def function(*values: Tensor) -> Any:
        moving, count = dict(zip(places, values, strict=True)), iter(range(10**9))
        given, named = mapped(args, lambda leaf: moving.get(next(count), leaf))
        found = kernel_named(name)(*given, **dict(named))
        return found if part is None else found[part]

    return function


@operation(joint=(0, 1), optional=(1,))
def derivative(
    moved: tuple[Tensor, ...],
    given: Tensor | None,
    name: str,
    args: Any,
    places: tuple[int, ...],
    at: tuple[Tensor, ...],
    part: int | None,
    is_linear: bool,
) -> Tensor:
    """The output of a kernel at X and, by its derivative there, how it moves with some of its arguments.

    Args:
        moved: The arguments that move.
        given: The recorded result; None in the linear part, and for a kernel that is linear in them.
        name: The kernel's name.
        args: All its arguments at X, and named ones as pairs.
        places: Which of the leaves of these move.
        at: The values of these leaves at X.
        part: Which of several results is meant.
        is_linear: Whether the kernel is linear in the arguments that move.
    """
    function = of_some(name, args, places, part)
    if is_linear:
        return function(*moved)
    # What is masked by an infinity does not move.
    pairs = zip(moved, at, strict=True)
    tangents = moved if given is None else tuple([torch.where(x0.isfinite(), x - x0, 0) for x, x0 in pairs])
    value, pull = torch.func.vjp(function, *at)  # pyright: ignore[reportAssignmentType]
    try:
        # J v as the derivative of u ↦ Jᵀu: torch's own forward mode loads scripted functions first, and warns of them.
        found = torch.func.vjp(pull, torch.ones_like(value))[1](tangents)[0]
    except (RuntimeError, NotImplementedError) as error:
        raise NotLinearError(
            f"`T @ x` is unavailable: torch has only the backward derivative of `{name}`. Use maps, rows or "
            f"`T.T @ u`, which need nothing else."
        ) from error
    return found if given is None else given + found


@derivative.transposed_by
def _(
    u: Tensor,
    moved: tuple[Spec, ...],
    given: Any,
    name: str,
    args: Any,
    places: tuple[int, ...],
    at: tuple[Tensor, ...],
    part: int | None,
    is_linear: bool,
) -> tuple[Tensor, ...]:
    return torch.func.vjp(of_some(name, args, places, part), *at)[1](u)
