"""`Parts`: one model pass, and the ranges of blocks and heads that were asked of it lately."""

from __future__ import annotations

from typing import Any

from tensorlens.app.explorer.questions import Ask
from tensorlens.app.explorer.recent import Recent
from tensorlens.errors import InputError
from tensorlens.tensor import AttentionTensor

_MOST_PARTS = 3


class Parts:
    """The attention tensor of one input with its latest parts, so that bias and certificate are found once for each.

    Args:
        whole: The tensor of all blocks and heads.
    """

    def __init__(self, whole: AttentionTensor) -> None:
        self.whole = whole
        self._kept: Recent[Any, AttentionTensor] = Recent(_MOST_PARTS, 2**62)

    @property
    def n_bytes(self) -> int:
        """Memory of the hidden states and of the constants that are not the model's own."""
        recording = self.whole.operator.recording
        return sum(state.nbytes for state in recording.states) + recording.program.held_bytes

    def part(self, ask: Ask) -> AttentionTensor:
        """The tensor of the blocks and heads that a question is about."""
        start, stop = ask.blocks or (0, self.whole.n_blocks)
        if (start, stop) == (0, self.whole.n_blocks) and not ask.heads:
            return self.whole
        key = (start, stop, ask.heads, ask.keeps_heads)
        kept = self._kept.get(key)
        if kept is None:
            kept = _with_heads(self.whole.blocks(start, stop), start, ask)
            self._kept.put(key, kept, 1)
        return kept


def _with_heads(T: AttentionTensor, start: int, ask: Ask) -> AttentionTensor:
    """Heads are counted from the model's first block on the page, from the range's in a tensor."""
    chosen = {block - start: list(heads) for block, heads in ask.heads}
    outside = [block + start for block in chosen if not 0 <= block < T.n_blocks]
    if outside:
        raise InputError(
            f"Expected heads of blocks {start} to {start + T.n_blocks - 1}, got block {outside[0]}. "
            "Widen the range of blocks, or choose other heads."
        )
    if not chosen:
        return T
    return T.heads(chosen) if ask.keeps_heads else T.without_heads(chosen)
