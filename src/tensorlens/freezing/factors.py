"""Where held factors go while a pass is recorded, and come from while it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensorlens.errors import TensorLensError
from tensorlens.freezing.layouts import constants
from tensorlens.freezing.places import Site


class KeptFactors(dict[Site, Any]):
    """Factors of a recording: computed once and kept."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site and keep it.

        Detached: a gradient through a factor would be no part of T, and the factor would keep its graph.
        """
        self[site] = factor = constants(compute())
        return factor


class NoFactors(dict[Site, Any]):
    """For a recording that is asked for its graph alone: factors are computed, used and let go."""

    def at(self, site: Site, compute: Callable[[], Any]) -> Any:
        """Compute the factor of a site."""
        return constants(compute())


class SomeFactors(dict[Site, Any]):
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
