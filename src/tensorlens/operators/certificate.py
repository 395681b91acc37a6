r"""The certificate: is this operator exact and linear, and does it miss nothing? Answered with numbers.

Reproducing F(X) proves nothing on its own: any split of a product passes it. The evidence is the structure of the
program, the adjoint identity, completeness with a bias found by a run at zero (`laws`), and a law that shares no code
with the rules (`capture`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from tensorlens import tolerances
from tensorlens.models.around import said_of
from tensorlens.models.runner import tf32_allowed
from tensorlens.operators.capture import HALF, Capture, capture
from tensorlens.operators.laws import LAWS, LawEvidence, in_float32
from tensorlens.operators.operator import FrozenOperator
from tensorlens.operators.plain import plain_output
from tensorlens.recording.recording import Recording
from tensorlens.tolerances import relative
from tensorlens.views.printing import Printed

N_HELD = 3
"""Number of modules that the text of a certificate names: those with the largest parts in B."""


@dataclass(frozen=True, kw_only=True)
class Certificate(Printed):
    r"""Errors of an attention tensor, relative, with the verdict.

    Attributes:
        errors: By law: `value`, `structure`, `capture`, `linearity`, `adjoint`, `completeness`, `composition`,
            `logits`; for a model in half precision also linearity and adjoint of some blocks in float32.
        tolerance: The accepted error for this type of numbers.
        rules: The modules in which each rule fired.
        conventions: Products of two live tensors that T carries and whose roles are a choice: the modules, by
            convention.
        options: The user's `Rules`.
        dtype: Type of the hidden states.
        carried: $\lVert T X \rVert / \lVert F(X) \rVert$: the part of the output that is not in B.
        moves: $\lVert T V \rVert / \lVert V \rVert$ at a random V.
        passing: For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.
        silent: The blocks whose output does not depend on their input.
        held: For each module the norm of its output in a run at zero, divided by that at X: 0 if T carries all of it, 1
            if it is all in B.
        rounded: The errors in the model's own half precision, for laws that blocks were tested on in float32.
        captured: For each block the gap between finite differences of the model and T under the Jacobian's rules.
        reservations: Notes that a plain "passed" would hide.
        seconds: Time for the laws, and for those in float32.
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
        """Whether every error is a number within its tolerance, and every block passes on part of its input."""
        return not self.failures

    @property
    def verdict(self) -> dict[str, Any]:
        """The part that maps record."""
        return {"passed": self.passed, "errors": self.errors}

    def accepted(self, law: str) -> float:
        """The accepted error of a law."""
        if law == "capture":
            return tolerances.CAPTURE
        return tolerances.CERTIFICATE[torch.float32] if law.endswith(", float32") else self.tolerance

    @property
    def failures(self) -> tuple[str, ...]:
        """The laws that do not hold, and the blocks that pass nothing on.

        A law that was also measured in float32 is judged by that error; the one in half precision shows the rounding.
        """
        judged = {law: error for law, error in self.errors.items() if law not in self.rounded}
        laws = [law for law, error in judged.items() if not error <= self.accepted(law)]
        zero = () if self.moves > 0 else ("T is zero",)
        return (*laws, *zero, *(f"block {n} passes nothing on" for n in self.silent))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {"passed": self.passed, **msgspec.to_builtins(self, str_keys=True)}

    def __str__(self) -> str:
        """The verdict, the numbers, the largest parts in B, and the rules with the number of modules each."""
        lines = [f"{'exact and linear' if self.passed else 'NOT CERTIFIED: ' + ', '.join(self.failures)}"]
        lines += [f"  but: {reservation}" for reservation in self.reservations]
        lines += [
            f"  {law:<13}{error:9.1e}  (accepted: {self.accepted(law):.0e})" for law, error in self.errors.items()
        ]
        lines += [f"  {law}, rounded{error:9.1e}" for law, error in self.rounded.items()]
        lines += [f"  |T X| / |F(X)| = {self.carried:.3g}  ({self.dtype})"]
        in_bias = [path for path, share in self.held.items() if share > 0]
        most = sorted(in_bias, key=lambda path: -self.held[path])[:N_HELD]
        lines += ["largest parts in B, output at zero relative to X:"] if most else []
        lines += [f"  {path} {self.held[path]:.2g}" for path in most] + ["rules:"]
        lines += [
            f"  {rule}: {len(modules)} module{'s' * (len(modules) > 1)}, such as {modules[0]}"
            for rule, modules in self.rules.items()
        ]
        return "\n".join(lines)


def certify(operator: FrozenOperator, *, seed: int = 0) -> Certificate:
    r"""Measure the laws of an attention tensor: those of `laws.LAWS`, and capture.

    A tensor that was loaded without its model has neither value nor capture.

    Args:
        operator: The operator.
        seed: Random seed for the probes.
    """
    began = time.perf_counter()
    recording, generator = operator.recording, torch.Generator().manual_seed(seed)
    e = LawEvidence(operator, generator)
    errors = {law: error for law, measure in LAWS.items() if (error := measure(e)) is not None}
    seen = capture(recording, generator) if recording.origin is not None else Capture()
    if seen.error is not None and not (seen.error > tolerances.CAPTURE and (seen.by_design or seen.jumping)):
        errors["capture"] = seen.error
    moves = relative(e.of_v, e.v)
    moves = moves if max(moves, relative(e.of_v, e.expected)) > tolerances.NOTHING else 0.0
    silent = tuple(n for n, part in enumerate(e.passing, operator.span.start) if part <= tolerances.NOTHING)
    reservations = (
        *_of_numbers(e, errors, moves),
        *_of_capture(seen, has_model=recording.origin is not None),
        *_of_structure(operator, silent),
    )
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
        carried=relative(e.at_x - e.bias, e.expected),
        moves=moves,
        passing=e.passing,
        silent=silent,
        held=e.held,
        rounded=rounded,
        captured=seen.blocks,
        reservations=reservations,
        seconds=seconds,
    )


def _conventions(operator: FrozenOperator) -> dict[str, tuple[str, ...]]:
    """The conventions behind steps of the program."""
    found: dict[str, set[str]] = defaultdict(set)
    for step in operator.recording.part(operator.span, operator.heads).steps:
        if step.note is not None:
            found[step.note].add(step.module)
    return {name: tuple(sorted(modules)) for name, modules in found.items()}


def _of_numbers(e: LawEvidence, errors: dict[str, float], moves: float) -> tuple[str, ...]:
    """Notes that a reader needs to understand the numbers."""
    expected, recording = e.expected, e.recording
    if not expected.isfinite().all():
        return ("the model's own output is not finite at this input: nothing can be proved about it",)
    if not moves:
        return ("T V is zero at a random V: everything is kept fixed, and B is all of F(X)",)
    holds = errors["value"] <= tolerance(recording) and errors.get("capture", 0.0) <= tolerances.CAPTURE
    if holds or not e.operator.is_whole or recording.origin is None:
        return ()
    moved = relative(plain_output(recording, is_nudged=True)[0] - expected, expected)
    if moved <= tolerances.MAGNIFIED_ROUNDING * torch.finfo(expected.dtype).eps:
        lost = "a part of it is not followed, or the model was changed since, by a hook or another forward"
        return () if errors["value"] <= tolerance(recording) else (f"the model gives another output than T: {lost}",)
    return (
        f"changing the last digit of X⁰ changes the model's own output by {moved:.1e}: the model amplifies rounding",
    )


def _of_capture(seen: Capture, *, has_model: bool) -> tuple[str, ...]:
    found = []
    if not has_model:
        found.append("loaded without the model: neither its output nor the captured parts were compared with it")
    if seen.left_out:
        blocks = ", ".join(map(str, seen.left_out))
        found.append(
            f"finite differences cannot check block {blocks}: it does not run on its own, rounds to half precision, or "
            "has a function without a forward derivative"
        )
    if seen.error is not None and seen.error > tolerances.CAPTURE and seen.jumping:
        found.append(
            f"`{seen.jumping[0] or 'the model'}` is discontinuous: finite differences cannot check what it passes on"
        )
    elif seen.error is not None and seen.error > tolerances.CAPTURE and seen.by_design:
        found.append(
            f"`{seen.by_design[0] or 'the model'}` keeps values fixed that finite differences move, by design: "
            f"their effect, {seen.error:.1e} of a block, is in B"
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
    """The relative error accepted for the model's type of numbers, including casts in its own code.

    Every cast of a float64 state to float32 rounds once more, so the error grows with the square root of their number.
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
