r"""The product bound of a real model at an input: how large $\Vert T_X\Vert_2$ can be (Eq. 34, corrected).

The arguments of the formulas are found in the paths of each block of a recorded pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import takewhile
from typing import Literal

import torch
from torch import Tensor

from tensorlens.errors import AnatomyError, MethodError
from tensorlens.program.folding import dense, in_form, product_of
from tensorlens.program.paths import Chain, NotFoldable, Path, Wiring, before_weight, has_norm, naming_block, wiring
from tensorlens.program.program import Program
from tensorlens.program.steps import at_least_float32
from tensorlens.recording.recorder import record
from tensorlens.recording.recording import Recording, Span

Reading = Literal["weights", "measured", "printed"]


def matrix_norm(matrix: Tensor) -> Tensor:
    r"""$\Vert\cdot\Vert_2$ of an operator or of a weight (…, rows, columns): the largest singular value, exactly."""
    return torch.linalg.matrix_norm(matrix, ord=2)


@dataclass(frozen=True, kw_only=True)
class ProductBound:
    r"""An upper bound of $\Vert T_X\Vert_2$, as its logarithm: thirty blocks multiply to more than a float holds.

    Attributes:
        log10: log10 of the bound.
        blocks: log10 of the factor of each block, first block first.
        final_norm: log10 of the final norm's factor, 0 without one.
        reading: Which quantities came from weights and which were measured.
    """

    log10: float
    blocks: tuple[float, ...]
    final_norm: float
    reading: Reading

    @property
    def value(self) -> float:
        """The bound itself; infinite if it exceeds a float."""
        return 10**self.log10 if self.log10 < 308 else math.inf


@torch.no_grad()
def product_bound(recording: Recording, span: Span | None = None, reading: Reading = "weights") -> ProductBound:
    r"""$\Vert L_f\Vert\prod_n \Vert T^n\Vert$ over blocks, each bounded by its parts (Eq. 34, corrected and completed).

    A path of a block is bounded by the product of the bounds of its pieces, and a sum of paths by the sum. 1/σ of each
    norm is the recorded one. Everything else that depends on the input has two readings:

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
        in_form(self.found)  # a block that cannot be folded contains more than these norms
        inner = sum(self._product(path.pieces) for path in self.found.streams) + sum(self._branches())
        if self.found.is_parallel:
            return inner + self._attention()
        return (sum(self._product(path.pieces) for path in self.found.carry) + self._attention()) * inner

    def tail(self) -> float:
        """The pieces between the block and the next state: after the last block, the final norm."""
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
                # The paper prints the variance in place of σ.
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
                # An activation that exceeds |z| would break the bound on the gate; then the measured value is used.
                factors = [max(f, gated[_is_gate(path)]) for path, f in zip(paths, factors, strict=True)]
            else:
                # φ(z)/z ≤ 1 for every usual activation; for others there is no constant, so the ratio is measured.
                factors = [1.0 if self.reading == "printed" else max(1.0, f) for f in factors]
        return [factor * self._product(path.pieces) for factor, path in zip(factors, paths, strict=True)]

    def _gated(self) -> tuple[float, float] | None:
        """The largest factors on up and on gate, from the weights; None without a gate, zero if no norm bounds them."""
        both = self._with_both_branches()
        if both is None or sorted(map(_is_gate, both.branches)) != [False, True]:
            return None
        up, gate = sorted(both.branches, key=_is_gate)
        if both.first or not has_norm(before_weight(up.pieces)):
            return 0.0, 0.0
        share = 0.5 if self.recording.rules.gate == "half" else 1.0
        return share * _longest(both, gate), share * _longest(both, up)

    def _with_both_branches(self) -> Wiring | None:
        """The block with gate and up both live: the weights of a held branch are not in the program."""
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
    r"""The largest entry that the first matrix of a branch can give on a row that the norm before it has normalised.

    Such a row is at most $\sqrt D\,\Vert\gamma\Vert_\infty + \Vert\beta\Vert$ long.
    """
    entry = before_weight(path.pieces)
    inner = tuple(takewhile(lambda piece: piece.kind != "gain", path.pieces))
    read, given = (both.slot_of(Path(path.source, pieces)) for pieces in (entry, inner))
    assert read is not None and given is not None, "the paths were read from slots"
    shift, bias = (_at_zero(both.program, *slots) for slots in ((path.source, read), (read, given)))
    weight = dense(tuple([piece for piece in inner[len(entry) :] if piece.kind != "token"]), -1).T
    scales = [piece.by for piece in entry if piece.kind == "scale"]
    longest_row = len(shift) ** 0.5 * _largest(scales) + shift.norm()
    return float((weight.norm(dim=0) * longest_row + bias.abs()).max())


def _at_zero(program: Program, start: int, stop: int) -> Tensor:
    """One token of a slot while another slot is zero: the biases and shifts between them."""
    part = program.part((start,), (stop,))
    return at_least_float32(part.run(*part.zeros())[0].flatten(0, -2)[0])
