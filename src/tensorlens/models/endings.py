"""What follows the blocks: the end of the body, whose output is $X^N$, and the head; and where states hold channels."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from tensorlens.models.chains import Chain, leaving
from tensorlens.models.evidence import Evidence, ModuleCall, Seen
from tensorlens.models.module_calls import has_hooks


@dataclass(frozen=True, kw_only=True)
class Ending:
    """Where a model ends.

    Attributes:
        body_end: Path of the module whose output is $X^N$; None for the output of the last block.
        state: $X^N$ as it was seen.
        has_head: Whether anything follows.
        head_linear: The last linear layer that leads to the model's output, after $X^N$.
    """

    body_end: str | None
    state: Seen
    has_head: bool
    head_linear: ModuleCall | None


def find_ending(chain: Chain, evidence: Evidence, body: str | None = None) -> Ending:
    """Where the body of a model ends, and what leads from there to its output.

    Args:
        chain: The blocks.
        evidence: The pass in which they ran.
        body: Path of the module around the blocks that is known to be the body, if one is.
    """
    last = chain[-1]
    state = last.given[leaving(last, None, evidence)]
    if body is not None:
        holder = next((call for call in last.holders() if call.path == body), None)
        if holder is not None and holder.given:
            is_all = holder is evidence.root
            return Ending(
                body_end=body,
                state=holder.given[0],
                has_head=not is_all,
                head_linear=None if is_all else _last_linear(holder.given[0], evidence),
            )
    body_end, state, has_head = _follow(last, state, evidence)
    linear = _last_linear(state, evidence) if has_head else None
    return Ending(body_end=body_end, state=state, has_head=has_head, head_linear=linear)


def _follow(last: ModuleCall, state: Seen, evidence: Evidence) -> tuple[str | None, Seen, bool]:
    """Continue from the last block, through norms and the modules around the blocks, until a head begins.

    What begins like a head may be a side branch, such as a gate that says when to stop: a norm that all of the state
    passes later, around it, still belongs to the body.
    """
    end: str | None = None
    heads: list[ModuleCall] = []
    for holder, follower in _followers(last):
        after = follower if follower is not None else holder
        if not after.given or follower is not None and not evidence.is_read(state, follower):
            continue
        given = after.given[0]
        if evidence.is_same(given.node, state.node) and math.prod(given.shape) == math.prod(state.shape):
            continue  # the same values, perhaps in another order: windows put together again
        if follower is None:
            if heads or not _is_like(given, state):
                break
            end, state = holder.path, given
        elif _is_norm(follower, state, evidence) and (_keeps_tokens(given, state) or _is_most(given, state)):
            if not heads or _goes_around(heads, follower, state, evidence):
                end, state, heads = follower.path, given, []
        elif _begins_head(follower, state, evidence):
            heads.append(follower)
    else:
        output = evidence.output
        if not heads:
            return end, state, output is None or output.shape != state.shape
    norm = _norm_first(heads[0], state, evidence) if heads else None
    return (end, state, True) if norm is None else (norm.path, norm.given[0], True)


def _goes_around(heads: list[ModuleCall], norm: ModuleCall, state: Seen, evidence: Evidence) -> bool:
    """Whether a norm takes the state past all that began like a head, and the output depends on nothing else of it."""
    if evidence.output is None:
        return False
    past = {seen.node for head in heads for seen in head.given}
    is_read = any(evidence.reaches({state.node}, seen.node, past=past, since=state.node) for seen in norm.taken)
    given = {norm.given[0].node}
    return is_read and not evidence.reaches({state.node}, evidence.output.node, past=given, since=state.node)


def _norm_first(head: ModuleCall, state: Seen, evidence: Evidence) -> ModuleCall | None:
    """The norm of all tokens that a head begins with, if it takes nothing else of the state."""
    first = next((part for part in head.children if part.given and evidence.is_read(state, part)), None)
    if first is None or not head.given:
        return None
    given = first.given[0]
    if not (_is_norm(first, state, evidence) and _keeps_tokens(given, state)):
        return _norm_first(first, state, evidence)
    is_all = not evidence.reaches({state.node}, head.given[0].node, past={given.node}, since=state.node)
    return first if is_all else None


def _followers(last: ModuleCall) -> Iterator[tuple[ModuleCall, ModuleCall | None]]:
    """What came after a call: for each module around it the later parts, then (with None) its own end."""
    inner = last
    for holder in last.holders():
        yield from ((holder, call) for call in holder.children if call.number > inner.number)
        yield holder, None
        inner = holder


def _is_like(given: Seen, state: Seen) -> bool:
    """Whether a tensor can be a later state: as many axes and channels, and no fewer tokens."""
    if len(given.shape) != len(state.shape) or math.prod(given.shape) < math.prod(state.shape):
        return False
    return sorted(given.shape) == sorted(state.shape) or given.shape[-1] == state.shape[-1]


def _keeps_tokens(given: Seen, state: Seen) -> bool:
    """Whether a norm's output is a later state, or one with its tokens spread over rows and columns."""
    is_spread = len(given.shape) != len(state.shape) and math.prod(given.shape) == math.prod(state.shape)
    return _is_like(given, state) or is_spread and len(given.shape) > 2 and state.shape[-1] in given.shape


def _is_most(given: Seen, state: Seen) -> bool:
    """Whether a tensor has most tokens of a state: a model may drop others, such as registers, before its last norm.

    Or all of them, from a state with several streams that were joined.
    """
    streams = [state.shape[:n] + state.shape[n + 1 :] for n in (1, 2)] if len(state.shape) == 4 else []
    if len(state.shape) == 3 and state.shape[1] > 1:
        streams.append((1, *state.shape[1:]))  # they took the place of samples
    if given.shape in streams:
        return True
    tokens = [math.prod(seen.shape[:-1]) for seen in (given, state)]
    is_alike = len(given.shape) == len(state.shape) and given.shape[-1] == state.shape[-1]
    return is_alike and tokens[0] > tokens[1] / 2


def _is_norm(call: ModuleCall, state: Seen, evidence: Evidence) -> bool:
    """Whether a module only scales and shifts the state: its weights have one axis, or read something else.

    An example is a condition from which a norm's gain and shift are computed.
    """
    weights = list(call.module.parameters())
    if not weights:
        return "norm" in type(call.module).__name__.lower()
    if all(max(weight.shape, default=1) == weight.numel() for weight in weights):
        return True
    inside = [part for part in call.walk() if part is not call]
    mixing = [part for part in inside if any(p.dim() > 1 for p in part.module.parameters(recurse=False))]
    reading = [part for part in inside if evidence.is_read(state, part)]
    has_own = any(p.dim() > 1 for p in call.module.parameters(recurse=False))
    is_conditional = bool(reading) and not has_own and not any(part in reading for part in mixing)
    return is_conditional and any("norm" in type(part.module).__name__.lower() for part in reading)


def _begins_head(call: ModuleCall, state: Seen, evidence: Evidence) -> bool:
    """Whether a head begins: a module with weights that is not one more of a list, or one that gives no later state."""
    if any(weight.dim() > 1 for weight in call.module.parameters()):
        return evidence.list_of(call) is None
    return not _is_like(call.given[0], state)


def _last_linear(state: Seen, evidence: Evidence) -> ModuleCall | None:
    """The last linear layer on the way from a state to the model's output."""
    if evidence.output is None:
        return None
    for call in reversed(evidence.calls):
        if isinstance(call.module, nn.Linear) and call.taken and call.given and call.start >= state.node:
            is_after = evidence.reaches({state.node}, call.taken[0].node, since=state.node)
            if is_after and evidence.reaches({call.given[0].node}, evidence.output.node, since=call.start):
                return call
    return None


def find_readout(evidence: Evidence, head: ModuleCall | None) -> str | None:
    """Path of the module whose output a softmax or its like turns into the model's output, if one does."""
    if evidence.output is None:
        return None
    sources = [taken for node, taken in evidence.ends.items() if evidence.is_same(node, evidence.output.node)]
    if not sources:
        return None
    if head is not None and evidence.is_same(head.given[0].node, sources[-1]):
        return head.path
    given = [c.path for c in evidence.calls if c.path and c.given and evidence.is_same(c.given[0].node, sources[-1])]
    return given[-1] if given else None


def is_all_of_head(call: ModuleCall | None, ending: Ending, evidence: Evidence) -> bool:
    """Whether a linear layer's weights say what it gives, and all that becomes of the state goes through it."""
    assert call is not None
    module, output = call.module, evidence.output
    is_replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # accelerate calls what it found
    if type(module).forward is not nn.Linear.forward or is_replaced or has_hooks(module):
        return False
    if output is None or not call.given:
        return True
    return not evidence.reaches({ending.state.node}, output.node, past={call.given[0].node}, since=ending.state.node)


# Which axis of a state holds its channels -----------------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_CHANNELS_SECOND = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


def channel_axes(blocks: Sequence[ModuleCall], ending: Ending, evidence: Evidence) -> tuple[int | None, ...]:
    """The channel axis of the state that enters each block, and of $X^N$, as the weights that read it show."""
    found = [_reading_axis(call.state, call.walk(), evidence) for call in blocks]
    last = blocks[-1]
    end = next((call for call in evidence.calls if ending.body_end and call.path == ending.body_end), last)
    return (*found, _last_axis(found[-1], last, end, ending, evidence))


def _last_axis(before: int | None, last: ModuleCall, end: ModuleCall, ending: Ending, evidence: Evidence) -> int | None:
    """The channel axis of $X^N$: the first of several witnesses that knows."""
    state, is_block = ending.state, end is last
    if is_block and state.shape == end.state.shape and before is not None:
        return before
    if not is_block and end.taken and end.taken[0].shape == state.shape:
        axis = _reading_axis(end.taken[0], end.walk(), evidence)
        if axis is not None:
            return axis
    # States may have been joined to one: what follows reads them.
    axis = _reading_axis(state, evidence.calls[end.number :], evidence)
    if axis is None and len(state.shape) == len(last.state.shape):  # or they are laid out as before
        axis = before
    return axis


def _reading_axis(state: Seen, calls: Iterable[ModuleCall], evidence: Evidence) -> int | None:
    """The channel axis of a state by the first weights among `calls` that read it; None if there are none."""
    readers = [
        call
        for call in calls
        if not call.children and call.taken and evidence.reaches({state.node}, call.taken[0].node, since=state.node)
    ]
    return _first_axis(state, [(call.taken[0].shape, *_weights_of(call.module)) for call in readers])


def _first_axis(state: Seen, witnesses: list[tuple[tuple[int, ...], int | None, int | None]]) -> int | None:
    """The axis by the first witness that saw the state as it is, or else by the first with a number that fits."""
    shape = state.shape
    for other, n_channels, axis in witnesses:
        if axis is not None and shape == other and -len(shape) <= axis < len(shape) and shape[axis] == n_channels:
            return axis % len(shape)
    batch = next((i for i in (0, 1) if shape[i] == 1), None)
    for _, n_channels, _ in witnesses:
        fitting = [i for i, size in enumerate(shape) if size == n_channels and i != batch]
        if len(fitting) == 1:
            return fitting[0]
    return None


def _weights_of(module: Any) -> tuple[int | None, int | None]:
    """How many channels a module reads, and at which axis of its input, as far as known."""
    if isinstance(module, _CONVOLUTIONS):
        return module.in_channels, 1 - module.weight.dim()
    if isinstance(getattr(module, "in_features", None), int):
        return module.in_features, -1
    if isinstance(module, _CHANNELS_SECOND):
        return int(getattr(module, "num_features", None) or module.num_channels), 1  # type: ignore[arg-type]
    weights = list(module.parameters(recurse=False))
    if not weights or any(weight.dim() != 1 for weight in weights):
        return None, None
    # A subclass of the norms may put its channels elsewhere, and a norm of the model's own does not say where they are.
    return weights[0].numel(), -1 if type(module) in (nn.LayerNorm, nn.RMSNorm) else None
