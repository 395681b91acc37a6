"""Pictures: how they are opened and shown, and which part of one each of its tokens covers.

A vision–language model reads a picture as tokens among those of the text. Each belongs to a rectangle of the picture:
a cell of a grid, after patches were merged, the picture was cut into tiles, or a border was cropped off.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tensorlens.errors import InputError, missing_extra

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as parts of the width and height of a picture."""

WHOLE: Box = (0.0, 0.0, 1.0, 1.0)

_TILE = re.compile(r"row_(\d+)_col_(\d+)")
_CROPS = "here are some crops to help you see better"


class Picture(NamedTuple):
    """A picture among tokens.

    Attributes:
        image: A data URI that shows it; None if only its pixels are known.
        tokens: The positions of its tokens, in order.
        boxes: The part that each token covers; None for a token that covers nothing, or if the part is not known.
    """

    image: str | None
    tokens: tuple[int, ...]
    boxes: tuple[Box | None, ...]


def is_picture(value: Any) -> bool:
    """Whether a value is a Pillow image."""
    return type(value).__module__.startswith("PIL.")


def open_picture(path: Path) -> Any:
    """The picture in a file."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise missing_extra("Reading an image", "pillow", "explore") from None
    try:
        with Image.open(path) as opened:
            return opened.convert("RGB")
    except FileNotFoundError:
        raise InputError(f"Found no image at {str(path)!r}. To map that text itself, pass token ids.") from None
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise InputError(
            f"{str(path)!r} cannot be read as an image: {error}. Expected a PNG, JPEG or similar file."
        ) from error


def data_uri(image: Any, part: Box = WHOLE, longest: int = 448) -> str:
    """A small copy of a part of a picture, for a page; anything beyond the picture is black."""
    left, top, right, bottom = (round(edge * side) for edge, side in zip(part, 2 * image.size, strict=True))
    small = image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
    small.thumbnail((longest, longest))
    buffer = io.BytesIO()
    small.save(buffer, "JPEG", quality=85)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def check_pixels(pixels: Tensor, channels: Sequence[int]) -> None:
    """Refuse anything but the pixels of a processor: floats of shape ([sample,] colour, height, width).

    Args:
        pixels: What was given.
        channels: How many colours the model may read, the likeliest first; empty if that is not known.
    """
    shape = tuple(pixels.shape)
    is_first = len(shape) in (3, 4) and (not channels or shape[-3] in channels)
    if is_first and pixels.is_floating_point():
        return
    is_last = len(shape) == 2 or len(shape) in (3, 4) and shape[-1] in (3, 4)
    advice = ""
    if (is_first or is_last) and (len(shape) < 4 or shape[0] == 1):
        made = f"numpy.asarray(x){'[0]' if len(shape) == 4 else ''}{'.transpose(1, 2, 0)' if is_first else ''}"
        in_bytes = pixels.dtype is torch.uint8
        advice = (
            f" Pass `{made}`." if in_bytes else f" If its colours are from 0 to 1: `(255 * {made}).astype('uint8')`."
        )
    first = channels[0] if channels else 3
    raise InputError(
        "Expected an image: a PIL image, a uint8 array of shape (height, width, 3), or a processor's pixels, floats of "
        f"shape ({first}, height, width) or (1, {first}, height, width); "
        f"got {str(pixels.dtype).removeprefix('torch.')} of shape {shape}.{advice}"
    )


# What the model sees of a picture ------------------------------------------------------------------------------------


class SeenPicture:
    """A picture, and the part of it that a processor passes to the model, which is measured on first use."""

    def __init__(self, image: Any, processor: Any) -> None:
        self.image, self.processor = image, processor

    @cached_property
    def part(self) -> Box | None:
        """The part of the picture that became pixels; None if it is not known."""
        return seen_part(self.image.size, self.processor)


def seen_part(size: tuple[int, int], processor: Any) -> Box | None:
    """The part of a picture that a processor passes to the model, whatever the names of its settings.

    It is measured. A processed picture that gets lighter from left to right shows where each pixel came from:
    on a line $x(k) = (k + o) / R$ if the picture was scaled to $R$ pixels and cut from pixel $o$ on. A picture
    that gets lighter downwards does so for rows. (Both are tilted a little to average out rounding.) A black and a
    white picture undo the processor's normalisation, and are equal in a border that was added; a part with a border
    goes beyond the picture.

    Args:
        size: Width and height of the picture.
        processor: Takes `images`, and gives `pixel_values` of one picture.

    Returns:
        The part, or None if the processor does more than scale, cut and add a border: it mirrors, turns, cuts tiles or
        adjusts the brightness, or its pixels are in no (colour, row, column) order. Also None if a side is under 8
        pixels, which are too few to measure by.
    """
    width, height = size
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height)[:, None] + 0.5) / height
    shades = ((0, 0, 0), (0, 0, 1), (7 / 8, 1 / 8, 0), (1 / 8, 7 / 8, 0))
    try:
        made = np.stack([_processed(of_x * x + of_y * y + constant, processor) for of_x, of_y, constant in shades])
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    black, white, across, down = made
    is_seen = white - black > (white - black).max() / 2
    if min(size) < 8 or not np.isfinite(made).all() or not is_seen.any():
        return None
    across, down = ((one - black) / np.where(is_seen, white - black, 1.0) for one in (across, down))
    columns = _line((7 * across - down) / 6, is_seen, width)
    rows = _line(((7 * down - across) / 6).T, is_seen.T, height)
    return None if columns is None or rows is None else (columns[0], rows[0], columns[1], rows[1])


def _processed(values: np.ndarray, processor: Any) -> np.ndarray:
    """A grey picture of values from 0 to 1 as the processor gives it, the mean of the colours: (row, column)."""
    from PIL import Image

    grey = Image.fromarray(np.round(255 * values).astype(np.uint8)).convert("RGB")
    pixels = torch.as_tensor(processor(images=grey, return_tensors="pt")["pixel_values"]).cpu().float().numpy()
    return pixels.astype(float).reshape(3, *pixels.shape[-2:]).mean(0)


def _line(places: np.ndarray, is_seen: np.ndarray, n_given: int) -> tuple[float, float] | None:
    """The start of the first column and the end of the last, from the origin of each pixel; None if not on a line.

    Args:
        places: (row, column), as parts of the side.
        is_seen: (row, column), false in a border.
        n_given: Pixels of the side before processing.
    """
    kept = np.flatnonzero(is_seen.any(0))
    middles = kept + 0.5
    means = np.where(is_seen, places, 0.0).sum(0)[kept] / is_seen.sum(0)[kept]
    slope, start = np.polyfit(middles, means, 1)
    edge = 2 * max(slope, 1 / n_given)  # close to the edge of the picture, a pixel is mixed on one side only
    inside = (means > edge) & (means < 1 - edge)
    if inside.sum() > 3:
        slope, start = np.polyfit(middles[inside], means[inside], 1)
    straight = slope * (np.arange(places.shape[1]) + 0.5) + start
    if not slope > 0 or not np.abs(places - straight)[is_seen].max() < 0.02 + 1 / n_given:
        return None
    scaled = round(1 / slope)  # the whole side in pixels, of which the first that is seen is a whole number too
    first = round(start * scaled)
    return first / scaled, (first + places.shape[1]) / scaled


# Where tokens look ---------------------------------------------------------------------------------------------------


def cells(rows: int, columns: int, within: Box = WHOLE) -> list[Box]:
    """The boxes of a grid, row by row."""
    left, top, right, bottom = within
    width, height = (right - left) / columns, (bottom - top) / rows
    return [
        (left + c * width, top + r * height, left + (c + 1) * width, top + (r + 1) * height)
        for r in range(rows)
        for c in range(columns)
    ]


class Looking(NamedTuple):
    """The pictures in an input, as far as they are known.

    Attributes:
        pictures: The given pictures, in order; empty if only pixels are known.
        positions: Positions of the tokens of pictures.
        between: The text of the tokens from one position to another.
        arguments: The model's arguments.
        config: The model's config.
        image_processor: The processor that made the pixels.
    """

    pictures: Sequence[Any]
    positions: Sequence[int]
    between: Callable[[int, int], str]
    arguments: Mapping[str, Any]
    config: Any
    image_processor: Any


def find_pictures(looking: Looking) -> tuple[Picture, ...]:
    """Each picture with its tokens and the part that each token covers; parts of Gemma 3's crops are not known."""
    n = len(looking.pictures)
    if not looking.positions:
        return ()
    if _CROPS in " ".join(looking.between(0, looking.positions[-1]).split()):
        raise InputError(
            "The picture was cut into crops by pan and scan, and the processor does not report their places. Leave "
            "`do_pan_and_scan` out."
        )
    found = _by_sizes(looking) or _by_runs(looking) or [(tuple(looking.positions), None)]
    uris = (
        [data_uri(picture.convert("RGB")) for picture in looking.pictures] if len(found) == n else [None] * len(found)
    )
    return tuple(
        Picture(uri, tokens, tuple(boxes) if boxes is not None and len(boxes) == len(tokens) else (None,) * len(tokens))
        for uri, (tokens, boxes) in zip(uris, found, strict=True)
    )


Placed = list[tuple[tuple[int, ...], Sequence[Box | None] | None]]
"""Tokens and boxes of each picture."""


def _by_sizes(looking: Looking) -> Placed | None:
    """Boxes from the height and width in patches that come with the pixels (Qwen-VL, whose patches are merged)."""
    sizes = looking.arguments.get("image_grid_thw")
    if sizes is None:
        return None
    merge = getattr(looking.image_processor, "merge_size", None)
    merge = merge or getattr(getattr(looking.config, "vision_config", None), "spatial_merge_size", 1)
    found: Placed = []
    start = 0
    for time, height, width in sizes.tolist():
        boxes = cells(height // merge, width // merge) * time
        found.append((tuple(looking.positions[start : start + len(boxes)]), boxes))
        start += len(boxes)
    return found if start == len(looking.positions) else None


def _by_runs(looking: Looking) -> Placed | None:
    """Boxes of tokens in a row: a picture, or a tile that the text before it names."""
    positions = looking.positions
    steps = groupby(enumerate(positions), lambda pair: pair[1] - pair[0])
    runs = [tuple(position for _, position in run) for _, run in steps]
    n = len(looking.pictures) or len(runs)
    if len(runs) < n and len(positions) % n == 0:  # consecutive pictures
        size = len(positions) // n
        runs = [tuple(positions[k * size : (k + 1) * size]) for k in range(n)]
    if len(runs) == n:
        return [(run, _grid(len(run), k, looking)) for k, run in enumerate(runs)]
    found = _by_tiles(runs, looking.between)
    return found if len(found) == n else [(tuple(positions), None)] if n == 1 else None


def _by_tiles(runs: Sequence[tuple[int, ...]], between: Callable[[int, int], str]) -> Placed:
    """As with Idefics3 and SmolVLM: tiles named by row and column, and then the whole picture once more."""
    found: Placed = []
    tiles: list[tuple[int, int, tuple[int, ...]]] = []
    end = 0
    for run in runs:
        named = _TILE.findall(between(end, run[0]))
        end = run[-1] + 1
        if named:
            tiles.append((int(named[-1][0]) - 1, int(named[-1][1]) - 1, run))
            continue
        rows = max((row for row, _, _ in tiles), default=0) + 1
        columns = max((column for _, column, _ in tiles), default=0) + 1
        places = cells(rows, columns)
        boxes: list[Box | None] = []
        for row, column, tile in tiles:
            boxes += _square(len(tile), places[row * columns + column])
        tokens = tuple(position for *_, tile in tiles for position in tile) + run
        found.append((tokens, [*boxes, *_square(len(run))]))
        tiles = []
    return found


def _square(n_tokens: int, within: Box = WHOLE) -> list[Box | None]:
    """The cells of a square grid; if there is one extra token, the first covers the whole picture."""
    side = math.isqrt(n_tokens)
    if side * side not in (n_tokens, n_tokens - 1):
        return [None] * n_tokens
    return [*([None] * (n_tokens - side * side)), *cells(side, side, within)]


def _grid(n_tokens: int, k: int, looking: Looking) -> Sequence[Box | None]:
    sizes = looking.arguments.get("image_sizes")
    lines = [] if sizes is None else _with_newlines(n_tokens, sizes[k].tolist(), looking.config)
    if lines:
        return lines
    part = seen_part(looking.pictures[k].size, looking.image_processor) if looking.pictures else WHOLE
    return [None] * n_tokens if part is None else [box and _on_picture(box) for box in _square(n_tokens, part)]


def _on_picture(box: Box) -> Box | None:
    """A box without the part in the border that was added around the picture."""
    left, top, right, bottom = max(box[0], 0.0), max(box[1], 0.0), min(box[2], 1.0), min(box[3], 1.0)
    return (left, top, right, bottom) if left < right and top < bottom else None


def _with_newlines(n_tokens: int, size: Sequence[int], config: Any) -> list[Box | None]:
    """As with LLaVA-NeXT: the whole picture as a square, then its tiles as one grid with a token that ends each row."""
    height, width = size
    vision: Any = getattr(config, "vision_config", None)
    side = getattr(vision, "image_size", 0) // max(getattr(vision, "patch_size", 1), 1)
    for high, wide in getattr(config, "image_grid_pinpoints", None) or ():
        rows, columns = side * high // vision.image_size, side * wide // vision.image_size
        if width / height > columns / rows:  # padding above and below is cut off again
            rows -= 2 * ((rows - int(round(height * columns / width, 7))) // 2)
        else:
            columns -= 2 * ((columns - int(round(width * rows / height, 7))) // 2)
        if side * side + rows * (columns + 1) == n_tokens:
            grid: list[Box | None] = list(cells(rows, columns))
            lines = [[*grid[r * columns : (r + 1) * columns], None] for r in range(rows)]
            return [*cells(side, side), *(box for line in lines for box in line)]
    return []
