"""The certificate: is this operator exact and linear? Answered with numbers.

Reproducing F(X) proves nothing by itself: any split of a product passes it, and so does a map that is not linear at
all. The evidence is linearity away from X, the adjoint identity, and completeness with a bias found independently.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorlens.freezing.observe import plain_output
from tensorlens.freezing.places import Span
from tensorlens.freezing.recording import Recording
from tensorlens.models.precision import tf32_allowed
from tensorlens.operators.matrix_free import FrozenOperator

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Relative error accepted by the type of the hidden states."""

TOLERANCE_FLOAT32_INSIDE = 1e-6
"""The same for a float64 model whose own code computes parts in float32."""


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """Errors of an attention tensor, relative, with the verdict.

    Attributes:
        errors: By law: `value`, `linearity`, `adjoint`, `completeness`, `composition`.
        tolerance: What is accepted for this type of numbers.
        rules: The modules in which each rule fired.
        conventions: Products of two live tensors that carry gradient and whose roles are a choice: the modules, by
            convention.
        options: The user's `Rules`.
        dtype: Type of the hidden states.
    """

    errors: dict[str, float]
    tolerance: float
    rules: dict[str, tuple[str, ...]]
    conventions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"

    @property
    def passed(self) -> bool:
        """Whether every error is a number within the tolerance."""
        return all(error <= self.tolerance for error in self.errors.values())

    @property
    def failures(self) -> tuple[str, ...]:
        """The laws that do not hold."""
        return tuple(law for law, error in self.errors.items() if not error <= self.tolerance)

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "passed": self.passed,
            "errors": self.errors,
            "tolerance": self.tolerance,
            "dtype": self.dtype,
            "options": self.options,
            "rules": {rule: list(modules) for rule, modules in self.rules.items()},
            "conventions": {name: list(modules) for name, modules in self.conventions.items()},
        }

    def __str__(self) -> str:
        """The verdict, the numbers, and the rules with the number of modules each."""
        lines = [f"{'exact and linear' if self.passed else 'NOT CERTIFIED: ' + ', '.join(self.failures)}"]
        lines += [f"  {law:<13}{error:9.1e}" for law, error in self.errors.items()]
        lines += [f"  tolerance    {self.tolerance:9.1e}  ({self.dtype})", "rules:"]
        lines += [f"  {rule}: {len(modules)} modules, such as {modules[0]}" for rule, modules in self.rules.items()]
        return "\n".join(lines)


def certify(operator: FrozenOperator, *, n_probes: int = 4, seed: int = 0) -> Certificate:
    r"""Measure the laws of an attention tensor.

    - value: $\tilde F_X(X)$ against the model left to itself;
    - linearity: $\tilde F_X(aU + bV) - B$ against $a(\tilde F_X(U) - B) + b(\tilde F_X(V) - B)$ at random U, V of the
      size of X;
    - adjoint: $⟨u, T·V⟩$ against $⟨T^\top u, V⟩$, and $T^\top u$ from the recording itself, which a first map uses,
      against the replay's;
    - completeness: $⟨u, F(X) - B⟩$ against $⟨T^\top u, X⟩$, with B the replay at zero;
    - composition: blocks in two steps against all at once, away from X.

    Inner products are with `n_probes` standard normal u, so that the root mean square of their differences estimates
    the norm of the whole difference.
    """
    recording, span = operator.recording, operator.span
    probes = _Probes(operator, n_probes, seed)
    full = span == Span(0, recording.n_blocks) and not operator.heads
    expected = (
        plain_output(recording)[0]
        if full
        else operator.output
        if not operator.heads
        else operator.push(operator.input[None])[0]
    )
    pulled, conventions = _pull_and_watch(operator, probes.u)
    errors = {
        "value": _relative(operator.push(operator.input[None])[0] - expected, expected),
        "linearity": probes.linearity(),
        "adjoint": probes.mismatch(operator.apply(probes.v), pulled, probes.v),
        "completeness": probes.mismatch(expected - operator.bias, pulled, operator.input, scale=expected),
    }
    if full and recording.graph is not None:
        first = operator.replay.pull(probes.u[:1], span)
        errors["adjoint"] = max(errors["adjoint"], _relative(first - pulled[:1], pulled[:1]))
    if not recording.side_channels:  # else a range in the middle is no function of its state alone
        errors["composition"] = probes.composition()
    return Certificate(
        errors=errors,
        tolerance=tolerance(recording),
        rules=_by_rule(recording),
        conventions={name: tuple(sorted(modules)) for name, modules in conventions.items()},
        options=recording.rules.as_dict(),
        dtype=str(operator.dtype).removeprefix("torch."),
    )


def tolerance(recording: Recording) -> float:
    """The relative error accepted for the type of numbers that the model computes with."""
    dtype = recording.states[0].dtype
    casts = any(rule == "cast: float32" for rule, _ in recording.rules_applied)
    if dtype == torch.float32 and recording.states[0].is_cuda and tf32_allowed():
        return TOLERANCES[torch.float16]  # tf32 has as many digits
    return TOLERANCE_FLOAT32_INSIDE if dtype == torch.float64 and casts else TOLERANCES[dtype]


class _Probes:
    """Random states and cotangents, and the laws that need them."""

    def __init__(self, operator: FrozenOperator, n_probes: int, seed: int) -> None:
        self.operator = operator
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(operator.input)

        n_out, d_out, n_in, d_in = operator.shape
        size = operator.input.square().mean().sqrt()
        self.u = normal(n_probes, n_out, d_out)
        self.v, self.w = size * normal(n_in, d_in), size * normal(n_in, d_in)

    def linearity(self) -> float:
        a, b, bias = 2.0, -3.0, self.operator.bias
        of_v, of_w, of_both = self.operator.push(torch.stack([self.v, self.w, a * self.v + b * self.w])) - bias
        return _relative(of_both - a * of_v - b * of_w, of_both)

    def mismatch(self, y: Tensor, pulled: Tensor, x: Tensor, scale: Tensor | None = None) -> float:
        differences = (self.u * y).sum((1, 2)) - (pulled * x).sum((1, 2))
        norm = (y if scale is None else scale).norm()
        return float(differences.square().mean().sqrt() / norm.clamp_min(torch.finfo(norm.dtype).tiny))

    def composition(self) -> float:
        replay, (start, stop), heads = self.operator.replay, self.operator.span, self.operator.heads
        if stop - start < 2:
            return 0.0
        middle = (start + stop) // 2
        halfway = replay.push(self.v[None], Span(start, middle), heads)
        in_two_steps = replay.push(halfway, Span(middle, stop), heads)
        at_once = replay.push(self.v[None], self.operator.span, heads)
        return _relative(in_two_steps - at_once, at_once)


def _pull_and_watch(operator: FrozenOperator, u: Tensor) -> tuple[Tensor, dict[str, set[str]]]:
    """Tᵀu one by one, through a pass that notes which conventions carry gradient."""
    with operator.replay.graph(operator.span, operator.heads) as (x, y, run):
        pulled = [torch.autograd.grad(y, x, one[None], retain_graph=True)[0] for one in u]
    return torch.cat(pulled), run.conventions


def _relative(difference: Tensor, scale: Tensor) -> float:
    error = difference.double().norm() / scale.double().norm().clamp_min(torch.finfo(torch.float64).tiny)
    return float(error)


def _by_rule(recording: Recording) -> dict[str, tuple[str, ...]]:
    modules: dict[str, list[str]] = defaultdict(list)
    for rule, module in recording.rules_applied:
        modules[rule].append(module)
    return {rule: tuple(modules[rule]) for rule in sorted(modules)}
