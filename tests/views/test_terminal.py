from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console
from view_samples import HOSTILE, WORDS, map_view

from tensorlens.views import terminal
from tensorlens.views.record import MapView, PatchGrid

ESCAPE = "\x1b"


def shown(view: MapView, *, colour: bool = False, width: int = 100) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=colour, color_system="truecolor" if colour else None)
    terminal.show(view, console)
    return file.getvalue()


def test_one_row_has_a_signed_number_and_a_bar_for_each_token():
    text = shown(map_view([[0.1, 0.6, 1.3, 1.7, 2.0, -0.5, 0.0]], labels=WORDS))
    lines = {line.split()[1]: line for line in text.splitlines() if re.match(r"\s*\d+ ", line)}
    assert "+2.00" in lines["Tower"]
    assert lines["Tower"].count("█") == 12
    assert "-0.50" in lines["is"]
    assert lines["is"].index("█") < lines["is"].index("│") < lines["Tower"].index("█")
    assert "█" not in lines["in"]


def test_unsigned_bars_start_at_the_left():
    text = shown(map_view([[1.0, 2.0]]))
    assert "│" not in text
    assert text.count("█") == 24 + 12


def test_a_long_row_shows_the_strongest():
    scores = np.zeros((1, 500))
    scores[0, 321] = -7.0
    text = shown(map_view(scores))
    assert "The 24 strongest of 500 inputs." in text
    assert re.search(r"321\s+w321\s+-7.00", text)
    assert len(text.splitlines()) < 40


def test_a_small_square_map_is_a_grid_of_percentages():
    text = shown(map_view([[2.0, -1.0], [0.5, 0.0]], labels=("a", "b")))
    assert re.search(r"a\s+100\s+-50", text)
    assert re.search(r"b\s+25\s+0", text)
    assert "100 × score ÷ 2" in text


def test_a_long_map_is_summed_up():
    scores = np.eye(300) + 0.01
    text = shown(map_view(scores))
    assert "12 of 300 outputs" in text
    assert re.search(r"299\s+w299\s+w299 1.01", text)


def test_patches_are_drawn_in_their_grid():
    scores = np.array([[5.0, 0.0, 1.0, 2.0, 10.0]])
    text = shown(map_view(scores, grid=PatchGrid(rows=2, columns=2, first=1)))
    assert " 0 1\n" in text.replace("  ", "")
    assert " 2 9\n" in text.replace("  ", "")


def test_without_colour_no_escape_codes_are_written(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert ESCAPE not in shown(map_view(np.eye(3)))


def test_with_colour_positive_is_red_and_negative_blue():
    text = shown(map_view([[1.0, -1.0]]), colour=True)
    (above, below) = [re.search(r"38;2;(\d+);\d+;(\d+)m *█", line) for line in text.splitlines() if "█" in line]
    assert above is not None
    assert below is not None
    assert int(above[1]) > int(above[2])
    assert int(below[1]) < int(below[2])


def test_tokens_are_never_markup_or_control_codes():
    n = len(HOSTILE)
    for view in (map_view(np.ones((1, n)), labels=HOSTILE), map_view(np.eye(n), labels=HOSTILE)):
        text = shown(view, width=200)
        assert ESCAPE not in text
        assert "\u202e" not in text
        assert "[bold]b[/bold]" in text
        text.encode()


def test_titles_and_captions_are_never_markup():
    text = shown(map_view([[1.0]], title="[red]x[/red]", caption=(("[b]n[/b]", "[i]v[/i]\x1b"),)))
    assert "[red]x[/red]" in text
    assert "[b]n[/b]" in text
    assert "[i]v[/i]\\x1b" in text


def test_caption_and_bias_share():
    text = shown(map_view([[1.0]], caption=(("Model", "m"),), row_caption=(("Logit", ("3.5",)),)))
    assert re.search(r"Model\s+m", text)
    assert re.search(r"Logit\s+3.5", text)
    assert re.search(r"Bias share\s+25.0%", text)
    several = shown(map_view(np.eye(2), bias_share=np.array([0.1, 0.3])))
    assert "10.0% to 30.0%, median 20.0%" in several
    assert "Bias share" not in shown(map_view([[1.0]], bias_share=np.array([np.nan])))
    assert "-0.0%" not in shown(map_view([[1.0]], bias_share=np.array([-1e-7])))
    assert "-0.1%" in shown(map_view([[1.0]], bias_share=np.array([-1e-3])))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_an_empty_map_says_so(shape):
    assert "the map is empty" in shown(map_view(np.zeros(shape)))


@pytest.mark.parametrize("scores", [[[np.nan]], [[np.nan, np.inf], [-np.inf, 0.0]], [[0.0]], [[1e-30, 1e30]]])
def test_odd_numbers_are_printed(scores):
    text = shown(map_view(scores))
    for value in np.ravel(scores):
        assert np.isfinite(value) or str(value) in text


def test_unsigned_numbers_have_no_plus():
    for scores in ([[1.0, 2.0]], np.ones((2, 2)), np.ones((60, 60))):
        assert "+" not in shown(map_view(scores, signed=False))
    assert "+1.00" in shown(map_view([[1.0, 2.0]], signed=True))


def test_what_is_set_aside_has_a_bar_of_its_own():
    text = shown(map_view([[6.1, 0.1, 2.7, -0.5]], labels=WORDS[:4], set_aside=(0,)))
    lines = text.splitlines()
    of_sink = next(line for line in lines if "+6.10" in line)
    of_rest = next(line for line in lines if "+2.70" in line)
    assert lines.index(of_sink) > lines.index(of_rest) and re.match(r"\s*0 The", of_sink)
    assert of_rest.count("█") == 12, "the scale is that of the others"
    assert of_sink.count("█") < 12 and "╱" in of_sink, "a broken bar says that it is longer"
    whole = shown(map_view([[6.1, 0.1, 2.7, -0.5]], labels=WORDS[:4]))
    assert "╱" not in whole
    assert next(line for line in whole.splitlines() if "+2.70" in line).count("█") == 5


def test_a_column_that_is_set_aside_is_named_below_a_grid():
    text = shown(map_view([[8.0, 0.0, 0.0], [8.0, 1.0, 0.0], [8.0, 1.0, 2.0]], labels=("a", "b", "c"), set_aside=(0,)))
    assert "score ÷ 2" in text and "not in the colours: a." in text


def test_the_sum_of_one_row_is_printed():
    assert re.search(r"Sum\s+inputs sum to 1", shown(map_view([[1.0]], sums=("inputs sum to 1",))))
