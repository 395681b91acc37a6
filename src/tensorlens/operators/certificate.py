r"""The certificate: is this operator exact and linear, and does it see everything? Answered with numbers.

Reproducing F(X) proves nothing on its own: any split of a product passes it. The evidence is the structure of the
program, the adjoint identity, completeness with a bias found by a run at zero, and a law that shares no code with the
rules: *capture*. Which operations carry the input is one for all members of the family; only the replacements differ.
The Jacobian's member has a truth outside: finite differences of the model itself. A path that was lost, to a kernel
that torch's dispatcher does not see, to numpy, to another thread, is a constant in every other law; here it is a gap,

    ‖(F(X + εv) - F(X - εv)) / 2ε - T_J v‖ / ‖T_J v‖,

of the size of that path. Block by block from its own state, and end to end, on the first tokens of the input; blocks of
a half-precision model are copied to float32, since finite differences in half precision are noise.
"""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tensorlens import tolerances
from tensorlens.errors import AnatomyError, InputError, NotLinearError, TensorLensError
from tensorlens.models.around import said_of
from tensorlens.models.layouts import state_layout, state_of
from tensorlens.models.precision import in_float64, tf32, tf32_allowed
from tensorlens.models.runner import End, run
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.nodes import at_least_float32, words
from tensorlens.program.program import Program
from tensorlens.program.verify import verify
from tensorlens.recording.block_calls import BlockCall
from tensorlens.recording.conventions import Rules
from tensorlens.recording.one_pass import record
from tensorlens.recording.prologue import Reborn
from tensorlens.recording.recording import Origin, Recording, Span
from tensorlens.trees import map_tensors, tensors_in
from tensorlens.views.printing import Printed

N_HELD = 3
"""Modules named in the text of a certificate, of those that hold most."""

MOST_TOKENS = 32
"""Tokens of the input that are enough to show which operations carry it."""

STEPS = {torch.float64: (3e-4, 1e-5, 3e-7, 1e-8), torch.float32: (3e-3, 3e-4, 3e-5)}
"""Sizes of a step, relative to the state: each where the one before is not small enough for what bends sharply."""

HALF = (torch.bfloat16, torch.float16)
READS = ("held: item", "held: cast")
"""Rules that hold what finite differences move, by design: numbers that leave for Python, and whole numbers."""
JUMPS = words(
    "round trunc floor ceil sign threshold hardshrink floor_divide frac fmod remainder "
    "fake_quantize_per_tensor_affine fake_quantize_per_channel_affine"
)
"""Functions that finite differences may step over a jump of."""


N_CLASSES = 5
"""Classes whose logits are tried."""

N_BLOCKS = 4
"""Blocks of a half-precision model whose laws are measured in float32."""


@dataclass(frozen=True, kw_only=True)
class Certificate(Printed):
    r"""Errors of an attention tensor, relative, with the verdict.

    Attributes:
        errors: By law: `value`, `structure`, `capture`, `linearity`, `adjoint`, `completeness`, `composition`,
            `logits`; for a model in half precision also linearity and adjoint of some blocks in float32.
        tolerance: What is accepted for this type of numbers.
        rules: The modules in which each rule fired.
        conventions: Products of two live tensors whose roles are a choice and that T carries: the modules, by
            convention.
        options: The user's `Rules`.
        dtype: Type of the hidden states.
        carried: $\lVert T X \rVert / \lVert F(X) \rVert$: the part of the output that is not in B.
        moves: $\lVert T V \rVert / \lVert V \rVert$ at a random V.
        passing: For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.
        silent: The blocks that pass nothing of their input on.
        held: For each module the norm of what it gives in a run at zero, by that at X: 0 for one that T carries whole,
            1 for one that is all in B.
        rounded: The errors in the model's own half precision, for laws that blocks were tested on in float32.
        captured: For each block the gap between finite differences of the model and the Jacobian's member.
        reservations: What a plain "passed" would hide.
        seconds: What the laws took, and what those in float32 took.
    """

    errors: dict[str, float]
    tolerance: float
    rules: dict[str, tuple[str, ...]]
    conventions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    carried: float = 1.0
    moves: float = 1.0
    passing: tuple[float, ...] = ()
    silent: tuple[int, ...] = ()
    held: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    captured: dict[int, float] = field(default_factory=dict)
    reservations: tuple[str, ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every error is a number within its tolerance, and every block passes something of its input on."""
        return not self.failures

    def accepted(self, law: str) -> float:
        """What is accepted of a law."""
        if law == "capture":
            return tolerances.CAPTURE
        return tolerances.CERTIFICATE[torch.float32] if law.endswith(", float32") else self.tolerance

    @property
    def failures(self) -> tuple[str, ...]:
        """The laws that do not hold, and the blocks that pass nothing on.

        A law that was measured in float32 too is judged by that alone: in half precision it says how much was rounded.
        """
        judged = {law: error for law, error in self.errors.items() if law not in self.rounded}
        laws = [law for law, error in judged.items() if not error <= self.accepted(law)]
        zero = () if self.moves > 0 else ("T is zero",)
        return (*laws, *zero, *(f"block {n} passes nothing on" for n in self.silent))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "passed": self.passed,
            "errors": self.errors,
            "tolerance": self.tolerance,
            "carried": self.carried,
            "moves": self.moves,
            "passing": list(self.passing),
            "silent": list(self.silent),
            "held": self.held,
            "rounded": self.rounded,
            "captured": {str(n): gap for n, gap in self.captured.items()},
            "reservations": list(self.reservations),
            "dtype": self.dtype,
            "options": self.options,
            "rules": {rule: list(modules) for rule, modules in self.rules.items()},
            "conventions": {name: list(modules) for name, modules in self.conventions.items()},
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        """The verdict, the numbers, what was held, and the rules with the number of modules each."""
        lines = [f"{'exact and linear' if self.passed else 'NOT CERTIFIED: ' + ', '.join(self.failures)}"]
        lines += [f"  but: {reservation}" for reservation in self.reservations]
        lines += [
            f"  {law:<13}{error:9.1e}  (accepted: {self.accepted(law):.0e})" for law, error in self.errors.items()
        ]
        lines += [f"  {law}, rounded{error:9.1e}" for law, error in self.rounded.items()]
        lines += [f"  |T X| / |F(X)| = {self.carried:.3g}  ({self.dtype})"]
        most = sorted(self.held, key=lambda path: -self.held[path])[:N_HELD]
        lines += ["held, at zero by at X:"] if most else []
        lines += [f"  {path} {self.held[path]:.2g}" for path in most] + ["rules:"]
        lines += [f"  {rule}: {len(modules)} modules, such as {modules[0]}" for rule, modules in self.rules.items()]
        return "\n".join(lines)


def certify(operator: FrozenOperator, *, seed: int = 0) -> Certificate:
    r"""Measure the laws of an attention tensor.

    - value: the program at X against the model left to itself;
    - structure: every step of the program is affine, by a table that shares nothing with the rules;
    - capture: finite differences of the model against the Jacobian's member, block by block and end to end;
    - linearity: the affine program less B against its linear part, at a random V of the size of X;
    - adjoint: $⟨u, T·V⟩$ against $⟨T^\top u, V⟩$;
    - completeness: $⟨u, F(X) - B⟩$ against $⟨T^\top u, X⟩$, with B the program at zero;
    - composition: blocks in two steps against all at once, away from X;
    - logits: the adjoint identity from the input to the logits of a few classes, for a model with a head.

    A tensor that was loaded without its model has neither value nor capture. With heads chosen, value is
    $F(m) + F(1 - m) - F(0) = F(1)$ in their multipliers m.

    Args:
        operator: The operator.
        seed: Random seed for the probes.
    """
    began = time.perf_counter()
    recording, generator = operator.recording, torch.Generator().manual_seed(seed)
    at_x, bias, held = _at_x_and_zero(operator)
    expected = _expected(operator, at_x)
    seen = capture(recording, generator) if recording.origin is not None else Capture()
    errors = {
        "value": _value_with_heads(operator, at_x) if operator.heads else relative(at_x - expected, expected),
        "structure": _structure(operator),
    }
    if seen.error is not None and not (seen.error > tolerances.CAPTURE and seen.is_explained):
        errors["capture"] = seen.error
    probes = Probes(operator, generator)
    of_v = operator.apply(probes.v)
    errors |= probes.laws(expected, bias, of_v)
    moves = relative(of_v, probes.v)
    moves = moves if max(moves, relative(of_v, expected)) > tolerances.NOTHING else 0.0
    by_block = passing(operator, generator)
    silent = tuple(n for n, part in enumerate(by_block, operator.span.start) if part <= tolerances.NOTHING)
    seconds = {"laws": time.perf_counter() - began}
    rounded: dict[str, float] = {}
    if operator.dtype in HALF:
        began = time.perf_counter()
        exact = in_float32(operator, generator)
        rounded = {law: errors[law] for law in ("linearity", "adjoint") if f"{law}, float32" in exact}
        errors |= exact
        seconds["float32"] = time.perf_counter() - began
    return Certificate(
        errors=errors,
        tolerance=tolerance(recording),
        rules=_by_rule(recording),
        conventions=_conventions(operator),
        options=recording.rules.as_dict(),
        dtype=str(operator.dtype).removeprefix("torch."),
        carried=relative(at_x - bias, expected),
        moves=moves,
        passing=by_block,
        silent=silent,
        held=held,
        rounded=rounded,
        captured=seen.blocks,
        reservations=(
            *_of_numbers(operator, expected, errors, moves),
            *_of_capture(seen, has_model=recording.origin is not None),
            *_of_structure(operator, silent),
        ),
        seconds=seconds,
    )


def _expected(operator: FrozenOperator, at_x: Tensor) -> Tensor:
    """What the operator should give at X; with heads chosen no other way gives it."""
    if operator.heads:
        return at_x
    has_model = operator.recording.origin is not None
    return plain_output(operator.recording)[0] if operator.is_whole and has_model else operator.output


def _value_with_heads(operator: FrozenOperator, at_x: Tensor) -> float:
    """The law of heads for all blocks in which some are chosen: with the others instead, less none, it is the whole."""
    recording, span = operator.recording, operator.span
    x = operator.input[None]
    others = {n: 1 - multiplier for n, multiplier in operator.heads.items()}
    if len(others) != 1:  # the law is of one block: several multiply each other
        return 0.0
    none = {n: torch.zeros_like(multiplier) for n, multiplier in operator.heads.items()}
    found = at_x + recording.push(x, span, others)[0] - recording.push(x, span, none)[0]
    return relative(found - operator.output, operator.output)


def _structure(operator: FrozenOperator) -> float:
    """Zero for a program that is affine by its structure, infinite for another."""
    try:
        verify(operator.recording.part(operator.span, operator.heads))
    except NotLinearError:
        return float("inf")
    return 0.0


def _conventions(operator: FrozenOperator) -> dict[str, tuple[str, ...]]:
    """The conventions that steps of the program rest on."""
    found: dict[str, set[str]] = defaultdict(set)
    for step in operator.recording.part(operator.span, operator.heads).steps:
        if step.note is not None:
            found[step.note].add(step.module)
    return {name: tuple(sorted(modules)) for name, modules in found.items()}


def _of_numbers(operator: FrozenOperator, expected: Tensor, errors: dict[str, float], moves: float) -> tuple[str, ...]:
    """What must be known of the numbers themselves."""
    if not expected.isfinite().all():
        return ("the model's own output is not finite at this input: nothing can be proved of it",)
    if not moves:
        return ("T V is zero at a random V: everything is held, and B is all of F(X)",)
    recording = operator.recording
    holds = errors["value"] <= tolerance(recording) and errors.get("capture", 0.0) <= tolerances.CAPTURE
    if holds or not operator.is_whole or recording.origin is None:
        return ()
    moved = relative(plain_output(recording, is_nudged=True)[0] - expected, expected)
    if moved <= tolerances.MAGNIFIED_ROUNDING * torch.finfo(expected.dtype).eps:
        return ()
    return (f"a change of X⁰ in its last digit changes the model's own output by {moved:.1e}: it magnifies rounding",)


def _of_capture(seen: Capture, *, has_model: bool) -> tuple[str, ...]:
    found = []
    if not has_model:
        found.append("loaded without the model: neither its value nor what was captured of it is compared with it")
    if seen.left_out:
        blocks = ", ".join(map(str, seen.left_out))
        found.append(
            f"finite differences say nothing of block {blocks}: it does not run alone, or rounds to half precision"
        )
    if seen.error is not None and seen.error > tolerances.CAPTURE and seen.jumping:
        found.append(f"`{seen.jumping[0] or 'the model'}` jumps: finite differences say nothing of what it passes on")
    elif seen.error is not None and seen.error > tolerances.CAPTURE and seen.by_design:
        found.append(
            f"`{seen.by_design[0] or 'the model'}` holds numbers that finite differences move, by design: what they "
            f"carry, {seen.error:.1e} of a block, is in B"
        )
    return tuple(found)


def _of_structure(operator: FrozenOperator, silent: tuple[int, ...]) -> tuple[str, ...]:
    found: list[str] = []
    recording = operator.recording
    anatomy = None if recording.origin is None else recording.origin.anatomy
    if anatomy is not None and anatomy.beside:
        found.append(said_of(anatomy.stack, anatomy.beside))
    if anatomy is not None and anatomy.around:
        found.append(
            f"{', '.join(f'`{path}`' for path in anatomy.around)} also feeds input information to the output without "
            "passing through X⁰; this part is treated as constant and does not appear in maps"
        )
    for kind in _casts(recording):
        if kind in HALF and operator.dtype not in HALF:
            found.append(f"the model's own code computes parts in {kind}, whose rounding may hide a fault")
    if silent:
        found.append(f"block {', '.join(map(str, silent))} passes nothing of its input on")
    return tuple(found)


def tolerance(recording: Recording) -> float:
    """The relative error accepted for the numbers that the model computes with, of which it may cast some itself.

    Every cast of a float64 state to float32 rounds once more, so that the error grows as the root of their number.
    """
    dtype = recording.states[0].dtype
    if dtype == torch.float32 and recording.states[0].is_cuda and tf32_allowed():
        return tolerances.CERTIFICATE[torch.float16]  # tf32 has as many digits
    casts = _casts(recording)
    halves = [tolerances.CERTIFICATE[kind] for kind in HALF if kind in casts]
    if halves or dtype != torch.float64 or torch.float32 not in casts:
        return max([tolerances.CERTIFICATE[dtype], *halves])
    return min(tolerances.CERTIFICATE[torch.float32], tolerances.CAST_TO_FLOAT32 * casts[torch.float32] ** 0.5)


def _casts(recording: Recording) -> dict[torch.dtype, int]:
    """How often a live state was cast to each type that is narrower than the states between blocks."""
    found: dict[torch.dtype, int] = {}
    for (rule, _), n in recording.rules_applied.items():
        kind = getattr(torch, rule.removeprefix("cast: "), None) if rule.startswith("cast: ") else None
        if kind is not None and kind.itemsize < recording.states[0].dtype.itemsize:
            found[kind] = found.get(kind, 0) + n
    return found


def _by_rule(recording: Recording) -> dict[str, tuple[str, ...]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for rule, module in recording.rules_applied:
        modules[rule].append(module)
    return {rule: tuple(modules[rule]) for rule in sorted(modules)}


# Laws of the program --------------------------------------------------------------------------------------------------


def normal(shape: Sequence[int], like: Tensor, generator: torch.Generator) -> Tensor:
    """Standard normal numbers of a tensor's type, drawn where it is: a CPU takes longer than the laws do on a GPU."""
    if like.device.type == "cpu":
        return torch.randn(shape, generator=generator, dtype=like.dtype)
    seed = int(torch.randint(2**62, (), generator=generator))
    there = torch.Generator(like.device).manual_seed(seed)
    return torch.randn(shape, generator=there, dtype=like.dtype, device=like.device)


class Probes:
    """A random state v and a random cotangent u, and the laws that need them."""

    def __init__(self, operator: FrozenOperator, generator: torch.Generator) -> None:
        self.operator, self._generator = operator, generator
        n_out, d_out, n_in, d_in = operator.shape
        self.u = self.normal(1, n_out, d_out)
        self.v = operator.input.square().mean().sqrt() * self.normal(n_in, d_in)

    def normal(self, *shape: int) -> Tensor:
        """Standard normal numbers of the operator's type."""
        return normal(shape, self.operator.input, self._generator)

    def laws(self, expected: Tensor, bias: Tensor, of_v: Tensor) -> dict[str, float]:
        """The errors of the laws of T and B by name; one that cannot be asked of this operator is left out.

        Args:
            expected: F(X).
            bias: B, the program at zero.
            of_v: T·V.
        """
        operator, recording = self.operator, self.operator.recording
        at_v, pulled = operator.push(self.v[None])[0], operator.pull(self.u)
        found: dict[str, float | None] = {
            "linearity": relative(at_v - bias - of_v, at_v),
            "adjoint": self.mismatch(of_v, pulled, self.v),
            "completeness": self.mismatch(expected - bias, pulled, operator.input, scale=expected),
            "composition": self.composition(at_v),
        }
        has_logits = (
            recording.readout_slot is not None and recording.readout is not None and recording.readout.dim() < 4
        )
        if has_logits and operator.span.stop == recording.n_blocks:
            found["logits"] = self.logits(of_v)
        if "folded" in operator.__dict__ and operator.folded is not None:  # rows or norms were asked for
            found["folded"] = self.folded(pulled)
        return {law: error for law, error in found.items() if error is not None}

    def folded(self, pulled: Tensor) -> float:
        """Relative error of folded blocks against the program, by the way of few cotangents and by that of many."""
        ways = (False, True) if self.operator.matrices_fit(n_passes=3) else (False,)
        found = [self.operator.adjoint_folded(self.u, by_matrices=way).to(pulled) for way in ways]
        return max(relative(one - pulled, pulled) for one in found)

    def mismatch(self, y: Tensor, pulled: Tensor, x: Tensor, scale: Tensor | None = None) -> float:
        """⟨u, y⟩ - ⟨pulled, x⟩, relative to the norm of y."""
        difference = in_float64(self.u * y).sum() - in_float64(pulled * x).sum()
        return float(difference.abs() / in_float64(y if scale is None else scale).norm().clamp_min(tolerances.TINY))

    def composition(self, at_once: Tensor) -> float | None:
        """Relative error of blocks in two steps against all at once; None where a range in the middle is refused.

        Args:
            at_once: The affine map at v.
        """
        recording, (start, stop), heads = self.operator.recording, self.operator.span, self.operator.heads
        if stop - start < 2:
            return 0.0
        middle = (start + stop) // 2
        try:
            recording.part(Span(middle, stop), heads)
        except AnatomyError:
            return None
        halfway = recording.push(self.v[None], Span(start, middle), heads)
        return relative(recording.push(halfway, Span(middle, stop), heads)[0] - at_once, at_once)

    def logits(self, of_v: Tensor) -> float:
        r"""Relative error of $⟨w, T_{logits} V⟩ = ⟨T_{logits}^\top w, V⟩$ for weights w of a few classes.

        Args:
            of_v: T·V; the head alone takes it to the logits, unless it reads more than the last state.
        """
        operator, recording = self.operator, self.operator.recording
        out_token = last_read(recording, operator.shape[0])
        try:
            head = Span(recording.n_blocks, recording.n_blocks)
            end = recording.push(of_v[None], head, linear=True, to_logits=True)
        except AnatomyError:
            end = operator.push_to_head(self.v[None], linear=True)
        weights = torch.zeros(recording.logits_at(out_token).shape, dtype=operator.dtype, device=operator.device)
        some = torch.randperm(len(weights), generator=self._generator)[:N_CLASSES].to(weights.device)
        weights[some] = self.normal(len(some))
        u = recording.head_cotangent(weights, out_token)
        pulled = operator.pull_from_head(u)[0]
        difference = in_float64(u * end).sum() - in_float64(pulled * self.v).sum()
        return float(difference.abs() / (in_float64(u).norm() * in_float64(end).norm()).clamp_min(tolerances.TINY))


def last_read(recording: Recording, n_tokens: int) -> int:
    """The last output that the head reads: it may read fewer places than the body ends with."""
    readout = recording.readout
    if recording.head is None:
        n_read = n_tokens if readout is None or readout.dim() < 3 else readout.shape[1]
        return min(n_tokens, n_read) - 1
    for token in reversed(range(n_tokens)):
        with suppress(InputError):
            recording.place_read(token)
            return token
    return n_tokens - 1


def relative(difference: Tensor, scale: Tensor) -> float:
    """The norm of a difference by that of what it is a difference of."""
    return float(in_float64(difference).norm() / in_float64(scale).norm().clamp_min(tolerances.TINY))


def in_float32(operator: FrozenOperator, generator: torch.Generator) -> dict[str, float]:
    """The largest error of the laws over a few blocks of a half-precision model, cast to float32: no rounding hides.

    In bfloat16 every law holds to a few per cent alone. The constants of a block are copied, nothing of the model is.
    """
    start, stop = operator.span
    chosen = sorted({start, (start + stop) // 2, stop - 1, *_some(start, stop, generator)})[:N_BLOCKS]
    worst: dict[str, float] = {}
    wide = operator.input.float()
    with tf32(False):
        for n in chosen:
            try:
                program = operator.recording.part(Span(n, n + 1), operator.heads).to(torch.float32)
            except AnatomyError:  # it reads more than the state
                continue
            ends = (program.inputs[0], program.outputs[0])
            v, u = (normal(program.specs[slot].shape, wide, generator) for slot in ends)
            at_v, at_zero = program.run(v)[0], program.run(torch.zeros_like(v))[0]
            of_v, pulled = program.linear.run(v)[0], program.linear.pull(u)[0]
            found = {
                "linearity, float32": relative(at_v - at_zero - of_v, at_v),
                "adjoint, float32": relative((u * of_v).sum() - (pulled * v).sum(), u.norm() * of_v.norm()),
            }
            worst = {law: max(error, worst.get(law, 0.0)) for law, error in found.items()}
    return worst


def _some(start: int, stop: int, generator: torch.Generator) -> list[int]:
    return torch.randint(start, stop, (1,), generator=generator).tolist()


# How much passes on ---------------------------------------------------------------------------------------------------


def passing(operator: FrozenOperator, generator: torch.Generator) -> tuple[float, ...]:
    r"""For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.

    By the size of what the block gave: a norm at its end makes any state small. What a block reads beside the state
    is zero.
    """
    recording, found = operator.recording, []
    for n in range(*operator.span):
        state = recording.states[n]
        v = state.square().mean().sqrt() * normal(state.shape, state, generator)
        pushed = recording.push_alone(v, n, operator.heads)
        found.append(relative(pushed, recording.states[n + 1]))
    return tuple(found)


def _at_x_and_zero(operator: FrozenOperator) -> tuple[Tensor, Tensor, dict[str, float]]:
    r"""The program at X and at zero, and for each module $\lVert Y(0) \rVert / \lVert Y(X) \rVert$ of what it gives.

    Zero is a module whose output is all carried by T, one a module whose output is all in B. Empty for a range of
    blocks, for chosen heads, for one sample of several, and for a long input.
    """
    recording, x = operator.recording, operator.input[None]
    if not operator.is_whole or recording.is_streamed or recording.n_samples > 1:
        return operator.push(x)[0], operator.bias, {}
    # Slots of what nobody reads any more, such as queries that are held, are gone.
    live = {output.slot for output in recording.modules if output.slot is not None} & set(recording.program.specs)
    inputs, outputs = recording.slots[0], recording.slots[-1]
    program = recording.program.part(inputs, outputs, also=live)

    def run_at(x: Tensor) -> tuple[Tensor, dict[int, float]]:
        found = program.observe(recording._divided(inputs, x), {*outputs, *live})
        sizes = {slot: float(at_least_float32(found[slot]).norm()) ** 2 for slot in live}
        return recording._joined(tuple([found[slot] for slot in outputs]))[0], sizes

    (at_x, there), (at_zero, left) = run_at(x), run_at(torch.zeros_like(x))
    squares: dict[str, tuple[float, float]] = {}
    for path, slot in recording.modules:
        if slot is None or slot in live:  # without a slot it is held whole, unless it also gave something live
            zero, whole = squares.get(path, (0.0, 0.0))
            squares[path] = (zero, whole) if slot is None else (zero + left[slot], whole + there[slot])
    all_held = {path for path, slot in recording.modules if slot is None}
    held = {
        path: (zero / whole) ** 0.5 if whole else 1.0
        for path, (zero, whole) in squares.items()
        if whole or path in all_held
    }
    return at_x, at_zero, held


# The law of capture ---------------------------------------------------------------------------------------------------


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
    short, found = _of_jacobian(recording), Capture()
    found.note(short)
    origin = short.from_model("The law of capture")
    with tf32(False):
        for call, state in zip(origin.calls, short.states, strict=False):
            gap = _gap_of_block(call, _own_part(short, call.n, state), generator, found)
            if gap is None:
                found.left_out.append(call.n)
            else:
                found.blocks[call.n] = gap
        if short is not recording and not recording.n_encoder_blocks and not _is_half(short.program):
            found.whole = _gap_of_model(origin, short, generator)
    return found


def _of_jacobian(recording: Recording) -> Recording:
    """The first tokens recorded under the Jacobian's rules; all of them where the input cannot be cut.

    The recording as it is where what other members hold has no derivative: it still has the states of blocks.
    """
    origin = recording.from_model("The law of capture")
    rules = Rules.jacobian(include_final_norm=recording.rules.include_final_norm)
    for inputs in (beginning(origin.inputs, MOST_TOKENS), origin.inputs):
        try:
            if inputs is not None:
                return record(origin.anatomy, inputs, rules)
        except NotLinearError:
            break
        except (TensorLensError, RuntimeError, ValueError, IndexError):  # a model for inputs of one length
            continue
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
    if not call.is_repeatable:
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

    args, kwargs = map_tensors(wide, (call.args, call.kwargs))
    return call.like(copy.deepcopy(call.module).float(), args, kwargs)


def _gap_of_model(origin: Origin, recorded: Recording, generator: torch.Generator) -> float | None:
    """The gap from X⁰ to X^N; None where the place that makes X⁰ was not seen."""
    if origin.birth is None or recorded.starts_at_embedding:
        return None
    to: End = "end" if recorded.rules.include_final_norm else "last block"
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
    v = torch.where(x == 0, 0, v)  # a state that a relu gave lies at the bend of the next
    expected = in_float64(tangent(v))
    best = float("inf")
    for step in STEPS.get(x.dtype, STEPS[torch.float32]):
        after, before = in_float64(function(x + step * v)), in_float64(function(x - step * v))
        sizes = _sizes((after + before) / 2, 1e-3)
        gap = (((after - before) / (2 * step) - expected) / sizes).norm() / (expected / sizes).norm().clamp_min(
            tolerances.TINY
        )
        best = min(best, float(gap))
        if best <= tolerances.CAPTURE / 4:
            break
    return best


def _sizes(x: Tensor, least: float) -> Tensor:
    """The size of the numbers along the last axis, and at least a part of the size of all of them."""
    return (
        torch.maximum(x.square().mean(-1, keepdim=True), least**2 * x.square().mean()).sqrt().clamp_min(tolerances.TINY)
    )


# The model itself, nothing recorded: the truth that laws compare with -------------------------------------------------


def plain_output(recording: Recording, *, is_nudged: bool = False) -> Tensor:
    """$X^N$ (sample, token, channel) from the model left to itself: what must be reproduced.

    Args:
        recording: The recording of the model at the input.
        is_nudged: Whether every other number that enters the first block is changed in its last digit.
    """
    origin = recording.from_model("The value law")

    def nudge(n: int, state: Tensor) -> Tensor | None:
        return _nudged(state) if is_nudged and n == 0 else None

    to: End = "end" if recording.rules.include_final_norm else "last block"
    state = run(origin.anatomy, origin.inputs, to=to, n_blocks=recording.n_blocks, entering=nudge)
    return as_tokens(origin, state, recording.n_samples)


def as_tokens(origin: Origin, state: Tensor, n_samples: int = 1) -> Tensor:
    """The last state of a model as (sample, token, channel)."""
    return state_layout(state, -1, origin.anatomy.channels, origin.inputs, n_samples).to_tokens(state)


def _nudged(state: Tensor) -> Tensor:
    steps = torch.arange(state.numel(), device=state.device).view(state.shape) % 2
    return state + state * steps * torch.finfo(state.dtype).eps


def plain_logits(recording: Recording, out_tokens: list[int]) -> Tensor:
    """Logits (output, class) as the model itself gives them, after whatever its code does behind the unembedding.

    One row for a head that reads the whole input at once. A pass is needed only if something is behind an unembedding.
    """
    if recording.head is None or recording.gives_raw_logits:
        return torch.stack([recording.logits_at(i) for i in out_tokens])
    origin = recording.from_model("A logit after a soft cap or a scale")
    places = torch.tensor(out_tokens, device=recording.states[-1].device)
    keeps = recording.head is not None and "logits_to_keep" in signature(origin.model.forward).parameters
    inputs = {**origin.inputs, **({"logits_to_keep": places} if keeps else {})}
    logits = state_of(run(origin.anatomy, inputs))[0]
    return logits[None] if logits.dim() == 1 else logits if keeps else logits[places]
