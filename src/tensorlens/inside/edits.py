r"""Other values for some components: what T says of it, and what the model itself does.

With the components of a set S held at other values at once, the frozen target changes by

    Δt = Σ_{c ∈ S} ⟨λ_c^S, y_c' − y_c⟩,   λ_c^S = λ_c − Σ_{c' ∈ S after c} (∂y_{c'}/∂y_c)ᵀ λ_{c'}^S:

a path that passes through another of them is cut there. The model itself is run with hooks on the modules that give the
components out, and on those that take the heads in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.observe import plain_logits
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replayed import check_unchanged
from tensorlens.inside.component_map import Component
from tensorlens.inside.components import Cotangents
from tensorlens.inside.stream import Mixture, Write, by_head, order
from tensorlens.inside.target import Pass
from tensorlens.inside.walk import kinds, told_apart
from tensorlens.models.modes import evaluating, hooked


class Part(NamedTuple):
    """A component that can be given another value: a whole write, or one head of its mixture."""

    component: Component
    write: Write
    mixture: Mixture | None = None

    @property
    def edge(self) -> Any:
        """Where in the graph its value is, or that of all heads."""
        return self.write.edge if self.mixture is None else self.mixture.edge

    @property
    def value(self) -> Tensor:
        """What it wrote; of a head (token, channel)."""
        if self.mixture is None:
            return self.write.value
        return by_head(self.mixture.value)[self.component.head]


class Edit(NamedTuple):
    """Another value for a part, in the shape of its own."""

    part: Part
    value: Tensor


def parts(run: Pass) -> Iterator[Part]:
    """Attention outputs, their heads, and feed-forwards, in the order of the pass."""
    for n, sums in run.sums.items():
        for write, kind in kinds(run, n, sums or []):
            yield Part(Component(block=n, kind=kind), write)
            for mixture in told_apart(run, n, write):
                for head in range(len(by_head(mixture.value))):
                    yield Part(Component(block=n, kind=f"{kind} head", head=head), write, mixture)


# By T ----------------------------------------------------------------------------------------------------------------


@dataclass
class _Held:
    """What is held at one place of the graph: the change, and where it is."""

    edge: Any
    change: Tensor
    chosen: Tensor


def predicted_change(run: Pass, edits: Sequence[Edit]) -> float:
    """Δt of the frozen model with all edits at once."""
    places: dict[tuple[Any, int], _Held] = {}
    for part, value in edits:
        edge = part.edge
        whole = part.write.value if part.mixture is None else part.mixture.value
        held = places.setdefault(
            (edge.node, edge.output_nr), _Held(edge, whole.new_zeros(whole.shape), whole.new_zeros(whole.shape))
        )
        rows: Any = slice(None) if part.mixture is None else part.component.head
        for tensor, new in ((held.change, value - part.value), (held.chosen, torch.ones_like(part.value))):
            (tensor if part.mixture is None else by_head(tensor))[rows] = new
    at = Cotangents(run, [held.edge for held in places.values()])
    done: list[tuple[Any, Tensor]] = []
    change = 0.0
    for held in sorted(places.values(), key=lambda held: -order(held.edge.node)):
        cotangent = at.times(held.edge, torch.ones_like(held.change))
        if done:
            edges, cotangents = zip(*done, strict=True)
            by_later = torch.autograd.grad(edges, [held.edge], cotangents, retain_graph=True, allow_unused=True)[0]
            cotangent = cotangent if by_later is None else cotangent - by_later
        done.append((held.edge, cotangent * held.chosen))
        change += float((cotangent * held.change).sum())
    return change


# By the model itself -------------------------------------------------------------------------------------------------


def path_of(run: Pass, part: Part) -> str | None:
    """The module through which a part can be changed in the model; None if there is none, or if it is used twice."""
    block = part.component.block
    assert block is not None, "a part is in a block"
    if part.mixture is None:
        paths = run.seen.modules.get((block, part.write.edge.node), [])
    else:
        paths = [run.seen.takers[part.mixture.edge.node]] if part.mixture.edge.node in run.seen.takers else []
    return next((path for path in reversed(paths) if run.seen.n_calls[path] == 1), None)


def edited_logits(run: Pass, edits: Sequence[Edit]) -> Tensor | None:
    """The model's own logits with all edits at once; None if one of them cannot be made."""
    before, after = [], []
    for edit in edits:
        path = path_of(run, edit.part)
        if path is None:
            return None
        module = run.recording.model.get_submodule(path)
        if edit.part.mixture is None:
            after.append((module, _given(edit)))
        else:
            before.append((module, _taken(edit)))
    with hooked(before, after):
        return logits_of_model(run.recording, run.out_token)


def _given(edit: Edit) -> Any:
    def replace(module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, tuple) else output
        new = edit.value.reshape(first.shape).to(first)
        return (new, *output[1:]) if isinstance(output, tuple) else new

    return replace


def _taken(edit: Edit) -> Any:
    assert edit.part.mixture is not None, "a head is one of a mixture"
    n_heads, n_tokens, width = by_head(edit.part.mixture.value).shape

    def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
        heads = args[0].reshape(n_tokens, n_heads, width).clone()
        heads[:, edit.part.component.head] = edit.value.to(heads)
        return (heads.reshape(args[0].shape), *args[1:]), kwargs

    return replace


def logits_of_model(recording: Recording, out_token: int) -> Tensor:
    """Logits as the unembedding gives them, before any soft cap, where there is one."""
    unembedding, seen = recording.anatomy.unembedding, []
    if unembedding is None:
        return plain_logits(recording, out_token)
    check_unchanged(recording)
    keep = hooked(after=[(unembedding, lambda module, args, output: seen.append(output))])
    with keep, own_precision(), torch.no_grad(), evaluating(recording.model):
        recording.model(**recording.inputs)
    return seen[-1][0, out_token]
