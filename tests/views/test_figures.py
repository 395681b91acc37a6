from __future__ import annotations

import re
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure
from matplotlib.text import Text
from view_samples import HOSTILE, PIXEL, map_view

from tensorlens.errors import MissingExtraError
from tensorlens.views import figures, labels
from tensorlens.views.record import PatchGrid
from tensorlens.views.table import Table, plot_table


def draw(figure, path: Path) -> int:
    figure.savefig(path)
    return path.stat().st_size


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_heat_map_fills_a_paper_column_with_square_cells():
    figure = figures.heat_map(map_view(np.eye(12)))
    assert figure.get_figwidth() == pytest.approx(3.35)
    box = figure.axes[0].get_position()
    width, height = figure.get_size_inches()
    assert box.width * width == pytest.approx(box.height * height)


def test_heat_map_colours_end_at_the_same_size_on_both_sides():
    signed = figures.heat_map(map_view([[1.0, -4.0], [0.0, 2.0]])).axes[0].collections[0]
    assert (signed.norm.vmin, signed.norm.vmax) == (-4.0, 4.0)
    unsigned = figures.heat_map(map_view([[1.0, 4.0], [0.0, 2.0]])).axes[0].collections[0]
    assert (unsigned.norm.vmin, unsigned.norm.vmax) == (0.0, 4.0)


def test_heat_map_is_vector_while_it_is_small():
    assert isinstance(figures.heat_map(map_view(np.eye(50))).axes[0].collections[0], QuadMesh)
    large: Any = figures.heat_map(map_view(np.eye(300))).axes[0]
    assert not large.collections
    assert large.images[0].get_array().shape == (300, 300)


def test_heat_map_names_tokens_while_they_are_readable():
    small = figures.heat_map(map_view(np.eye(10))).axes[0]
    assert [label.get_text() for label in small.get_yticklabels()] == [f"w{k}" for k in range(10)]
    large = figures.heat_map(map_view(np.eye(300))).axes[0]
    assert [label.get_text() for label in large.get_yticklabels()][:3] == ["0", "50", "100"]


def test_infinity_is_the_end_of_the_scale_and_nan_is_missing():
    cells: Any = figures.heat_map(map_view([[np.inf, np.nan], [-np.inf, 2.0]])).axes[0].collections[0].get_array()
    assert cells[0, 0] == 2.0
    assert cells[1, 0] == -2.0
    assert np.ma.is_masked(cells[0, 1])


def test_row_over_text_keeps_every_token_inside_the_page():
    words = [f" word{k}" for k in range(80)]
    figure = figures.row_over_text(map_view(np.ones((1, 80)), labels=words))
    width, height = figure.get_size_inches()
    axes: Any = figure.axes[0]
    assert [text.replace("\u00a0", " ") for text in texts(axes)] == words
    for patch in axes.patches:
        box = patch.get_bbox()
        assert box.x0 >= 0
        assert box.x1 <= width
        assert max(box.y0, box.y1) <= height


def test_row_over_text_breaks_the_line_after_a_newline():
    axes = figures.row_over_text(map_view(np.ones((1, 2)), labels=["a\n", "b"])).axes[0]
    first, second = (text.get_position()[1] for text in axes.texts)
    assert second > first


def test_row_over_text_writes_on_dark_colours_in_white():
    axes = figures.row_over_text(map_view([[5.0, 0.0]])).axes[0]
    assert [text.get_color() for text in axes.texts] == ["#ffffff", "#111418"]


def test_patch_overlay_shows_the_picture_through_weak_patches():
    view = map_view([[9.0, 0.0, 1.0, 2.0, 4.0]], grid=PatchGrid(rows=2, columns=2, first=1), image=PIXEL)
    picture: Any
    patches: Any
    picture, patches = figures.figure_of(view).axes[0].images
    assert picture.get_array().shape == (1, 1, 3)
    assert patches.get_array().tolist() == [[0.0, 1.0], [2.0, 4.0]]
    alpha = patches.get_alpha()
    assert alpha[0, 0] < alpha[1, 0] < alpha[1, 1] == 0.9, "full colour is the strongest patch, not the class token"


def test_the_kind_of_map_chooses_the_figure():
    grid = PatchGrid(rows=1, columns=2, first=0)
    assert texts(figures.figure_of(map_view([[1.0, 2.0]])).axes[0])
    assert figures.figure_of(map_view([[1.0, 2.0]], grid=grid)).axes[0].images
    assert figures.figure_of(map_view(np.eye(2))).axes[0].collections


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
@pytest.mark.parametrize("n_out", [1, len(HOSTILE)])
def test_hostile_labels_are_drawn_without_a_warning(tmp_path, kind, n_out):
    n = len(HOSTILE)
    figures.write_figure(map_view(np.ones((n_out, n)), labels=HOSTILE), tmp_path / "figure", kind)
    assert (tmp_path / "figure").stat().st_size > 1000


def test_a_character_without_a_glyph_is_spelled_out(monkeypatch):
    monkeypatch.setattr(labels, "_characters", lambda: frozenset(map(ord, "abc\\")))
    assert labels.drawable("a字👩") == "a\\u5b57\\U0001f469"


def test_dollars_are_not_mathematics():
    axes = figures.heat_map(map_view(np.eye(2), labels=["$a_b$", "b"])).axes[0]
    assert not any(label.get_parse_math() for label in axes.get_yticklabels())


@pytest.mark.parametrize("scores", [[[1.0]], [[np.nan]], [[0.0, 0.0]], np.full((3, 3), np.nan), np.zeros((2, 2))])
def test_odd_maps_are_drawn(tmp_path, scores):
    assert draw(figures.figure_of(map_view(scores)), tmp_path / "figure.png") > 500


@pytest.mark.parametrize("shape", [(4, 60), (60, 4), (2, 3), (150, 150)])
def test_all_shapes_fit(tmp_path, shape):
    figure = figures.heat_map(map_view(np.random.default_rng(0).normal(size=shape)))
    assert figure.get_figheight() < 7
    assert draw(figure, tmp_path / "figure.pdf") > 1000


def test_nothing_is_left_in_matplotlib(tmp_path):
    before = dict(matplotlib.rcParams)
    figures.write_figure(map_view(np.eye(3)), tmp_path / "figure.pdf", "pdf")
    assert dict(matplotlib.rcParams) == before
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_fonts_are_embedded_as_publishers_want(tmp_path):
    figures.write_figure(map_view(np.eye(3)), tmp_path / "figure.pdf", "pdf")
    content = (tmp_path / "figure.pdf").read_bytes()
    assert b"/Type3" not in content
    assert b"/CIDFontType2" in content


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_the_same_map_gives_the_same_bytes(tmp_path, kind):
    for name in ("a", "b"):
        figures.write_figure(map_view(np.eye(3)), tmp_path / name, kind)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_threads_may_save_at_once(tmp_path):
    errors = []

    def save(name: str) -> None:
        try:
            figures.write_figure(map_view(np.eye(4)), tmp_path / name, "pdf")
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(f"{k}.pdf",)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len({(tmp_path / f"{k}.pdf").read_bytes() for k in range(4)}) == 1


def test_without_matplotlib_the_install_line_is_given(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=re.escape('pip install "attention-tensorlens[plot]"')):
        figures.figure_of(map_view(np.eye(2)))


CAPTION = (("Method", "tensor.in_class"), ("Model", "smollm2-135m"), ("Target", "“ Paris”"))


@pytest.mark.parametrize("scores", [[[1.0, 2.0, 3.0]], np.eye(3)])
@pytest.mark.parametrize("grid", [None, PatchGrid(rows=1, columns=2, first=1)])
def test_every_figure_says_what_it_is_of(tmp_path, scores, grid):
    view = map_view(scores, title="tensor.in_class", caption=CAPTION, grid=grid)
    heading = figures.figure_of(view).texts[0].get_text()
    assert heading == "tensor.in_class  ·  smollm2-135m  ·  “ Paris”"
    figures.write_figure(view, tmp_path / "map.svg", "svg")
    assert "tensor.in_class" in (tmp_path / "map.svg").read_text("utf-8")
    asked = map_view(scores, title="Why “ Paris”?", caption=CAPTION, grid=grid)
    assert figures.figure_of(asked).texts[0].get_text() == "Why “ Paris”?  ·  smollm2-135m", "it names its target"


def outside(figure: Any) -> list[str]:
    """The texts of a figure that are not entirely within it."""
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    boxes = [
        (text, text.get_window_extent()) for text in figure.findobj(Text) if text.get_visible() and text.get_text()
    ]
    return [
        text.get_text() for text, box in boxes if min(box.x0, box.y0) < -1 or box.x1 > width + 1 or box.y1 > height + 1
    ]


LONG = {
    "words": "Why is “a passage on the history of glass” near “how windows are made”, which it is not about at all? ",
    "one word": "a-very-long-name/" * 15,
    "wide": "字体" * 130,
    "capitals": "WIDE " * 60,
}


@pytest.mark.parametrize("title", LONG.values(), ids=LONG)
@pytest.mark.parametrize("shape", [(5, 5), (1, 5), (1, 5, 2)])
def test_long_texts_stay_within_the_figure(title, shape):
    n_out, n_in, *patches = shape
    more: dict[str, Any] = {"grid": PatchGrid(rows=2, columns=2, first=1), "image": PIXEL} if patches else {}
    tokens = [f"image {k}: {title}" for k in range(n_in)]
    more |= {"caption": (("Model", title),), "sums": (title,) * n_out, "set_aside": (0, 1)}
    figure: Any = figures.figure_of(map_view(np.eye(n_out, n_in), labels=tokens, title=title, **more))
    assert len(figure.findobj(Text)) > 3 and outside(figure) == []
    heading: Any = figure.texts[0]
    below = heading.get_window_extent().y0
    assert all(axes.get_tightbbox().y1 <= below + 1 for axes in figure.axes if axes.axison), "nothing over the heading"


def test_labels_keep_their_number_and_what_tells_them_apart():
    patches = [f"image {k}: patch {n}" for k in (9, 10, 11) for n in (7, 1234)]
    short = labels.distinct(dict(enumerate(patches)), 16)
    assert [re.findall(r"\d+", label) for label in short] == [re.findall(r"\d+", name) for name in patches]
    assert max(map(len, short)) <= 16 and short[0] == "image 9: patch 7"
    alike = [f"{'a' * 20}{letter}{'b' * 20}" for letter in "xyx"]
    first, second, again = labels.distinct(dict(enumerate(alike)), 16)
    assert first != second and max(map(len, (first, second, again))) <= 16
    assert labels.distinct({0: " the", 1: " the"}, 16) == [" the", " the"], "the same name needs no number"
    axes = figures.heat_map(map_view(np.eye(6), labels=patches)).axes[0]
    assert len({label.get_text() for label in axes.get_yticklabels()}) == 6


@pytest.mark.parametrize("title", [LONG["words"], LONG["one word"]])
@pytest.mark.parametrize(("layout", "n_axes"), [("constrained", 1), (None, 1), (None, 3)])
def test_the_title_of_a_plot_stays_within_the_figure_and_its_column(title, layout, n_axes):
    names = [f"image {k}: a label of many words {k}" for k in range(4)]
    figure = Figure(figsize=(3.5 * n_axes, 3.5), layout=layout)
    every = figure.subplots(1, n_axes, squeeze=False)[0]
    for axes in every:
        plot_table(Table(np.eye(4), names, names), title, axes)
    figure.draw_without_rendering()
    boxes = [axes.title.get_window_extent() for axes in every]
    assert min(box.x0 for box in boxes) >= 0 and max(box.x1 for box in boxes) <= figure.bbox.width
    assert max(box.y1 for box in boxes) <= figure.bbox.height
    assert all(one.x1 <= other.x0 for one, other in pairwise(boxes))
    assert len({label.get_text() for label in every[0].get_yticklabels()}) == 4


@pytest.mark.parametrize(
    "said",
    [
        "inputs sum to 1.00; " * 5,
        "the sentences shown give 0.57 of 0.27, the logit difference; an attention sink −0.30",
    ],
)
def test_a_long_sum_fits_the_page(said):
    figure = figures.row_over_text(map_view([[1.0, 2.0]], sums=(said,)))
    assert said.split() in [text.get_text().split() for text in figure.axes[0].texts]
    assert outside(figure) == []


def test_what_is_set_aside_has_no_colour_and_a_bar_of_its_own():
    view = map_view([[6.1, 0.1, 2.7]], set_aside=(0,))
    figure = figures.figure_of(view)
    first, _, last = (patch.get_facecolor() for patch in figure.axes[0].patches)
    assert first == (1.0, 1.0, 1.0, 1.0) and last != first
    assert "set aside: w0 6.1" in figure.texts[-1].get_text()
    assert len(figure.axes) == len(figures.figure_of(map_view([[6.1, 0.1, 2.7]])).axes) + 1
    cells: Any = (
        figures.heat_map(map_view(np.tril(np.full((3, 3), 2.0)) * [9, 1, 1], set_aside=(0,))).axes[0].collections[0]
    )
    assert np.ma.getmaskarray(cells.get_array())[:, 0].all() and cells.norm.vmax == 2.0


def test_one_palette_for_a_method_whatever_its_scores():
    assert figures.heat_map(map_view(np.eye(2), signed=True)).axes[0].collections[0].norm.vmin == -1.0
    assert figures.heat_map(map_view(np.eye(2), signed=False)).axes[0].collections[0].norm.vmin == 0.0
