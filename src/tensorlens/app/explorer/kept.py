"""What is kept between questions: `Recent`, the last few of something, and `Parts`, one model pass and its parts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

from tensorlens.app.explorer.questions import Ask
from tensorlens.errors import InputError
from tensorlens.maps.defaults import has_predictions
from tensorlens.tensor import AttentionTensor

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

N_PREDICTIONS = 8
_MOST_PARTS = 3


class Recent(Generic[Key, Value]):
    """Keeps what was used last. The newest is kept even if it alone is too large. Safe to use from any thread."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Bytes of all that is kept."""
        return sum(n_bytes for _, n_bytes in self._kept.values())

    def get(self, key: Key) -> Value | None:
        """What is kept for `key`, now the most recent, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Key, value: Value, n_bytes: int) -> None:
        """Keep `value`, and drop what has not been used for longest."""
        with self._lock:
            self._kept[key] = (value, n_bytes)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most or len(self._kept) > 1 and self.n_bytes > self._most_bytes:
                self._kept.popitem(last=False)


class Parts:
    """The attention tensor of one input with its latest parts, so that each has its bias and certificate found once."""

    def __init__(self, whole: AttentionTensor) -> None:
        self.whole = whole
        self._kept: Recent[Any, AttentionTensor] = Recent(_MOST_PARTS, 2**62)

    @property
    def n_bytes(self) -> int:
        """Memory of the hidden states and of the constants that are not the model's own."""
        recording = self.whole.operator.recording
        return sum(state.nbytes for state in recording.states) + recording.program.held_bytes

    def predictions(self, out_token: int) -> list[dict[str, Any]]:
        """Names, numbers and probabilities of the top predictions at one output; none for a model without a head."""
        if not has_predictions(self.whole):
            return []
        out_token = 0 if self.whole.operator.recording.pools else out_token
        return [one._asdict() for one in self.whole.predictions(N_PREDICTIONS, out_token)]

    def part(self, ask: Ask) -> AttentionTensor:
        """The tensor of the blocks and heads that a question is about."""
        key = str((ask.blocks, ask.heads, ask.keeps_heads))
        kept = self._kept.get(key)
        if kept is None:
            kept = _part(self.whole, ask)
            self._kept.put(key, kept, 1)
        return kept


def _part(T: AttentionTensor, ask: Ask) -> AttentionTensor:
    """Heads are counted from the model's first block on the page, from the first of the range in a tensor."""
    start, stop = ask.blocks or (0, T.n_blocks)
    outside = [block for block in ask.heads or {} if not start <= block < stop]
    if outside:
        raise InputError(
            f"Expected heads of blocks {start} to {stop - 1}, got block {outside[0]}. "
            "Widen the range of blocks, or choose other heads."
        )
    T = T if ask.blocks is None else T.blocks(start, stop)
    chosen = {block - start: heads for block, heads in (ask.heads or {}).items()}
    return T if not chosen else T.heads(chosen) if ask.keeps_heads else T.without_heads(chosen)
