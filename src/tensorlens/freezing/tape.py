"""The tape: what a recording keeps, and the sites under which it is kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tensorlens.errors import TensorLensError


class Site(NamedTuple):
    """Where a factor was held: the place in the chain of blocks, the module, the operation, and its occurrence there.

    Keyed this way, and not by a running number, a stray operation cannot shift every factor after it,
    and a block whose weights are shared (ALBERT) has factors of its own at each call.
    """

    place: str
    module: str
    operation: str
    occurrence: int

    def __str__(self) -> str:
        return f"`{self.operation}` #{self.occurrence} in `{self.module or 'the model'}` ({self.place})"


@dataclass
class Tape:
    """Frozen factors by site, and what was learnt on the way.

    Costs about as much memory as the activations of one forward pass.

    Attributes:
        factors: The held tensors, or tuples of them.
        n_heads: Number of attention heads by block, where a head axis was recognised.
        rules: How often each rule fired, by (rule, module).
    """

    factors: dict[Site, Any] = field(default_factory=dict)
    n_heads: dict[int, int] = field(default_factory=dict)
    rules: Counter[tuple[str, str]] = field(default_factory=Counter)

    def put(self, site: Site, factor: Any) -> Any:
        """Keep `factor` and give it back."""
        self.factors[site] = factor
        return factor

    def get(self, site: Site) -> Any:
        """The factor held at `site`."""
        try:
            return self.factors[site]
        except KeyError:
            raise TensorLensError(
                f"The replay met {site}, which the recording never saw: the model took another path the second time. "
                "Expected a forward pass that does the same operations for the same tokens; make sure that the model "
                "is in eval mode and has no random or stateful branch."
            ) from None

    def sites(self, operation: str) -> Iterator[tuple[Site, Any]]:
        """All factors held for `operation`, in the order of the recording."""
        return ((site, factor) for site, factor in self.factors.items() if site.operation == operation)
