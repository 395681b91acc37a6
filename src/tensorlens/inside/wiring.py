r"""The residual stream as wires: who writes, who reads, and runs of the *model* with an input for every reader.

If each block adds its writes to a plain sum, component r reads

    x_r = Σ_b y_b  over the embedding and all components b before r.

With a circuit C, an edge b → r inside it carries the output of b in this run, an edge outside that of b for the
corrupted input:

    x_r = x_r(corrupted) + Σ_{b → r ∈ C} (y_b − y_b(corrupted)).

Every reader has an input of its own, so a block runs on as many rows as it has readers, and each reader's output is
taken from its own row; a head's by setting all others to zero in the input of the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import MethodError
from tensorlens.inside.block import Block, Part
from tensorlens.inside.seats import Arguments, Seat, check_lengths, readout_of_model, repeated_arguments, seat_of
from tensorlens.inside.stream import Component
from tensorlens.inside.target import Pass
from tensorlens.maps.targets import Weights
from tensorlens.memory import fitting
from tensorlens.models.layouts import replace_state, state_of
from tensorlens.models.runner import AtModule
from tensorlens.program.marks import MOVES
from tensorlens.progress import check_cancelled
from tensorlens.recording.conventions import Rules
from tensorlens.tolerances import in_float64, repeated

STRAIGHT = frozenset([*MOVES, "linear", "matmul", "add", "cast"])
"""Operations between a head's mixture and its write that are linear in the model too, not only in T."""

TARGET = Component(kind="target")
EMBEDDING = Component(kind="embedding")


class Streams(NamedTuple):
    """A plain run: the state that enters each block, the final state, the writes, and the target."""

    entering: list[Tensor]
    leaving: Tensor
    writes: dict[int, Tensor]
    value: float


@dataclass
class CircuitWiring:
    """The writers and readers of a pass, in order.

    Writers are the embedding and all readers; later readers and the target can read their outputs.

    Attributes:
        run: The pass of the clean input.
        readers: By block.

    Raises:
        MethodError: the stream of this model is not a plain sum of the outputs of single modules.
    """

    run: Pass
    readers: list[list[Part]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Find readers, and the modules that compute them."""
        recording = self.run.recording
        origin = recording.from_model("A circuit")
        if recording.n_encoder_blocks or self.run.side_channel is not None or not self.run.operator.is_whole:
            raise MethodError(
                f"`{recording.name}` passes more than one residual stream between blocks; use `tl.patching`."
            )
        if origin.calls[0].layout.batch != 0 or recording.readout is None:
            raise MethodError(f"A circuit of `{recording.name}` needs samples on the first axis, and a head.")
        self._model = origin.model
        self.write_seats: dict[int, Seat] = {}
        self.head_seats: dict[int, Seat] = {}
        for block in reversed(self.run.downwards):
            self.readers.append(list(self._of_block(block)))

    def _of_block(self, block: Block) -> Sequence[Part]:
        if block.sums is None:
            raise self._refusal(f"the parts of block {block.n} cannot be told apart")
        found: list[Part] = []
        for write, kind in block.writes:
            whole, *heads = [part for part in block.parts if part.write == write]
            seat = seat_of(self.run, whole)
            if seat is None:
                raise self._refusal(f"no single module outputs {kind} of block {block.n}")
            self.write_seats[write.slot] = seat
            # Heads are separate readers if each of them adds to the write on its own.
            seat = seat_of(self.run, heads[0]) if heads and _is_straight(block, heads[0].slot, write.slot) else None
            if seat is not None:
                self.head_seats[seat.slot] = seat
            found += [whole] if seat is None else heads
        return found

    def _refusal(self, why: str) -> MethodError:
        name = self.run.recording.name
        return MethodError(
            f"A circuit of `{name}` needs a residual stream that is a plain sum: {why}. Use `tl.patching`."
        )

    @property
    def flat(self) -> list[Part]:
        """All readers in order, without the target."""
        return [one for some in self.readers for one in some]

    @property
    def writers(self) -> tuple[Component, ...]:
        """The embedding, then every component that reads and writes."""
        return (EMBEDDING, *(one.component for one in self.flat))

    def is_wired(self) -> Tensor:
        """(reader, writer): whether a reader, the target last, comes after a writer."""
        n = len(self.flat)
        found = torch.zeros(n + 1, n + 1, dtype=torch.bool)
        found[:, 0] = True
        for r, reader in enumerate(self.flat):
            for b, writer in enumerate(self.flat):
                found[r, b + 1] = writer.block < reader.block or (
                    writer.block == reader.block and writer.place > reader.place
                )
        found[n] = True
        return found

    def reads_one_state(self, reader: Part) -> bool:
        """Whether the module of a feed-forward takes one state and nothing else that depends on the input."""
        block, path = self.run.block(reader.block), self.write_seats[reader.write.slot].path
        return not reader.write.mixtures and len(block.taken_by(path)) == 1

    # Cotangents -------------------------------------------------------------------------------------------------------

    def cotangents(self, run: Pass) -> tuple[Tensor, Tensor]:
        """Cotangents where readers read and where writers wrote, in a pass over the same model.

        Returns:
            (reader, token, channel), the target last: λ of a reader pulled through it alone, to the stream; and
            (writer, token, channel): λ of each write.
        """
        read, written = dict[int, list[Tensor]](), dict[int, list[Tensor]]()
        for n in reversed(range(run.start, run.stop)):
            block, at = run.block(n), run.cotangents(n)
            read[n], written[n] = [], []
            for slot in dict.fromkeys(reader.slot for reader in self.readers[n]):
                readers = [reader for reader in self.readers[n] if reader.slot == slot]
                stream = (block.sums or [])[readers[0].place].stream
                # (reader, …): λ of the shared slot with everything but the reader's own part (its head) set to zero
                rows = torch.stack([reader.alone(at[slot]) for reader in readers])
                pulled = block.cotangents_at({slot: rows}, (stream,), (stream,))[stream]
                read[n] += [block.to_tokens(one)[0] for one in pulled]
                written[n] += [block.to_tokens(at[readers[0].write.slot])[0]] * len(readers)
        first, last = run.block(run.start), run.block(run.stop - 1)
        end = last.to_tokens(run.waiting(run.stop)[last.exit])[0]
        start = first.to_tokens(run.waiting(run.start)[first.entry])[0]
        in_order = [[one for n in range(run.start, run.stop) for one in some[n]] for some in (read, written)]
        return torch.stack([*in_order[0], end]), torch.stack([start, *in_order[1]])

    # Runs of the model ------------------------------------------------------------------------------------------------

    def streams(self, arguments: Arguments) -> Streams:
        """The stream of a plain run, which must be a plain sum.

        Raises:
            MethodError: it is not: something comes between a block's writes and the next block.
        """
        states, last, kept = list[Tensor](), list[Tensor](), dict[int, Tensor]()
        layout = self.run.recording.from_model("A circuit").calls[0].layout

        def keep(slot: int) -> Callable[[Any], None]:
            def at(output: Any) -> None:
                kept[slot] = state_of(output).reshape(states[-1].shape).clone()  # the model may write to it

            return at

        def leaving(n: int, state: Tensor) -> None:
            if n == self.run.stop - 1:
                last.append(layout.to_tokens(state).clone())

        given = {self.module(seat): keep(slot) for slot, seat in self.write_seats.items()}
        entering = lambda n, state: states.append(layout.to_tokens(state).clone())  # noqa: E731
        end = readout_of_model(self.run.recording, arguments, given=given, entering=entering, leaving=leaving)
        for n, readers in enumerate(self.readers):
            after = states[n + 1] if n + 1 < len(states) else last[0]
            slots = dict.fromkeys(one.write.slot for one in readers)
            gap = after - states[n] - sum(kept[slot] for slot in slots)
            if float(gap.norm()) > repeated(after.dtype) * float(after.norm()):
                raise self._refusal(f"the output of block {n} is not its input plus what it wrote")
        logits = self.run.recording.logits(end, min(self.run.out_token, states[0].shape[1] - 1))[0]
        return Streams(states, last[0], kept, self.run.read(logits))

    def module(self, seat: Seat) -> nn.Module:
        """The module of a seat."""
        return self._model.get_submodule(seat.path)

    def judged(self, kept: Tensor, corrupted: Streams, clean: Tensor) -> tuple[Tensor, Tensor]:
        """Run the model with the edges outside of circuits as they are for the corrupted input.

        Args:
            kept: (circuit, reader, writer): the edges of each circuit, the target as the last reader.
            corrupted: The stream of the corrupted input.
            clean: X⁰ of the clean input (token, channel).

        Returns:
            Logits (circuit, class), and the output of each writer minus that for the corrupted input (circuit, writer,
            token, channel).
        """
        run = _Judged(self, kept, corrupted, clean)
        end = readout_of_model(
            self.run.recording,
            repeated_arguments(self.run.recording.from_model("A circuit").inputs, run.n_rows),
            n_rows=run.n_rows,
            taken=run.taken,
            given=run.given,
            entering=run.entering,
            leaving=run.leaving,
        )
        logits = self.run.recording.logits(end[:: run.width], self.run.out_token)
        return logits[1:], run.moved[1:]


class _Judged:
    """One run of several circuits: the first is the empty one, which shows the corrupted output of components.

    Rows are (circuit, reader of the block).
    """

    def __init__(self, wiring: CircuitWiring, kept: Tensor, corrupted: Streams, clean: Tensor) -> None:
        self.wiring, self.corrupted = wiring, corrupted
        self.kept = torch.cat([torch.zeros_like(kept[:1]), kept]).to(clean)
        self.width = max(map(len, wiring.readers))
        self.n_circuits = len(self.kept)
        self.n_rows = self.n_circuits * self.width
        self.layout = wiring.run.recording.from_model("A circuit").calls[0].layout
        # The output of each writer minus its corrupted output: the embedding, then readers in order.
        self.moved = clean.new_zeros(self.n_circuits, len(wiring.flat) + 1, *clean.shape)
        self.moved[1:, 0] = clean - corrupted.entering[0][0]
        self.taken: dict[nn.Module, AtModule] = {}
        self.given: dict[nn.Module, AtModule] = {}
        self.starts = [0, *accumulate(map(len, wiring.readers))]
        for start, readers in zip(self.starts, wiring.readers, strict=False):
            for slot in dict.fromkeys(one.write.slot for one in readers):
                self._seat(start, readers, slot)

    def _seat(self, start: int, readers: list[Part], slot: int) -> None:
        """Keep the output of a write's module in its own rows, and set the inputs of later readers of the block."""
        wiring, written = self.wiring, self.corrupted.writes[slot]
        own = [row for row, one in enumerate(readers) if one.write.slot == slot]
        later = [row for row, one in enumerate(readers) if one.place < readers[own[0]].place]
        writers = [start + row + 1 for row in own]

        def gave(output: Any) -> Any:
            state = state_of(output)
            # (circuit, row, token, channel); one row per circuit if `_own_row` has left out the others
            rows = state.reshape(self.n_circuits, -1, *written.shape[1:])
            found = rows if rows.shape[1] == 1 else rows[:, own]
            moved = found - found[:1]
            self.moved[:, writers] = moved
            if not later and found is not rows:
                return None
            rows = rows.expand(-1, self.width, -1, -1).clone()
            for row in later:  # a later reader of the block receives this write as its own edges carry it
                rows[:, row] = written + torch.einsum("cw,cwij->cij", self.kept[:, start + row, writers], moved)
            return replace_state(output, state, rows.reshape(-1, *state.shape[1:]))

        module, mixture = wiring.module(wiring.write_seats[slot]), readers[own[0]].slot
        self.given[module] = gave
        if mixture != slot:
            self.taken[wiring.module(wiring.head_seats[mixture])] = self._one_head_each(mixture, own)
        elif wiring.reads_one_state(readers[own[0]]):
            self.taken[module] = self._own_row(own[0])

    def _own_row(self, row: int) -> AtModule:
        """Run a module only on the rows of its own reader: its output in other rows is not used."""

        def own(x: Tensor) -> Tensor:
            return x.reshape(self.n_circuits, self.width, -1, *x.shape[1:])[:, row].flatten(0, 1).contiguous()

        return own

    def _one_head_each(self, mixture: int, own: list[int]) -> AtModule:
        """Keep only its own head in each row of a head."""
        seat, spec = self.wiring.head_seats[mixture], self.wiring.run.recording.program.specs[mixture]
        numbers = torch.arange(len(own), dtype=spec.dtype, device=spec.device)[:, None, None].expand(spec.shape[-3:])
        heads = seat.laid_out(numbers.reshape(spec.shape)).flatten()  # which head each number belongs to
        is_own = heads[None] == torch.arange(len(own), device=heads.device)[:, None]

        def alone(x: Tensor) -> Tensor:
            rows = x.clone(memory_format=torch.contiguous_format).view(self.n_circuits, self.width, -1)
            rows[:, own] *= is_own
            return rows.reshape(x.shape)

        return alone

    def entering(self, n: int, state: Tensor) -> Tensor:
        """The input of each reader of the block from earlier blocks."""
        check_cancelled()
        start, stop = self.starts[n], self.starts[n + 1]
        # (circuit, reader, token, channel): x_r = x_r(corrupted) + Σ over kept edges of y_b − y_b(corrupted)
        found = self.corrupted.entering[n].expand(self.n_circuits, self.width, -1, -1).clone()
        edges = self.kept[:, start:stop, : start + 1]
        found[:, : stop - start] += torch.einsum("crw,cwij->crij", edges, self.moved[:, : start + 1])
        return self.layout.to_native(found.flatten(0, 1)).to(state)

    def leaving(self, n: int, state: Tensor) -> Tensor | None:
        """The input of the target."""
        if n != self.wiring.run.stop - 1:
            return None
        found = self.corrupted.leaving + torch.einsum("cw,cwij->cij", self.kept[:, -1], self.moved)
        return self.layout.to_native(found.repeat_interleave(self.width, 0)).to(state)


def _is_straight(block: Block, start: int, end: int) -> bool:
    """Whether the model itself is linear from one slot to another: without norms and held factors."""
    weights = block.program.constants.names
    return all(
        step.operation in STRAIGHT or step.operation == "mul" and all(n in weights for n in step.held)
        for step in block.program.part((start,), (end,)).steps
    )


# Pairs of inputs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InputPair:
    """One pair of inputs: its wires, the corrupted run, and the target in the clean one."""

    wiring: CircuitWiring
    corrupted: Streams
    value: float

    @property
    def gap(self) -> float:
        """The difference between the clean and the corrupted input."""
        return self.value - self.corrupted.value

    def recovered(self, edges: Tensor) -> list[float]:
        """F of circuits (circuit, reader, writer) in the model, some at a time."""
        run, clean = self.wiring.run, self.wiring.run.operator.input
        if self.gap == 0:
            raise MethodError(
                "The target is the same for the clean and the corrupted input, so nothing can be recovered."
            )
        width = max(map(len, self.wiring.readers))
        bytes_each = clean.nbytes * (edges.shape[2] * 2 + 16 * width)
        most = fitting(bytes_each, len(edges), run.operator.device)
        found = list[float]()
        for some in edges.split(most):
            check_cancelled()
            logits, _ = self.wiring.judged(some.to(run.operator.device), self.corrupted, clean)
            found += [(run.read(one) - self.corrupted.value) / self.gap for one in logits]
        return found


def scored_pair(lens: Any, run: Pass, corrupted: Any, steps: int | None) -> tuple[InputPair, tuple[Tensor, Tensor]]:
    """A pair, and the scores of its edges (reader, writer) and writers (writer,)."""
    wiring, specimen = CircuitWiring(run), lens.specimen
    arguments = specimen.arguments(specimen.prepare(corrupted).arguments)
    own = run.recording.from_model("A circuit").inputs
    streams = wiring.streams(arguments)
    check_lengths(run.operator.input, streams.leaving[0])
    is_wired = wiring.is_wired()
    _, (moved,) = wiring.judged(is_wired[None].to(run.operator.device), streams, run.operator.input)
    pair = InputPair(wiring, streams, wiring.streams(own).value)
    if steps is None:
        read, written = wiring.cotangents(run)
    else:
        read, written = _integrated(specimen, wiring, own, arguments, steps, run.weights)
    edges = torch.einsum("rij,wij->rw", in_float64(read), in_float64(moved)).cpu()
    effects = (in_float64(written) * in_float64(moved)).sum((1, 2)).cpu()
    return pair, (torch.where(is_wired, edges, 0), effects)


def _integrated(
    specimen: Any, wiring: CircuitWiring, clean: dict[str, Any], corrupted: dict[str, Any], steps: int, weights: Weights
) -> tuple[Tensor, Tensor]:
    """Cotangents of the model's own gradient, averaged along the way from the corrupted embedding to the clean one."""
    embedding = wiring.run.recording.from_model("A circuit").anatomy.embedding
    if embedding is None or "input_ids" not in clean:
        raise MethodError("Integrated gradients between two inputs need token ids and their embedding.")
    with torch.no_grad():
        end, start = (embedding(one["input_ids"]) for one in (clean, corrupted))
    rules = Rules.jacobian(include_final_norm=wiring.run.recording.rules.include_final_norm)
    at = type(specimen)(specimen.model, specimen.processor, rules, specimen.blocks, specimen.name)
    rest = {name: value for name, value in clean.items() if name != "input_ids"}
    read = written = torch.zeros(())
    for k in range(1, steps + 1):
        check_cancelled()
        recording = at.record(rest | {"inputs_embeds": start + k / steps * (end - start)})
        run = Pass(type(wiring.run.operator)(recording), weights, wiring.run.out_token)
        more = CircuitWiring(run).cotangents(run)
        read, written = read.to(more[0]) + more[0] / steps, written.to(more[1]) + more[1] / steps
    return read, written
