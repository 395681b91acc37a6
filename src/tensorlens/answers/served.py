"""An answer from a server, and whether the model here gives it the same probabilities."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorlens.errors import InputError
from tensorlens.tolerances import SERVED_AT_WORST, SERVED_ON_AVERAGE


class Agreement(NamedTuple):
    r"""Log-probabilities of a server beside those of the model here, $d_q = \log p_q - \log p_q^{\text{served}}$.

    Attributes:
        served: The server's log-probabilities, one per token of the answer.
        mean: Mean of |d| over the tokens.
        largest: The largest |d|.
        at: The token with the largest |d|, counted from the answer's first.
    """

    served: tuple[float, ...]
    mean: float
    largest: float
    at: int

    @property
    def holds(self) -> bool:
        """Whether the two agree up to rounding."""
        return self.mean <= SERVED_ON_AVERAGE and self.largest <= SERVED_AT_WORST

    def __str__(self) -> str:
        """One sentence."""
        size = f"{self.mean:.3f} on average, {self.largest:.3f} at most (token {self.at})"
        if self.holds:
            return f"the server's log-probabilities agree with this model's: they differ by {size}"
        return (
            f"the server's log-probabilities are not this model's: they differ by {size}. A different model, "
            f"template, quantisation or temperature answered there; the explanation is of this model"
        )


def check_served(logprobs: Any, n_tokens: int) -> tuple[float, ...]:
    """A server's log-probabilities, one for each token of an answer."""
    if isinstance(logprobs, str) or not isinstance(logprobs, Sequence):
        raise InputError(
            f"`logprobs` must be a list with one number for each token of the answer; got {logprobs!r:.60}."
        )
    if len(logprobs) != n_tokens:
        raise InputError(
            f"The answer has {n_tokens} tokens here, but `logprobs` has {len(logprobs)}: the server tokenised "
            f"the text differently, or counted the token that ends the answer. Pass the server's token ids as `answer`."
        )
    numbers = tuple(float(one) if isinstance(one, (int, float)) else math.nan for one in logprobs)
    if not all(one <= 1e-6 and math.isfinite(one) for one in numbers):
        raise InputError(f"`logprobs` must be finite and not above zero; got {logprobs!r:.60}.")
    return numbers


def agreement(served: Sequence[float], own: Sequence[float]) -> Agreement:
    """Compare; a disagreement raises a warning."""
    apart = [abs(one - other) for one, other in zip(own, served, strict=True)]
    largest = max(apart)
    found = Agreement(tuple(served), sum(apart) / len(apart), largest, apart.index(largest))
    if not found.holds:
        warnings.warn(str(found), UserWarning, stacklevel=4)
    return found
