"""The version of the package, which the build reads from here, and those of the packages that results depend on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

__version__ = "1.0.0rc1"

_DISTRIBUTIONS = {"tensorlens": "attention-tensorlens", "torch": "torch", "transformers": "transformers"}


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


@cache
def package_versions() -> Mapping[str, str]:
    """Installed versions by import name; ``"unknown"`` for a package that runs without being installed."""
    return MappingProxyType({name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()})
