"""Looking on: what attention mixed and modules took in a replay, and what the model gives when it is left to itself.

The operator itself never forms an attention matrix. What needs one (the baselines, `attentions()`) asks here, and one
replay reads them off wherever attention and values meet, whatever the kernel: after masks, windows, caps and sinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from tensorlens.axes import Attention, Hidden
from tensorlens.errors import AnatomyError, InputError, MethodError, NotLinearError
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.interpreter import Interpreter
from tensorlens.freezing.layouts import state_of
from tensorlens.freezing.places import Span
from tensorlens.freezing.proof import TOLERANCES, tolerance_of
from tensorlens.freezing.recording import Reached, Recording
from tensorlens.freezing.replayed import check_unchanged, replayed
from tensorlens.freezing.traced import Traced, constant, is_live
from tensorlens.models.plain_pass import evaluating, hooked
from tensorlens.models.precision import tf32_allowed

MANY_ROUNDINGS = 100
"""How many times what one rounding does two passes of all their roundings may differ by."""

# The model left to itself --------------------------------------------------------------------------------------------


def plain_output(recording: Recording, *, is_nudged: bool = False) -> Tensor:
    """$X^N$ (sample, token, channel) from the model left to itself, no rule applied: what must be reproduced.

    The pass ends there: logits of a long input could take more memory than all the rest.

    Args:
        recording: Of the model and the input.
        is_nudged: Whether every other number that enters the first block is changed in its last digit.
    """
    anatomy, model, n_left = recording.anatomy, recording.model, Counter[str]()

    def leave_block(module: nn.Module, args: Any, output: Any) -> None:
        n_left["blocks"] += 1
        is_end = anatomy.body_end is None or not recording.rules.include_final_norm
        if is_end and n_left["blocks"] == recording.n_blocks:
            raise Reached(state_of(output, anatomy.state_place))

    def enter_block(module: nn.Module, args: Any, kwargs: Any) -> Any:
        n_left["entered"] += 1
        if is_nudged and n_left["entered"] == 1:
            return tuple(map(_nudged, args)), {name: _nudged(value) for name, value in kwargs.items()}
        return None

    def leave_body(module: nn.Module, args: Any, output: Any) -> None:
        # None was seen to be entered where code calls `forward` itself. In a block, it is a norm that both share.
        if n_left["blocks"] == (recording.n_blocks if n_left["entered"] else 0):
            raise Reached(state_of(output))

    def read(module: nn.Module, args: Any, kwargs: Any) -> None:
        raise Reached(args[0])

    blocks = dict.fromkeys(anatomy.blocks)
    before, after = [(block, enter_block) for block in blocks], [(block, leave_block) for block in blocks]
    if anatomy.body_end:
        after.append((model.get_submodule(anatomy.body_end), leave_body))
    elif anatomy.body_end == "" and anatomy.unembedding is not None:
        before.append((anatomy.unembedding, read))
    with hooked(before, after), own_precision(), torch.no_grad(), evaluating(model):
        try:
            state = state_of(model(**recording.inputs))
        except Reached as reached:
            state = reached.state
    return recording.layouts[-1].to_tokens(state)


def _nudged(value: Any) -> Any:
    """Every other number of a state changed in its last digit."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    steps = torch.arange(value.numel(), device=value.device).view(value.shape) % 2
    return value + value * steps * torch.finfo(value.dtype).eps


def magnified(recording: Recording) -> float:
    """How far the model's own output moves, relative to it, when its first state changes in the last digit.

    Random weights and many layers may make rounding large: two ways to compute the same then differ by as much.
    """
    plainly = plain_output(recording)
    return _norm(plain_output(recording, is_nudged=True) - plainly) / max(_norm(plainly), 1e-300)


def refuse_other_numbers(recording: Recording) -> None:
    """Raise where a recording differs from the model left to itself: it has no operator, or a rule missed a step."""
    end = None if recording.graph is None else recording.graph.end
    if end is not None and not end.requires_grad:
        raise AnatomyError(
            f"What leaves the blocks in `{recording.anatomy.stack}` does not depend on the tensor of shape "
            f"{recording.layouts[0].shape} that enters the first of them as its state, by anything a rule carries. "
            "Let the blocks take their state first, or pass the path of the right list as `blocks=`."
        )
    plainly, found = plain_output(recording), recording.states[-1]
    if not (found.isfinite().all() and plainly.isfinite().all()) or _differ(recording, plainly, found) is None:
        return
    again = _differ(recording, plain_output(recording), plainly)
    name = type(recording.model).__name__
    if again is not None:
        raise InputError(
            f"`{name}` gave other numbers when it was run again on the same input (they differ by {again:.1e}): it "
            "draws random numbers, or keeps something from one call to the next. Expected a model that does the same "
            "each time; switch that off at inference."
        )
    difference = _differ(recording, found, plainly) or 0.0
    if difference <= MANY_ROUNDINGS * magnified(recording):
        return  # the certificate says so
    raise NotLinearError(
        f"Under the rules `{name}` gave other numbers than by itself (they differ by "
        f"{difference:.1e}), though it repeats itself: its code takes a step that no rule "
        "follows, such as a write into memory that other tensors share. Write that step out of place, in plain torch "
        "functions, or register an adapter for its module's class with `tensorlens.adapter`."
    )


def _differ(recording: Recording, one: Tensor, other: Tensor) -> float | None:
    """The relative difference of two outputs, or None where it may be rounding, of the coarsest type on the way."""
    casts = [rule.removeprefix("cast: ") for rule, _ in recording.rules_applied if rule.startswith("cast: ")]
    kinds = [kind for kind in TOLERANCES if kind == other.dtype or str(kind).removeprefix("torch.") in casts]
    is_tf32 = other.is_cuda and tf32_allowed()
    accepted = max(tolerance_of(kind, kind, is_tf32=is_tf32) for kind in kinds)
    difference = _norm(one - other) / max(_norm(other), 1e-300)
    return None if difference <= accepted else difference


def _norm(state: Tensor) -> float:
    """Without a copy in another type: a long input's states are large."""
    wide = state.dtype if state.dtype.itemsize >= 4 else torch.float32
    return float(torch.linalg.vector_norm(state, dtype=wide))


def plain_logits(recording: Recording, out_token: int) -> Tensor:
    """Logits (class,) as the model itself gives them, after whatever its code does behind the unembedding."""
    return plain_logits_at(recording, (out_token,))[0]


def plain_logits_at(recording: Recording, out_tokens: Sequence[int]) -> Tensor:
    """The same at several outputs, (output, class); one row for a head that reads the whole input at once."""
    check_unchanged(recording)
    model, places = recording.model, torch.tensor(list(out_tokens), device=recording.states[-1].device)
    keeps = recording.anatomy.unembedding is not None and "logits_to_keep" in signature(model.forward).parameters
    chosen = {"logits_to_keep": places} if keeps else {}
    with own_precision(), torch.no_grad(), evaluating(model):
        logits = state_of(model(**recording.inputs, **chosen))[0]
    return logits[None] if logits.dim() == 1 else logits if keeps else logits[places]


# Attention -----------------------------------------------------------------------------------------------------------


class Meeting(NamedTuple):
    """Attention meeting values in a replay: where, and what."""

    block: int
    module: str
    attention: Tensor | None
    values: Tensor
    mixture: Tensor


def meeting(run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Meeting | None:
    """Whether a function that ran mixed live values by attention, and which."""
    if run.block is None or not is_live(result):
        return None
    if name == "scaled_dot_product_attention":
        values = args[2] if len(args) > 2 else kwargs["value"]
        return Meeting(run.block, run.module, None, constant(values), constant(result))
    if name in ("matmul", "bmm"):
        left, right = (*args, *kwargs.values())[:2]
        if isinstance(left, Traced) and left.role == "attention" and is_live(right):
            return Meeting(run.block, run.module, constant(left), constant(right), constant(result))
    return None


@dataclass(frozen=True, kw_only=True)
class Mixing:
    r"""What one block's attention did: $\sum_j A_{h,ij} v_{h,j}$ for each head.

    Attributes:
        attention: $A_h$; rows sum to one except where the model has a sink.
        values: $v_{h,j}$, biases and the norm before them included; a value head that several query heads share is
            repeated. Of several samples both have an axis for samples in front.
        inputs: What entered each module of the block that takes one hidden state, by the module's path.
    """

    attention: Float[Tensor, "*sample head out_token in_token"]
    values: Float[Tensor, "*sample head in_token head_channel"]
    inputs: dict[str, Hidden] = field(repr=False)


def mixings(recording: Recording) -> list[Mixing]:
    """The attention of every block, by one replay of the recorded pass.

    Raises:
        MethodError: a block without softmax attention from tokens to tokens, or with more than one.
    """
    reader = _read(recording, Span(0, recording.n_blocks))
    return [reader.mixing(block) for block in range(recording.n_blocks)]


def attention_matrices(recording: Recording, block: int) -> Attention:
    """$A_h$ of one block, as the model used it, by a replay of that block alone."""
    return _read(recording, Span(block, block + 1)).mixing(block).attention


def _read(recording: Recording, span: Span) -> _Reader:
    reader = _Reader(type(recording.model).__name__, recording.n_samples)
    with own_precision(), torch.no_grad():
        replayed(recording, recording.states[span.start], span, observers=(reader,))
    return reader


class _Reader:
    """Looks on where attention meets values."""

    def __init__(self, model: str, n_samples: int) -> None:
        self.model, self.n_axes = model, 3 if n_samples == 1 else 4
        self.found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.inputs: dict[int, dict[str, Hidden]] = {}

    def mixing(self, block: int) -> Mixing:
        found = self.found.get(block, [])
        if len(found) != 1:
            raise MethodError(
                f"Block {block} of `{self.model}` mixes tokens by {len(found)} softmax attentions; expected one. Use a "
                "method that needs no attention matrix, such as `tensor.norm`."
            )
        attention, values = found[0]
        values = values.repeat_interleave(attention.shape[-3] // values.shape[-3], -3)
        return Mixing(attention=attention, values=values, inputs=self.inputs.get(block, {}))

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep attention and values."""
        met = meeting(run, name, args, kwargs, result)
        if met is None:
            return
        attention = _formed(*args, **kwargs) if met.attention is None else met.attention
        pair = _one(attention), _one(met.values)
        if all(part.dim() == self.n_axes for part in pair):
            self.found.setdefault(met.block, []).append(pair)

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep what entered it."""
        if run.block is not None and args and is_live(args[0]):
            self.inputs.setdefault(run.block, {})[run.module] = _one(constant(args[0]))


def _one(tensor: Tensor) -> Tensor:
    """The only sample of a batch."""
    return tensor[0] if len(tensor) == 1 else tensor


def _formed(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
            is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False) -> Tensor:  # fmt: skip
    """A from a fused kernel: its matrix, by applying it to the identity."""
    q, k = constant(query), constant(key)
    mask = None if attn_mask is None else constant(attn_mask)
    units = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
    return F.scaled_dot_product_attention(q, k, units, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


# One block, module by module -----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A module that ran: what came in first, and what came out."""

    path: str
    module: nn.Module
    input: Tensor
    output: Tensor


class Mixed(NamedTuple):
    """Attention meeting values: after how many steps, in which module, and what it made of them."""

    after: int
    path: str
    values: Tensor
    mixture: Tensor


@dataclass
class BlockSteps:
    """One block, watched away from X.

    Attributes:
        x: The state that entered it.
        y: What it returned.
        end: Where the pass ended.
        steps: Its modules, in the order they finished.
        mixed: Where attention met values.
        tail: Modules that ran after it.
    """

    x: Tensor
    y: Tensor | None = None
    end: Tensor | None = None
    steps: list[Step] = field(default_factory=list)
    mixed: list[Mixed] = field(default_factory=list)
    tail: list[Step] = field(default_factory=list)


def watch_block(recording: Recording, n: int) -> BlockSteps:
    """Replay one block at a state away from X and keep what its modules took and gave."""
    x = recording.states[n]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(n)).to(x)
    watcher = _Watcher(BlockSteps(x * (1 + 0.5 * noise)), n, recording.anatomy.blocks)
    with own_precision(), torch.no_grad():
        end, _ = replayed(recording, watcher.seen.x, Span(n, n + 1), observers=(watcher,))
    watcher.seen.end = constant(end)
    if watcher.seen.y is None:  # the pass ended inside the block
        watcher.seen.y = watcher.seen.end
    return watcher.seen


class _Watcher:
    """Keeps the first tensor in and out of every module from a block on."""

    def __init__(self, seen: BlockSteps, n: int, blocks: tuple[nn.Module, ...]) -> None:
        self.seen, self.n, self.blocks = seen, n, {id(block) for block in blocks}

    def saw_call(self, run: Interpreter, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Keep what attention mixed."""
        met = meeting(run, name, args, kwargs, result)
        if met is not None:
            self.seen.mixed.append(Mixed(len(self.seen.steps), met.module, met.values, met.mixture))

    def saw_module(self, run: Interpreter, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Keep the module's input and output."""
        output = output[0] if isinstance(output, tuple) else output
        if not isinstance(output, Tensor) or run.place.block < self.n:
            return
        if id(module) in self.blocks and run.block is None:
            self.seen.y = constant(output)
        elif args and is_live(args[0]):
            steps = self.seen.steps if run.block is not None else self.seen.tail
            steps.append(Step(run.module, module, by_token(args[0]), by_token(output)))


def by_token(x: Tensor) -> Tensor:
    """The values of (…, channel) as (token, channel)."""
    return constant(x).reshape(-1, x.shape[-1])
