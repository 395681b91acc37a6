"""Which engines answered for an operator: what the certificate has to prove, and what a map says of itself."""

from __future__ import annotations

from typing import Any

from tensorlens.freezing.interpreter import Heads
from tensorlens.freezing.places import Span
from tensorlens.freezing.proof import Proof
from tensorlens.freezing.recording import Recording
from tensorlens.freezing.replay import Replay


class Engines:
    """The engines that answered so far, the last one first in mind, and why a fast one gave way.

    Attributes:
        answered: Names of engines: ``"recorded graph"``, ``"replayed"``, ``"streamed"``, ``"folded"``, ``"captured"``.
        ways: How folded cotangents went, of all that answered.
        fallback: Why a fast way did not answer, or None.
    """

    def __init__(self, replay: Replay, span: Span, heads: Heads) -> None:
        self._replay, self._span, self._heads = replay, span, heads
        self.answered: dict[str, None] = {}
        self.ways: dict[str, None] = {}
        self.fallback = replay.fallback
        self._last: str | None = None

    @property
    def slow(self) -> str:
        """The engine behind single cotangents."""
        return self.slow_to(to_logits=False)

    def slow_to(self, *, to_logits: bool) -> str:
        """The engine behind single cotangents of the output, or of what the head reads."""
        recording = self._replay.recording
        if not self._replay.keeps_factors:
            return "streamed"
        graph = recording.graph
        whole = self._span == Span(0, recording.n_blocks) and not self._heads
        has_end = graph is not None and (to_logits or graph.end is not None)
        return "recorded graph" if whole and has_end else "replayed"

    def note(self, engine: str, way: str | None = None) -> None:
        """An engine has answered."""
        self.answered[engine] = None
        self._last = engine
        if way is not None:
            self.ways[way] = None

    def give_up(self, proof: Proof) -> None:
        """A fast way was wrong."""
        self.fallback = (
            f"folded blocks differed from a replay by {proof.error:.1e} (accepted: {proof.tolerance:.0e}); backward "
            "passes answered instead"
        )

    def notes(self) -> dict[str, Any]:
        """For a map: the engine that answered last, and why a faster one did not."""
        found = {} if self._last is None else {"engine": self._last}
        return found if self.fallback is None else found | {"fallback": self.fallback}


def inner_width_by_sizes(recording: Recording) -> int:
    """Channels inside the widest feed-forward, by the sizes of weights alone; twice where gate and up are both live."""
    d = recording.states[0].shape[-1]
    weights = [p.shape for block in recording.anatomy.blocks for p in block.parameters() if p.dim() == 2]
    inner = max((shape[1] for shape in weights if shape[0] == d), default=d)
    return inner * (2 if recording.rules.gate == "half" else 1)
