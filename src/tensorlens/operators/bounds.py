r"""The paper's error bound and the norms it rests on (Eqs. 25 and 29-34), in the manner of `equations.py`.

$\Vert\cdot\Vert_2$ of an operator is the largest singular value of its $LD \times LD$ matrix; of a hidden
state it is the 2-norm of its entries. What is below bounds how large $T$ can be. It does not say that
$T$ is a good approximation: $T = 0$ with $B = F(X)$ satisfies the proposition too, with a smaller right side.

Where a bound of the print does not hold, the function with its plain name is the corrected one, and
`..._as_printed` stays beside it for the test that shows the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import Hidden
from tensorlens.operators.equations import Channels, Down, HiddenChannels, Inner, Operator, OutHeads, Up, ValueHeads


def spectral_norm(matrix: Float[Tensor, "*batch rows columns"]) -> Float[Tensor, "*batch"]:
    r"""The largest singular value, $\Vert\cdot\Vert_2$ of an operator or of a weight."""
    return torch.linalg.matrix_norm(matrix, ord=2)


# --- Proposition 1 -----------------------------------------------------------------------------------


def proposition_bound(T: Operator, delta: Hidden, output: Hidden, moved_output: Hidden) -> float:
    r"""$\Vert T_X\Vert_2 \Vert\epsilon\Vert_2 + \Vert F(X+\epsilon) - F(X)\Vert_2$ (Eqs. 25, 29 and 30).

    It bounds $\Vert T_X(X+\epsilon) + B - F(X+\epsilon)\Vert_2$.

    Args:
        T: the operator at $X$.
        delta: the perturbation $\epsilon$.
        output: $F(X)$.
        moved_output: $F(X+\epsilon)$.
    """
    # Paper: the main text leaves B out of the left side, and the proof has F(X) - F(X+ε) with a minus
    # in front where a plus belongs. The first makes the claim false for biased models, the second is harmless.
    return float(spectral_norm(T) * delta.norm() + (moved_output - output).norm())


# --- Sub-layers -----------------------------------------------------------------------------------------


def attention_bound(w_value: ValueHeads, w_out: OutHeads, n_tokens: int) -> float:
    r"""$\Vert\mathcal{A}\Vert_2 \le \sqrt{L}\,\sum_h \Vert W_{v,h} W_{o,h}\Vert_2$ (Eq. 31).

    From $\Vert A_h\Vert_2^2 \le \Vert A_h\Vert_1 \Vert A_h\Vert_\infty \le L \cdot 1$ for weights in [0, 1]
    whose rows sum to at most one.
    """
    return float(n_tokens**0.5 * spectral_norm(w_value @ w_out).sum())


def ffn_bound(w_up: Up, w_down: Down) -> float:
    r"""$\Vert\mathcal{M}\Vert_2 \le \Vert M_2\Vert_2 \Vert M_1\Vert_2$ (Eq. 32), if $|\phi(z)| \le |z|$."""
    # Paper: asks for φ(x) ≤ x, which fails for every x < 0 of GELU and SiLU. What it needs, and what
    # they satisfy, is |φ(x)/x| ≤ 1; squared ReLU and SELU do not.
    return float(spectral_norm(w_down) * spectral_norm(w_up))


def gated_ffn_bound(w_live: Up, held: Inner, w_down: Down) -> float:
    r"""$\Vert\mathcal{M}\Vert_2 \le \Vert W_{down}\Vert_2 \Vert W_{live}\Vert_2 \max|held|$ (not printed).

    Args:
        w_live: the projection that stays linear: up for `freeze_gate`, gate for `freeze_up`.
        held: the factor on it: $\phi(g)$, or $u \odot \phi(g)/g$.
        w_down: the projection back.
    """
    # Paper: Eq. 32 has no such factor, so that it does not cover gated models, and the variance of the
    # norms is not "the only data-dependent quantity" there.
    return float(spectral_norm(w_down) * spectral_norm(w_live) * held.abs().max())


def gate_bound(w_gate: Up, b_gate: HiddenChannels, scale: Channels, shift: Channels) -> float:
    r"""$\max|\phi(g)| \le \max_f \Vert W_{g[:,f]}\Vert\,(\sqrt{D}\,\Vert\gamma\Vert_\infty + \Vert\beta\Vert) + |b_f|$.

    For a gate that reads a normalised state, whose rows cannot be longer than the term in brackets: with
    it `gated_ffn_bound` becomes a statement about weights alone. Needs $|\phi(z)| \le |z|$ (not printed).
    """
    longest_row = len(scale) ** 0.5 * scale.abs().max() + shift.norm()
    return float((w_gate.norm(dim=0) * longest_row + b_gate.abs()).max())


def norm_bound(scale: Channels, min_variance: float, eps: float) -> float:
    r"""$\Vert\mathcal{L}\Vert_2 \le \Vert\gamma\Vert_\infty / \sqrt{\xi + \varepsilon}$ (Eq. 33).

    Here $\xi = \min_l \mathrm{Var}[X_{[l,:]}]$ over the tokens; for RMSNorm it is the smallest mean square.
    """
    return float(scale.abs().max()) / (min_variance + eps) ** 0.5


def norm_bound_as_printed(scale: Channels, min_variance: float) -> float:
    r"""$\Vert\gamma\Vert_\infty / \xi$: the print takes $\sigma$ for the variance, which fails as soon as $\xi > 1$."""
    return float(scale.abs().max()) / min_variance


# --- Blocks and the whole model: arguments are bounds of the parts, in the order of computation ----------


def post_ln_bound(attention: float, norm_1: float, ffn: float, norm_2: float) -> float:
    r"""$\Vert L_2\Vert (\Vert M\Vert + 1) \Vert L_1\Vert (\Vert A\Vert + 1)$, one factor of Eq. 34."""
    return norm_2 * (ffn + 1) * norm_1 * (attention + 1)


def pre_ln_bound(norm_1: float, attention: float, norm_2: float, ffn: float) -> float:
    r"""$(1 + \Vert M\Vert \Vert L_2\Vert)(1 + \Vert A\Vert \Vert L_1\Vert)$ (not printed)."""
    return (1 + ffn * norm_2) * (1 + attention * norm_1)


def parallel_bound(norm_1: float, attention: float, norm_2: float, ffn: float) -> float:
    r"""$1 + \Vert A\Vert \Vert L_1\Vert + \Vert M\Vert \Vert L_2\Vert$ (not printed)."""
    return 1 + attention * norm_1 + ffn * norm_2


def sandwich_bound(norm_1: float, attention: float, post_1: float, norm_2: float, ffn: float, post_2: float) -> float:
    r"""$(1 + \Vert P_2\Vert\Vert M\Vert\Vert L_2\Vert)(1 + \Vert P_1\Vert\Vert A\Vert\Vert L_1\Vert)$ (not printed)."""
    return (1 + post_2 * ffn * norm_2) * (1 + post_1 * attention * norm_1)


def post_sublayer_bound(attention: float, post_1: float, ffn: float, post_2: float) -> float:
    r"""$(1 + \Vert P_2\Vert \Vert M\Vert)(1 + \Vert P_1\Vert \Vert A\Vert)$ (not printed)."""
    return (1 + post_2 * ffn) * (1 + post_1 * attention)


def model_bound(blocks: Iterable[float], final_norm: float = 1.0) -> float:
    r"""$\Vert T_X\Vert_2 \le \Vert L_f\Vert \prod_n \Vert T^n\Vert$ (Eq. 34, where $L_f$ is absent)."""
    return final_norm * prod(blocks)
