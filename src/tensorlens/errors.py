"""Everything that can go wrong, by kind.

Each message has three parts: what was expected, what came, what to do next. Raise the most
specific class; callers who do not care catch `TensorLensError`.
"""

from __future__ import annotations


class TensorLensError(Exception):
    """Base of every error this package raises on purpose."""


class LoadError(TensorLensError):
    """A model, tokenizer or processor could not be found or read."""


class MissingExtraError(LoadError, ImportError):
    """A feature needs a package that is not installed; the message holds the install line."""


class InputError(TensorLensError, ValueError):
    """What the user passed to a lens, an operator or a map does not fit."""


class AnatomyError(TensorLensError):
    """The blocks, the heads or the output head of a model could not be found."""


class NotLinearError(TensorLensError):
    """An operation cannot be held fixed, so that no exact linear operator exists."""


class SizeError(TensorLensError, MemoryError):
    """A result would not fit into memory."""


class MethodError(TensorLensError, ValueError):
    """A map was asked for by an unknown name, or does not apply to this model."""


def missing_extra(feature: str, package: str, extra: str) -> MissingExtraError:
    """The error for `feature` when `package`, part of the optional `extra`, is absent."""
    return MissingExtraError(
        f"{feature} needs the package `{package}`, which is not installed. "
        f'Install it with: pip install "attention-tensorlens[{extra}]"'
    )
