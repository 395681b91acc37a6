r"""`compare`: where two attention tensors differ, step by step, and by how much as operators.

$$\mathrm{distance} = \frac{\lVert T_1 - T_2 \rVert_F}{\lVert T_1 \rVert_F}, \qquad
D_{ij} = \frac{\lVert T_1[i, :, j, :] - T_2[i, :, j, :] \rVert_F}{\lVert T_1[i, :, j, :] \rVert_F}$$

Both norms are sketched: for Gaussian probes u, $E\lVert u^\top A \rVert^2 = \lVert A \rVert_F^2$.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.nodes import Held, Step, leaves
from tensorlens.program.program import Program
from tensorlens.tensor import AttentionTensor

PROBES = 16
"""Random directions of each norm; the relative error of a norm is about one over their root twice."""


class StepDifference(NamedTuple):
    """A step that two programs do not share.

    Attributes:
        kind: It is in the first alone, in the second alone, or in both with other constants.
        step: The step, the first's where both have it.
        distance: Of its constants: the largest relative difference; None where it is in one alone.
    """

    kind: Literal["first alone", "second alone", "constants"]
    step: Step
    distance: float | None

    def __str__(self) -> str:
        """One line: where, what, how much."""
        place = "outside of blocks" if self.step.block is None else f"block {self.step.block}"
        how = "" if self.distance is None else f", constants differ by {self.distance:.1e}"
        where = self.kind if self.distance is None else "both"
        return f"{place}, `{self.step.operation}` in `{self.step.module or 'the model'}`: in {where}{how}"


@dataclass(frozen=True, eq=False)
class Comparison:
    """How two attention tensors differ.

    Attributes:
        first: One of them.
        second: The other.
        probes: How many random directions the norms are sketched with.
        seed: Random seed for the directions.
        steps: The steps that differ, in the order of the programs.
    """

    first: AttentionTensor = field(repr=False)
    second: AttentionTensor = field(repr=False)
    probes: int
    seed: int
    steps: tuple[StepDifference, ...] = field(repr=False)

    def __repr__(self) -> str:
        """One line: steps and distance."""
        distance = "shapes differ" if self.distance is None else f"distance {self.distance:.2e}"
        return f"Comparison({len(self.steps)} steps differ, {distance})"

    @cached_property
    def distance(self) -> float | None:
        """‖T₁ - T₂‖ over ‖T₁‖ (Frobenius, sketched); None where the shapes differ."""
        if self.first.operator.shape != self.second.operator.shape:
            return None
        generator = torch.Generator().manual_seed(self.seed)
        apart, size = 0.0, 0.0
        for _ in range(self.probes):
            u = torch.randn(self.first.operator.output.shape, generator=generator)
            one, other = (t.operator.adjoint(u.to(t.operator.output)).double().cpu() for t in (self.first, self.second))
            apart, size = apart + float((one - other).square().sum()), size + float(one.square().sum())
        return (apart / size) ** 0.5 if size else (0.0 if apart == 0 else float("inf"))

    @cached_property
    def per_pair(self) -> Float[Tensor, "out_token in_token"] | None:
        """The same for every pair of tokens; NaN where T₁ is zero and T₂ is not; None where the shapes differ."""
        if self.first.operator.shape != self.second.operator.shape:
            return None
        n_out, n_channels = self.first.operator.output.shape
        generator = torch.Generator().manual_seed(self.seed)
        rows = []
        for i in range(n_out):
            starts = torch.randn(self.probes, n_channels, generator=generator)
            one, other = (self._pulled(t.operator, i, starts) for t in (self.first, self.second))
            apart, size = ((one - other).square().sum((0, 2)), one.square().sum((0, 2)))
            ratio = (apart / size).sqrt()
            rows.append(torch.where(size == 0, torch.where(apart == 0, 0.0, torch.nan), ratio))
        return torch.stack(rows).float()

    def _pulled(self, operator: FrozenOperator, out_token: int, starts: Tensor) -> Tensor:
        u = operator.output.new_zeros(len(starts), *operator.output.shape)
        u[:, out_token] = starts.to(u)
        return operator.adjoint(u).double().cpu()


def compare(first: AttentionTensor, second: AttentionTensor, *, probes: int = PROBES, seed: int = 0) -> Comparison:
    """Compare two attention tensors: two inputs, two members, or a model before and after a change.

    Args:
        first: An attention tensor.
        second: Another.
        probes: How many random directions the norms are sketched with.
        seed: Random seed for the directions.
    """
    for one in (first, second):
        if not isinstance(one, AttentionTensor):
            raise InputError(f"`compare` expected two attention tensors; got {type(one).__name__}.")
    if type(probes) is not int or probes < 1:
        raise InputError(f"`probes` must be a number of directions, 1 or more; got {probes!r:.60}.")
    return Comparison(first, second, probes, seed, tuple(_differences(first.program, second.program)))


def _differences(first: Program, second: Program) -> Iterator[StepDifference]:
    ones, others = first.steps, second.steps
    matcher = SequenceMatcher(None, [*map(_key, ones)], [*map(_key, others)], autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            for one, other in zip(ones[a:b], others[c:d], strict=True):
                distance = _apart(first, one, second, other)
                if distance > 0:
                    yield StepDifference("constants", one, distance)
            continue
        yield from (StepDifference("first alone", step, None) for step in ones[a:b])
        yield from (StepDifference("second alone", step, None) for step in others[c:d])


def _key(step: Step) -> Any:
    return step.block, step.module, step.operation, len(step.slots)


def _apart(first: Program, one: Step, second: Program, other: Step) -> float:
    """The largest relative difference of the constants of a step."""
    pairs = zip(_held(first, one), _held(second, other), strict=False)
    return max((_relative(a, b) for a, b in pairs), default=0.0)


def _held(program: Program, step: Step) -> Sequence[Tensor]:
    return [program.constants[leaf.index] for leaf in leaves(step.args) if type(leaf) is Held]


def _relative(a: Tensor, b: Tensor) -> float:
    if a is b or a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b):
        return 0.0
    if a.shape != b.shape or a.is_complex() or b.is_complex():
        return float("inf")
    a, b = a.double().cpu(), b.double().cpu()
    size = float(a.norm())
    return float((a - b).norm()) / size if size else float("inf")
