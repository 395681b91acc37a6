r"""The paper's error bound and the norms it rests on (Eqs. 25 and 29-34), and the product bound of a real model.

First the formulas, in the manner of `equations.py`, then `product_bound`, which finds their arguments in the paths of
each block of a recorded pass.

$\Vert\cdot\Vert_2$ of an operator is the largest singular value of its $LD \times LD$ matrix; of a hidden
state it is the 2-norm of its entries. What is below bounds how large $T$ can be. It does not say that
$T$ is a good approximation: $T = 0$ with $B = F(X)$ satisfies the proposition too, with a smaller right side.

Where a bound of the print does not hold, the function with its plain name is the corrected one, and
`..._as_printed` stays beside it for the test that shows the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from tensorlens.axes import Hidden
from tensorlens.errors import AnatomyError, MethodError
from tensorlens.operators.equations import Channels, Down, HiddenChannels, Inner, Operator, OutHeads, Up, ValueHeads
from tensorlens.program.folding import dense, in_form, product_of
from tensorlens.program.nodes import at_least_float32
from tensorlens.program.paths import Chain, NotFoldable, Path, Wiring, before_weight, has_norm, naming_block, wiring
from tensorlens.program.program import Program
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Recording, Span

Reading = Literal["weights", "measured", "printed"]


def matrix_norm(matrix: Tensor) -> Tensor:
    r"""$\Vert\cdot\Vert_2$ of an operator or of a weight (…, rows, columns): the largest singular value, exactly."""
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
    return float(matrix_norm(T) * delta.norm() + (moved_output - output).norm())


# --- Sub-layers -----------------------------------------------------------------------------------------


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
    return final_norm * math.prod(blocks)


# --- The product bound of a real model, any wiring --------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ProductBound:
    r"""An upper bound of $\Vert T_X\Vert_2$, as its logarithm: thirty blocks multiply to more than a float holds.

    Attributes:
        log10: log10 of the bound.
        blocks: log10 of the factor of each block, first block first.
        final_norm: log10 of the final norm's factor, 0 without one.
        reading: What was taken from weights and what was measured.
    """

    log10: float
    blocks: tuple[float, ...]
    final_norm: float
    reading: Reading

    @property
    def value(self) -> float:
        """The bound itself, infinite where a float ends."""
        return 10**self.log10 if self.log10 < 308 else math.inf


@torch.no_grad()
def product_bound(recording: Recording, span: Span | None = None, reading: Reading = "weights") -> ProductBound:
    r"""$\Vert L_f\Vert\prod_n \Vert T^n\Vert$ over blocks, each bounded by its parts (Eq. 34, corrected and completed).

    A path of a block is bounded by the product of its pieces' bounds, and paths that add up by the sum. 1/σ of each
    norm is what was recorded. Two readings of what else depends on the input:

    - ``"weights"``: $\sqrt L$ for attention, and for a gate the largest value that a normalised row can give it. Only
      the norms' σ are measured, as the paper says. Where a gate reads a row that no norm has bounded (OLMo 2), its
      measured values are used.
    - ``"measured"``: the norms of the actual attention matrices, and the actual gates. Smaller, and still a bound.

    Args:
        recording: The model at an input.
        span: Blocks; all of them, and the final norm, if None.
        reading: ``"weights"``, ``"measured"``, or ``"printed"``: the paper's, which is not a bound; post-LN only.

    Raises:
        AnatomyError: A block is not made of one attention, one feed-forward and norms.
    """
    span = span or Span(0, recording.n_blocks)
    tail, factors = 1.0, []

    @cache
    def both() -> Recording:
        origin = recording.from_model("A bound by weights")
        return record(origin.anatomy, origin.inputs, replace(recording.rules, gate="half"))

    for n in range(*span):
        block = _BlockBound(recording, n, reading, both)
        with naming_block(recording.name, n):
            factors.append(block.value())
            tail = block.tail()
    logarithms = tuple(math.log10(factor) for factor in factors)
    return ProductBound(
        log10=sum(logarithms) + math.log10(tail), blocks=logarithms, final_norm=math.log10(tail), reading=reading
    )


def _wiring(recording: Recording, n: int) -> Wiring:
    return wiring(recording.part(Span(n, n + 1)), n, recording.name)


class _BlockBound:
    """The bound of one block.

    Args:
        recording: The model at an input.
        n: The block.
        reading: As in `product_bound`.
        both: Gives the same pass with gate and up both live.
    """

    def __init__(self, recording: Recording, n: int, reading: Reading, both: Callable[[], Recording]) -> None:
        self.recording, self.n, self.reading, self.both = recording, n, reading, both
        self.found = _wiring(recording, n)
        if reading == "printed" and not self.found.first:
            raise MethodError(f"The paper prints a bound for post-LN blocks only; block {n} is not post-LN.")

    def value(self) -> float:
        """(‖C‖ + ‖O V‖) · ‖E‖, or of a parallel block ‖O V‖ + ‖E‖."""
        in_form(self.found)  # what cannot be folded has more to it than these norms
        inner = sum(self._product(path.pieces) for path in self.found.streams) + sum(self._branches())
        if self.found.is_parallel:
            return inner + self._attention()
        return (sum(self._product(path.pieces) for path in self.found.carry) + self._attention()) * inner

    def tail(self) -> float:
        """What comes between the block and the next state: the final norm after the last one."""
        whole, own = ([path for path in paths if not path.has_weights] for paths in (self.found.inner, self.found.own))
        own = [path for path in own if path.source == self.found.start]
        return self._product(whole[0].pieces[len(own[0].pieces) :])

    def _product(self, pieces: Chain) -> float:
        """The product of the bounds of some pieces, gains left out."""
        found = 1.0
        for place, piece in enumerate(pieces):
            if piece.kind == "weight":
                taken = tuple(takewhile(lambda one: one.kind == "take", pieces[place + 1 :]))
                found *= float(matrix_norm(dense((piece, *taken), -1)))
            elif piece.kind in ("scale", "token"):
                largest = float(at_least_float32(piece.by).abs().max())
                # The print has the variance for σ.
                found *= largest**2 if piece.kind == "token" and self.reading == "printed" else largest
        return found

    # Attention --------------------------------------------------------------------------------------------------------

    def _attention(self) -> float:
        r"""$\sum_h \Vert A_h\Vert\,\Vert W_{v,h}W_{o,h}\Vert$, with $\Vert A_h\Vert_2 \le \sqrt L$ unless measured."""
        mixing, n_heads = self.found.mixing, self.found.mixing.shape[1]
        outs = self.found.own if self.found.is_parallel else self.found.out
        paths = [*self.found.value, *(path for path in outs if path.source == mixing.slot)]
        if len(paths) != 2 or not all(path.has_weights for path in paths) or _gains(paths[1]):
            raise NotFoldable("its attention does not lie between two matrices")
        value, out = (path.pieces for path in paths)
        first, last = len(before_weight(value)), len(out) - len(before_weight(out[::-1]))
        between = (*value[first:], *out[:last])
        around = self._product((*value[:first], *out[last:], *(one for one in between if one.kind == "token")))
        around *= _largest(_gains(paths[0])) if _gains(paths[0]) else 1.0
        w_value, w_out = (
            dense(tuple([one for one in pieces if one.kind not in ("token", "gain")]), n_in)
            for pieces, n_in in ((value[first:], -1), (out[:last], mixing.shape[1] * mixing.shape[3]))
        )
        w_value, w_out = w_value.unflatten(0, (n_heads, -1)).mT, w_out.T.unflatten(0, (n_heads, -1))
        # ‖W_v W_o‖ = ‖R W_o‖ for W_v = Q R: a head's few channels instead of D rows.
        by_head = around * matrix_norm(torch.linalg.qr(w_value).R @ w_out)
        if self.reading == "measured":
            return float((matrix_norm(mixing.matrix()[0]).to(by_head) * by_head).sum())
        return float(mixing.shape[2] ** 0.5 * by_head.sum())

    # Feed-forward -----------------------------------------------------------------------------------------------------

    def _branches(self) -> list[float]:
        paths = self.found.branches
        factors = [_largest(_gains(path)) for path in paths]
        if self.reading != "measured":
            gated = self._gated()
            if gated is not None:
                # An activation that exceeds |z| would break the bound on the gate; what was measured then stands.
                factors = [max(f, gated[_is_gate(path)]) for path, f in zip(paths, factors, strict=True)]
            else:
                # φ(z)/z ≤ 1 for every usual activation; for one that exceeds it there is no constant: it is measured.
                factors = [1.0 if self.reading == "printed" else max(1.0, f) for f in factors]
        return [factor * self._product(path.pieces) for factor, path in zip(factors, paths, strict=True)]

    def _gated(self) -> tuple[float, float] | None:
        """The largest factors on up and on gate, by weights; None without a gate, zero where no norm bounds them."""
        both = self._with_both_branches()
        if both is None or sorted(map(_is_gate, both.branches)) != [False, True]:
            return None
        up, gate = sorted(both.branches, key=_is_gate)
        if both.first or not has_norm(before_weight(up.pieces)):
            return 0.0, 0.0
        share = 0.5 if self.recording.rules.gate == "half" else 1.0
        return share * _longest(both, gate), share * _longest(both, up)

    def _with_both_branches(self) -> Wiring | None:
        """The block with gate and up both live: what is held leaves no weights in a program."""
        if len(self.found.branches) > 1:
            return self.found
        try:
            return _wiring(self.both(), self.n)
        except AnatomyError:
            return None


def _gains(path: Path) -> list[Tensor]:
    return [piece.by for piece in path.pieces if piece.kind == "gain"]


def _largest(gains: list[Tensor]) -> float:
    return float(product_of(gains).abs().max()) if gains else 1.0


def _is_gate(path: Path) -> bool:
    """Whether a branch is the one that the activation sees: it has a factor of that, and one of the other branch."""
    return len(_gains(path)) > 1


def _longest(both: Wiring, path: Path) -> float:
    """The largest entry that the first matrix of a branch can give on a row that the norm before it has normalised."""
    entry = before_weight(path.pieces)
    inner = tuple(takewhile(lambda piece: piece.kind != "gain", path.pieces))
    read, given = (both.slot_of(Path(path.source, pieces)) for pieces in (entry, inner))
    assert read is not None and given is not None, "the paths were read from slots"
    shift, bias = (_at_zero(both.program, *slots) for slots in ((path.source, read), (read, given)))
    weight = dense(tuple([piece for piece in inner[len(entry) :] if piece.kind != "token"]), -1).T
    scales = [piece.by for piece in entry if piece.kind == "scale"]
    return gate_bound(weight, bias, product_of(scales) if scales else torch.ones_like(shift), shift)


def _at_zero(program: Program, start: int, stop: int) -> Tensor:
    """What one token of a slot holds when another slot is zero: the biases and shifts between them."""
    part = program.part((start,), (stop,))
    return at_least_float32(part.run(*part.zeros())[0].flatten(0, -2)[0])
