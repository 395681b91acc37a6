"""Components of a target: what each head, feed-forward and bias carries of it, at every token."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.nn.functional import pad

from tensorlens.errors import InputError
from tensorlens.inside.component_map import Component, ComponentMap
from tensorlens.inside.stream import Write
from tensorlens.inside.target import Explained, Finer, Pass, pass_to
from tensorlens.inside.walk import (
    Row,
    Walk,
    finer_rows,
    head_rows,
    is_finer,
    kinds,
    seen_from,
    told_apart,
    whole_write,
)

Effect = Literal["total", "direct"]


@dataclass
class Found:
    """Scores by component, and the flow (depth, token)."""

    rows: list[Row] = field(default_factory=list)
    flow: list[Tensor] = field(default_factory=list)

    def as_map(self, effect: Effect, run: Pass, asked: Explained) -> ComponentMap:
        """The record of them."""
        return ComponentMap(
            scores=torch.stack([row.scores for row in self.rows]), labels=tuple(row.component for row in self.rows),
            tokens=asked.tokens, effect=effect, target=asked.name, value=float(run.t.detach()),
            depths=torch.stack(self.flow), meta=asked.meta,
        )  # fmt: skip


def component_map(asked: Explained, effect: Effect, finer: Finer | None = None) -> ComponentMap:
    """All components of a target, as a record."""
    with pass_to(asked.operator, asked.weights, asked.out_token, finer) as run:
        found = find(run, effect)
    channels, meta = run.recording.side_channels, asked.meta
    if channels and run.seen.memory is None:
        meta = meta | {"flow": f"of the state alone: {channels[0]} also reads what earlier blocks left for it"}
    return found.as_map(effect, run, replace(asked, meta=meta))


def find(run: Pass, effect: Effect) -> Found:
    """All components of a pass.

    Args:
        run: The pass.
        effect: ``"total"`` by all paths to the target, ``"direct"`` by the stream alone.
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
                Row(Component(block=n, kind="block"), run.by_token(n, at.times(edge, whole_write(after, before))))
            )
            continue
        for write, kind in kinds(run, n, sums):
            if is_finer(run, n, write):
                found.rows += _finer(run, at, write, kind, n)
                continue
            of_heads = [at.times(mixture.edge, mixture.value) for mixture in told_apart(run, n, write)]
            found.rows += head_rows(run, kind, n, run.by_token(n, at.times(write.edge, write.value)), of_heads)
    return found


def _finer(run: Pass, at: Cotangents, write: Write, kind: str, n: int) -> list[Row]:
    cotangent = at.times(write.edge, torch.ones_like(write.value))
    whole = run.by_token(n, cotangent * write.value)
    rows = finer_rows(run, kind, n, write, cotangent[None], whole[None])
    return [Row(row.component, row.scores[0]) for row in rows]


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
        past = whole if depth + start == n_encoder or whole is None else whole - seen_from(state, there, edge, memory)
        of_memory = pad((past * memory)[0].sum(-1), (0, len(flow[0]) - split)) if past is not None else of_memory
        flow[depth] = of_memory + pad(flow[depth][split:], (split, 0))
    for depth in range(1, n_encoder - start):
        flow[depth] = flow[depth] + pad(flow[0][split:], (split, 0))
    return flow


# Direct effects ------------------------------------------------------------------------------------------------------


def direct(run: Pass) -> Found:
    r"""$d_c = ⟨λʳ, y_c⟩$ with λʳ pulled along the stream alone, past all components.

    What the constants on the stream itself give (norms after a sum, the final norm, the unembedding) are biases:
    between two places of the stream $s' = A s + c$, they give $⟨λ', s'⟩ - ⟨λ, s⟩$; those of the head stand at the
    output explained. All scores sum to the target.
    """
    start, stop = run.operator.span
    walk, reached, head = from_target(run)
    flow, groups = [reached], []
    for n in reversed(range(start, stop)):
        if n + 1 == run.recording.n_encoder_blocks and n + 1 < stop:
            break  # the encoder is read by components of the decoder only
        groups.append(walk.block(n))
        flow.append(walk.carried(n)[0])
    n_missing = stop - start + 1 - len(flow)
    flow += [flow[-1]] * n_missing  # depths within the encoder: the decoder's embedding is all that crosses
    rows = [Row(row.component, row.scores[0]) for group in reversed(groups) for row in group]
    return Found([Row(Component(kind="embedding"), flow[-1]), *rows, Row(Component(kind="bias"), head)], flow[::-1])


def from_target(run: Pass) -> tuple[Walk, Tensor, Tensor]:
    """A walk down from the target; what the last state carries at each token, and what the constants of the head do."""
    n = run.operator.span.stop - 1
    at, value = run.seen.outputs[n]
    cotangent = torch.autograd.grad(run.t, [at], retain_graph=True)[0]
    reached = run.by_token(n, cotangent * value)
    head = torch.zeros_like(reached)
    head[run.out_token] = run.t.detach() - reached.sum()
    return Walk(run, cotangent[None]), reached, head
