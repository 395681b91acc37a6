r"""Patching and ablation: effects of replaced components, predicted by T and checked in the real model.

Patching from a corrupted into a clean run,

    predicted_c = ⟨λ_c(clean), y_c(corrupted) − y_c(clean)⟩

over all tokens, takes two plain runs and one backward walk.

Attribution patching overlooks two things (AtP*: Kramár et al. 2024). A saturated softmax is flat, so a query or a
key that would move attention looks idle. Its effect is computed by the *true* softmax, and only the rest is linear,

    ⟨λ_h, (softmax(q' kᵀ) − softmax(q kᵀ)) v⟩.

Effects that cancel along different paths look idle too: without the cotangent of one block at a time they no longer
cancel, and the mean of the magnitudes shows them.

Ablation replaces several components at once. With those of a set S held at other values, the frozen target changes by

    Δt = Σ_{c ∈ S} ⟨λ_c^S, y_c' − y_c⟩,   λ_c^S = λ_c − Σ_{c' ∈ S after c} (∂y_{c'}/∂y_c)ᵀ λ_{c'}^S:

a path that passes through another of them is cut there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import torch
from jaxtyping import Float
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_choice, check_lens, check_whole
from tensorlens.inside.block import Part
from tensorlens.inside.seats import Edit, check_lengths, edited_logits, readout_of_model, seat_of, values_in_model
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Explained, Pass
from tensorlens.maps.targets import OUT_TOKEN, Said, Target
from tensorlens.models.runner import own_modes
from tensorlens.operators.attention_matrices import FusedAttention, fused_attention, mixing
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.steps import rows_of_attention
from tensorlens.progress import bar
from tensorlens.recording.recording import Recording
from tensorlens.records import Record, as_array
from tensorlens.tolerances import in_float64
from tensorlens.views.labels import visible
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

PATCHES = 512
"""Number of patches between two updates of the progress bar."""

SUBSETS, IN_SUBSET = 64, 0.1
"""The number of random subsets of the remaining components, and the chance of each to be in a subset."""

Values = Callable[[Part], Tensor]
"""The value of each part in a run."""


class Correlation(NamedTuple):
    """How well predicted and true effects agree: Pearson's and Spearman's correlation, and the number of effects."""

    pearson: float
    rank: float
    n: int


class Patching(Record, frozen=True, kw_only=True, tag="tensorlens.patching/2"):
    """Effects of patching each component from a corrupted run into a clean one, over all tokens.

    Attributes:
        labels: Attention outputs, heads and feed-forwards.
        predicted: T's prediction for each: the change of the target.
        true: The change in the model; NaN if no single module outputs the component, or if it was not patched. None
            without `verify`.
        robust: The mean magnitude of each effect with one block's cotangent dropped at a time, if requested: large
            if effects along different paths cancel in `predicted`.
        missed: If only the best were patched: the root of the summed squares of the true effects of all other heads
            and feed-forwards, so none is larger. An estimate by random subsets, which assumes that effects add up.
        target: What is measured.
        clean: Its value in the clean run.
        meta: Model, versions, rules, blocks, output.
    """

    labels: tuple[Component, ...]
    predicted: Float[Tensor, " component"]
    true: Float[Tensor, " component"] | None
    target: str
    clean: float
    robust: Float[Tensor, " component"] | None = None
    missed: float | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is a number for each component."""
        super().__post_init__()
        shapes = {tuple(one.shape) for one in (self.predicted, self.true, self.robust) if one is not None}
        if shapes != {(len(self.labels),)}:
            raise InputError(f"Expected a number for each of {len(self.labels)} components; got shapes {shapes}.")

    def __repr__(self) -> str:
        """One line: how many, of what."""
        known = "" if self.true is None else f", correlation with the truth {self.pearson:.2f}"
        return f"Patching({len(self.labels)} components on {self.target!r} = {self.clean:.4g}{known})"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return f"What moves “{visible(self.target)}” from the corrupted run to the clean one?"

    def _table(self) -> Table:
        known = {"predicted": self.predicted} | ({} if self.true is None else {"true": self.true})
        return Table(as_array(torch.stack([*known.values()], 1)), [*map(str, self.labels)], [*known])

    @property
    def pearson(self) -> float:
        """Correlation of predicted and true effects; NaN if the truth is not known."""
        return self.correlation().pearson

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of predicted and true effects; NaN if the truth is not known."""
        return self.correlation().rank

    def correlation(self, kind: str | None = None) -> Correlation:
        """Correlation of predicted and true effects of the components of one kind, or of all."""
        true = torch.full_like(self.predicted, float("nan")) if self.true is None else self.true
        chosen = torch.tensor([kind is None or label.kind == kind for label in self.labels], dtype=torch.bool)
        chosen &= ~true.isnan()
        pair = in_float64(torch.stack([self.predicted[chosen], true[chosen]]))
        both = [pair, in_float64(pair.argsort().argsort())]  # the numbers, and the rank of each
        found = [float(torch.corrcoef(one)[0, 1]) if pair.shape[1] > 1 else float("nan") for one in both]
        return Correlation(found[0], found[1], pair.shape[1])

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        known = torch.full_like(self.predicted, float("nan")) if self.true is None else self.true
        true = ["" if math.isnan(one) else f"{one:+.4g}" for one in known.tolist()]
        best = self.predicted.abs().topk(min(k, len(self.labels))).indices.tolist()
        rows = [(str(self.labels[i]), f"{float(self.predicted[i]):+.4g}", true[i]) for i in best]
        yield table(("component", "predicted", "true"), rows, numbers=(1, 2))


@own_modes
def patching(
    lens: Any,
    clean: Any,
    corrupted: Any,
    target: Target | None = None,
    *,
    out_token: int = OUT_TOKEN,
    verify: bool | int = False,
    queries_and_keys: bool = False,
    drop: bool = False,
    progress: bool | None = None,
) -> Patching:
    r"""Predicted effects $⟨λ_c(clean), y_c(corrupted) - y_c(clean)⟩$ of patching every component, over all tokens.

    Args:
        lens: A lens on the model.
        clean: The input whose target is measured.
        corrupted: An input of the same length, whose components are patched in.
        target: A token, a pair for a contrast, or weights by class; the model's own prediction if None.
        out_token: Where the target is read.
        verify: Whether to patch the real model too: attention outputs, heads and feed-forwards, many in one run. A
            number k patches the k best alone, by `robust` if it was computed, and random subsets of the rest together.
        queries_and_keys: Whether to add each head's queries and keys, by the true softmax: where it is saturated, its
            derivative is zero. Needs fused attention.
        drop: Whether to find effects that cancel, by one pull per block with its cotangent dropped.
        progress: Whether to show a progress bar; on a terminal if None.
    """
    check_lens(lens)
    asked = Explained.of(lens(clean), out_token, target)
    run = asked.run()
    values, others = _both_values(lens, run, corrupted)
    moved = {part: others(part) - values(part) for part in run.parts.values()}
    labels, effects = (*run.parts,), torch.stack(run.effects(moved, moved.__getitem__)).cpu()
    robust = _with_blocks_dropped(run, moved.__getitem__) if drop else None
    edits = [Edit(part, others(part)) for part in moved]
    true, left = _verified(run, edits, effects if robust is None else robust, verify, progress)
    if queries_and_keys:
        more = _queries_and_keys(run, lens(corrupted).operator.recording)
        labels, effects = (*labels, *more), torch.cat([effects, torch.stack([*more.values()]).to(effects)])
        nothing = torch.full((len(more),), float("nan"), dtype=torch.float64)
        true = None if true is None else torch.cat([true, nothing])
        robust = None if robust is None else torch.cat([robust, nothing.to(robust)])
    return Patching(
        labels=labels,
        predicted=effects,
        true=None if true is None else (true - run.value).to(effects),
        robust=robust,
        missed=left,
        clean=run.value,
        target=asked.name,
        meta=asked.meta,
    )


def _verified(
    run: Pass, edits: list[Edit], scores: Tensor, verify: bool | int, progress: bool | None
) -> tuple[Tensor | None, float | None]:
    """The target with each patch, NaN for those left out; and an estimate of the effects left out."""
    if verify is False:
        return None, None
    if verify is True:
        return _true(run, edits, progress), None
    best = set(scores.abs().topk(min(check_whole(verify, "verify", 1), len(edits))).indices.tolist())
    found = torch.full((len(edits),), float("nan"), dtype=torch.float64)
    chosen = sorted(best)
    found[chosen] = _true(run, [edits[i] for i in chosen], progress)
    return found, _estimate_of_missed(run, [edit for i, edit in enumerate(edits) if i not in best])


def _both_values(lens: Any, run: Pass, corrupted: Any) -> tuple[Values, Values]:
    """Values of components in the clean and the corrupted run; from plain runs if modules output all of them."""
    specimen = lens.specimen
    prepared, own = specimen.prepare(corrupted), run.recording.from_model("Patching").inputs
    arguments = specimen.arguments(prepared.arguments)
    seats = {part.slot: seat_of(run, part) for part in run.parts.values()}
    known = [seat for seat in seats.values() if seat is not None]
    if len(known) == len(seats) and _shapes(arguments) == _shapes(own):
        ours, theirs = (values_in_model(run, one, known) for one in (own, arguments))
        return (lambda part: part.of(ours[part.slot])), (lambda part: part.of(theirs[part.slot]))
    other = specimen.look(prepared)
    check_lengths(run.operator.input, other.operator.input)
    if run.recording.split(0) != other.operator.recording.split(0):
        raise InputError(
            "Expected two inputs of the same length in the encoder, and of the same length in the decoder."
        )
    twin = Pass(other.operator, run.weights, run.out_token)
    return run.written, lambda part: twin.written(twin.parts[part.component])


def _shapes(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(x.shape) if isinstance(x, Tensor) else None for name, x in arguments.items()}


def _true(run: Pass, edits: list[Edit], progress: bool | None) -> Tensor:
    """The target with one edit after the other, NaN if it cannot be made; several edits share a run of the model."""
    found = list[float]()
    with bar(progress=progress, total=len(edits), unit=" patches") as shown:
        for start in range(0, len(edits), PATCHES):
            some = edits[start : start + PATCHES]
            logits = edited_logits(run, [[edit] for edit in some])
            found += [float("nan") if one is None else run.read(one) for one in logits]
            shown.update(len(some))
    return torch.tensor(found, dtype=torch.float64)


def _estimate_of_missed(run: Pass, edits: list[Edit], seed: int = 0) -> float:
    r"""The length $\sqrt{\sum θ^2}$ of the effects of some patches, from the variance of random subsets.

    If effects add up, a subset that takes each with probability p has the variance $p(1 - p) \sum θ^2$. An attention is
    left out if its heads are there, whose sum it is.
    """
    taken_apart = {(edit.part.block, edit.part.write) for edit in edits if edit.part.head is not None}
    edits = [one for one in edits if one.part.head is not None or (one.part.block, one.part.write) not in taken_apart]
    edits = [one for one in edits if seat_of(run, one.part) is not None]
    if not edits:
        return 0.0
    drawn = torch.rand(SUBSETS, len(edits), generator=torch.Generator().manual_seed(seed)) < IN_SUBSET
    logits = edited_logits(
        run, [[edit for edit, is_in in zip(edits, some, strict=True) if is_in] for some in drawn.tolist()]
    )
    effects = torch.tensor([run.read(one) for one in logits if one is not None])
    return float(effects.std()) / math.sqrt(IN_SUBSET * (1 - IN_SUBSET))


# What attribution overlooks -------------------------------------------------------------------------------------------


def _queries_and_keys(run: Pass, other: Recording) -> dict[Component, Tensor]:
    """The effects of all queries of a head, and of all its keys, by the true softmax.

    Raises:
        MethodError: a block has attention that is not one fused call.
    """
    found = dict[Component, Tensor]()
    for block in reversed(run.downwards):
        mixtures, twins = ([m for m in one.mixtures if m.block == block.n] for one in (run.recording, other))
        if len(mixtures) != 1 or len(twins) != 1:
            raise MethodError(
                f"Block {block.n} has {len(mixtures)} attention layers; queries and keys need exactly one."
            )
        ours, theirs = fused_attention(run.recording, mixtures[0].slot), fused_attention(other, twins[0].slot)
        values = mixing(run.recording, block.n).values
        cotangent = run.cotangents(block.n)[mixtures[0].slot].flatten(0, -4).squeeze(0)  # (head, token, channel)
        before = _attention(ours)
        for name in ("query", "key"):
            moved = (_attention(ours._replace(**{name: getattr(theirs, name)})) - before) @ values
            for head, effect in enumerate((cotangent * moved).sum((1, 2)).unbind()):
                found[Component(block=block.n, kind=f"attention {name}", head=head)] = effect
    return found


def _attention(held: FusedAttention) -> Tensor:
    key = held.key.repeat_interleave(held.query.shape[-3] // held.key.shape[-3], -3)
    found = rows_of_attention(held.query, key, held.mask, held.causal, held.scale)
    return found.flatten(0, -4).squeeze(0) if found.dim() > 3 else found


def _with_blocks_dropped(run: Pass, moved: Values) -> Tensor:
    r"""$\frac{1}{N-1}\sum_n |⟨λ^{(n)}, y' - y⟩|$ for each part, with $λ^{(n)}$ pulled past all that block n writes.

    A part of block n itself has no effect there, so it is the mean over the other blocks.
    """
    parts, total = [*run.parts.values()], torch.zeros(())
    for left_out in range(run.start, run.stop):
        block = run.block(left_out)
        silent = {write.slot: torch.zeros_like(block.values[write.slot]) for write, _ in block.writes}
        found = torch.stack(run.effects(parts, moved, silent)).abs()
        total = total.to(found) + found * torch.tensor([part.block != left_out for part in parts]).to(found)
    return (total / max(1, run.stop - run.start - 1)).cpu()


# Ablation: components switched off ------------------------------------------------------------------------------------

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
