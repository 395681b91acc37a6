"""What the model computes beside the one state from X⁰ to X^N.

A second state of the same input is refused. A second tower, a condition, an embedding that later blocks read are not
functions of X⁰: the operator holds them, in B and in the factors. That is exact, but it must be reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from tensorlens.errors import AnatomyError
from tensorlens.models.chains import Chain
from tensorlens.models.evidence import Evidence, ModuleCall


def held_sources(chain: Chain, encoder: Chain, ends: Iterable[int], evidence: Evidence) -> tuple[str, ...]:
    """Paths of the modules with weights through which the input reaches the model's end without passing X⁰.

    Args:
        chain: The blocks.
        encoder: The encoder's blocks, whose states are part of X⁰ too.
        ends: Nodes of what counts: X^N and the model's output.
        evidence: The pass in which they ran.
    """
    starts = {some[0].state.node for some in (chain, encoder) if some}
    leads_there, leads_to_start = evidence.before(ends, starts), evidence.before(starts)
    from_start, from_input = evidence.after(starts), evidence.after(range(evidence.n_inputs))
    found: list[ModuleCall] = []
    for call in evidence.calls:
        nodes = call.gave & leads_there & from_input - from_start - leads_to_start
        has_weights = any(weight.dim() > 1 for weight in call.module.parameters(recurse=False))
        if nodes and has_weights and not any(_reads(call, other, evidence) for other in found):
            found.append(call)
    around = {id(holder) for call in (*chain, *encoder) for holder in (call, *call.holders())}
    return tuple(dict.fromkeys(_outermost(call, around).path for call in found))


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


def start_before(chain: Chain, ends: Iterable[int], evidence: Evidence) -> ModuleCall | None:
    """The last call before the blocks that returns all of the state, if the first block takes only a part of it.

    An example is the embedding, if attention takes its norm and the residual is added outside of all repeated modules.
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
    once = [call for call in fitting if sum(other.module is call.module for other in evidence.calls) == 1]
    return next((call for call in reversed(once) if is_whole(call.given[0].node)), None)


def refuse_several_states(chain: Chain, evidence: Evidence) -> None:
    """A model that carries several states at once has no chain through which all of the input goes."""
    through = {seen.node for call in chain for seen in call.given}
    for holder in chain[-1].holders():
        sources = {seen.node for seen in holder.taken}
        around = [s for s in holder.given if evidence.reaches(sources, s.node, past=through, since=holder.start)]
        if holder.several_states and around:
            raise AnatomyError(
                f"`{holder.path}` takes {len(holder.taken)} states at once, of shapes "
                f"{', '.join(str(seen.shape) for seen in holder.taken)}; expected one state that goes from block to "
                "block. Apply the lens to one of its parts."
            )


def refuse_second_state(chain: Chain, evidence: Evidence) -> None:
    """A second state beside the first, made of the same input, would be lost: only one of them is the operator's."""
    for a, b in pairwise(chain):
        for seen in b.taken[1:]:
            is_state = any(evidence.is_same(given.node, seen.node) for given in a.given) and seen.node != b.state.node
            firsts = [first for first in chain[0].taken[1:] if len(first.shape) == len(seen.shape)]
            sources = evidence.roots(chain[0].state.node)
            if is_state and any(sources & evidence.roots(first.node) for first in firsts):
                raise AnatomyError(
                    f"`{b.path}` takes two states from earlier blocks, of shapes {b.state.shape} and "
                    f"{seen.shape}, both computed from the same input; expected one state that goes from block "
                    f"to block. "
                    "To look at a part in which one of them continues alone, pass the path of its list as `blocks=`."
                )


def _reads(call: ModuleCall, other: ModuleCall, evidence: Evidence) -> bool:
    sources = other.gave
    return any(evidence.reaches(sources, seen.node, since=other.start) for seen in call.taken)


def _outermost(call: ModuleCall, around: set[int]) -> ModuleCall:
    """The largest module around a call that holds no block and is in none."""
    while call.parent is not None and id(call.parent) not in around:
        call = call.parent
    return call
