"""`PlacedPicture`: a picture, and which input stands for which part of it."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

IMAGE = re.compile(r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*")
"""What a page may show: a picture inside of it, never an address."""


@dataclass(frozen=True, kw_only=True)
class PlacedPicture:
    """A picture that a map is laid over.

    Attributes:
        image: A data URI, or None.
        places: For each part the number of its input, then left, top, right and bottom as parts of width and height.
    """

    image: str | None
    places: tuple[tuple[int | float, ...], ...]


def placed_pictures(value: Any, n_inputs: int) -> tuple[PlacedPicture, ...]:
    """Pictures from the `meta` of a map; none if anything of them is damaged, since files come from strangers."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        return ()
    found = []
    for one in value:
        image, places = one.get("image"), one.get("places")
        is_image = image is None or isinstance(image, str) and IMAGE.fullmatch(image) is not None
        if not is_image or not isinstance(places, list) or not all(_is_place(place, n_inputs) for place in places):
            return ()
        found.append(PlacedPicture(image=image, places=tuple(tuple(place) for place in places)))
    return tuple(found)


def _is_place(place: Any, n_inputs: int) -> bool:
    if not isinstance(place, (list, tuple)) or len(place) != 5 or type(place[0]) is not int:
        return False
    edges = place[1:]
    is_finite = all(isinstance(edge, (int, float)) and math.isfinite(edge) and 0 <= edge <= 1.0001 for edge in edges)
    return 0 <= place[0] < n_inputs and is_finite
