"""`PlacedPicture`: a picture, and which input stands for which part of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

_DATA_URI = r"data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*"
IMAGE = re.compile(_DATA_URI)
"""What a page may show: a picture inside of it, never an address."""

Part = Annotated[float, Meta(ge=0, le=1.0001)]
Place = tuple[Annotated[int, Meta(ge=0)], Part, Part, Part, Part]


def checked(value: Any, kind: Any) -> Any:
    """The value if it is of this kind; None otherwise, since files may come from anywhere."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError, UnicodeEncodeError):
        return None


@dataclass(frozen=True, kw_only=True)
class PlacedPicture:
    """A picture that a map is laid over.

    Attributes:
        image: A data URI, or None.
        places: For each part the number of its input, then left, top, right and bottom as parts of width and height.
    """

    image: Annotated[str, Meta(pattern=f"^{_DATA_URI}$")] | None
    places: tuple[Place, ...]


def placed_pictures(value: Any, n_inputs: int) -> tuple[PlacedPicture, ...]:
    """Pictures from the `meta` of a map; none if anything of them is damaged."""
    found = checked(value, tuple[PlacedPicture, ...]) or ()
    return found if all(place[0] < n_inputs for one in found for place in one.places) else ()
