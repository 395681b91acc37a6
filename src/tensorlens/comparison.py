r"""`compare`: where two attention tensors differ, step by step, and by how much as operators.

$$\mathrm{distance} = \frac{\lVert T_1 - T_2 \rVert_F}{\lVert T_1 \rVert_F}, \qquad
D_{ij} = \frac{\lVert T_1[i, :, j, :] - T_2[i, :, j, :] \rVert_F}{\lVert T_1[i, :, j, :] \rVert_F}$$

Both norms are sketched: for Gaussian probes u, $E\lVert u^\top A \rVert^2 = \lVert A \rVert_F^2$.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from difflib import SequenceMatcher
from typing import Any, Literal

import msgspec
import numpy as np
import torch
from jaxtyping import Float
from msgspec.structs import force_setattr
from rich.console import RenderableType
from torch import Tensor

from tensorlens.errors import InputError, MethodError, check_seed, check_whole
from tensorlens.program.program import Program
from tensorlens.program.steps import Step
from tensorlens.records import Index, Record
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64, relative
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

PROBES = 16
"""Random directions per norm; the relative error of a norm is about 1/√(2·probes)."""


class StepDifference(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A step that two programs do not share.

    Attributes:
        kind: Whether it is only in the first, only in the second, or in both with different constants.
        operation: Its operation.
        module: Its module.
        block: Its block; None outside all blocks.
        distance: The largest relative difference of its constants; None if only one program has it.
    """

    kind: Literal["first alone", "second alone", "constants"]
    operation: str
    module: str
    block: Index | None
    distance: float | None

    def __str__(self) -> str:
        """One line: place, operation and difference."""
        place = "outside of blocks" if self.block is None else f"block {self.block}"
        how = "" if self.distance is None else f", constants differ by {self.distance:.1e}"
        where = self.kind if self.distance is None else "both"
        return f"{place}, `{self.operation}` in `{self.module or 'the model'}`: in {where}{how}"


class Comparison(Record, frozen=True, kw_only=True, dict=True, tag="tensorlens.comparison/1"):
    """How two attention tensors differ.

    Attributes:
        steps: The steps that differ, in the order of the programs.
        distance: ‖T₁ - T₂‖ over ‖T₁‖ (Frobenius, sketched); None if the shapes differ.
        probes: Number of random directions for sketching the norms.
        seed: Random seed for the directions.
        pairs: `per_pair`, once computed.
    """

    steps: tuple[StepDifference, ...]
    distance: float | None
    probes: Index
    seed: int
    pairs: Float[Tensor, "out_token in_token"] | None = None

    def __repr__(self) -> str:
        """One line: steps and distance."""
        distance = "shapes differ" if self.distance is None else f"distance {self.distance:.2e}"
        return f"Comparison({len(self.steps)} steps differ, {distance})"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return "How do these two tensors differ?"

    def _table(self) -> Table:
        """The difference of the constants of each step; NaN for a step in only one of the two."""
        apart = [[math.nan if step.distance is None else step.distance] for step in self.steps]
        return Table(np.array(apart, dtype=float).reshape(-1, 1), [*map(str, self.steps)], ["distance"])

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        most = sorted(self.steps, key=lambda step: -(math.inf if step.distance is None else step.distance))[:k]
        rows = [(str(one.block), one.operation, one.module, one.kind, f"{one.distance or 0:.1e}") for one in most]
        yield table(("block", "operation", "module", "in", "by"), rows, numbers=(4,))

    @property
    def per_pair(self) -> Float[Tensor, "out_token in_token"] | None:
        """The distance of every pair of tokens, NaN for a pair with T₁ = 0 ≠ T₂; None if the shapes differ."""
        if self.pairs is None and self.distance is not None:
            tensors = getattr(self, "_tensors_compared", None)
            if tensors is None:
                raise MethodError("This comparison was loaded without its tensors. Call `tl.compare` again.")
            first, second = tensors
            force_setattr(self, "pairs", _per_pair(first, second, self.probes, self.seed))
        return self.pairs


def _distance(first: AttentionTensor, second: AttentionTensor, probes: int, seed: int) -> float | None:
    if first.operator.shape != second.operator.shape:
        return None
    generator, squares = torch.Generator().manual_seed(seed), torch.zeros(2, dtype=torch.float64)
    for _ in range(probes):
        u = torch.randn(first.operator.output.shape, generator=generator)
        one, other = _pulled((first, second), u)
        squares += torch.stack([(one - other).square().sum(), one.square().sum()])
    apart, size = squares.tolist()
    return (apart / size) ** 0.5 if size else (0.0 if apart == 0 else math.inf)


def _per_pair(first: AttentionTensor, second: AttentionTensor, probes: int, seed: int) -> Tensor:
    n_out, n_channels = first.operator.output.shape
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for i in range(n_out):
        u = torch.zeros(probes, n_out, n_channels)
        u[:, i] = torch.randn(probes, n_channels, generator=generator)
        one, other = _pulled((first, second), u)  # (probe, in_token, in_channel)
        apart, size = (one - other).square().sum((0, 2)), one.square().sum((0, 2))
        ratio = (apart / size).sqrt()
        rows.append(torch.where(size == 0, torch.where(apart == 0, 0.0, torch.nan), ratio))
    return torch.stack(rows).float()


def _pulled(tensors: Iterable[AttentionTensor], u: Tensor) -> Iterator[Tensor]:
    return (in_float64(T.operator.adjoint(u)).cpu() for T in tensors)


def compare(first: AttentionTensor, second: AttentionTensor, *, probes: int = PROBES, seed: int = 0) -> Comparison:
    """Compare two attention tensors: two inputs, two rule sets, or a model before and after a change.

    Args:
        first: An attention tensor.
        second: Another.
        probes: Number of random directions for sketching the norms.
        seed: Random seed for the directions.
    """
    for one in (first, second):
        if not isinstance(one, AttentionTensor):
            raise InputError(f"`compare` expected two attention tensors; got {type(one).__name__}.")
    probes, seed = check_whole(probes, "probes", 1), check_seed(seed)
    steps = tuple(
        StepDifference(kind, step.operation, step.module, step.block, distance)
        for kind, step, distance in _differences(first.program, second.program)
    )
    made = Comparison(steps=steps, distance=_distance(first, second, probes, seed), probes=probes, seed=seed)
    force_setattr(made, "_tensors_compared", (first, second))  # not fields, so they are not saved
    return made


def _differences(first: Program, second: Program) -> Iterator[tuple[Any, Step, float | None]]:
    ones, others = first.steps, second.steps
    matcher = SequenceMatcher(None, [*map(_key, ones)], [*map(_key, others)], autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            for one, other in zip(ones[a:b], others[c:d], strict=True):
                distance = _apart(first, one, second, other)
                if distance > 0:
                    yield "constants", one, distance
            continue
        yield from (("first alone", step, None) for step in ones[a:b])
        yield from (("second alone", step, None) for step in others[c:d])


def _key(step: Step) -> Any:
    return step.block, step.module, step.operation, len(step.slots)


def _apart(first: Program, one: Step, second: Program, other: Step) -> float:
    """The largest relative difference of the constants of a step."""
    pairs = zip(one.held, other.held, strict=False)
    return max((_relative(first.constants[a], second.constants[b]) for a, b in pairs), default=0.0)


def _relative(a: Tensor, b: Tensor) -> float:
    if a is b or a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b):
        return 0.0
    if a.shape != b.shape or a.is_complex() or b.is_complex() or not a.any():
        return math.inf
    a, b = in_float64(a).cpu(), in_float64(b).cpu()
    return relative(a - b, a)
