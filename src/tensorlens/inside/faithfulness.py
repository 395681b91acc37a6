r"""`Faithfulness`: how much of a target circuits of growing size recover in the model itself.

With m the target, M the model on the clean input, C_k the circuit that keeps the share k of all edges, and everything
outside of it as it is for the corrupted input,

    f(k) = (m(C_k) − m(∅)) / (m(M) − m(∅)),   CPR = ∫ f dk,   CMD = ∫ |1 − f| dk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from rich.console import RenderableType

from tensorlens.errors import InputError
from tensorlens.records import Index, Record
from tensorlens.views.printing import heading, table
from tensorlens.views.table import Table

SHARES = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Sizes at which circuits are tested, as shares of all edges or nodes."""

N_RESAMPLES = 2000

Point = tuple[float, float]

Unit = Literal["edges", "nodes"]
"""The units of a circuit."""


class Faithfulness(Record, frozen=True, kw_only=True, tag="tensorlens.faithfulness/1"):
    """How faithful circuits of growing size are, each run in the model.

    Attributes:
        curve: (share of all edges or nodes, f): 0 is the corrupted run, 1 the clean one.
        cpr: The area under f; higher is better, but above 1 circuits overshoot.
        cmd: The area between f and 1; lower is better.
        interval: 95 % bootstrap interval of `cpr` over pairs; for one pair, its own value.
        cmd_interval: The same for `cmd`.
        n_pairs: How many pairs of inputs.
        unit: ``"edges"`` or ``"nodes"``.
        size: The number of edges or nodes.
        pairs: f at every share, one row per pair.
        selected: (share, f) of the selection, if there is one.
        meta: Model, versions, rules, and how edges were scored.
    """

    curve: tuple[Point, ...]
    cpr: float
    cmd: float
    interval: Point
    cmd_interval: Point
    n_pairs: Index
    unit: Unit
    size: Index
    pairs: tuple[tuple[float, ...], ...]
    selected: Point | None = None
    meta: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that every pair has the whole curve."""
        super().__post_init__()
        if len(self.pairs) != self.n_pairs or {len(row) for row in self.pairs} != {len(self.curve)}:
            raise InputError(
                f"Expected {len(self.curve)} numbers for each of {self.n_pairs} pairs; got a different number."
            )

    def __repr__(self) -> str:
        """One line: the areas."""
        pairs = "1 pair" if self.n_pairs == 1 else f"{self.n_pairs} pairs"
        return f"Faithfulness(CPR {self.cpr:.3f}, CMD {self.cmd:.3f}, {pairs}, {self.size} {self.unit})"

    @property
    def headline(self) -> str:
        """The question that it answers."""
        return f"How much of the target do circuits of a share of {self.unit} recover in the model?"

    def _table(self) -> Table:
        """F at every share."""
        return Table(np.array([[f] for _, f in self.curve]), [f"{share:.1%}" for share, _ in self.curve], ["f"])

    def _printed(self, k: int) -> Iterator[RenderableType]:
        yield heading(repr(self))
        yield table((f"share of {self.unit}", "f"), [(f"{share:.1%}", f"{f:.3f}") for share, f in self.curve])


def faithfulness_of(rows: Sequence[Sequence[float]], shares: Sequence[float], **more: Any) -> Faithfulness:
    """The record of curves, one row per pair."""
    values, at = np.asarray(rows, dtype=np.float64), np.asarray(shares, dtype=np.float64)
    cpr, cmd = (np.asarray(np.trapezoid(one, at, axis=1)) for one in (values, np.abs(1 - values)))
    return Faithfulness(
        curve=tuple(zip(map(float, shares), values.mean(0).tolist(), strict=True)),
        cpr=float(cpr.mean()),
        cmd=float(cmd.mean()),
        interval=_interval(cpr),
        cmd_interval=_interval(cmd),
        n_pairs=len(values),
        pairs=tuple(tuple(row) for row in values.tolist()),
        **more,
    )


def _interval(values: np.ndarray) -> Point:
    drawn = np.random.default_rng(0).integers(len(values), size=(N_RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn].mean(1), (0.025, 0.975))
    return float(low), float(high)
