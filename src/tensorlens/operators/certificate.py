"""The certificate: is this operator exact and linear? Answered with numbers.

Reproducing F(X) proves nothing by itself: any split of a product passes it, and so does a map that is not linear at
all. The evidence is linearity away from X, the adjoint identity, and completeness with a bias found independently.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from tensorlens.freezing.observe import MANY_ROUNDINGS, magnified, plain_output
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.models.around import said_of
from tensorlens.models.precision import tf32_allowed
from tensorlens.operators.held import NOTHING, held_by_module, passing
from tensorlens.operators.laws import Probes, engine_errors, relative, value_with_heads
from tensorlens.operators.laws_in_float32 import HALF, errors_in_float32
from tensorlens.operators.matrix_free import FrozenOperator

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative error accepted by the type of the hidden states."""

FLOAT32 = TOLERANCES[torch.float32]
"""The same for blocks of a half-precision model in float32: there a fault cannot hide in rounding."""

N_HELD = 3
"""Modules named in the text of a certificate, of those that hold most."""

TOLERANCE_OF_ONE_CAST = 2e-6
"""The same for a float64 model whose own code casts its state to float32 once."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    r"""Errors of an attention tensor, relative, with the verdict.

    Attributes:
        errors: By law: `value`, `linearity`, `adjoint`, `completeness`, `composition`, `logits`; for a model in half
            precision also linearity and adjoint of its blocks in float32.
        tolerance: What is accepted for this type of numbers.
        rules: The modules in which each rule fired.
        conventions: Products of two live tensors that carry gradient and whose roles are a choice: the modules, by
            convention.
        options: The user's `Rules`.
        dtype: Type of the hidden states.
        engines: How far each engine that answered, or could, is from a replay.
        engine_tolerance: What is accepted of them.
        carried: $\lVert T X \rVert / \lVert F(X) \rVert$: the part of the output that is not in B.
        moves: $\lVert T V \rVert / \lVert V \rVert$ at a random V.
        passing: For each block $\lVert T_n V \rVert / \lVert X^{n+1} \rVert$ at a random V as large as $X^n$.
        silent: The blocks that pass nothing of their input on.
        held: For each module the norm of what it gives in the replay at zero, by that at X: 0 for one that T carries
            whole, 1 for one that is all in B.
        rounded: Of the laws that all blocks were held to in float32, the errors in the model's own half precision.
        reservations: What a plain "passed" would hide.
    """

    errors: dict[str, float]
    tolerance: float
    rules: dict[str, tuple[str, ...]]
    conventions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    engines: dict[str, float] = field(default_factory=dict)
    engine_tolerance: float = 1e-3
    carried: float = 1.0
    moves: float = 1.0
    passing: tuple[float, ...] = ()
    silent: tuple[int, ...] = ()
    held: dict[str, float] = field(default_factory=dict)
    rounded: dict[str, float] = field(default_factory=dict)
    reservations: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every error is a number within its tolerance, and every block passes something of its input on."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The laws that do not hold, the engines that are wrong, and the blocks that pass nothing on.

        A law that was measured in float32 too is judged by that alone: in half precision it says how much was rounded.
        """
        accepted = {law: FLOAT32 if law.endswith(", float32") else self.tolerance for law in self.errors}
        judged = {law: error for law, error in self.errors.items() if law not in self.rounded}
        laws = [law for law, error in judged.items() if not error <= accepted[law]]
        engines = [name for name, error in self.engines.items() if not error <= self.engine_tolerance]
        zero = () if self.moves > 0 else ("T is zero",)
        return (*laws, *engines, *zero, *(f"block {n} passes nothing on" for n in self.silent))

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "passed": self.passed,
            "errors": self.errors,
            "tolerance": self.tolerance,
            "engines": self.engines,
            "engine_tolerance": self.engine_tolerance,
            "carried": self.carried,
            "moves": self.moves,
            "passing": list(self.passing),
            "silent": list(self.silent),
            "held": self.held,
            "rounded": self.rounded,
            "reservations": list(self.reservations),
            "dtype": self.dtype,
            "options": self.options,
            "rules": {rule: list(modules) for rule, modules in self.rules.items()},
            "conventions": {name: list(modules) for name, modules in self.conventions.items()},
        }

    def __str__(self) -> str:
        """The verdict, the numbers, what was held, and the rules with the number of modules each."""
        lines = [f"{'exact and linear' if self.passed else 'NOT CERTIFIED: ' + ', '.join(self.failures)}"]
        lines += [f"  but: {reservation}" for reservation in self.reservations]
        lines += [f"  {law:<13}{error:9.1e}" for law, error in self.errors.items()]
        lines += [f"  tolerance    {self.tolerance:9.1e}  ({self.dtype})"]
        lines += [f"  {law}, rounded{error:9.1e}" for law, error in self.rounded.items()]
        lines += [f"  engine {name}: {error:.1e} (accepted: {self.engine_tolerance:.0e})"
                  for name, error in self.engines.items()]  # fmt: skip
        lines += [f"  |T X| / |F(X)| = {self.carried:.3g}"]
        most = sorted(self.held, key=lambda path: -self.held[path])[:N_HELD]
        lines += ["held, at zero by at X:"] if most else []
        lines += [f"  {path} {self.held[path]:.2g}" for path in most] + ["rules:"]
        lines += [f"  {rule}: {len(modules)} modules, such as {modules[0]}" for rule, modules in self.rules.items()]
        return "\n".join(lines)


def certify(
    operator: FrozenOperator, *, engines: Literal["answered", "all"] = "answered", n_probes: int = 4, seed: int = 0
) -> Certificate:
    r"""Measure the laws of an attention tensor, and the engines behind it.

    - value: $\tilde F_X(X)$ against the model left to itself; with heads chosen, each such block against what its
      weights and attention matrices give;
    - linearity: $\tilde F_X(aU + bV) - B$ against $a(\tilde F_X(U) - B) + b(\tilde F_X(V) - B)$ at random U, V of the
      size of X;
    - adjoint: $⟨u, T·V⟩$ against $⟨T^\top u, V⟩$, and $T^\top u$ from the recording itself, which single maps use,
      against the replay's;
    - completeness: $⟨u, F(X) - B⟩$ against $⟨T^\top u, X⟩$, with B the replay at zero;
    - composition: blocks in two steps against all at once, away from X;
    - logits: the adjoint identity from the input to the logits of a few classes, for a model with a head.

    Inner products are with `n_probes` standard normal u, so that the root mean square of their differences estimates
    the norm of the whole difference.

    Args:
        operator: The operator.
        engines: Which engines to prove: those that answered, or every one there is.
        n_probes: How many cotangents.
        seed: Of the probes.
    """
    recording = operator.recording
    probes = Probes(operator, n_probes, seed)
    at_x = operator.push(operator.input[None])[0]
    expected = _expected(operator, at_x)
    pulled, conventions = _pull_and_watch(operator, probes.u)
    of_v = operator.apply(probes.v)
    by_engine = engine_errors(operator, probes, pulled, every=engines == "all")
    errors = {
        "value": value_with_heads(operator) if operator.heads else relative(at_x - expected, expected),
        "linearity": probes.linearity(),
        "adjoint": max(probes.mismatch(of_v, pulled, probes.v), by_engine.get("recorded graph", 0.0)),
        "completeness": probes.mismatch(expected - operator.bias, pulled, operator.input, scale=expected),
    }
    if not recording.side_channels:  # else a range in the middle is no function of its state alone
        errors["composition"] = probes.composition()
    has_logits = recording.readout is not None and recording.readout.dim() < 4  # a picture has none
    if has_logits and operator.span.stop == recording.n_blocks:
        errors["logits"] = probes.logits()
    errors, rounded, reservations = _without_rounding(operator, errors)
    moves, by_block = relative(of_v, probes.v), passing(operator, torch.Generator().manual_seed(seed))
    moves = moves if max(moves, relative(of_v, expected)) > NOTHING else 0.0
    silent = tuple(n for n, part in enumerate(by_block, operator.span.start) if part <= NOTHING)
    return Certificate(
        errors=errors,
        tolerance=tolerance(recording),
        rules=_by_rule(recording),
        conventions={name: tuple(sorted(modules)) for name, modules in conventions.items()},
        options=recording.rules.as_dict(),
        dtype=str(operator.dtype).removeprefix("torch."),
        engines=by_engine
        if "replayed" not in operator.engines.answered
        else {"replayed": errors["adjoint"]} | by_engine,
        engine_tolerance=operator.accepted,
        carried=relative(at_x - operator.bias, expected),
        moves=moves,
        passing=by_block,
        silent=silent,
        held=held_by_module(operator),
        rounded=rounded,
        reservations=reservations
        + _of_numbers(operator, expected, errors["value"], moves)
        + _reservations(operator, silent),
    )


def _expected(operator: FrozenOperator, at_x: Tensor) -> Tensor:
    """What the operator should give at X; with heads chosen no other way gives it."""
    if operator.heads:
        return at_x
    is_whole = operator.span == Span(0, operator.recording.n_blocks)
    return plain_output(operator.recording)[0] if is_whole else operator.output


def _without_rounding(
    operator: FrozenOperator, errors: dict[str, float]
) -> tuple[dict[str, float], dict[str, float], tuple[str, ...]]:
    """For a model in half precision, its laws in float32, and apart from them those in its own type."""
    if operator.dtype not in HALF:
        return errors, {}, ()
    if operator.recording.side_channels:
        return errors, {}, ("blocks read more than the state, so that no law is measured in float32: "
                            "rounding may hide a fault",)  # fmt: skip
    exact, left_out = errors_in_float32(operator)
    said = f"block {', '.join(map(str, left_out))} could not be measured in float32: rounding may hide a fault"
    rounded = {} if left_out else {law: errors[law] for law in exact}
    return errors | {f"{law}, float32": error for law, error in exact.items()}, rounded, (said,) if left_out else ()


def _of_numbers(operator: FrozenOperator, expected: Tensor, error: float, moves: float) -> tuple[str, ...]:
    """What must be known of the numbers themselves."""
    if not expected.isfinite().all():
        return ("the model's own output is not finite at this input: nothing can be proved of it",)
    if not moves:
        return ("T V is zero at a random V: everything is held, and B is all of F(X)",)
    if error <= tolerance(operator.recording) or operator.heads:
        return ()
    moved = magnified(operator.recording)
    said = (
        "this model magnifies rounding: a change of its first state in the last digit changes its output by "
        f"{moved:.1e}. A wider type, such as float64, may help"
    )
    return (said,) if error <= MANY_ROUNDINGS * moved else ()


def _reservations(operator: FrozenOperator, silent: tuple[int, ...]) -> tuple[str, ...]:
    found: list[str] = []
    anatomy = operator.recording.anatomy
    if anatomy.beside:
        found.append(said_of(anatomy.stack, anatomy.beside))
    around = anatomy.around
    if around:
        found.append(f"{', '.join(f'`{path}`' for path in around)} brings something of the input to the output around "
                     "X⁰: it is held, in B and in factors, and no map shows it")  # fmt: skip
    for kind in _casts(operator.recording):
        if kind in HALF and operator.dtype not in HALF:
            found.append(f"the model's own code computes parts in {kind}, whose rounding may hide a fault")
    if silent:
        found.append(f"block {', '.join(map(str, silent))} passes nothing of its input on")
    if operator.engines.fallback is not None:
        found.append(operator.engines.fallback)
    return tuple(found)


def tolerance(recording: Recording) -> float:
    """The relative error accepted for the numbers that the model computes with, of which it may cast some itself.

    Every cast of a float64 state to float32 rounds once more, so that the error grows as the root of their number.
    """
    dtype = recording.states[0].dtype
    if dtype == torch.float32 and recording.states[0].is_cuda and tf32_allowed():
        return TOLERANCES[torch.float16]  # tf32 has as many digits
    casts = _casts(recording)
    halves = [TOLERANCES[kind] for kind in HALF if kind in casts]
    if halves or dtype != torch.float64 or torch.float32 not in casts:
        return max([TOLERANCES[dtype], *halves])
    return min(FLOAT32, TOLERANCE_OF_ONE_CAST * casts[torch.float32] ** 0.5)


def _casts(recording: Recording) -> dict[torch.dtype, int]:
    """How often a live state was cast to each type that is narrower than the states between blocks."""
    found: dict[torch.dtype, int] = {}
    for (rule, _), n in recording.rules_applied.items():
        kind = getattr(torch, rule.removeprefix("cast: "), None) if rule.startswith("cast: ") else None
        if kind is not None and kind.itemsize < recording.states[0].dtype.itemsize:
            found[kind] = found.get(kind, 0) + n
    return found


def _pull_and_watch(operator: FrozenOperator, u: Tensor) -> tuple[Tensor, dict[str, set[str]]]:
    """Tᵀu one by one, through a pass that notes which conventions carry gradient."""
    with operator.replay.graph(operator.span, operator.heads) as (x, y, run):
        pulled = [torch.autograd.grad(y, x, one[None], retain_graph=True)[0] for one in u]
    return torch.cat(pulled), run.conventions


def _by_rule(recording: Recording) -> dict[str, tuple[str, ...]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for rule, module in recording.rules_applied:
        modules[rule].append(module)
    return {rule: tuple(modules[rule]) for rule in sorted(modules)}
