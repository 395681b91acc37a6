"""Where held factors go while a pass is recorded, and come from while it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from tensorlens.errors import TensorLensError
from tensorlens.freezing.layouts import constants
from tensorlens.freezing.places import Site
from tensorlens.freezing.traced import address_of
from tensorlens.models.evidence import tensors_in


class KeptFactors(dict[Site, Any]):
    """Factors of a recording: computed once and kept."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site and keep it.

        Detached: a gradient through a factor would be no part of T, and the factor would keep its graph.
        """
        self[site] = factor = constants(compute())
        return factor

    def protect(self, target: Tensor) -> None:
        """Give factors that lie in the memory of `target` their own, before it is written to."""
        address = address_of(target)
        for site, factor in self.items():
            if any(address_of(one) == address for one in tensors_in(factor)):
                self[site] = copies(factor)


class NoFactors(dict[Site, Any]):
    """For a recording that is asked for its graph alone: factors are computed, used and let go."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site."""
        return constants(compute())

    def protect(self, target: Tensor) -> None:
        """Nothing is kept."""


class SomeFactors(KeptFactors):
    """Keeps what is held outside of blocks, and of blocks only while they are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: set[int] = set()

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site, and keep it unless it belongs to a closed block."""
        factor = constants(compute())
        if not site.place.inside or site.place.block in self.open:
            self[site] = factor
        return factor


class RecalledFactors:
    """Factors of a recording, looked up."""

    def __init__(self, factors: Mapping[Site, Any]) -> None:
        self.factors = factors

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """The factor held at `site`."""
        try:
            return self.factors[site]
        except KeyError:
            raise TensorLensError(
                f"The replay met {site}, which the recording never saw: the model took another path the second time. "
                "Expected a forward pass that does the same operations for the same tokens; make sure that the model "
                "is in eval mode and has no random or stateful branch."
            ) from None

    def protect(self, target: Tensor) -> None:
        """Nothing: a replay writes into tensors of its own."""


def copies(factor: Any) -> Any:
    """A factor in memory of its own."""
    if isinstance(factor, (tuple, list)):
        parts = [copies(part) for part in factor]
        return type(factor)(*parts) if hasattr(factor, "_fields") else type(factor)(parts)
    return factor.clone() if isinstance(factor, Tensor) else factor
