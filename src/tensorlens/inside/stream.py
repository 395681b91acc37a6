"""The residual stream by dataflow: which sums of a block write to it, and which `Component` each write is.

No module is known by name. In the program of a block, a sum whose terms are $x, f(x), g(x), …$ is a write to the
stream: the stream is the term that all the others were computed from. So pre-norm, post-norm, parallel and sandwich
blocks are treated alike; if no chain of such sums leads from a block's output to its input, the block is one piece.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from tensorlens.errors import words
from tensorlens.program.marks import MOVES, Choice, Mixture
from tensorlens.program.program import Program
from tensorlens.program.steps import Slot, Step
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recording import Recording
from tensorlens.records import Index

PRODUCTS = words("mul div matmul einsum")
"""Operations that multiply by a constant."""

MATRICES = words("linear matmul einsum")

SAME_STATE = words("cast reshape expand")
"""Operations after which a state is still the same state."""


class Component(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that writes to the residual stream.

    Attributes:
        kind: ``"embedding"``, ``"attention head"``, ``"attention"`` where its heads cannot be told apart,
            ``"attention bias"`` (of its output projection), ``"feed-forward"``, ``"bias"`` (on the stream itself), or
            ``"block"`` where the parts of a block cannot be told apart. Parts of a block without attention are
            ``"part 1"``, ``"part 2"``; writes after a block and before the next are ``"between blocks"``. A
            second one of a kind is ``"attention 2"``, ``"feed-forward 2"``. If neurons were requested,
            ``"neuron"`` and ``"feed-forward bias"``; if experts were, ``"expert"``, and ``"feed-forward"`` for a part
            of no expert. If features were, ``"feature"``, ``"decoder bias"`` and ``"error"``; features of a
            cross-layer dictionary that read an earlier block are ``"feature of block 3"``.
        block: The block it is in, if any.
        head: Its number, if it is a head.
        neuron: Its number, if it is a neuron.
        expert: Its number, if it is an expert.
        feature: Its number, if it is a feature of a dictionary.
    """

    kind: str
    block: Index | None = None
    head: Index | None = None
    neuron: Index | None = None
    expert: Index | None = None
    feature: Index | None = None

    def __str__(self) -> str:
        if self.kind == "block":
            return f"block {self.block}"
        number = next((one for one in (self.neuron, self.expert, self.feature) if one is not None), self.head)
        what = self.kind if number is None else f"{self.kind} {number}"
        return what if self.block is None else f"block {self.block}, {what}"

    @property
    def column(self) -> str | None:
        """Its column in the picture of blocks and heads; None if it has no cell there."""
        inner = (self.neuron, self.expert, self.feature)
        if self.block is None or self.kind.endswith(("bias", "error")) or any(one is not None for one in inner):
            return None
        if self.head is None:
            return self.kind
        return str(self.head) if self.kind == "attention head" else f"{self.kind} {self.head}"

    @property
    def short(self) -> str:
        """A name for a picture."""
        if self.block is None:
            return self.kind
        what = {"feed-forward": "ff", "attention bias": "b", "bias": "b"}.get(self.kind, "")
        if self.feature is not None:
            return f"{self.block} f{self.feature}"
        return f"{self.block}.{self.head}" if self.head is not None else f"{self.block} {what}".strip()


class Write(NamedTuple):
    """A term added to the stream: its slot, and the attention it came from, if any."""

    slot: int
    mixtures: tuple[Mixture, ...]


class StreamSum(NamedTuple):
    """A sum that writes to the stream.

    Attributes:
        slot: Its result.
        writes: The terms that are written.
        term: The term that is the stream.
        stream: Where components read the stream: the term, or the same state in another type or shape.
    """

    slot: int
    writes: tuple[Write, ...]
    term: int
    stream: int


class Turn(NamedTuple):
    """On the way down from a sum to one of its terms: a sum, and which of its two terms is next."""

    slot: int
    place: int


Way = tuple[Turn, ...]


class Stream:
    """The stream in one block.

    Args:
        program: The steps of the block.
        entry: The slot of the state that enters it.
        mixtures: Its mixtures of values by attention.
        rules: The conventions in force.
    """

    def __init__(self, program: Program, entry: int, mixtures: Sequence[Mixture], rules: Rules) -> None:
        self.program, self.entry, self.mixtures = program, entry, mixtures
        self._splits_products = rules.name != "paper"
        self._weights = program.constants.names
        self._order = {slot: -2 for slot in program.inputs} | {entry: -1}
        self._parents: dict[int, list[int]] = {slot: [] for slot in self._order}
        self._sums: dict[int, tuple[int, int]] = {}
        for place, step in enumerate(program.steps):
            parents = [slot for slot in dict.fromkeys(step.slots) if slot in self._parents]
            if parents:  # otherwise it holds a constant that a write left in memory
                self._order[step.out], self._parents[step.out] = place, parents
                if self._is_sum(step):
                    self._sums[step.out] = step.args[0].index, step.args[1].index

    def _is_sum(self, step: Step) -> bool:
        specs = self.program.specs
        is_live = step.operation == "add" and all(type(arg) is Slot and arg.index in self._order for arg in step.args)
        if not is_live or specs[step.args[0].index].shape != specs[step.args[1].index].shape:
            return False
        return not (self._splits_products and self._is_product(step))

    def _is_product(self, step: Step) -> bool:
        """Whether a sum is one product of two live factors, each times the other's value: a⁰ b + a b⁰."""
        if step.out != max(step.slots) + 1 or abs(step.slots[0] - step.slots[1]) != 1:
            return False  # a rule makes all three at once
        return all(self._is_scaled(self.program.makers.get(slot)) for slot in step.slots)

    def _is_scaled(self, step: Step | None) -> bool:
        """Whether a step multiplies by a constant that is not a weight."""
        if step is None or step.operation not in PRODUCTS:
            return False
        return bool(step.held) and self._weights.keys().isdisjoint(step.held)

    def sums(self, end: int) -> list[StreamSum] | None:
        """The sums that write to the stream, the last first; None if the parts of the block cannot be told apart.

        Args:
            end: The slot of the state that leaves the block.
        """
        found: list[StreamSum] = []
        slot: int | None = end
        while True:
            slot = self._next_sum(slot)
            if slot == self.entry:
                return found
            one = None if slot is None else self._sum(slot)
            if one is None:
                return None
            found.append(one)
            slot = one.stream

    def last_matrix(self, write: Write, of: StreamSum) -> Step | None:
        """The last matrix of a write after it left the stream: its inputs are the neurons."""
        behind = self._ancestors(write.slot, (of.term, of.stream)) - {of.term, of.stream}
        steps = [step for step in self.program.steps if step.out in behind and is_matrix(step, self.program)]
        return steps[-1] if steps else None

    def read_state(self, write: Write, of: StreamSum) -> int | None:
        """The one state that the first matrices of a write read, such as the output of its norm; None if several."""
        stream = {of.term, of.stream}
        behind, late, found = self._ancestors(write.slot, stream) - stream, set[int](), set[int]()
        for step in self.program.steps:
            if step.out not in behind:
                continue
            if not late.isdisjoint(step.slots):
                late.add(step.out)
            elif step.operation in MATRICES and len(set(step.slots)) == 1:
                late.add(step.out)
                found.add(self._same_state(step.slots[0], MOVES, stream))
        return found.pop() if len(found) == 1 else None

    def _next_sum(self, slot: int) -> int | None:
        """The nearest sum on the way back that the whole stream goes through, or the block's entry."""
        mixed = {mixture.slot for mixture in self.mixtures}
        if slot not in self._order:
            return None
        ahead, met = [(-self._order[slot], slot)], {slot}
        while ahead:
            _, slot = heapq.heappop(ahead)
            if slot == self.entry or not ahead and slot in self._sums:
                return slot if not ahead else None
            if slot in mixed:
                return None
            for parent in self._parents[slot]:
                if parent not in met:
                    met.add(parent)
                    heapq.heappush(ahead, (-self._order[parent], parent))
        return None

    def _sum(self, root: int) -> StreamSum | None:
        """Split a sum: the stream is the nearest term that all other terms were computed from.

        In $(x + f(x)) + g(x + f(x))$ that is $x + f(x)$, a sum itself; in $(f(x) + g(x)) + x$ it is $x$.
        """
        # With attention held, the decoder's reading of the encoder does not come from the decoder's own stream.
        ways = [(way, term) for way, term in self._terms(root, ()) if self._comes_from(term, self.entry)]
        longest = max((len(way) for way, _ in ways), default=0)
        for way in dict.fromkeys(way[:n] for n in range(1, longest + 1) for way, _ in ways):
            term = self._sums[way[-1].slot][way[-1].place]
            others = [other for place, other in ways if place[: len(way)] != way]
            for origin in (term, self._same_state(term)):
                if all(self._comes_from(other, origin) for other in others):
                    return self._split(way, term, origin)
        return None

    def _terms(self, slot: int, way: Way) -> Iterator[tuple[Way, int]]:
        """The terms of a sum of sums, each with the way to it."""
        for place, term in enumerate(self._sums[slot]):
            further = (*way, Turn(slot, place))
            if term in self._sums and term != self.entry:
                yield from self._terms(term, further)
            else:
                yield further, term

    def _split(self, way: Way, term: int, origin: int) -> StreamSum:
        """The writes: the siblings along the way from a sum to its stream."""
        stops = {term, origin, *(turn.slot for turn in way)}
        others = [self._sums[slot][1 - place] for slot, place in way]
        writes = [part for other in others for part in self._parts(other, stops)]
        return StreamSum(way[0].slot, tuple(writes), term, origin)

    def _parts(self, slot: int, stops: set[int]) -> Iterator[Write]:
        """One write, or two if attention and feed-forward were added before they were written (parallel)."""
        parts = self._sums.get(slot, ())
        if len([part for part in parts if self._mixed(part, stops)]) == 1:
            for part in parts:
                yield from self._parts(part, stops)
        else:
            yield Write(slot, self._mixed(slot, stops))

    def _mixed(self, slot: int, stops: set[int]) -> tuple[Mixture, ...]:
        """The attention that a write was computed from since it left the stream."""
        behind = self._ancestors(slot, stops)
        return tuple(mixture for mixture in self.mixtures if mixture.slot in behind)

    def _same_state(self, slot: int, operations: Collection[str] = SAME_STATE, stops: Collection[int] = ()) -> int:
        while slot not in stops and slot in self.program.makers and self.program.makers[slot].operation in operations:
            slot = self._parents[slot][0]
        return slot

    def _comes_from(self, slot: int, origin: int) -> bool:
        return origin in self._ancestors(slot, (origin,))

    def _ancestors(self, slot: int, stops: Collection[int]) -> set[int]:
        """A slot and all slots that it was computed from, down to those of `stops`."""
        ahead, met = [slot], {slot}
        while ahead:
            slot = ahead.pop()
            for parent in () if slot in stops else self._parents[slot]:
                if parent not in met:
                    met.add(parent)
                    ahead.append(parent)
        return met


def is_matrix(step: Step, program: Program) -> bool:
    """Whether a step multiplies a live value by a weight matrix."""
    if step.operation == "linear":
        return type(step.args[0]) is Slot
    is_product = step.operation == "matmul" and type(step.args[0]) is Slot
    return is_product and program.constants[step.args[1].index].dim() == 2


# Experts --------------------------------------------------------------------------------------------------------------


class ExpertRows(NamedTuple):
    """The write of one expert: the slot of rows that contains it, its own rows, and the tokens of these."""

    expert: int
    slot: int
    rows: Tensor
    tokens: Tensor


def expert_rows(recording: Recording, program: Program, block: int) -> list[ExpertRows]:
    r"""The write of each expert of a block; empty without experts, or if they cannot be told apart.

    A module that takes states and, beside them, the numbers of the experts chosen for each token gives out
    $y_j = Σ_{e ∈ chosen(j)} w_{j,e} f_e(x_j)$, by adding the experts' rows to their tokens one expert after the other,
    or by a sum over the choices of each token.
    """
    for choice in [one for one in recording.choices if one.block == block]:
        steps = [step for step in program.steps if f"{step.module}.".startswith(f"{choice.module}.")]
        found = _added_rows(choice, steps, program) or _summed_rows(choice, steps, program)
        if found:
            return found
    return []


def _added_rows(choice: Choice, steps: list[Step], program: Program) -> list[ExpertRows]:
    """Rows that are added to their tokens, one expert after the other in the order of their numbers."""
    experts = choice.experts.unique().tolist()
    added = [one for one in steps if one.operation == "index_add" and one.args[1] == 0 and type(one.args[3]) is Slot]
    if len(added) != len(experts):
        return []
    found = []
    for expert, step in zip(experts, added, strict=True):
        tokens = program.constants[step.args[2].index]
        found.append(ExpertRows(expert, step.args[3].index, torch.arange(len(tokens), device=tokens.device), tokens))
    return found


def _summed_rows(choice: Choice, steps: list[Step], program: Program) -> list[ExpertRows]:
    """Rows (token, choice, channel) that are summed over choices."""
    chosen = choice.experts
    slots = [step.slots[0] for step in steps if step.operation == "sum" and step.args[1] in ((1,), (-2,))]
    slots = [slot for slot in slots if program.specs[slot].shape[:-1] == tuple(chosen.shape)]
    if not slots:
        return []
    # Row r of the (token · choice) rows is choice r % k of token r // k.
    places = {expert: (chosen.flatten() == expert).nonzero()[:, 0] for expert in chosen.unique().tolist()}
    return [ExpertRows(expert, slots[-1], rows, rows // chosen.shape[1]) for expert, rows in places.items()]
