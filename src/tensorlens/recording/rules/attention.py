r"""Attention: A is held and the values stay linear (Eq. 6, 7, 9), or A is live by the derivative of the softmax.

A sink is the first position, which heads attend to when they have nothing else to attend to. In a causal model it sees
itself alone, so only its own column of T depends on it. Holding the values that attention takes from it moves a
part of this column into B and leaves all other columns as they are. `Rules.sink` says from which block on.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tensorlens.errors import NotLinearError
from tensorlens.program.program import Program
from tensorlens.program.steps import Slot
from tensorlens.recording.conventions import Role
from tensorlens.recording.live import is_live, now, raw, value_of
from tensorlens.recording.rules.modules import with_names
from tensorlens.recording.tape import Tape, family, of_value, rule
from tensorlens.tolerances import in_float64

if TYPE_CHECKING:
    from tensorlens.recording.recording import Recording


@of_value("softmax")
def softmax_rule(run: Tape, name: str, weights: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The attention matrix A (Eq. 7), held or live."""
    run.note_cast(weights, args[0].dtype)
    run.note_softmax(args[0])
    if run.rules.attention == "hold":
        run.note("attention: softmax")
        return run.held(weights, Role.ATTENTION)
    run.note("attention: softmax, live")
    scores, temperature = args[0], run.rules.softmax_temperature
    dim = kwargs["dim"] if "dim" in kwargs else next((a for a in args[1:] if type(a) is int), -1)

    def parts() -> tuple[Tensor, Tensor]:
        # Masked entries, by zero weight or by the largest number, have no derivative.
        s0 = value_of(scores)
        masked = (weights == 0) | (s0.abs() >= torch.finfo(s0.dtype).max / 2)
        at_temperature = weights if temperature == 1 else (s0.to(weights.dtype) / temperature).softmax(dim)
        a0 = torch.where(masked, 0, at_temperature)
        moved = a0 * torch.where(masked, 0, s0).to(a0.dtype)
        return a0, weights - (moved - a0 * moved.sum(dim, keepdim=True))

    a0, added = raw(parts)
    return run.emit("softmax", weights, scores, a0, dim, added, role=Role.ATTENTION)


# Fused ----------------------------------------------------------------------------------------------------------------


@rule("scaled_dot_product_attention")
def attention_rule(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Fused attention: with q, k and mask held, A is fixed without being formed; with A live, by its derivative."""
    run = now.tape
    mixed = raw(
        F.scaled_dot_product_attention,
        query,
        key,
        value,
        attn_mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    q, k, mask = value_of(query), value_of(key), value_of(attn_mask)
    if run.rules.attention == "hold" or not (is_live(query) or is_live(key) or is_live(attn_mask)):
        run.note("attention: fused, query and key held")
        if not is_live(value):
            return mixed
        value = without_sink(value)
        found = run.emit("attention", mixed, q, k, value, mask, is_causal, scale, enable_gqa)
    elif is_live(attn_mask):
        return _spelled_out(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    else:
        run.note(f"attention: fused, {run.rules.attention}")
        live = [x if is_live(x) else None for x in (query, key, value)]
        shares = _shares(query, key, value)
        found = run.emit(
            "live_attention",
            mixed,
            *live,
            raw(Tensor.clone, mixed),
            (q, k, value_of(value)),
            mask,
            is_causal,
            scale,
            enable_gqa,
            shares,
            run.rules.softmax_temperature,
        )
    run.note_fused(found, query, key, value)
    return found


def _shares(query: Any, key: Any, value: Any) -> tuple[float, float, float]:
    """Shares that follow the scores' factors, the matrix and the values; a single live factor gets all."""
    if now.tape.rules.attention == "taylor":
        return 1.0, 1.0, 1.0
    mixing = 0.5 if is_live(value) else 1.0
    return 0.5 if is_live(query) and is_live(key) else 1.0, mixing, mixing


def _spelled_out(
    query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Any:
    """Attention whose mask is live too, recorded step by step."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = torch.matmul(query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale), key.transpose(-2, -1))
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    return torch.matmul(torch.softmax(scores + mask, -1), value)


@family(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
)
def attention_kernel(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The kernels of fused attention, by device; their other results are read only by a backward pass."""
    arguments = function._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False)) | kwargs
    mask = given.get("attn_mask", given.get("attn_bias"))
    q, k, v = (given[key] for key in ("query", "key", "value"))
    is_grouped = q.shape[-3] != k.shape[-3]
    mixed = attention_rule(q, k, v, mask, 0.0, given.get("is_causal", False), given.get("scale"), is_grouped)
    return (mixed, *[None] * (len(function._schema.returns) - 1))


@family("flex_attention")
def flexible(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`flex_attention` with any score function: applied to the identity it gives A, which is held."""
    query, key, value, *rest = args
    if run.rules.attention != "hold":
        raise NotLinearError(f"{run.refusal('flex_attention')} Only rules that keep attention fixed support it.")
    run.note("attention: flexible, held")
    q, k, v = (value_of(x) for x in (query, key, value))

    def mixing(values: Tensor) -> Any:
        with _disable_current_modes():  # it refuses unknown arguments
            return raw(function, q, k, values, *rest, **kwargs)

    unit = torch.eye(v.shape[-2], dtype=v.dtype, device=v.device).expand(*v.shape[:-1], -1)
    found = mixing(unit)
    weights = run.held(value_of(found[0] if isinstance(found, tuple) else found), Role.ATTENTION)
    n_shared = weights.shape[1] // v.shape[1]
    value = value if n_shared == 1 else value.repeat_interleave(n_shared, 1)
    mixed = torch.matmul(weights, value)
    return (mixed, *mixing(v)[1:]) if isinstance(found, tuple) else mixed


# torch's whole layer --------------------------------------------------------------------------------------------------


@family("multi_head_attention_forward")
def multi_head_attention(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Torch's whole attention layer by its own code, in which fused attention has an axis of heads.

    If it also returns the weights, they come from the code that torch runs in this case; nothing else of it is used.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    own_code = with_names(function, dict.fromkeys(("has_torch_function",), lambda *_: False))
    if not given.get("need_weights", True):
        return own_code(**given)
    mixed, _ = own_code(**given | {"need_weights": False, "is_causal": False})
    marks = len(run.mixtures), len(run.meetings)
    _, weights = own_code(**given)
    del run.mixtures[marks[0] :], run.meetings[marks[1] :]
    return mixed, weights


# Sinks ----------------------------------------------------------------------------------------------------------------


ALIKE = 0.99
"""The cosine above which two states count as the same, whatever the token."""

COMMON = range(256, 512)
"""Tokens to try: vocabularies begin with special tokens and bytes, followed by the most common tokens."""

NOTE = "sink held"
"""Note of the step that replaces the first position's values with held ones."""


def without_sink(values: Any, axis: int = -2) -> Any:
    """The values that attention mixes along an axis, those of the first position held if the rules say so.

    They become $0 · v_1 + v_1^0$: the step that adds $v_1^0$ is where the sink enters the program.
    """
    run = now.tape
    since, block = run.rules.sink, run.block
    if not isinstance(since, int) or block is None or block < since or not is_live(values) or values.dim() < 2:
        return values
    run.note("attention: sink held")
    first = values.narrow(axis, 0, 1)
    held = raw(Tensor.clone, value_of(first))
    emptied = run.emit("mul", raw(torch.zeros_like, held), first, 0.0)
    sink = run.emit("add", held, emptied, raw(Tensor.clone, held), note=NOTE)
    return torch.cat([sink, values.narrow(axis, 1, values.shape[axis] - 1)], axis)


def with_live_sinks(program: Program) -> Program:
    """The program without a held sink; the program itself if no sink is held."""
    if NOTE not in [step.note for step in program.steps]:
        return program
    emptied = program.makers
    steps = [
        # v₁ as it was before it was emptied
        replace(step, operation="mul", args=(emptied[step.slots[0]].args[0], 1.0)) if step.note == NOTE else step
        for step in program.steps
    ]
    return replace(program, steps=tuple(steps))


def tokens_to_try(n_tokens: int) -> Tensor:
    """Inputs of one token each, (input, 1): common tokens of a vocabulary of this size."""
    return torch.arange(n_tokens)[COMMON.start if n_tokens >= COMMON.stop else 0 :][: len(COMMON), None]


def settled_block(recording: Recording) -> int:
    """The first block at which the first position no longer depends on its token.

    Args:
        recording: A recording of inputs of one token each, all different.

    Returns:
        The first block in which what attention reads there has a cosine above `ALIKE` to the mean over the other
        inputs, for each of the inputs; the number of blocks if there is none.
    """
    for n in range(recording.n_blocks):
        first = in_float64(_read_by_attention(recording, n)).flatten(1)
        others = (first.sum(0) - first) / (len(first) - 1)
        if bool((torch.cosine_similarity(first, others, dim=-1) > ALIKE).all()):
            return n
    return recording.n_blocks


def _read_by_attention(recording: Recording, n: int) -> Tensor:
    """The input of the layer that makes the values of block n; if there is no such layer, the state that enters it."""
    makers = recording.program.makers
    slot = next((mark.values.index for mark in recording.mixtures if mark.block == n and type(mark.values) is Slot), -1)
    while slot in makers and makers[slot].operation != "linear" and makers[slot].slots:
        slot = makers[slot].slots[0]
    if slot not in makers or makers[slot].block != n:
        return recording.states[n]
    (read,) = makers[slot].slots
    return recording.values(n, [read])[read]
