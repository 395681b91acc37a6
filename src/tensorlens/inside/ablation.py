"""`Ablation`: the model run with components switched off, beside what T said of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch
from torch import Tensor

from tensorlens.errors import InputError, MethodError
from tensorlens.inside.edits import parts, predicted_change
from tensorlens.inside.seats import Edit, Editable, edited_logits, readout_of_model
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.maps.targets import Said
from tensorlens.models.precision import in_float64
from tensorlens.operators.operator import FrozenOperator
from tensorlens.records import Record
from tensorlens.views.labels import visible
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

if TYPE_CHECKING:
    from rich.console import RenderableType

Replacement = Literal["zero", "mean"]
Named = Component | tuple[int, int] | str
"""A component, a head as (block, head), or a component's name, such as ``"block 3, feed-forward"``."""


class Ablation(Record, frozen=True, kw_only=True, tag="tensorlens.ablation/1"):
    """A target with components switched off, predicted and true.

    Attributes:
        components: What was switched off, all at once and at every token.
        to: What stands in their place: ``"zero"`` or their ``"mean"``.
        target: What is measured.
        value: The target as it was.
        predicted: The target by T, in which everything else is held: the path from one of them through another is cut.
        true: The target in the model, in which everything after them moves.
        before: What the model said.
        after: What it says without them.
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
        asked: What is measured.
        components: What is switched off.
        to: What stands in its place.
        over: Operators of the inputs whose mean it is; the input's own tokens alone if there are none.
    """
    if to not in ("zero", "mean"):
        raise InputError(f"`to` must be 'zero' or 'mean'; got {to!r}.")
    run = Pass(asked.operator, asked.weights, asked.out_token)
    chosen = _chosen(run, components)
    edits = [Edit(part, value) for part, value in zip(chosen, _values(run, chosen, to, over), strict=True)]
    (logits,) = edited_logits(run, [edits])
    if logits is None:
        raise MethodError(
            f"No single module of `{run.recording.name}` gives out all of "
            f"{', '.join(str(part.component) for part in chosen)}, so the model cannot be run without. "
            "Use `T.components`, which needs no run."
        )
    predicted = predicted_change(run, edits)
    before = run.recording.logits(readout_of_model(run.recording), run.out_token)[0]
    assert asked.classes is not None, "a target has classes"
    return Ablation(
        components=tuple(part.component for part in chosen),
        to=to,
        target=asked.name,
        value=run.value,
        predicted=run.value + predicted,
        true=run.read(logits),
        before=asked.classes.said(in_float64(before).softmax(-1)),
        after=asked.classes.said(in_float64(logits).softmax(-1)),
        meta=asked.meta,
    )


def _chosen(run: Pass, components: Any) -> list[Editable]:
    known: dict[Any, Editable] = {part.component: part for block in reversed(run.downwards) for part in parts(block)}
    by_name: dict[Any, Editable] = {str(component): part for component, part in known.items()}
    heads: dict[Any, Editable] = {(c.block, c.head): part for c, part in known.items() if c.kind == "attention head"}
    single = isinstance(components, (str, Component)) or _is_pair(components)
    found: list[Editable] = []
    for one in [components] if single else _listed(components):
        by = heads if _is_pair(one) else known if isinstance(one, Component) else by_name
        part = by.get(one) if isinstance(one, Hashable) else None
        if part is None:
            some = ", ".join(repr(name) for name in list(by_name)[:3])
            raise InputError(
                f"This model has no component {one!r} that can be switched off; expected a head as (block, head), a "
                f"component of `T.components`, or a name such as {some}."
            )
        found.append(part)
    if not found:
        raise InputError("Expected at least one component to switch off; got none.")
    return found


def _listed(components: Any) -> list[Any]:
    if not isinstance(components, Iterable):
        raise InputError(f"Expected components in a list; got {type(components).__name__}.")
    return [getattr(one, "component", one) for one in components]


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(number) is int for number in value)


def _values(run: Pass, chosen: list[Editable], to: Replacement, over: Sequence[FrozenOperator]) -> list[Tensor]:
    """What stands in the place of each part."""
    if to == "zero":
        return [torch.zeros_like(_value(run, part)) for part in chosen]
    sums, n_tokens = [_over_tokens(run, part) for part in chosen], [run.block(part.block).n_tokens for part in chosen]
    if over:
        sums, n_tokens = [torch.zeros_like(one) for one in sums], [0] * len(sums)
    for operator in over:
        other = Pass(operator, run.weights, 0 if operator.recording.pools else operator.shape[0] - 1)
        for i, part in enumerate(chosen):
            same = next(one for one in parts(other.block(part.block)) if one.component == part.component)
            sums[i] = sums[i] + _over_tokens(other, same)
            n_tokens[i] += other.block(part.block).n_tokens
    return [_at_every_token(run, part, one / n) for part, one, n in zip(chosen, sums, n_tokens, strict=True)]


def _value(run: Pass, part: Editable) -> Tensor:
    return part.of(run.values(part.block)[part.slot])


def _over_tokens(run: Pass, part: Editable) -> Tensor:
    """The sum of what a part wrote over tokens, (channel,)."""
    value = _value(run, part)
    return value.sum(0) if part.head is not None else run.block(part.block).to_tokens(value)[0].sum(0)


def _at_every_token(run: Pass, part: Editable, vector: Tensor) -> Tensor:
    value = _value(run, part)
    if part.head is not None:
        return vector.expand_as(value)
    block = run.block(part.block)
    return block.from_tokens(vector.expand(1, block.n_tokens, -1), value.shape)
