"""Which part of a photograph a vision model sees: positions set by hand, in pixels of the photograph."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image, ImageDraw, ImageOps

import tensorlens as tl
from tensorlens.models.pictures import seen_part

# A processor of transformers hands tensors to numpy in a way that it is told to leave.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

CLIP = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
BIT = hf.BitImageProcessorPil(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
UNCUT = hf.CLIPImageProcessorPil(do_resize=False, crop_size={"height": 96, "width": 96})
SQUASHED = hf.ViTImageProcessorPil(size={"height": 32, "width": 32})
CONVNEXT = hf.ConvNextImageProcessorPil(size={"shortest_edge": 28}, crop_pct=0.875)
TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


class Changing:
    """A processor that changes a picture before it is scaled and cropped."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self.change = change

    def __call__(self, images: Any, return_tensors: str) -> Any:
        return CLIP(images=self.change(images), return_tensors=return_tensors)


def photograph() -> Image.Image:
    """Of 400 × 200, on grey: a red thing that is cropped off, and a white one just inside of the crop's left edge."""
    made = Image.new("RGB", (400, 200), (60, 60, 60))
    pen = ImageDraw.Draw(made)
    pen.rectangle((10, 100, 59, 149), fill=(255, 0, 0))
    pen.rectangle((100, 50, 124, 74), fill=(255, 255, 255))
    return made


def lens_with(processor: Any, patch_size: int = 4) -> tl.Lens:
    torch.manual_seed(0)
    config = hf.Dinov2Config(**TINY, image_size=32, patch_size=patch_size)
    return tl.Lens(hf.Dinov2ForImageClassification(config).eval(), processor)


def shown(found: tl.TokenMap) -> np.ndarray:
    picture = Image.open(io.BytesIO(base64.b64decode(found.meta["image"].split(",")[1])))
    return np.asarray(picture.convert("RGB")).astype(int)


# Scaled to 32 rows, 64 columns, the middle 32 of them: pixels 100 to 300. To 40 rows, the middle 32: 20 to 180 of 200.
PARTS = [
    pytest.param(CLIP, (400, 200), (100, 0, 300, 200), id="crop"),
    pytest.param(CLIP, (200, 400), (0, 100, 200, 300), id="crop of a tall one"),
    pytest.param(BIT, (400, 200), (120, 20, 280, 180), id="crop on all sides"),
    pytest.param(CONVNEXT, (400, 200), (112.5, 12.5, 287.5, 187.5), id="crop by a share"),  # 32 rows, the middle 28
    pytest.param(UNCUT, (400, 200), (152, 52, 248, 148), id="crop alone"),
    pytest.param(UNCUT, (64, 32), (-16, -32, 80, 64), id="border"),
    pytest.param(SQUASHED, (400, 200), (0, 0, 400, 200), id="whole"),
    pytest.param(Changing(lambda image: image.crop((0, 0, 100, 100))), (400, 200), (0, 0, 100, 100), id="corner"),
    pytest.param(
        Changing(lambda image: ImageOps.pad(image, (400, 400), color=(99, 99, 99))), (400, 200), (0, -100, 400, 300)
    ),
]


@pytest.mark.parametrize(("processor", "size", "pixels"), PARTS)
def test_the_part_that_is_seen(processor: Any, size: tuple[int, int], pixels: tuple[float, ...]) -> None:
    part = seen_part(size, processor)
    assert part is not None
    assert [edge * size[k % 2] for k, edge in enumerate(part)] == pytest.approx(pixels, abs=1e-9)


def test_patches_lie_where_their_pixels_are(tmp_path: Path) -> None:
    found = lens_with(CLIP)(photograph()).map("tensor.norm", out_token=0)
    assert found.meta["seen"] == [0.25, 0, 0.75, 1]
    # A patch is 25 pixels of the photograph: the white thing is that of row 2, column 0, and nothing red is left.
    pixels = shown(found)
    assert pixels.shape == (200, 200, 3)
    assert pixels[54:71, 4:21].min() > 240 and pixels[30:46].max() < 90 and pixels[54:71, 30:].max() < 90
    assert (pixels[..., 0] - pixels[..., 2]).max() < 40
    given = lens_with(CLIP).processor(images=photograph(), return_tensors="pt")["pixel_values"][0].mean(0)
    patches = given.reshape(8, 4, 8, 4).mean((1, 3))
    assert divmod(int(patches.argmax()), 8) == (2, 0)
    page = found.save(tmp_path / "map.html").read_text("utf-8")
    assert "25 % to 75 % of the width, 0 % to 100 % of the height" in page


def test_regions_are_those_of_the_whole_photograph() -> None:
    lens = lens_with(CLIP)
    boxes = {"red": (0.025, 0.5, 0.15, 0.75), "white": (0.25, 0.25, 0.3125, 0.375)}
    found = tl.similarity(lens, photograph(), photograph(), groups={"regions": boxes})
    assert found.in_tokens == ("[CLS]", "rest", "white", "bias")  # what is red was cropped off
    tokens = tl.similarity(lens, photograph(), photograph())
    place = tokens.in_tokens.index("patch 2,0")
    assert found.scores[2, 2] == pytest.approx(float(tokens.scores[place, place]))
    quarters = tl.similarity(lens, photograph(), photograph(), groups={"regions": (1, 4)})
    assert quarters.in_tokens == ("[CLS]", "region 0,1", "region 0,2", "bias")
    (picture,) = tokens.meta["a_pictures"]
    assert [place, 0, 0.25, 0.125, 0.375] in picture["places"]  # in the picture that is shown: its left edge


def test_pixels_beyond_the_last_whole_patch_are_not_seen() -> None:
    found = lens_with(SQUASHED, patch_size=5)(photograph()).map("tensor.norm", out_token=0)
    assert found.meta["grid"]["rows"] == 6 and found.meta["seen"] == pytest.approx([0, 0, 30 / 32, 30 / 32])
    assert shown(found).shape == (188, 375, 3)  # 30 / 32 of 200 and of 400


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        lambda image: image.rotate(90),
        lambda image: image.rotate(10),
        lambda image: image.point(lambda value: 255 * (value / 255) ** 0.5),
    ],
    ids=["mirrored", "turned", "tilted", "lighter"],
)
def test_a_place_that_is_not_known_is_not_drawn(change: Callable[[Any], Any], tmp_path: Path) -> None:
    lens = lens_with(Changing(change))
    found = lens(photograph()).map("tensor.norm", out_token=0)
    assert found.meta["seen"] is None and found.meta["image"] is None
    assert "so the picture is not shown" in found.save(tmp_path / "map.html").read_text("utf-8")
    pairs = tl.similarity(lens, photograph(), photograph())
    assert pairs.meta["a_pictures"][0]["image"] is None
    assert "so the picture is not shown" in pairs.save(tmp_path / "pairs.html").read_text("utf-8")
    with pytest.raises(tl.InputError, match="more than scale and crop"):
        tl.similarity(lens, photograph(), photograph(), groups={"regions": (2, 2)})
