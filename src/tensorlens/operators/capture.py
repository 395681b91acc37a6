r"""The law of capture: does the program see everything that the input moves?

The capture (which operations carry the input) is one for all members of the family; only the replacements differ. The
Jacobian's member has a truth outside: finite differences of the model itself. A path that was lost, to a kernel that
torch's dispatcher does not see, to numpy, to another thread, is a constant in every other law; here it is a gap,

    ‖(F(X + εv) - F(X - εv)) / 2ε - T_J v‖ / ‖T_J v‖,

of the size of that path. Block by block from its own state, and end to end, on the first tokens of the input; blocks of
a half-precision model are copied to float32, since finite differences in half precision are noise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError, TensorLensError
from tensorlens.models.evidence import tensors_in
from tensorlens.models.layouts import changed
from tensorlens.models.precision import in_float64, tf32
from tensorlens.models.runner import End, run
from tensorlens.operators.laws import normal
from tensorlens.operators.model_itself import as_tokens
from tensorlens.program.nodes import words
from tensorlens.program.program import Program
from tensorlens.recording.blocks import BlockCall
from tensorlens.recording.conventions import Rules
from tensorlens.recording.prologue import Reborn
from tensorlens.recording.record import record
from tensorlens.recording.recording import Origin, Recording, Span

MOST_TOKENS = 64
"""Tokens of the input that are enough to show which operations carry it."""

STEPS = {torch.float64: (3e-4, 1e-5, 3e-7, 1e-8), torch.float32: (3e-3, 3e-4, 3e-5)}
"""Sizes of a step, relative to the state: each where the one before is not small enough for what bends sharply."""

ACCEPTED = 2e-2
"""The smallest lost path that the law is sure to see, as a part of what the block carries."""

HALF = (torch.bfloat16, torch.float16)
READS = ("held: item", "held: cast")
"""Rules that hold what finite differences move, by design: numbers that leave for Python, and whole numbers."""
JUMPS = words(
    "round trunc floor ceil sign threshold hardshrink floor_divide frac fmod remainder "
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine"
)
"""Functions that finite differences may step over a jump of."""


@dataclass
class Capture:
    """What finite differences say.

    Attributes:
        blocks: The gap of each block that was measured.
        whole: That of the whole model; None for one in half precision, or with parts in it.
        left_out: Blocks that cannot be run on their own, or round to half precision by their own code.
        by_design: Modules that hold what finite differences move.
        jumping: Modules of functions with jumps.
    """

    blocks: dict[int, float] = field(default_factory=dict)
    whole: float | None = None
    left_out: list[int] = field(default_factory=list)
    by_design: tuple[str, ...] = ()
    jumping: tuple[str, ...] = ()

    @property
    def is_explained(self) -> bool:
        """Whether a gap may have other reasons than a path that was lost."""
        return bool(self.by_design or self.jumping)

    def note(self, recorded: Any) -> None:
        """Note what a recording, of a block or of all, holds that finite differences move."""
        for rule, module in sorted(recorded.rules_applied):
            if rule.startswith(READS) and module not in self.by_design:
                self.by_design += (module,)
            if rule.rpartition(": ")[2] in JUMPS and module not in self.jumping:
                self.jumping += (module,)

    @property
    def error(self) -> float | None:
        """The largest gap; None if nothing could be measured."""
        return max([*self.blocks.values(), *([] if self.whole is None else [self.whole])], default=None)


def capture(recording: Recording, generator: torch.Generator) -> Capture:
    """Compare the Jacobian's member of a model with finite differences of the model itself."""
    short = _shortened(recording)
    origin = short.from_model("The law of capture")
    found = Capture()
    found.note(short)
    rules = Rules.jacobian(include_final_norm=recording.rules.include_final_norm)
    with tf32(False):
        for call, state in zip(origin.calls, short.states, strict=False):
            gap = _gap_of_block(call, _own_part(short, call.n, state), generator, found)
            if gap is None:
                found.left_out.append(call.n)
            else:
                found.blocks[call.n] = gap
        if not recording.n_encoder_blocks and not _is_half(short.program):
            found.whole = _gap_of_model(origin, rules, short, generator, found)
    return found


def _shortened(recording: Recording) -> Recording:
    """A recording of the first tokens, for an input that is long; of all of it where it cannot be cut."""
    origin = recording.from_model("The law of capture")
    inputs = beginning(origin.inputs, MOST_TOKENS)
    if inputs is None:
        return recording
    try:
        return record(origin.anatomy, inputs, recording.rules)
    except (TensorLensError, RuntimeError, ValueError, IndexError):  # a model for inputs of one length
        return recording


def beginning(inputs: dict[str, Any], n: int) -> dict[str, Any] | None:
    """The first `n` tokens of a text: every axis over tokens is cut; None where there are no more, or none at all."""
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if not isinstance(tokens, Tensor) or tokens.dim() < 2 or tokens.shape[1] <= n or "decoder_input_ids" in inputs:
        return None
    length = tokens.shape[1]
    return {name: _cut(value, length, n) if isinstance(value, Tensor) else value for name, value in inputs.items()}


def _cut(value: Tensor, length: int, n: int) -> Tensor:
    # Of (sample, token, channel) the last axis may be as long as the input by chance.
    axes = (1,) if value.is_floating_point() and value.dim() == 3 else range(value.dim())
    for axis in axes:
        if value.shape[axis] == length:
            value = value.narrow(axis, 0, n)
    return value


def _own_part(recording: Recording, n: int, state: Tensor) -> Tensor:
    """The tokens of a state that a block takes: the encoder's, or the decoder's."""
    split = recording.split(n)
    return state[:, :split] if n < recording.n_encoder_blocks else state[:, split:]


def _gap_of_block(call: BlockCall, x: Tensor, generator: torch.Generator, found: Capture) -> float | None:
    """The gap of one block at its own state; None if it cannot be run on its own."""
    if not call.is_plain:
        return None
    try:
        if x.dtype in HALF:
            call, x = _in_float32(call), x.float()
        recorded = call.record(x, Rules.jacobian())
        found.note(recorded)
        program = recorded.program.linear
        if _is_half(program):
            return None
        return _gap(call.run, lambda v: program.run(v)[0], x, generator)
    except (TensorLensError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError):
        return None


def _is_half(program: Program) -> bool:
    """Whether parts of a program are in half precision, in which finite differences are noise."""
    return any(program.specs[step.out].dtype in HALF for step in program.steps)


def _in_float32(call: BlockCall) -> BlockCall:
    def wide(x: Tensor) -> Tensor:
        return x.float() if x.dtype in HALF else x

    args, kwargs = changed((call.args, call.kwargs), wide)
    return call.like(copy.deepcopy(call.module).float(), args, kwargs)


def _gap_of_model(
    origin: Origin, rules: Rules, short: Recording, generator: torch.Generator, found: Capture
) -> float | None:
    """The gap from X⁰ to X^N; None where the place that makes X⁰ was not seen."""
    if origin.birth is None or short.starts_at_embedding:
        return None
    try:
        recorded = short if short.rules == rules else record(origin.anatomy, origin.inputs, rules)
    except NotLinearError:  # what other members hold has no derivative
        return None
    found.note(recorded)
    to: End = "end" if rules.include_final_norm else "last block"
    layout, birth = origin.calls[0].layout, origin.birth
    kept = [*origin.model.parameters(), *origin.model.buffers(), *tensors_in(origin.inputs)]

    def model(x: Tensor) -> Tensor:
        other = Reborn(birth, layout.to_native(x), kept)
        return as_tokens(origin, run(origin.anatomy, origin.inputs, to=to, n_blocks=recorded.n_blocks, within=other))

    span = Span(0, recorded.n_blocks)
    return _gap(model, lambda v: recorded.push(v, span, linear=True), recorded.states[0], generator)


def _gap(
    function: Callable[[Tensor], Tensor], tangent: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator
) -> float:
    """The relative difference of a derivative and a central difference, by the best step.

    A token may be a thousand times as large as another: each is moved by a part of its own size, and counts by it.
    """
    v = _sizes(x, 1e-6) * normal(x.shape, x, generator)
    expected = in_float64(tangent(v))
    best = float("inf")
    for step in STEPS.get(x.dtype, STEPS[torch.float32]):
        after, before = in_float64(function(x + step * v)), in_float64(function(x - step * v))
        sizes = _sizes((after + before) / 2, 1e-3)
        gap = (((after - before) / (2 * step) - expected) / sizes).norm() / (expected / sizes).norm().clamp_min(1e-300)
        best = min(best, float(gap))
        if best <= ACCEPTED / 4:
            break
    return best


def _sizes(x: Tensor, least: float) -> Tensor:
    """The size of the numbers along the last axis, and at least a part of the size of all of them."""
    return torch.maximum(x.square().mean(-1, keepdim=True), least**2 * x.square().mean()).sqrt().clamp_min(1e-300)
