"""Components of a target: what each head, feed-forward and bias carries of it, at every token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.functional import pad

from tensorlens.errors import InputError
from tensorlens.inside.component_map import Component, ComponentMap
from tensorlens.inside.stream import Mixture, Sum, Write, pulled
from tensorlens.inside.target import Pass, pass_to, weights_of
from tensorlens.maps.targets import Classes, Target
from tensorlens.operators.matrix_free import FrozenOperator

Effect = Literal["total", "direct"]


class Row(NamedTuple):
    """A component and its score at every token."""

    component: Component
    scores: Tensor


@dataclass
class Found:
    """Scores by component, and the flow (depth, token)."""

    rows: list[Row] = field(default_factory=list)
    flow: list[Tensor] = field(default_factory=list)


def component_map(
    operator: FrozenOperator, classes: Classes | None, out_token: int, target: Target | None, effect: Effect, *,
    tokens: tuple[str, ...], meta: dict[str, Any],
) -> ComponentMap:  # fmt: skip
    """All components of a target, as a record."""
    weights = weights_of(operator, classes, target, out_token)
    assert classes is not None, "a target has classes"
    with pass_to(operator, weights, out_token) as run:
        found = find(run, effect)
    channels = operator.recording.side_channels
    if channels and run.seen.memory is None:
        meta = meta | {"flow": f"of the state alone: {channels[0]} also reads what earlier blocks left for it"}
    return ComponentMap(
        scores=torch.stack([row.scores for row in found.rows]),
        labels=tuple(row.component for row in found.rows),
        tokens=tokens,
        effect=effect,
        target=" − ".join(classes.name(index) for index in weights),
        value=float(run.t.detach()),
        depths=torch.stack(found.flow),
        meta=meta,
    )


def find(run: Pass, effect: Effect) -> Found:
    """All components of a pass.

    Args:
        run: The pass.
        effect: ``"total"`` by all ways to the target, ``"direct"`` by the stream alone.
    """
    if effect not in ("total", "direct"):
        raise InputError(f"`effect` must be 'total' or 'direct'; got {effect!r}.")
    return total(run) if effect == "total" else direct(run)


# Total effects -------------------------------------------------------------------------------------------------------


class Cotangents:
    r"""$\partial t/\partial y$ at chosen places of the graph, by one backward pass."""

    def __init__(self, run: Pass, edges: Iterable[GradientEdge]) -> None:
        chosen = {(edge.node, edge.output_nr): edge for edge in edges}
        found = torch.autograd.grad(run.t, list(chosen.values()), retain_graph=True, allow_unused=True)
        self._found = dict(zip(chosen, found, strict=True))

    def of(self, edge: GradientEdge) -> Tensor | None:
        """λ; None where the target does not see it."""
        return self._found[edge.node, edge.output_nr]

    def times(self, edge: GradientEdge, value: Tensor) -> Tensor:
        """λ ⊙ y; zero where the target does not see it."""
        found = self.of(edge)
        return torch.zeros_like(value) if found is None else found * value


def total(run: Pass) -> Found:
    r"""$e_c = ⟨\partial t/\partial y_c, y_c⟩$ for every component, and $⟨λ^n_j, X^n_j⟩$ for every depth and token."""
    start, stop = run.operator.span
    states = [run.entry(n) for n in range(start, stop)] + [run.seen.outputs[stop - 1]]
    writes = [write for sums in run.sums.values() for one in sums or () for write in one.writes]
    mixtures = [mixture.edge for write in writes for mixture in write.mixtures]
    memory = [] if run.seen.memory is None else [run.seen.memory[0]]
    at = Cotangents(run, [*(edge for edge, _ in states), *(write.edge for write in writes), *mixtures, *memory])
    found = Found()
    found.flow = _flow(run, at, states)
    found.rows.append(Row(Component(kind="embedding"), found.flow[0]))
    for n in range(start, stop):
        sums = run.sums[n]
        if sums is None:
            _, before = run.entry(n)
            edge, after = run.seen.outputs[n]
            found.rows.append(
                Row(Component(block=n, kind="block"), run.by_token(n, at.times(edge, _minus(after, before))))
            )
            continue
        for write, kind in kinds(run, n, sums):
            of_heads = [at.times(mixture.edge, mixture.value) for mixture in told_apart(run, n, write)]
            found.rows += _rows(run, kind, n, run.by_token(n, at.times(write.edge, write.value)), of_heads)
    return found


def _flow(run: Pass, at: Cotangents, states: list[tuple[GradientEdge, Tensor]]) -> list[Tensor]:
    """What each depth carries: its state, and with an encoder whatever else crosses it.

    Below the decoder that is the decoder's own input; within the decoder, the encoder's output, as far as later blocks
    read it: all of its cotangent but what comes by way of the decoder's state.
    """
    start, stop = run.operator.span
    places = [*range(start, stop), stop - 1]
    flow = [run.by_token(n, at.times(*state)) for n, state in zip(places, states, strict=True)]
    if run.seen.memory is None:
        return flow
    edge, memory = run.seen.memory
    n_encoder, split = run.recording.n_encoder_blocks, memory.shape[1]
    whole, of_memory = at.of(edge), torch.zeros_like(flow[0])
    for depth in range(max(1, n_encoder - start), len(flow)):
        there, state = at.of(states[depth][0]), states[depth][0]
        past = whole if depth + start == n_encoder or whole is None else whole - _seen_from(state, there, edge, memory)
        of_memory = pad((past * memory)[0].sum(-1), (0, len(flow[0]) - split)) if past is not None else of_memory
        flow[depth] = of_memory + pad(flow[depth][split:], (split, 0))
    for depth in range(1, n_encoder - start):
        flow[depth] = flow[depth] + pad(flow[0][split:], (split, 0))
    return flow


def _seen_from(state: GradientEdge, cotangent: Tensor | None, edge: GradientEdge, value: Tensor) -> Tensor:
    """The part of a cotangent that comes by way of one state."""
    if cotangent is None:
        return torch.zeros_like(value)
    found = torch.autograd.grad([state], [edge], [cotangent], retain_graph=True, allow_unused=True)[0]
    return torch.zeros_like(value) if found is None else found


def _minus(after: Tensor, before: Tensor) -> Tensor:
    """What a whole block wrote."""
    return after - before.reshape(after.shape) if after.numel() == before.numel() else after


def kinds(run: Pass, n: int, sums: list[Sum]) -> Iterator[tuple[Write, str]]:
    """What was written in a block, in order, and what to call it."""
    n_attentions = 0
    for one in reversed(sums):
        for write in reversed(one.writes):
            if write.mixtures:
                n_attentions += 1
                yield write, "attention" if n_attentions == 1 else f"attention {n_attentions}"
            else:  # without attention anywhere in the block, one cannot say which of its parts mixes tokens
                yield write, "feed-forward" if run.seen.mixtures.get(n) else "block"


def told_apart(run: Pass, n: int, write: Write) -> list[Mixture]:
    """The mixture behind a write, where its axes are known to be heads and the tokens of the stream."""
    if len(write.mixtures) != 1:
        return []
    value = write.mixtures[0].value
    is_told = value.dim() == 3 or value.dim() == 4 and len(value) == 1
    return list(write.mixtures) if is_told and value.shape[-2] == run.n_tokens(n) else []


def _rows(run: Pass, kind: str, n: int, whole: Tensor, of_heads: list[Tensor]) -> Iterator[Row]:
    """A row for each head and one for the bias of the output projection, or one for the whole."""
    if not of_heads:
        yield Row(Component(block=n, kind=kind), whole)
        return
    heads = run.placed(n, of_heads[0].reshape(-1, *of_heads[0].shape[-2:]).sum(-1))
    for head, scores in enumerate(heads):
        yield Row(Component(block=n, kind=f"{kind} head", head=head), scores)
    yield Row(Component(block=n, kind=f"{kind} bias"), whole - heads.sum(0))


# Direct effects ------------------------------------------------------------------------------------------------------


def direct(run: Pass) -> Found:
    r"""$d_c = ⟨λʳ, y_c⟩$ with λʳ pulled along the stream alone, past all components.

    What the constants on the stream itself give (norms after a sum, the final norm, the unembedding) are biases:
    between two places of the stream $s' = A s + c$, they give $⟨λ', s'⟩ - ⟨λ, s⟩$; those of the head stand at the
    output explained. All scores sum to the target.
    """
    start, stop = run.operator.span
    at, value = run.seen.outputs[stop - 1]
    cotangent = torch.autograd.grad(run.t, [at], retain_graph=True)[0]
    reached = run.by_token(stop - 1, cotangent * value)
    flow, groups = [reached], []
    head = torch.zeros_like(reached)
    head[run.out_token] = run.t.detach() - reached.sum()
    for n in reversed(range(start, stop)):
        if n + 1 == run.recording.n_encoder_blocks and n + 1 < stop:
            break  # the encoder is read by components of the decoder only
        rows, cotangent = _direct_of_block(run, n, cotangent)
        groups.append(rows)
        flow.append(run.by_token(n, cotangent * run.entry(n)[1]))
    n_missing = stop - start + 1 - len(flow)
    flow += [flow[-1]] * n_missing  # depths within the encoder: the decoder's embedding is all that crosses
    rows = [Row(Component(kind="embedding"), flow[-1]), *(row for group in reversed(groups) for row in group)]
    return Found([*rows, Row(Component(kind="bias"), head)], flow[::-1])


def _direct_of_block(run: Pass, n: int, cotangent: Tensor) -> tuple[list[Row], Tensor]:
    """The rows of one block, and the cotangent at the state that enters it."""
    at, value = run.seen.outputs[n]
    entry, before = run.entry(n)
    sums = run.sums[n]
    if sums is None:
        row = Row(Component(block=n, kind="block"), run.by_token(n, cotangent * _minus(after=value, before=before)))
        return [row], cotangent.reshape(before.shape)
    bias = torch.zeros(run.x.shape[1], dtype=run.x.dtype, device=run.x.device)
    by_write: dict[int, Tensor] = {}
    for edge, value_there, one in [*((one.edge, one.value, one) for one in sums), (entry, before, None)]:
        further = pulled(at, cotangent, edge)
        if edge.node is not at.node:
            bias = bias + run.by_token(n, cotangent * value) - run.by_token(n, further * value_there)
        cotangent = further
        if one is not None:
            by_write |= {id(write): cotangent for write in one.writes}
            at, value = one.stream, one.stream_value
    rows = []
    for write, kind in kinds(run, n, sums):
        its = by_write[id(write)]
        of_heads = [pulled(write.edge, its, one.edge) * one.value for one in told_apart(run, n, write)]
        rows += _rows(run, kind, n, run.by_token(n, its * write.value), of_heads)
    return rows if not bool(bias.any()) else [*rows, Row(Component(block=n, kind="bias"), bias)], cotangent
