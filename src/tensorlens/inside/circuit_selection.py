r"""The heaviest connected circuit within a budget, as an integer programme.

    maximise Σ_e |w_e| x_e   over x ∈ {0, 1}^edges
    Σ_e x_e ≤ budget,   x_{b→r} ≤ z_b,   x_{b→r} ≤ z_r,   z_c ≤ Σ_b x_{b→c},   z_c ≤ Σ_r x_{c→r}

with z_c = 1 if component c is in the circuit: every component in it has an edge in and an edge out. The
embedding needs no edge into it, and the target none out of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensorlens.errors import MethodError, missing_extra

CANDIDATES = 20
"""Edges that may be chosen, as a multiple of the budget: the heaviest, and of every component the two heaviest."""

SECONDS = 60.0
GAP = 1e-3
"""The search stops once it is proved to be this near the optimum, or after this number of seconds."""


def best_connected(weights: Tensor, is_wired: Tensor, budget: int) -> Tensor:
    """(reader, writer): the heaviest edges, at most `budget`, each on a path from the embedding to the target."""
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError as error:
        raise missing_extra("A budget", "scipy", "circuits") from error
    edges = _candidates(weights, is_wired, budget)
    n_edges, n_inner = len(edges), len(weights) - 1  # components that read and write
    # Variables: x of the edges, then z of the components. Writer 0 is the embedding, the last reader the target.
    rows: list[dict[int, float]] = [dict.fromkeys(range(n_edges), 1.0)]
    upper = [float(budget)]
    into: dict[int, dict[int, float]] = {c: {n_edges + c: 1.0} for c in range(n_inner)}
    out: dict[int, dict[int, float]] = {c: {n_edges + c: 1.0} for c in range(n_inner)}
    for e, (r, b) in enumerate(edges):
        if b > 0:
            rows.append({e: 1.0, n_edges + b - 1: -1.0})
            out[b - 1][e] = -1.0
        if r < n_inner:
            rows.append({e: 1.0, n_edges + r: -1.0})
            into[r][e] = -1.0
    rows += [*into.values(), *out.values()]
    upper += [0.0] * (len(rows) - 1)
    limits: Any = np.array(upper)
    gain = np.array([float(weights[r, b]) for r, b in edges])
    found: Any = milp(
        np.concatenate([-gain, np.zeros(n_inner)]),
        constraints=LinearConstraint(_sparse(rows, n_edges + n_inner), ub=limits),
        integrality=np.ones(n_edges + n_inner),
        bounds=Bounds(0, 1),
        options={"time_limit": SECONDS, "mip_rel_gap": GAP},
    )
    if found.x is None:
        raise MethodError(f"No circuit of {budget} edges was found: {found.message}. Choose a larger budget.")
    kept = torch.zeros_like(is_wired)
    for (r, b), x in zip(edges, found.x, strict=False):
        kept[r, b] = bool(x > 0.5)
    return kept


def _candidates(weights: Tensor, is_wired: Tensor, budget: int) -> list[tuple[int, int]]:
    sizes = torch.where(is_wired, weights.abs(), -1.0)
    chosen = torch.zeros_like(is_wired)
    most = min(int(is_wired.sum()), CANDIDATES * budget)
    chosen.view(-1)[sizes.flatten().topk(most).indices] = True
    n = min(2, sizes.shape[1])
    chosen.scatter_(1, sizes.topk(n, dim=1).indices, True)
    chosen.scatter_(0, sizes.topk(n, dim=0).indices, True)
    return [(r, b) for r, b in (chosen & is_wired).nonzero().tolist()]


def _sparse(rows: list[dict[int, float]], n_columns: int) -> Any:
    from scipy.sparse import csr_array

    data = [value for row in rows for value in row.values()]
    columns = [column for row in rows for column in row]
    starts = np.cumsum([0, *map(len, rows)])
    return csr_array((data, columns, starts), shape=(len(rows), n_columns))
