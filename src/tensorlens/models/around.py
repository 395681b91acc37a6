"""Everything around the blocks: what follows them, what comes before, and what the model computes beside them.

*Behind*: the end of the body, whose output is $X^N$, and the head; and where states hold channels. *Before*: where X⁰
is. *Beside*: a second state of the same input is refused. A second tower, a condition, an embedding that later blocks
read are not functions of X⁰: the operator holds them, in B and in factors. This is exact, but must be reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from tensorlens.errors import AnatomyError
from tensorlens.models.chains import Chain, leaving
from tensorlens.models.evidence import Evidence, ModuleCall, Seen
from tensorlens.models.runner import has_hooks

# Behind ---------------------------------------------------------------------------------------------------------------


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
    """Where the body of a model ends, and the way from there to its output.

    Args:
        chain: The blocks.
        evidence: The pass in which they ran.
        body: Path of the module around the blocks that is known to be the body, if any.
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

    A part that begins like a head may be a side branch, such as a gate that says when to stop: a norm that the state
    as a whole passes later, around the branch, still belongs to the body.
    """
    end: str | None = None
    heads: list[ModuleCall] = []
    for holder, follower in _followers(last):
        after = follower if follower is not None else holder
        if not after.given or follower is not None and not evidence.is_read(state, follower):
            continue
        given = after.given[0]
        if evidence.is_same(given.node, state.node) and math.prod(given.shape) == math.prod(state.shape):
            continue  # the same values, perhaps in a different order: windows that were joined again
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
    """Whether the output depends on the state only through a norm after everything that began like a head."""
    if evidence.output is None:
        return False
    past = {seen.node for head in heads for seen in head.given}
    is_read = any(evidence.reaches({state.node}, seen.node, past=past, since=state.node) for seen in norm.taken)
    given = {norm.given[0].node}
    return is_read and not evidence.reaches({state.node}, evidence.output.node, past=given, since=state.node)


def _norm_first(head: ModuleCall, state: Seen, evidence: Evidence) -> ModuleCall | None:
    """The norm of all tokens at the start of a head, if the head reads nothing else of the state."""
    first = next((part for part in head.children if part.given and evidence.is_read(state, part)), None)
    if first is None or not head.given:
        return None
    given = first.given[0]
    if not (_is_norm(first, state, evidence) and _keeps_tokens(given, state)):
        return _norm_first(first, state, evidence)
    is_all = not evidence.reaches({state.node}, head.given[0].node, past={given.node}, since=state.node)
    return first if is_all else None


def _followers(last: ModuleCall) -> Iterator[tuple[ModuleCall, ModuleCall | None]]:
    """Everything after a call: for each module around it its later parts, then (with None) its own end."""
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
    """Whether a tensor has most tokens of a state: a model may drop some, such as registers, before its last norm.

    It may also have all tokens of a state whose streams were joined.
    """
    streams = [state.shape[:n] + state.shape[n + 1 :] for n in (1, 2)] if len(state.shape) == 4 else []
    if len(state.shape) == 3 and state.shape[1] > 1:
        streams.append((1, *state.shape[1:]))  # the streams were on the axis of samples
    if given.shape in streams:
        return True
    tokens = [math.prod(seen.shape[:-1]) for seen in (given, state)]
    is_alike = len(given.shape) == len(state.shape) and given.shape[-1] == state.shape[-1]
    return is_alike and tokens[0] > tokens[1] / 2


def _is_norm(call: ModuleCall, state: Seen, evidence: Evidence) -> bool:
    """Whether a module only scales and shifts the state: its weights have one axis, or read a different input.

    An example of such an input is a condition from which a norm's gain and shift are computed.
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
    """Whether a head begins here: at a module with matrices outside of lists, or at one whose result is not a state."""
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


def find_readout(evidence: Evidence) -> str | None:
    """Path of the module whose output a softmax or similar function turns into the model's output, if any."""
    if evidence.output is None:
        return None
    sources = [taken for node, taken in evidence.ends.items() if evidence.is_same(node, evidence.output.node)]
    given = [c.path for c in evidence.calls if sources and c.given and evidence.is_same(c.given[0].node, sources[-1])]
    return given[-1] or None if given else None


def is_all_of_head(call: ModuleCall | None, ending: Ending, evidence: Evidence) -> bool:
    """Whether a linear layer's output is given by its weights, and every path from the state goes through the layer."""
    assert call is not None
    module, output = call.module, evidence.output
    is_replaced = "forward" in vars(module) and "_old_forward" not in vars(module)  # accelerate wraps a forward
    if type(module).forward is not nn.Linear.forward or is_replaced or has_hooks(module):
        return False
    if output is None or not call.given:
        return True
    return not evidence.reaches({ending.state.node}, output.node, past={call.given[0].node}, since=ending.state.node)


# Which axis of a state holds its channels -----------------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def channel_axes(blocks: Sequence[ModuleCall], ending: Ending, evidence: Evidence) -> tuple[int | None, ...]:
    """The channel axis of the state that enters each block, and of $X^N$, as the weights that read it show."""
    found = [_reading_axis(call.state, call.walk(), evidence) for call in blocks]
    last = blocks[-1]
    end = next((call for call in evidence.calls if ending.body_end and call.path == ending.body_end), last)
    return (*found, _last_axis(found[-1], last, end, ending, evidence))


def _last_axis(before: int | None, last: ModuleCall, end: ModuleCall, ending: Ending, evidence: Evidence) -> int | None:
    """The channel axis of $X^N$, from the first of several sources that shows it."""
    state = ending.state
    if end is not last and end.taken and end.taken[0].shape == state.shape:
        axis = _reading_axis(end.taken[0], end.walk(), evidence)
        if axis is not None:
            return axis
    # Several states may have been joined into one, which the next modules read.
    axis = _reading_axis(state, evidence.calls[end.number :], evidence)
    if axis is None and len(state.shape) == len(last.state.shape):  # otherwise they are laid out as before
        axis = before
    return axis


def _reading_axis(state: Seen, calls: Iterable[ModuleCall], evidence: Evidence) -> int | None:
    """The channel axis of a state, from the first weights among `calls` that read it; None if there are none."""
    readers = [
        call
        for call in calls
        if not call.children and call.taken and evidence.reaches({state.node}, call.taken[0].node, since=state.node)
    ]
    return _first_axis(state, [(call.taken[0].shape, *_weights_of(call.module)) for call in readers])


def _first_axis(state: Seen, witnesses: list[tuple[tuple[int, ...], int | None, int | None]]) -> int | None:
    """The axis shown by the first module that read the state unchanged, else by the first with a number that fits."""
    shape = state.shape
    for other, n_channels, axis in witnesses:
        if axis is not None and shape == other and -len(shape) <= axis < len(shape) and shape[axis] == n_channels:
            return axis % len(shape)
    for other, n_channels, _ in witnesses:
        fitting = [i for i, size in enumerate(shape) if size == n_channels]
        if len(fitting) == 1 and math.prod(other) >= math.prod(shape):  # a part of the state may have any number
            return fitting[0]
    return None


def _weights_of(module: Any) -> tuple[int | None, int | None]:
    """How many channels a module reads, and on which axis of its input, as far as known."""
    if isinstance(module, _CONVOLUTIONS):
        return module.in_channels, 1 - module.weight.dim()
    if isinstance(getattr(module, "in_features", None), int):
        return module.in_features, -1
    weights = list(module.parameters(recurse=False))
    if not weights or any(weight.dim() != 1 for weight in weights):
        return None, None
    # A subclass of a norm may put its channels elsewhere, and a norm of the model's own does not say where they are.
    return weights[0].numel(), -1 if type(module) in (nn.LayerNorm, nn.RMSNorm) else None


# Before ---------------------------------------------------------------------------------------------------------------


def start_before(chain: Chain, ends: Iterable[int], evidence: Evidence) -> ModuleCall | None:
    """The last call before the blocks that returns all of the state, if the first block takes only a part of it.

    An example is the embedding, if attention takes its norm and the residual is added outside all repeated modules.
    None if the first block takes the whole state, or no call returns it.
    """
    first, targets = chain[0].state, list(ends)
    behind = evidence.before({first.node}) & evidence.after(range(evidence.n_inputs))
    behind -= {*range(evidence.n_inputs), first.node}

    def is_whole(node: int) -> bool:
        return (behind - evidence.after({node})).isdisjoint(evidence.before(targets, {node}))

    if is_whole(first.node):
        return None
    calls = [call for call in evidence.calls[: chain[0].number] if call.stop and call.stop <= chain[0].start]
    fitting = [call for call in calls if call.given and call.given[0].shape == first.shape]
    return next((call for call in reversed(fitting) if is_whole(call.given[0].node)), None)


# Beside ---------------------------------------------------------------------------------------------------------------


def held_sources(
    chain: Chain, encoder: Chain, ends: Iterable[int], evidence: Evidence, start: ModuleCall | None = None
) -> tuple[str, ...]:
    """Paths of the modules with weights through which the input reaches the model's end without passing X⁰.

    Args:
        chain: The blocks.
        encoder: The encoder's blocks, whose states are part of X⁰ too.
        ends: Nodes of X^N and of the model's output.
        evidence: The pass in which they ran.
        start: The call that returns X⁰, if that is not what enters the first block.
    """
    starts = {some[0].state.node for some in (chain, encoder) if some} if start is None else {start.given[0].node}
    leads_there = evidence.before(ends, starts)
    from_start, from_input = evidence.after(starts), evidence.after(range(evidence.n_inputs))
    found: list[ModuleCall] = []
    for call in evidence.calls:
        nodes = call.gave & leads_there & from_input - from_start
        has_weights = any(weight.dim() > 1 for weight in call.module.parameters(recurse=False))
        if nodes and has_weights and not any(_reads(call, other, evidence) for other in found):
            found.append(call)
    around = {id(holder) for call in (*chain, *encoder) for holder in (call, *call.holders())}
    return tuple(dict.fromkeys(_whole(call, around).path for call in found))


def stacks_beside(chain: Chain, encoder: Chain, evidence: Evidence) -> tuple[str, ...]:
    """Paths of blocks like these that ran beside them: a second tower, or the same blocks on another input.

    Those that lead to X⁰ or depend on a block belong to the parts before or after the blocks.
    """
    own = {one.number for call in (*chain, *encoder) for one in (*call.walk(), *call.holders())}
    kinds = {type(call.module) for call in chain}
    before = evidence.before({chain[0].state.node})
    behind = evidence.after({seen.node for call in chain for seen in call.given})
    found: list[str] = []
    for call in evidence.calls:
        is_like = type(call.module) in kinds and call.number not in own and call.taken and call.given
        if is_like and not call.gave & before and call.state.node not in behind:
            listed = evidence.list_of(call)
            found.append(call.path if listed is None else listed)
    return tuple(dict.fromkeys(found))


def said_of(stack: str, beside: tuple[str, ...]) -> str:
    """A note for the reader about stacks that ran beside the operator's own."""
    others = [path for path in beside if path not in stack.split(", ")]
    if not others:
        return f"`{stack}` was called again on another input; this operator describes the first call only"
    return (
        f"`{'`, `'.join(others)}` ran beside `{stack}`, which this operator describes: it includes whatever the "
        f'other adds on the way to X^N. To look at the other, pass `blocks="{others[0]}"`'
    )


def refuse_second_state(chain: Chain, evidence: Evidence) -> None:
    """Refuse a second state that is computed from the same input: the operator has only one, so it would be lost."""
    for a, b in pairwise(chain):
        for seen in b.taken[1:]:
            is_state = any(evidence.is_same(given.node, seen.node) for given in a.given) and seen.node != b.state.node
            firsts = [first for first in chain[0].taken[1:] if len(first.shape) == len(seen.shape)]
            sources = evidence.roots(chain[0].state.node)
            if is_state and any(sources & evidence.roots(first.node) for first in firsts):
                raise AnatomyError(
                    f"`{b.path}` takes two states from earlier blocks, of shapes {b.state.shape} and {seen.shape}, "
                    "both computed from the same input; expected one state that goes from block to block. To look at a "
                    "part in which one of them continues alone, pass the path of its list as `blocks=`."
                )


def _reads(call: ModuleCall, other: ModuleCall, evidence: Evidence) -> bool:
    sources = other.gave
    return any(evidence.reaches(sources, seen.node, since=other.start) for seen in call.taken)


def _whole(call: ModuleCall, around: set[int]) -> ModuleCall:
    """The largest module around a call that contains no block and is not inside one."""
    while call.parent is not None and id(call.parent) not in around:
        call = call.parent
    return call
