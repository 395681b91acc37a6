r"""`Ablation`: the model run with components switched off, beside T's prediction.

With the components of a set S held at other values at once, the frozen target changes by

    Δt = Σ_{c ∈ S} ⟨λ_c^S, y_c' − y_c⟩,   λ_c^S = λ_c − Σ_{c' ∈ S after c} (∂y_{c'}/∂y_c)ᵀ λ_{c'}^S:

a path that passes through another of them is cut there. `seats` runs the model itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import Any, Literal, get_args

import msgspec
import torch
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_choice
from tensorlens.inside.block import Part
from tensorlens.inside.seats import Edit, edited_logits, readout_of_model
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.maps.targets import Said
from tensorlens.operators.operator import FrozenOperator
from tensorlens.records import Record
from tensorlens.tolerances import in_float64
from tensorlens.views.labels import visible
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

Replacement = Literal["zero", "mean"]
Named = Component | tuple[int, int] | str
"""A component, a head as (block, head), or a component's name, such as ``"block 3, feed-forward"``."""


class Ablation(Record, frozen=True, kw_only=True, tag="tensorlens.ablation/1"):
    """A target with components switched off, predicted and true.

    Attributes:
        components: What was switched off, all at once and at every token.
        to: What replaces their outputs: ``"zero"`` or their ``"mean"``.
        target: What is measured.
        value: The target as it was.
        predicted: The target according to T, which keeps all else fixed; paths from one component through another
            are cut.
        true: The target in the model, in which everything after them may change.
        before: The model's predictions with them.
        after: Its predictions without them.
        meta: Model, versions, rules, blocks, output.
    """

    components: tuple[Component, ...]
    to: Replacement
    target: str
    value: float
    predicted: float
    true: float
    before: tuple[Said, ...]
    after: tuple[Said, ...]
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: before, predicted, true."""
        numbers = f"{self.value:.4g} → {self.predicted:.4g} predicted, {self.true:.4g} true"
        return f"Ablation({len(self.components)} to {self.to}: {self.target!r} {numbers})"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return f"What happens to “{visible(self.target)}” without {', '.join(map(str, self.components))}?"

    def _table(self) -> Table:
        numbers = torch.tensor([[self.value, self.predicted, self.true]], dtype=torch.float64)
        return Table(numbers.numpy(), [self.target], ["before", "predicted", "true"])

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(f"{', '.join(map(str, self.components))} at {self.to}")
        numbers = (f"{one:.4g}" for one in (self.value, self.predicted, self.true))
        yield table((repr(self.target), "predicted", "true"), [tuple(numbers)])
        said = zip_longest(self.before[:k], self.after[:k])
        rows = [["" if one is None else f"{one.name!r} {one.probability:.1%}" for one in pair] for pair in said]
        yield table(("before", "after"), rows)


def ablation(
    asked: Explained, components: Sequence[Named] | Named, to: Replacement, over: Sequence[FrozenOperator] = ()
) -> Ablation:
    """Run the model without some components, and compute T's prediction of the same.

    Args:
        asked: The target.
        components: The components to switch off.
        to: What replaces their outputs.
        over: Operators of the inputs to average over; if there are none, the tokens of the input itself.
    """
    check_choice(to, "to", get_args(Replacement))
    run = asked.run()
    chosen = _chosen(run, components)
    values = _values(run, chosen, to, over)
    edits = [Edit(part, values[part.component]) for part in chosen]
    (logits,) = edited_logits(run, [edits])
    if logits is None:
        raise MethodError(
            f"No single module of `{run.recording.name}` outputs all of "
            f"{', '.join(str(part.component) for part in chosen)}, so the model cannot be run without that part. "
            "Use `T.components`, which does not run the model."
        )
    kept = {part.slot: torch.ones_like(run.values(part.block)[part.slot]) for part in chosen}
    for part in chosen:
        part.of(kept[part.slot]).zero_()
    predicted = sum(run.effects(chosen, lambda part: values[part.component] - run.written(part), kept))
    before = run.recording.logits(readout_of_model(run.recording), run.out_token)[0]
    assert asked.classes is not None, "a target has classes"
    return Ablation(
        components=tuple(part.component for part in chosen),
        to=to,
        target=asked.name,
        value=run.value,
        predicted=run.value + float(predicted),
        true=run.read(logits),
        before=asked.classes.said(in_float64(before).softmax(-1)),
        after=asked.classes.said(in_float64(logits).softmax(-1)),
        meta=asked.meta,
    )


def _chosen(run: Pass, components: Any) -> list[Part]:
    known: dict[Any, Part] = {**run.parts}
    known |= {str(component): part for component, part in run.parts.items()}
    known |= {(c.block, c.head): part for c, part in run.parts.items() if c.kind == "attention head"}
    is_pair = isinstance(components, tuple) and all(type(n) is int for n in components)
    if is_pair or isinstance(components, (str, Component)) or not isinstance(components, Iterable):
        components = [components]
    found: dict[Component, Part] = {}
    for one in (getattr(one, "component", one) for one in components):
        part = known.get(one) if isinstance(one, Hashable) else None
        if part is None:
            some = ", ".join(repr(str(component)) for component in list(run.parts)[:3])
            raise InputError(
                f"This model has no component {one!r} that can be switched off; expected a head as (block, head), a "
                f"component of `T.components`, or a name such as {some}."
            )
        found[part.component] = part
    if not found:
        raise InputError("Expected at least one component to switch off; got none.")
    return list(found.values())


def _values(run: Pass, chosen: list[Part], to: Replacement, over: Sequence[FrozenOperator]) -> dict[Component, Tensor]:
    """The values that replace each part."""
    if to == "zero":
        return {part.component: torch.zeros_like(run.written(part)) for part in chosen}
    runs = [Pass(one, run.weights, 0 if one.recording.pools else one.shape[0] - 1) for one in over] or [run]
    found = dict[Component, Tensor]()
    for part in chosen:
        states = torch.cat([_by_token(one, one.parts[part.component]) for one in runs])  # (token of any input, channel)
        found[part.component] = _at_every_token(run, part, states.mean(0))
    return found


def _by_token(run: Pass, part: Part) -> Tensor:
    """The output of a part, (token, channel)."""
    value = run.written(part)
    return value if part.head is not None else run.block(part.block).to_tokens(value)[0]


def _at_every_token(run: Pass, part: Part, vector: Tensor) -> Tensor:
    value, block = run.written(part), run.block(part.block)
    if part.head is not None:
        return vector.expand_as(value)
    return block.from_tokens(vector.expand(1, block.n_tokens, -1), value.shape)
