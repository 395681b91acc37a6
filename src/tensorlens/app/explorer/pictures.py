"""Uploaded pictures: bytes from a stranger, made into a small RGB image or refused."""

from __future__ import annotations

import io
import warnings
from typing import Any

from tensorlens.app.explorer.limits import Limits
from tensorlens.errors import InputError, missing_extra

LONGEST_SIDE = 1024
"""Pixels of a picture that is kept; models see a few hundred."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def read_picture(data: bytes, limits: Limits) -> Any:
    """Decode a picture, upright and in RGB, and make it small.

    Raises:
        InputError: not a picture, damaged, or one with more pixels than the limit; sizes are read before pixels are.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise missing_extra("Dropping an image", "pillow", "explore") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large pictures: our own limit is lower, and refuses
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
        width, height = opened.size
        if width * height > limits.image_pixels:
            raise InputError(
                f"Expected a picture of at most {limits.image_pixels:,} pixels, got {width} × {height}. Shrink it."
            )
        if width < 1 or height < 1:
            raise InputError("Expected a picture with pixels, got an empty one. Choose another file.")
        opened.draft("RGB", (LONGEST_SIDE, LONGEST_SIDE))
        picture = ImageOps.exif_transpose(opened).convert("RGB")
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        return picture
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001  decoders raise whatever a hostile file provokes
        raise InputError(
            f"Expected a PNG, JPEG, WebP, GIF or BMP picture, got a file that cannot be read ({type(error).__name__}). "
            "Choose another file."
        ) from error
