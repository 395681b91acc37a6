"""Texts before there are tokens: whether one can be read at all, and whether it names a picture. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from tensorlens.errors import InputError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def names_image(text: str) -> bool:
    """Whether a text ends like the file name of a picture."""
    return Path(text).suffix.lower() in IMAGE_SUFFIXES


def check_unicode(text: str) -> None:
    """Refuse halves of surrogate pairs: JSON and the command line may hold some, and no tokenizer takes them.

    Raises:
        InputError: The text has one.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError("Expected text in Unicode, got half of a surrogate pair. Write or paste it as UTF-8.")
