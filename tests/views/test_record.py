from __future__ import annotations

import numpy as np
import pytest
from view_samples import map_view

from tensorlens.errors import InputError
from tensorlens.views.captions import caption_lines, row_caption_lines, sum_lines
from tensorlens.views.labels import shorten, visible
from tensorlens.views.record import PatchGrid, palette


def test_limit_is_the_largest_finite_size():
    assert map_view([[1.0, -3.0, np.inf, np.nan]]).limit == 3.0
    assert map_view([[0.0, np.nan]]).limit == 1.0
    assert map_view(np.zeros((0, 2))).limit == 1.0


def test_labels_must_match():
    with pytest.raises(InputError, match=r"shape \(1, 1\)"):
        map_view([[1.0, 2.0]], in_tokens=("a",))


@pytest.mark.parametrize(
    "image",
    [
        "https://example.org/a.png",
        "data:image/svg+xml;base64,PHN2Zz4=",
        'data:image/png;base64,AAAA" onload="x',
        "javascript:alert(1)",
    ],
)
def test_only_plain_pictures_are_taken(image):
    with pytest.raises(InputError, match="data URI"):
        map_view([[1.0]], image=image, grid=PatchGrid(rows=1, columns=1, first=0))


def test_a_picture_needs_a_grid_inside_the_tokens():
    with pytest.raises(InputError, match="patch grid with the image"):
        map_view([[1.0]], image="data:image/png;base64,AAAA")
    with pytest.raises(InputError, match="inside the 3 input tokens"):
        map_view([[1.0, 2.0, 3.0]], grid=PatchGrid(rows=1, columns=3, first=1))


def test_caption_puts_the_known_first_and_reads_plainly():
    meta = {
        "extra": True,
        "versions": {"torch": "2.13"},
        "model": "m",
        "target": " Paris",
        "blocks": [0, 1, 2, 3],
        "heads": {"3": [0, 1], "4": [2]},
        "certificate": {"passed": True, "errors": {"value": 3e-7}},
        "image": "data:…",
    }
    assert caption_lines("tensor.norm", meta, 3) == (
        ("Method", "tensor.norm"),
        ("Target", "“ Paris”"),
        ("Model", "m"),
        ("Blocks", "0 to 3"),
        ("Heads", "3: 0, 1; 4: 2"),
        ("Certificate", "passed (value 3e-07)"),
        ("Versions", "torch 2.13"),
        ("Extra", "yes"),
    )


def test_a_failed_or_missing_certificate_says_so():
    assert ("Certificate", "FAILED") in caption_lines("tensor.norm", {"certificate": {"passed": False}}, 1)
    assert ("Certificate", "not checked") in caption_lines("tensor.norm", {"certificate": None}, 1)


@pytest.mark.parametrize("method", ["rollout.attn", "control.random", "gradient.integrated"])
def test_a_certificate_of_T_says_nothing_of_a_baseline(method):
    found = caption_lines(method, {"certificate": {"passed": True, "errors": {"value": 0.0}}}, 1)
    assert found == (("Method", method), ("Certificate", "not derived from T"))


def test_the_sum_is_said_in_one_sentence():
    meta = {"logit": [12.8419, -1.0]}
    lines = sum_lines(np.array([12.8419, 3.0]), np.array([-6.7e-7, 0.5]), meta)
    assert lines[0] == "inputs sum to 12.84; the bias gives 0.00; the logit is 12.84"
    assert lines[1].endswith("the logit is −1.00 with all heads, 2.50 with those kept")
    for other in ({}, {"logit": [None, 1.0]}, {"logit": 3.0}, {"logit": ["a", "b"]}):
        assert sum_lines(np.zeros(2), np.zeros(2), other) == ()


def test_what_is_set_aside_takes_no_part_in_the_limit():
    view = map_view([[9.0, 1.0, -2.0]], set_aside=(0,))
    assert view.limit == 2.0
    assert np.isnan(view.coloured[0, 0]) and view.scores[0, 0] == 9.0


def test_values_of_each_output_are_kept_apart():
    meta = {"target": ["a", "b"], "logit": [1.0, 2.0], "blocks": [0, 9]}
    assert row_caption_lines(meta, 2) == (("Target", ("a", "b")), ("Logit", ("1", "2")))
    assert caption_lines("m", meta, 2) == (("Method", "m"), ("Blocks", "0:9"))


def test_long_lists_are_cut():
    text = dict(caption_lines("m", {"samples": [f"s{k}" for k in range(500)]}, 1))["Samples"]
    assert text.endswith("s11, … (500 in all)")


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("", "∅"),
        ("  ", "␣␣"),
        (" Paris", " Paris"),
        ("a\nb", "a⏎b"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eevil", "\\u202eevil"),
        ("\ud800", "\\ud800"),
        ("\U000e0001", "\\U000e0001"),
        ("\u0301x", "◌\u0301x"),
        ("👩\u200d👧", "👩\u200d👧"),
    ],
)
def test_invisible_characters_are_spelled_out(token, shown):
    assert visible(token) == shown


def test_shorten():
    assert shorten("abcdef", 4) == "abc…"
    assert shorten("abcd", 4) == "abcd"


@pytest.mark.parametrize("name", ["signed", "unsigned"])
@pytest.mark.parametrize("shade", ["light", "dark"])
def test_colours_differ_in_lightness_alone(name, shade):
    """Whoever sees no hue still sees the order: lightness is monotonic from zero outwards."""
    stops = palette(name, shade)
    lightness = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in ((_channels(stop)) for stop in stops)]
    middle = len(stops) // 2 if name == "signed" else 0
    for side in (lightness[middle:], lightness[middle::-1] if middle else lightness):
        steps = np.diff(side)
        assert (steps < 0).all() if shade == "light" else (steps > 0).all()


def _channels(stop: str) -> list[float]:
    return [(int(stop[k : k + 2], 16) / 255) ** 2.2 for k in (1, 3, 5)]


def test_a_contrast_sums_to_a_difference():
    said = sum_lines(np.array([2.0]), np.array([0.0]), {"logit": [2.0], "target": " Paris −  London"})
    assert said == ("inputs sum to 2.00; the bias gives 0.00; the logit difference is 2.00",)
