"""The version of the package, which the build reads from here, and those of the packages that results depend on."""

from __future__ import annotations

from functools import cache
from importlib import metadata

__version__ = "1.0.0rc1"

_DISTRIBUTIONS = {"tensorlens": "attention-tensorlens", "torch": "torch", "transformers": "transformers"}


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


def package_versions() -> dict[str, str]:
    """Installed versions by import name; ``"unknown"`` for a package that runs without being installed."""
    return {name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()}
