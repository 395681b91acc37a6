"""Versions of the packages that results depend on, as maps, runs and tables record them."""

from __future__ import annotations

from functools import cache
from importlib import metadata

_DISTRIBUTIONS = {"tensorlens": "attention-tensorlens", "torch": "torch", "transformers": "transformers"}


def package_versions() -> dict[str, str]:
    """By import name, the installed version; ``"unknown"`` for a package that runs without being installed."""
    return {name: _version(distribution) for name, distribution in _DISTRIBUTIONS.items()}


@cache
def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
