r"""The paper's equations, one function each, dense and literal: to read beside the page, and as an oracle.

Nothing here knows a model, and nothing is fast: an operator holds $(LD)^2$ numbers. What belongs
here is a formula that the paper prints, or the formula that it should have printed for a layout it
only mentions. The bounds (Eqs. 25 and 29-34) come last.

Conventions, once for the whole file:

* A token is a row and a weight acts on the right, $XW$ (`torch.nn.Linear` stores the transpose).
* An operator is the $LD \times LD$ matrix of Eq. 5 and a bias is $\mathrm{vec}[B]$, so that a line
  of code reads like a line of the paper. Reshaped, it is the (L, D, L, D) tensor, which is what
  Eqs. 4 and 20-24 take, since the paper writes them with four indices.
* The paper's vec stacks columns, torch stores rows. Hence every Kronecker product below has its two
  factors in the opposite order: $A \otimes B^\top$ for the printed $B^\top \otimes A$.
  `bilinear_columns` is the printed form and `columns_to_rows` shows that both are one operator.
* Capital letters are the paper's, calligraphic there: A attention, L norm, M feed-forward, I identity,
  T a block or the whole model; B is a bias. P, with shift π, is a norm on the output of a sub-layer,
  which the paper does not have.
"""

# The paper's letters are the point of this file, also the ambiguous I.
# ruff: noqa: E741

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.axes import FullTensor, Hidden, TokenMatrix

Operator = Float[Tensor, "rows columns"]
"""A linear map of hidden states as the matrix that acts on their `vec`."""

Vector = Float[Tensor, "rows"]
"""The `vec` of a hidden state or of a bias."""

Tokens = Float[Tensor, "token"]
Channels = Float[Tensor, "channel"]
HiddenChannels = Float[Tensor, "hidden_channel"]
HeadChannels = Float[Tensor, "head head_channel"]
Up = Float[Tensor, "channel hidden_channel"]
Down = Float[Tensor, "hidden_channel channel"]
Inner = Float[Tensor, "token hidden_channel"]
ValueHeads = Float[Tensor, "head channel head_channel"]
OutHeads = Float[Tensor, "head head_channel channel"]
GateConvention = Literal["freeze_gate", "freeze_up", "half"]


Attention = Float[Tensor, "head out_token in_token"]
"""Attention probabilities A_h of one block."""


class Affine(NamedTuple):
    r"""A sub-layer, block or model at one input: $\mathrm{vec}[f(X)] = T\,\mathrm{vec}[X] + \mathrm{vec}[B]$."""

    tensor: Operator
    bias: Vector


def vec(x: Float[Tensor, "token channel"]) -> Float[Tensor, "token_channel"]:  # noqa: UP037
    r"""Flatten a hidden state row by row: index $l \cdot D + d$.

    Paper: its vec stacks columns, so that $\mathrm{vec}[AXB] = (B^\top \otimes A)\,\mathrm{vec}[X]$.
    Torch stores rows, where the same operator is $A \otimes B^\top$.
    """
    return x.reshape(-1)


def unvec(v: Float[Tensor, "token_channel"], n_tokens: int) -> Float[Tensor, "token channel"]:  # noqa: UP037
    """Undo `vec` for a hidden state of `n_tokens` rows."""
    return v.reshape(n_tokens, -1)


def unfold(tensor: FullTensor) -> Float[Tensor, "rows columns"]:
    r"""The L·D × L·D matrix $T_{mat}$ with $\mathrm{vec}[T(X)] = T_{mat}\,\mathrm{vec}[X]$ (Eq. 5), rows first."""
    n_out, d_out, n_in, d_in = tensor.shape
    return tensor.reshape(n_out * d_out, n_in * d_in)


# --- Prerequisites ---------------------------------------------------------------------------------


def bilinear(A: Float[Tensor, "l1 l2"], B: Float[Tensor, "d1 d2"]) -> Float[Tensor, "l1*d2 l2*d1"]:
    r"""$X \mapsto AXB$, rows first: $\mathrm{vec}[AXB] = (A \otimes B^\top)\,\mathrm{vec}[X]$."""
    # contiguous: torch.kron refuses a transposed view.
    return torch.kron(A, B.T.contiguous())


def bilinear_columns(A: Float[Tensor, "l1 l2"], B: Float[Tensor, "d1 d2"]) -> Float[Tensor, "d2*l1 d1*l2"]:
    r"""$X \mapsto AXB$ as printed, columns first: $\mathrm{vec}[AXB] = (B^\top \otimes A)\,\mathrm{vec}[X]$."""
    return torch.kron(B.T.contiguous(), A)


def vec_columns(X: Hidden) -> Vector:
    r"""The paper's vec: columns on top of each other, index $d \cdot L + l$."""
    return vec(X.T)


def columns_to_rows(K: Operator, n_tokens: int) -> Operator:
    """An operator on the paper's vec, rewritten to act on ours."""
    d_out, d_in = K.shape[0] // n_tokens, K.shape[1] // n_tokens
    return unfold(K.reshape(d_out, n_tokens, d_in, n_tokens).permute(1, 0, 3, 2))


def right_product(M: Float[Tensor, "d1 d2"], n_tokens: int) -> Operator:
    r"""$X \mapsto XM$, the bilinear map with $I_L$ on the left: $I_L \otimes M^\top$."""
    return bilinear(torch.eye(n_tokens, dtype=M.dtype, device=M.device), M)


def hadamard(H: Hidden) -> Operator:
    r"""$X \mapsto H \odot X$: $\mathrm{diag}(\mathrm{vec}[H])$."""
    return torch.diag(vec(H))


def contract(T: FullTensor, X: Hidden) -> Hidden:
    r"""$T(X)_{[i,:]} = \sum_j T_{[i,:,j,:]} X_{[j,:]}$ (Eqs. 4 and 20)."""
    return torch.einsum("idje,je->id", T, X)


def apply(T: Operator, X: Hidden) -> Hidden:
    r"""$\mathrm{vec}[T(X)] = T_{mat}\,\mathrm{vec}[X]$ (Eq. 5), shaped back to (L, D)."""
    return unvec(T @ vec(X), X.shape[0])


def broadcast(b: Channels, n_tokens: int) -> Vector:
    r"""$\mathrm{vec}[\mathbf{1}\, b^\top]$: one bias vector, the same at every token."""
    return vec(b.expand(n_tokens, -1))


# --- Self-attention ---------------------------------------------------------------------------------


def attention_tensor(A: Attention, w_value: ValueHeads, w_out: OutHeads) -> Operator:
    r"""$\mathcal{A} = \sum_h A_h \otimes (W_{v,h} W_{o,h})^\top$, from $\sum_h A_h X W_{v,h} W_{o,h}$ (Eqs. 6-9).

    `A` is what multiplies the values: after scale, mask, position and softmax, whatever those are.
    With grouped heads, pass the value weight of each *query* head.
    """
    heads = [bilinear(A_h, W_v @ W_o) for A_h, W_v, W_o in zip(A, w_value, w_out, strict=True)]
    return torch.stack(heads).sum(0)


def attention_bias(A: Attention, b_value: HeadChannels, w_out: OutHeads, b_out: Channels) -> Vector:
    r"""$B_{attn} = \sum_h A_h \mathbf{1}\, b_{v,h}^\top W_{o,h} + \mathbf{1}\, b_o^\top$ (appendix on biases)."""
    # Paper: prints B_v,h W_o,h + B_o,h. The sum over heads is missing, b_o belongs to no head, and
    # leaving out A_h needs rows that sum to 1, which attention sinks and dropout do not give.
    one = A.new_ones(A.shape[-1], 1)
    heads = [A_h @ one @ b_v[None] @ W_o for A_h, b_v, W_o in zip(A, b_value, w_out, strict=True)]
    return vec(torch.stack(heads).sum(0) + b_out)


# --- Norms ------------------------------------------------------------------------------------------


def norm_tensor(inverse_std: Tokens, scale: Channels, *, is_centred: bool = True) -> Operator:
    r"""$\mathcal{L} = \mathrm{diag}(1/\sigma) \otimes [(I - 11^\top/D)\,\mathrm{diag}(\gamma)]^\top$ (Eqs. 10-11).

    Only $1/\sigma$ is held fixed; the mean is linear in the input and stays inside. $\beta$ is the bias.

    Args:
        inverse_std: $1/\sqrt{\mathrm{Var}+\varepsilon}$ with the biased variance; for RMSNorm
            $1/\sqrt{\mathrm{mean}(x^2)+\varepsilon}$.
        scale: $\gamma$ as it multiplies (Gemma's is one plus its weight).
        is_centred: False for RMSNorm, which takes no mean away.
    """
    D = len(scale)
    I, one = torch.eye(D, dtype=scale.dtype, device=scale.device), scale.new_ones(D, 1)
    centring = I - one @ one.T / D if is_centred else I
    return bilinear(torch.diag(inverse_std), centring @ torch.diag(scale))


# --- Feed-forward -----------------------------------------------------------------------------------

ACTIVATION_GAINS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.special.ndtr,
    "gelu_tanh": lambda z: (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))) / 2,
    "silu": torch.sigmoid,
    "quick_gelu": lambda z: torch.sigmoid(1.702 * z),
    "relu": lambda z: (z > 0).to(z.dtype),
}
r"""$\phi(z)/z$ in closed form. Convention: no division, so that $z = 0$ has the limit $\phi'(0)$ (0 for ReLU)."""


def activation_tensor(gain: Inner) -> Operator:
    r"""$\Psi = \mathrm{diag}(\mathrm{vec}[\phi(Z)/Z])$, with `gain` $= \phi(Z)/Z$ (Eq. 13)."""
    return hadamard(gain)


def ffn_tensor(w_up: Up, gain: Inner, w_down: Down) -> Operator:
    r"""$\mathcal{M} = (I_L \otimes M_2^\top)\,\Psi\,(I_L \otimes M_1^\top)$, from $\phi(X M_1) M_2$ (Eqs. 12-14)."""
    L = len(gain)
    return right_product(w_down, L) @ activation_tensor(gain) @ right_product(w_up, L)


def ffn_bias(b_up: HiddenChannels, gain: Inner, w_down: Down, b_down: Channels) -> Vector:
    r"""$\mathrm{vec}[B_{ffn}] = \mathrm{vec}[B_{M_2}] + (I_L \otimes M_2^\top)\,\Psi\,\mathrm{vec}[B_{M_1}]$."""
    L = len(gain)
    return broadcast(b_down, L) + right_product(w_down, L) @ activation_tensor(gain) @ broadcast(b_up, L)


# Convention: the paper has no gated feed-forward. Each choice below is exact at X, since
# φ(g)⊙u = (gain⊙g)⊙u = (gain⊙u)⊙g. What is live and what is held differs, hence so does T.
UP_SHARE: dict[str, float] = {"freeze_gate": 1.0, "freeze_up": 0.0, "half": 0.5}
"""How much of the product is read as linear in the up-projection; the rest is read as linear in the gate."""


def gated_ffn_tensor(
    w_gate: Up,
    w_up: Up,
    w_down: Down,
    *,
    gain: Inner,
    gate: Inner,
    up: Inner,
    convention: GateConvention = "freeze_gate",
) -> Operator:
    r"""$\mathcal{M}$ of $(\phi(g) \odot u)\,W_{down}$, $g = XW_g + b_g$, $u = XW_u + b_u$ (not printed).

    It is Eq. 14 with another frozen factor: $\phi(g)$ on the live up-projection, or $u \odot \phi(g)/g$
    on the live gate, or the mean of both. Their sum without halving would give twice the output.

    Args:
        w_gate: the projection that the activation sees.
        w_up: the projection that it multiplies.
        w_down: the projection back.
        gain: $\phi(g)/g$ at the actual input.
        gate: $g$ at the actual input, before the activation.
        up: $u$ at the actual input.
        convention: which factor is held fixed.
    """
    share = UP_SHARE[convention]
    return share * ffn_tensor(w_up, gain * gate, w_down) + (1 - share) * ffn_tensor(w_gate, gain * up, w_down)


def gated_ffn_bias(
    b_gate: HiddenChannels,
    b_up: HiddenChannels,
    w_down: Down,
    b_down: Channels,
    *,
    gain: Inner,
    gate: Inner,
    up: Inner,
    convention: GateConvention = "freeze_gate",
) -> Vector:
    """The bias that goes with `gated_ffn_tensor`: only the live branch's own bias enters."""
    share = UP_SHARE[convention]
    through_up = ffn_bias(b_up, gain * gate, w_down, b_down)
    through_gate = ffn_bias(b_gate, gain * up, w_down, b_down)
    return share * through_up + (1 - share) * through_gate


# --- Blocks: arguments in the order in which the block computes ------------------------------------------


def identity_tensor(like: Operator) -> Operator:
    """$I$, of the size of `like`."""
    return torch.eye(len(like), dtype=like.dtype, device=like.device)


def residual(G: Operator) -> Operator:
    """$I + G$, the tensor of $X + g(X)$ (Eqs. 15-16)."""
    return identity_tensor(G) + G


def post_ln_tensor(A: Operator, L1: Operator, M: Operator, L2: Operator) -> Operator:
    """$T = L_2 (M+I) L_1 (A+I)$ (Eq. 17; BERT)."""
    I = identity_tensor(A)
    return L2 @ (M + I) @ L1 @ (A + I)


def post_ln_bias(attention: Affine, norm_1: Affine, ffn: Affine, norm_2: Affine) -> Vector:
    r"""$B = \beta_2 + L_2[B_{ffn} + (M+I)(\beta_1 + L_1 B_{attn})]$."""
    (_, B_attn), (L1, beta1), (M, B_ffn), (L2, beta2) = attention, norm_1, ffn, norm_2
    I = identity_tensor(M)
    # Paper: prints M for (M + I), which loses what the bias sends around the feed-forward.
    return beta2 + L2 @ (B_ffn + (M + I) @ (beta1 + L1 @ B_attn))


def post_ln_bias_as_printed(attention: Affine, norm_1: Affine, ffn: Affine, norm_2: Affine) -> Vector:
    """The post-LN bias without the residual, as the appendix has it: kept to show that it does not reconstruct."""
    (_, B_attn), (L1, beta1), (M, B_ffn), (L2, beta2) = attention, norm_1, ffn, norm_2
    return beta2 + L2 @ (B_ffn + M @ (beta1 + L1 @ B_attn))


def pre_ln_tensor(L1: Operator, A: Operator, L2: Operator, M: Operator) -> Operator:
    """$T = (I + M L_2)(I + A L_1)$ (appendix; GPT-2, ViT, Llama)."""
    I = identity_tensor(A)
    return (I + M @ L2) @ (I + A @ L1)


def pre_ln_bias(norm_1: Affine, attention: Affine, norm_2: Affine, ffn: Affine) -> Vector:
    r"""$B = (I + M L_2)(A\beta_1 + B_{attn}) + M\beta_2 + B_{ffn}$ (not printed)."""
    (_, beta1), (A, B_attn), (L2, beta2), (M, B_ffn) = norm_1, attention, norm_2, ffn
    I = identity_tensor(A)
    return (I + M @ L2) @ (A @ beta1 + B_attn) + M @ beta2 + B_ffn


def parallel_tensor(L1: Operator, A: Operator, L2: Operator, M: Operator) -> Operator:
    """$T = I + A L_1 + M L_2$ (not printed; NeoX; Phi has one norm for both)."""
    I = identity_tensor(A)
    return I + A @ L1 + M @ L2


def parallel_bias(norm_1: Affine, attention: Affine, norm_2: Affine, ffn: Affine) -> Vector:
    r"""$B = A\beta_1 + B_{attn} + M\beta_2 + B_{ffn}$ (not printed)."""
    (_, beta1), (A, B_attn), (_, beta2), (M, B_ffn) = norm_1, attention, norm_2, ffn
    return A @ beta1 + B_attn + M @ beta2 + B_ffn


def sandwich_tensor(L1: Operator, A: Operator, P1: Operator, L2: Operator, M: Operator, P2: Operator) -> Operator:
    """$T = (I + P_2 M L_2)(I + P_1 A L_1)$ (not printed; Gemma 3)."""
    I = identity_tensor(A)
    return (I + P2 @ M @ L2) @ (I + P1 @ A @ L1)


def sandwich_bias(
    norm_1: Affine, attention: Affine, post_1: Affine, norm_2: Affine, ffn: Affine, post_2: Affine
) -> Vector:
    r"""$B = (I + P_2 M L_2)\,b + \pi_2 + P_2(M\beta_2 + B_{ffn})$ (not printed).

    Here $b = \pi_1 + P_1(A\beta_1 + B_{attn})$, and $\pi$ is the shift of a post-norm.
    """
    (_, beta1), (A, B_attn), (P1, pi1) = norm_1, attention, post_1
    (L2, beta2), (M, B_ffn), (P2, pi2) = norm_2, ffn, post_2
    I = identity_tensor(A)
    return (I + P2 @ M @ L2) @ (pi1 + P1 @ (A @ beta1 + B_attn)) + pi2 + P2 @ (M @ beta2 + B_ffn)


def post_sublayer_tensor(A: Operator, P1: Operator, M: Operator, P2: Operator) -> Operator:
    """$T = (I + P_2 M)(I + P_1 A)$ (not printed; OLMo 2)."""
    I = identity_tensor(A)
    return (I + P2 @ M) @ (I + P1 @ A)


def post_sublayer_bias(attention: Affine, post_1: Affine, ffn: Affine, post_2: Affine) -> Vector:
    r"""$B = (I + P_2 M)(\pi_1 + P_1 B_{attn}) + \pi_2 + P_2 B_{ffn}$ (not printed)."""
    (_, B_attn), (P1, pi1), (M, B_ffn), (P2, pi2) = attention, post_1, ffn, post_2
    I = identity_tensor(M)
    return (I + P2 @ M) @ (pi1 + P1 @ B_attn) + pi2 + P2 @ B_ffn


# --- The whole model --------------------------------------------------------------------------------


def chain(tensors: Sequence[Operator], biases: Sequence[Vector]) -> Affine:
    r"""$T = T^N \cdots T^1$ and $B_{full} = B^N + T^N(B^{N-1} + \cdots)$, first block first (Eqs. 18-19).

    A final norm is one more block: the norm's tensor and $\beta$.
    """
    T, B = tensors[0], biases[0]
    for T_n, B_n in zip(tensors[1:], biases[1:], strict=True):
        # Paper: the product sign runs upwards from 1; the last block must stand leftmost.
        T, B = T_n @ T, T_n @ B + B_n
    return Affine(T, B)


def mean_tensor(tensors: Sequence[Tensor]) -> Tensor:
    r"""$\tilde{T}_r = \tfrac1m \sum_i T_{X_i}$ of a relation (Eq. 26); the biases are averaged alike."""
    return torch.stack(tuple(tensors)).mean(0)


def jacobian_tensor(patched: Callable[[Tensor], Tensor], X: Hidden) -> Operator:
    r"""$T_X = \partial\tilde{F}_X(X) / \partial X$ for the model with its factors detached (Eq. 27)."""
    return unfold(torch.func.jacrev(patched)(X))


def unit_inputs(n_tokens: int, n_channels: int, dtype: torch.dtype) -> Float[Tensor, "n_units token channel"]:
    r"""Every $E^{l,d}$, a one at token $l$ and channel $d$ and zero elsewhere, in the order of `vec`."""
    return torch.eye(n_tokens * n_channels, dtype=dtype).reshape(-1, n_tokens, n_channels)


def unit_input_tensor(frozen: Callable[[Tensor], Tensor], units: Float[Tensor, "n_units token channel"]) -> Operator:
    r"""$T_{[:,:,l,d]} = \tilde{F}_X(E^{l,d}) - \tilde{F}_X(0)$, the model having stored its factors at $X$ (Eq. 28)."""
    # Paper: prints the first term alone, which is right only without biases.
    columns = frozen(units) - frozen(torch.zeros_like(units[0]))
    return columns.reshape(len(units), -1).T


# --- Collapses of the folded tensor ---------------------------------------------------------------------


def norm_frobenius(T: FullTensor) -> TokenMatrix:
    r"""$T^{Norm}_{i \leftarrow j} = \Vert T_{[i,:,j,:]} \Vert_F$ (Eq. 21)."""
    # Convention: the paper's ‖·‖₂ of a D × D slice is read as the 2-norm of its entries.
    return T.square().sum((1, 3)).sqrt()


def norm_spectral(T: FullTensor) -> TokenMatrix:
    """Eq. 21 with the largest singular value of each slice; the bounds are about that of the whole $T$."""
    return torch.linalg.matrix_norm(T.transpose(1, 2), ord=2)


def in_out(T: FullTensor, X_0: Hidden, X_N: Hidden) -> TokenMatrix:
    r"""$T^{IO}_{i \leftarrow j} = X^N_{[i,:]}\, T_{[i,:,j,:]}\, X^0_{[j,:]}$ (Eq. 22)."""
    return torch.einsum("id,idje,je->ij", X_N, T, X_0)


def in_out_sum(X_N: Hidden, B: Hidden) -> Tokens:
    r"""$\sum_j T^{IO}_{i \leftarrow j} = \langle X^N_i,\, X^N_i - B_i \rangle$ (Eq. 23)."""
    # Paper: prints the squared norm of X^N_i, which is right only without biases.
    return (X_N * (X_N - B)).sum(-1)


def in_class(T: FullTensor, X_0: Hidden, class_column: Channels) -> TokenMatrix:
    r"""$T^{CLS}_{(c,i) \leftarrow j} = E^{out}_{[:,c]}\, T_{[i,:,j,:]}\, X^0_{[j,:]}$ (Eq. 24)."""
    return torch.einsum("d,idje,je->ij", class_column, T, X_0)


def contribution(T: FullTensor, X_0: Hidden) -> TokenMatrix:
    r"""$\Vert T_{[i,:,j,:]}\, X^0_{[j,:]} \Vert_2$, the size of what token $j$ adds to output $i$ (not printed)."""
    return torch.einsum("idje,je->ijd", T, X_0).norm(dim=-1)


# --- Bounds ------------------------------------------------------------------------------------------

# ‖·‖₂ of an operator is the largest singular value of its LD × LD matrix; of a hidden state it is the 2-norm of its
# entries. What follows bounds how large T can be. It does not say that T is a good approximation: T = 0 with B = F(X)
# satisfies the proposition too, with a smaller right side. Where a bound of the print does not hold, the function with
# its plain name is the corrected one, and `..._as_printed` shows the difference.


def matrix_norm(matrix: Tensor) -> Tensor:
    r"""$\Vert\cdot\Vert_2$ of an operator or of a weight (…, rows, columns): the largest singular value, exactly."""
    return torch.linalg.matrix_norm(matrix, ord=2)


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
    return float(matrix_norm(T) * delta.norm() + (moved_output - output).norm())


def attention_bound(w_value: ValueHeads, w_out: OutHeads, n_tokens: int) -> float:
    r"""$\Vert\mathcal{A}\Vert_2 \le \sqrt{L}\,\sum_h \Vert W_{v,h} W_{o,h}\Vert_2$ (Eq. 31).

    From $\Vert A_h\Vert_2^2 \le \Vert A_h\Vert_1 \Vert A_h\Vert_\infty \le L \cdot 1$ for weights in [0, 1]
    whose rows sum to at most one.
    """
    return float(n_tokens**0.5 * matrix_norm(w_value @ w_out).sum())


def ffn_bound(w_up: Up, w_down: Down) -> float:
    r"""$\Vert\mathcal{M}\Vert_2 \le \Vert M_2\Vert_2 \Vert M_1\Vert_2$ (Eq. 32), if $|\phi(z)| \le |z|$."""
    # Paper: asks for φ(x) ≤ x, which fails for every x < 0 of GELU and SiLU. What it needs, and what
    # they satisfy, is |φ(x)/x| ≤ 1; squared ReLU and SELU do not.
    return float(matrix_norm(w_down) * matrix_norm(w_up))


def gated_ffn_bound(w_live: Up, held: Inner, w_down: Down) -> float:
    r"""$\Vert\mathcal{M}\Vert_2 \le \Vert W_{down}\Vert_2 \Vert W_{live}\Vert_2 \max|held|$ (not printed).

    Args:
        w_live: the projection that stays linear: up for `freeze_gate`, gate for `freeze_up`.
        held: the factor on it: $\phi(g)$, or $u \odot \phi(g)/g$.
        w_down: the projection back.
    """
    # Paper: Eq. 32 has no such factor, so that it does not cover gated models, and the variance of the
    # norms is not "the only data-dependent quantity" there.
    return float(matrix_norm(w_down) * matrix_norm(w_live) * held.abs().max())


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


# Arguments from here on are bounds of the parts, in the order of computation.


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
    return final_norm * math.prod(blocks)
