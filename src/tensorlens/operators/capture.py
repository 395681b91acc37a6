r"""The law of *capture*: does the recording see every path of the input? It shares no code with the rules.

All rule sets agree on which operations carry the input; only the replacements differ. For the Jacobian there is
an independent reference: finite differences of the model itself. A path that was lost, to a kernel that torch's
dispatcher does not see, to numpy, to another thread, is a constant in every other law; here it shows as a gap,

    ‖(F(X + εv) - F(X - εv)) / 2ε - T_J v‖ / ‖T_J v‖,

of the size of that path. The first tokens of the input are enough.

- `_of_model`: the input is recorded once under the Jacobian's rules, and the model runs at X⁰ + εv and at X⁰ - εv. Each
  block is given the model's own difference at its entry and must return the model's own difference at its exit.
- `_of_block`: one block from its own state, where the first way found a gap or is not possible. In half precision
  finite differences are noise, so a block is copied to float32. Blocks with the same steps in the same modules
  share their code, so one block of each kind is copied.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens import tolerances
from tensorlens.errors import NotLinearError, TensorLensError, words
from tensorlens.models.layouts import find_state, is_plain, state_layout
from tensorlens.models.runner import run, tf32
from tensorlens.operators.laws import normal
from tensorlens.operators.plain import as_tokens, body_end
from tensorlens.program.marks import MOVES
from tensorlens.program.program import Program
from tensorlens.program.steps import Slot
from tensorlens.recording.calls import BlockCall
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Origin, Recording, Span
from tensorlens.tolerances import in_float64
from tensorlens.trees import map_tensors

MOST_TOKENS = 32
"""Number of tokens that suffices to show which operations carry the input."""

STEPS = {torch.float64: (1e-6, 1e-8, 3e-4), torch.float32: (1e-3, 1e-4, 3e-5)}
"""Step sizes relative to the state, tried in turn: some cross a bend, or are lost to the model's rounding."""

HALF = (torch.bfloat16, torch.float16)
READS = ("held: item", "held: cast")
"""Rules that by design hold values that finite differences move: numbers read by Python, and whole numbers."""
JUMPS = words(
    "round trunc floor ceil sign threshold hardshrink floor_divide frac fmod remainder "
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine"
)
"""Functions with jumps that finite differences may step over."""

NOT_ALONE = (TensorLensError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""Errors that a block, or a model for inputs of a fixed length, may raise on a shorter input."""


@dataclass
class Capture:
    """The result of finite differences.

    Attributes:
        blocks: The gap of each block that was measured.
        whole: The gap of the whole model, if no block has one but the code around the blocks may.
        left_out: Blocks that cannot be run on their own, or round to half precision by their own code.
        by_design: Modules that by design hold values that finite differences move.
        jumping: Modules of functions with jumps.
    """

    blocks: dict[int, float] = field(default_factory=dict)
    whole: float | None = None
    left_out: list[int] = field(default_factory=list)
    by_design: tuple[str, ...] = ()
    jumping: tuple[str, ...] = ()

    @property
    def error(self) -> float | None:
        """The largest gap; None if nothing could be measured."""
        return max([*self.blocks.values(), *([] if self.whole is None else [self.whole])], default=None)

    def note(self, recorded: Any) -> None:
        """Note the values that a recording, of a block or of all, holds although finite differences move them."""
        for rule, module in sorted(recorded.rules_applied):
            if rule.startswith(READS) and module not in self.by_design:
                self.by_design += (module,)
            if rule.rpartition(": ")[2] in JUMPS and module not in self.jumping:
                self.jumping += (module,)


def capture(recording: Recording, generator: torch.Generator) -> Capture:
    """Compare the operator under the Jacobian's rules with finite differences of the model itself."""
    found, doubtful = Capture(), list(range(recording.n_blocks))
    origin = recording.from_model("The law of capture")
    with tf32(False):
        short = None if recording.states[0].dtype in HALF else _of_jacobian(recording, origin)
        best: dict[int, float] = {}
        if short is not None:
            found.note(short)
            # Torch has no forward derivative of some kernel, or the model takes another path with each run.
            with suppress(NotLinearError, RuntimeError):
                best, found.whole = _of_model(short, generator)
            doubtful = [n for n in doubtful if not best.get(n, float("inf")) <= tolerances.CAPTURE]
            found.whole = found.whole if doubtful else None
        kinds = _kinds(recording, origin) if recording.states[0].dtype in HALF else [[n] for n in doubtful]
        calls = _calls(recording, origin, 1 + max(kind[0] for kind in kinds)) if kinds else []
        for kind in kinds:
            gap = _of_block(*calls[kind[0]], generator, found) if kind[0] < len(calls) else None
            gap = best.get(kind[0]) if gap is None else gap
            if gap is None:
                found.left_out += kind
            else:
                best[kind[0]] = gap
    found.blocks = dict(sorted(best.items()))
    return found


# The whole model ------------------------------------------------------------------------------------------------------


def _of_jacobian(recording: Recording, origin: Origin) -> Recording | None:
    """The first tokens recorded under the Jacobian's rules, or all of them if the input cannot be cut.

    None if an operation that other rule sets hold has no derivative.
    """
    rules = Rules.jacobian(include_final_norm=recording.rules.include_final_norm)
    for inputs in (beginning(origin.inputs, MOST_TOKENS), origin.inputs):
        try:
            if inputs is not None:
                return record(origin.anatomy, inputs, rules)
        except NotLinearError:
            break
        except NOT_ALONE:
            continue
    return None


def beginning(inputs: dict[str, Any], n: int) -> dict[str, Any] | None:
    """The first `n` tokens of a text, with every axis over tokens cut; None if there are not more than n."""
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[1] <= n or "decoder_input_ids" in inputs:
        return None
    length = tokens.shape[1]
    return {name: _cut(value, length, n) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _cut(value: Tensor, length: int, n: int) -> Tensor:
    # The last axis of (sample, token, channel) may be as long as the input by chance.
    axes = (1,) if value.is_floating_point() and value.dim() == 3 else range(value.dim())
    for axis in axes:
        if value.shape[axis] == length:
            value = value.narrow(axis, 0, n)
    return value


def _of_model(short: Recording, generator: torch.Generator) -> tuple[dict[int, float], float | None]:
    """The gap of each block and of all of them together, by the best step.

    None where X⁰ cannot be given to the model: there are two of it, or more than the first block reads it.
    """
    origin = short.origin
    if (
        origin is None
        or short.starts_at_embedding
        or short.n_encoder_blocks
        or _is_read_elsewhere(short.program, *short.slots[0])
        or _is_half(short.program)
    ):
        return {}, None
    pieces, x = short.pieces(Span(0, short.n_blocks)).programs, short.states[0]
    v = _direction(x, generator)
    best: dict[int, float] = {}
    whole = float("inf")
    for step in _steps(short):
        after, before = _states(short, origin, x + step * v), _states(short, origin, x - step * v)
        moved = [(one - other) / (2 * step) for one, other in zip(after, before, strict=True)]
        sizes = [_sizes((one + other) / 2, 1e-3) for one, other in zip(after, before, strict=True)]
        for n, given in _from_each(short, pieces, moved).items():
            best[n] = min(_gap(moved[n + 1] - given, given, sizes[n + 1]), best.get(n, float("inf")))
        if max(best.values()) <= tolerances.CAPTURE / 4:
            return best, None
        end = in_float64(short.push(v, Span(0, short.n_blocks), linear=True))
        whole = min(_gap(moved[-1] - end, end, sizes[-1]), whole)
    return best, whole


def _states(short: Recording, origin: Origin, x: Tensor) -> list[Tensor]:
    """The states of the model itself, as a function of the first state."""
    states = [x]

    def put_in(n: int, state: Tensor) -> Tensor | None:
        if n:
            states.append(as_tokens(origin, state, n=n).clone())
        return None if n else origin.calls[0].layout.to_native(x).clone()

    end = run(origin.anatomy, origin.inputs, to=body_end(short), n_blocks=short.n_blocks, entering=put_in)
    return [in_float64(state) for state in (*states, as_tokens(origin, end))]


def _is_read_elsewhere(program: Program, start: int) -> bool:
    """Whether a state is read by more than the first block, such as by a skip to the end."""
    same = {start}
    for step in program.steps:
        if step.block != 0 and not same.isdisjoint(step.slots):
            if step.operation not in MOVES:
                return True
            same.add(step.out)
    return False


def _from_each(short: Recording, pieces: Sequence[Program], moved: Sequence[Tensor]) -> dict[int, Tensor]:
    """The linear part of each block applied to the difference at its entry; side channels carry their own.

    A block whose output nothing reads has no entry.
    """
    values = dict.fromkeys(short.slots[0], moved[0].to(short.states[0]))
    found: dict[int, Tensor] = {}
    for n, piece in enumerate(pieces):
        (slot,) = short.slots[n + 1]
        values |= zip(piece.outputs, _moved(piece, [values[given] for given in piece.inputs]), strict=True)
        if slot in values:
            found[n] = in_float64(values[slot])
            values[slot] = moved[n + 1].to(values[slot])
    return found


# One block ------------------------------------------------------------------------------------------------------------


def _kinds(recording: Recording, origin: Origin) -> list[list[int]]:
    """Blocks that take the same steps in the same modules, apart from the block number, in groups."""
    taken: dict[int, list[Any]] = {call.n: [type(call.module)] for call in origin.calls}
    prefixes, without_numbers = [len(call.path) for call in origin.calls], cache(partial(re.sub, r"\d+", "#"))
    for step in recording.program.steps:
        if step.block is not None:
            module = without_numbers(step.module[prefixes[step.block] :])
            live = tuple([place for place, arg in enumerate(step.args) if type(arg) is Slot])
            taken[step.block].append((step.operation, module, live))
    kinds: dict[Any, list[int]] = {}
    for n, steps in taken.items():
        kinds.setdefault(tuple(steps), []).append(n)
    return list(kinds.values())


def _calls(recording: Recording, origin: Origin, n_blocks: int) -> list[tuple[BlockCall, Tensor]]:
    """The calls of the first blocks on the first tokens of the input, and their states.

    By a plain pass that ends with the last of them, if the input has more tokens.
    """
    own = [(call, _own_part(recording, call.n, recording.states[call.n])) for call in origin.calls]
    inputs = beginning(origin.inputs, MOST_TOKENS)
    if inputs is None:
        return own
    found: list[tuple[BlockCall, Tensor]] = []

    def note(n: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        state = find_state(args, kwargs, place=origin.anatomy.entry_place)
        layout = state_layout(state, n, origin.anatomy.channels, inputs)
        is_repeatable = all(map(is_plain, (*args, *kwargs.values())))
        call = replace(origin.calls[n], args=args, kwargs=kwargs, layout=layout, is_repeatable=is_repeatable)
        found.append((call, layout.to_tokens(state).clone()))

    try:
        run(origin.anatomy, inputs, to="last block", n_blocks=n_blocks, called=note)
    except NOT_ALONE:
        return own
    return found


def _own_part(recording: Recording, n: int, state: Tensor) -> Tensor:
    """The tokens of a state that a block reads: the encoder's or the decoder's."""
    split = recording.split(n)
    return state[:, :split] if n < recording.n_encoder_blocks else state[:, split:]


def _of_block(call: BlockCall, x: Tensor, generator: torch.Generator, found: Capture) -> float | None:
    """The gap of one block at its own state; None if it cannot be run on its own."""
    if not call.is_repeatable:
        return None
    try:
        if x.dtype in HALF:
            call, x = _in_float32(call), x.float()
        recorded = call.record(x, Rules.jacobian())
        found.note(recorded)
        if _is_half(recorded.program):
            return None
        v, best = _direction(x, generator), float("inf")
        expected = in_float64(_moved(recorded.program, [v])[0])
        for step in _steps(recorded):
            after, before = in_float64(call.run(x + step * v)), in_float64(call.run(x - step * v))
            difference = (after - before) / (2 * step) - expected
            best = min(_gap(difference, expected, _sizes((after + before) / 2, 1e-3)), best)
            if best <= tolerances.CAPTURE / 4:
                break
        return best
    except NOT_ALONE:
        return None


def _in_float32(call: BlockCall) -> BlockCall:
    """The same call on a copy of the block."""

    def wide(x: Tensor) -> Tensor:
        return x.float() if x.dtype in HALF else x

    args, kwargs = map_tensors(wide, (call.args, call.kwargs))
    return call.like(copy.deepcopy(call.module).float(), args, kwargs)


# Differences ----------------------------------------------------------------------------------------------------------


def _moved(program: Program, given: Sequence[Tensor]) -> list[Tensor]:
    """The linear part of a program applied to differences, without forming that part as a program."""
    return [y - at_zero for y, at_zero in zip(program.run(*given), program.run(*program.zeros()), strict=True)]


def _is_half(program: Program) -> bool:
    """Whether parts of a program are in half precision, in which finite differences are noise."""
    return not _types(program).isdisjoint(HALF)


def _types(program: Program) -> set[torch.dtype]:
    """The types of numbers that a program computes with."""
    return {program.specs[slot].dtype for slot in (*program.inputs, *[step.out for step in program.steps])}


def _steps(recorded: Any) -> tuple[float, ...]:
    """Step sizes for the precision of the model, which may cast its states."""
    return STEPS[torch.float32 if torch.float32 in _types(recorded.program) else torch.float64]


def _direction(x: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction that moves each token in proportion to its size: sizes may differ a thousandfold."""
    v = _sizes(x, 1e-6) * normal(x.shape, x, generator)
    return torch.where(x == 0, 0, v)  # the output of a relu is at the bend of the next one


def _gap(difference: Tensor, expected: Tensor, sizes: Tensor) -> float:
    """The relative size of a difference in which each token counts by its own size."""
    return float((difference / sizes).norm() / (expected / sizes).norm().clamp_min(tolerances.TINY))


def _sizes(x: Tensor, least: float) -> Tensor:
    """The size of the numbers along the last axis, but at least a share of the size of all of them."""
    squares = torch.maximum(x.square().mean(-1, keepdim=True), least**2 * x.square().mean())
    return squares.sqrt().clamp_min(tolerances.TINY)
