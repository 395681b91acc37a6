"""Between which lengths samples of a data set were padded and compared with what they are alone.

Code may branch by length, as rotary embeddings do that stretch, so that padding sends a short sample another way. That
depends on the model alone: it is found out once for each state of it.
"""

from __future__ import annotations

from collections.abc import Hashable
from weakref import WeakKeyDictionary

from torch import nn

from tensorlens.freezing.interception import current_fingerprint

Lengths = dict[tuple[str, ...], tuple[int, int]]
"""By kind of input, the shortest sample that was compared, and what it was padded to."""

_known: WeakKeyDictionary[nn.Module, dict[Hashable, Lengths]] = WeakKeyDictionary()

MOST_KNOWN = 64
"""States and questions remembered of a model."""


def recall(model: nn.Module, asked: Hashable) -> Lengths:
    """What was compared of a model in this state, asked the same."""
    return dict(_known.get(model, {}).get((current_fingerprint(model), asked), {}))


def remember(model: nn.Module, asked: Hashable, lengths: Lengths) -> None:
    """Keep what was compared and agreed, in place of the oldest where there is much."""
    state, known = current_fingerprint(model), _known.setdefault(model, {})
    if state is not None:
        known.setdefault((state, asked), {}).update(lengths)
        while len(known) > MOST_KNOWN:
            known.pop(next(iter(known)))


def forget(model: nn.Module) -> None:
    """Padding was heard after all."""
    _known.pop(model, None)


def widened(batches: list[list[int]]) -> list[list[int]]:
    """Batches of samples sorted by length, with the very shortest in that of the longest; all as large as before."""
    if len(batches) < 2:
        return batches
    shortest, *others = (i for some in batches for i in some)
    starts = [sum(map(len, batches[:n])) for n in range(len(batches) + 1)]
    *rest, last = (others[first:end] for first, end in zip(starts, starts[1:], strict=False))
    return [*rest, [shortest, *last]]
