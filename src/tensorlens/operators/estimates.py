"""The cost of a computation before it runs: operations, memory, and about how long it takes here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Literal, get_args

import torch

from tensorlens.errors import InputError, check_whole
from tensorlens.models.precision import Precision, matmul_mode
from tensorlens.operators.operator import ENOUGH_TO_FOLD, MOST_COTANGENTS, FrozenOperator
from tensorlens.program.folding import FoldedBlocks, folding_pays
from tensorlens.program.nodes import Held
from tensorlens.views.printing import Printed

Work = Literal["rows", "dense", "norm", "sketch", "in_out"]


@dataclass(frozen=True, kw_only=True)
class Estimate(Printed):
    """The cost of a computation.

    Attributes:
        work: What was asked for.
        way: ``"folded"`` or ``"pulls"``, one of each cotangent through the program.
        flops: Floating-point operations, a multiplication and an addition counting as two.
        n_bytes: Memory at the peak, beyond what the operator holds already.
        seconds: About how long, at half the rate of a large matrix product measured on the device.
    """

    work: str
    way: str
    flops: float
    n_bytes: int
    seconds: float

    @property
    def time_class(self) -> str:
        """In words: ``"instant"``, ``"seconds"``, ``"minutes"`` or ``"hours"``."""
        for limit, name in ((1, "instant"), (60, "seconds"), (3600, "minutes")):
            if self.seconds < limit:
                return name
        return "hours"

    def __str__(self) -> str:
        """One line."""
        cost = f"{self.flops / 1e12:.3g} TFLOP, {self.n_bytes / 2**30:.2f} GiB"
        return f"{self.work} by {self.way}: {cost}, {self.time_class} (about {self.seconds:.2g} s)"


def estimate(
    operator: FrozenOperator, work: str = "rows", *, n_outputs: int | None = None, probes: int = 16
) -> Estimate:
    """The cost of some work.

    Args:
        operator: The operator.
        work: ``"rows"`` (one slice), ``"dense"``, ``"norm"``, ``"sketch"`` or ``"in_out"``.
        n_outputs: For all but rows and dense: how many outputs; all if None.
        probes: For a sketch.
    """
    if work not in get_args(Work):
        raise InputError(f"`estimate` knows {', '.join(get_args(Work))}; got {work!r}.")
    n_out, d_out = operator.shape[:2]
    n_outputs = None if n_outputs is None else check_whole(n_outputs, "n_outputs", 1)
    probes = check_whole(probes, "probes", 1)
    n_outputs = 1 if work == "rows" else n_out if n_outputs is None or work == "dense" else n_outputs
    each = {"sketch": probes, "in_out": 1}.get(work, d_out)
    stored = {"rows": 1, "dense": n_out}.get(work, 0) * d_out * operator.n_tokens * operator.n_channels
    n_columns = min(n_outputs * each, MOST_COTANGENTS.get(operator.device.type, 2048))
    folded = operator.folded if n_outputs * each >= ENOUGH_TO_FOLD else None
    if folded is not None:
        flops = _folded_flops(operator, folded, n_outputs, each)
    else:
        flops = _pulled_flops(operator, n_outputs * each)
    rate = 0.5 * matmul_rate(operator.device, operator.precision, operator.compute_type)
    return Estimate(
        work=work,
        way="pulls" if folded is None else "folded",
        flops=flops,
        n_bytes=stored * operator.dtype.itemsize + n_columns * operator.bytes_per_cotangent,
        seconds=flops / rate,
    )


def _folded_flops(operator: FrozenOperator, folded: FoldedBlocks, n_outputs: int, n_cotangents: int) -> float:
    """Operations of the folded adjoint by sizes alone, as if every token saw every other."""
    n, d = operator.n_tokens, operator.n_channels
    width = min(n_outputs * n_cotangents, MOST_COTANGENTS.get(operator.device.type, 2048))
    n_passes = max(1, round(n_outputs * n_cotangents / width))
    n_columns, keeps = n_outputs * n_cotangents, n_passes > 2
    inner = folded.n_inner
    token_wise = 4.0 * d * inner * n * n_columns
    if keeps or folding_pays(d, inner, width):
        token_wise = 2.0 * d * d * n * n_columns + 2.0 * d * d * inner * n * (1 if keeps else n_passes)
    mixing = 2.0 * n * n * d * n_columns
    n_blocks = operator.n_blocks - 1  # in the last block one token is live
    return n_blocks * (token_wise + 4.0 * d * d * n * n_columns + mixing)


def _pulled_flops(operator: FrozenOperator, n_cotangents: int) -> float:
    """Two operations for each token, cotangent and number of a matrix that steps multiply by."""
    program = operator.recording.part(operator.span).linear
    held = [step.args[1] for step in program.steps if step.operation in ("linear", "matmul")]
    n_numbers = sum(program.constants[one.index].numel() for one in held if type(one) is Held)
    return 2.0 * n_numbers * operator.n_tokens * n_cotangents


@cache
def matmul_rate(device: torch.device, precision: Precision | None, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product, measured once."""
    n = 4096 if device.type == "cuda" else 512
    a = torch.randn(n, n, device=device).to(dtype)
    best = 0.0
    with matmul_mode(precision), torch.no_grad():
        for _ in range(4):
            _finish(device)
            start = time.perf_counter()
            torch.mm(a, a)
            _finish(device)
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
