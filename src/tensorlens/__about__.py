"""The version of the package, in one place: the build reads it from here."""

from __future__ import annotations

__version__ = "1.0.0rc1"
