"""Pages in a browser: pictures, single rows, what is set aside, words and sums.

Needs Chromium and the `playwright` package; without them these tests fail and say what to install.
"""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from playwright.sync_api import expect
from tiny_language import tiny_lens
from view_samples import background, eventually, map_view

from tensorlens.views import page
from tensorlens.views.record import PatchGrid

pytestmark = pytest.mark.browser


def picture() -> str:
    image = pytest.importorskip("PIL.Image", reason="pillow comes with matplotlib").new("RGB", (64, 64), (0, 200, 0))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def test_pictures_have_patches_a_slider_and_numbers(open_map):
    grid = PatchGrid(rows=2, columns=2, first=1)
    tab = open_map(map_view([[0.5, 4.0, 0.0, -4.0, 1.0]], grid=grid, image=picture()))
    canvas = tab.locator("canvas.patches")
    alpha = "canvas => [...canvas.getContext('2d').getImageData(0, 0, 2, 2).data].filter((_, k) => k % 4 === 3)"
    strong, weak, negative, _ = canvas.evaluate(alpha)
    assert strong == negative > weak == 0
    box = canvas.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 4, box["y"] + 3 * box["height"] / 4)
    expect(tab.locator(".tooltip .number")).to_have_text("−4.00")
    tab.get_by_label("Opacity of the overlay").fill("0")
    eventually(lambda: canvas.evaluate(alpha) == [0, 0, 0, 0])
    tab.get_by_label("Opacity of the overlay").fill("100")
    eventually(lambda: canvas.evaluate(alpha) == [255, 0, 255, 64])


def test_full_colour_is_the_strongest_patch_and_not_the_class_token(open_map):
    grid = PatchGrid(rows=1, columns=2, first=1)
    tab = open_map(map_view([[400.0, 4.0, 1.0]], grid=grid, image=picture()))
    strong = "canvas => canvas.getContext('2d').getImageData(0, 0, 1, 1).data[3]"
    assert tab.locator("canvas.patches").evaluate(strong) == round(255 * 0.9)
    expect(tab.locator(".side .ticks span").last).to_have_text("4.00")


def test_a_patch_of_a_square_map_selects_its_output(open_map):
    tab = open_map(map_view(np.eye(5), grid=PatchGrid(rows=2, columns=2, first=1), image=picture()))
    box = tab.locator("canvas.patches").bounding_box()
    tab.mouse.click(box["x"] + 0.75 * box["width"], box["y"] + 0.25 * box["height"])
    expect(tab.locator(".reading")).to_contain_text("(2)")


SINK = [[6.1, 0.1, 2.7, -0.5]]


def test_what_is_set_aside_has_no_colour_a_bar_of_its_own_and_a_switch(open_map):
    tab = open_map(map_view(SINK, set_aside=(0,), signed=True))
    tokens, aside = tab.locator(".token"), tab.locator("section.aside")
    expect(aside.locator(".number")).to_have_text("+6.10")
    expect(tab.locator(".legend .ticks").first).to_contain_text("+2.70")
    assert tokens.nth(0).evaluate("node => getComputedStyle(node).outlineStyle") == "dashed"
    full = background(tokens.nth(2))
    tab.get_by_label("Set aside “w0”").click()
    expect(aside).to_be_hidden()
    expect(tab.locator(".legend .ticks").first).to_contain_text("+6.10")
    assert background(tokens.nth(0)) == full != background(tokens.nth(2))
    assert tokens.nth(0).evaluate("node => getComputedStyle(node).outlineStyle") == "none"


def test_a_column_that_is_set_aside_leaves_the_colours_of_a_matrix_to_the_others(open_map):
    view = map_view([[9.0, 0.0, 0.0], [9.0, 1.0, 0.0], [9.0, 1.0, 2.0]], set_aside=(0,))
    tab = open_map(view)
    expect(tab.locator(".figure .ticks")).to_contain_text("2.00")
    tab.get_by_label("Set aside “w0”").click()
    expect(tab.locator(".figure .ticks")).to_contain_text("9.00")


def test_one_row_has_contrast_too(open_map):
    tab = open_map(map_view([[4.0, 1.0, 0.5]]))
    before = background(tab.locator(".token").nth(1))
    tab.get_by_label("Contrast").fill("60")
    expect(tab.locator(".legend .ticks")).to_contain_text("≥ ")
    assert background(tab.locator(".token").nth(1)) != before


def test_tokens_become_words_and_tokens_again(open_map):
    labels = ("The", " E", "iff", "el", " Tower")
    words = (("The", 0, 1), (" Eiffel", 1, 4), (" Tower", 4, 5))
    tab = open_map(map_view(np.arange(25.0).reshape(5, 5), labels=labels, words=words, set_aside=(2,)))
    tab.locator(".token").nth(3).click()
    tab.get_by_label("Whole words").check()
    assert tab.locator("[data-tensorlens]").evaluate("host => host.shadowRoot.activeElement.ariaLabel") == "Whole words"
    assert tab.locator(".text.row .token").all_inner_texts() == ["The", " Eiffel", " Tower"]
    expect(tab.locator(".reading")).to_contain_text("“el” (3)")
    expect(tab.locator("section.aside .number")).to_have_text("51.0")
    tab.get_by_label("Whole words").uncheck()
    assert tab.locator(".text.row .token").all_inner_texts() == list(labels)


def test_one_signed_row_begins_in_words_with_the_sink_beside(open_map):
    labels = ("Th", "e", " E", "iff", "el")
    words = (("The", 0, 2), (" Eiffel", 2, 5))
    row = map_view([[9.0, -1.0, 1.0, 2.0, 3.0]], labels=labels, words=words, set_aside=(0,))
    tab = open_map(row)
    assert tab.locator(".text.row .token").all_inner_texts() == ["Th", "The", " Eiffel"]
    assert "+6.00" in tab.locator(".ranking").first.inner_text()
    tab.get_by_label("Whole words").uncheck()
    assert tab.locator(".text.row .token").all_inner_texts() == list(labels)
    norms = open_map(map_view([[9.0, 1.0, 1.0, 2.0, 3.0]], labels=labels, words=words, signed=False))
    assert norms.locator(".text.row .token").all_inner_texts() == list(labels)


def test_what_a_head_reads_is_a_whole_word(open_html):
    found = tiny_lens()("the cat sat").inside(max_nodes=5, n_whys=0)
    assert min(look.query for look in found.looks.values()) > 0  # the first token has nowhere else to look
    tab = open_html(page.inside_page(found.payload(), "inside"))
    words = {"the": (0, 3), "cat": (3, 7), "sat": (7, 11)}
    reads = {str(head): read for head, read in found.reads.items()}
    lines = tab.locator(".ranked").filter(has_text=" reads ").all_inner_texts()
    assert len(lines) == min(10, len(reads))
    for line in lines:
        name, _, rest = line.partition(" reads “")
        sums = {
            word: abs(float(reads[name.replace("head", "attention head")][slice(*place)].sum()))
            for word, place in words.items()
        }
        assert rest.partition("”")[0] == max(("cat", "sat"), key=lambda word, sums=sums: sums[word])  # not the first


def test_the_sum_of_the_row_is_said(open_map):
    tab = open_map(map_view(np.eye(2), sums=("inputs sum to 1.00; …", "inputs sum to 2.00; …")))
    expect(tab.locator(".sum")).to_have_text("inputs sum to 2.00; …")
    tab.locator(".token").nth(0).click()
    expect(tab.locator(".sum")).to_have_text("inputs sum to 1.00; …")
    expect(open_map(map_view(np.eye(2))).locator(".sum")).to_be_hidden()


def test_a_question_says_what_its_colours_mean_and_wears_its_certificate(open_map):
    caption = (("Method", "tensor.in_class"), ("Note", "read as one token"), ("Certificate", "passed (value 3e-7)"))
    tab = open_map(map_view([[1.0, -2.0, 3.0]], title="Why “ a”?", caption=caption))
    expect(tab.locator(".reading")).to_have_text("Red supports it, blue works against it")
    expect(tab.locator(".badge")).to_have_text("✓ certified exact")
    assert tab.locator(".badge").get_attribute("title") == "passed (value 3e-7)"
    expect(tab.locator(".note")).to_have_text("read as one token")
    failed = open_map(map_view([[1.0, -2.0, 3.0]], caption=(("Certificate", "FAILED (value 1e-1)"),)))
    expect(failed.locator(".badge")).to_have_text("✗ not certified")
    unknown = open_map(map_view([[1.0, -2.0, 3.0]], caption=(("Certificate", "not checked"),)))
    expect(unknown.locator(".badge")).to_be_hidden()


def test_a_long_row_opens_at_its_strongest_token(open_map):
    scores = np.full((1, 2000), 0.01)
    scores[0, 1500] = 5.0
    tab = open_map(map_view(scores))
    token = tab.locator(".token").nth(1500)
    expect(token).to_be_in_viewport()
    assert tab.locator(".text.row").evaluate("node => node.scrollTop") > 500


def test_a_picture_opens_on_its_class_token(open_map):
    labels = ("[CLS]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1")
    tab = open_map(map_view(np.eye(5), labels=labels, grid=PatchGrid(rows=2, columns=2, first=1), image=picture()))
    expect(tab.locator(".reading")).to_contain_text("“[CLS]” (0)")


def test_unsigned_numbers_have_no_plus(open_map):
    tab = open_map(map_view([[1.0, 2.0, 3.0]], signed=False))
    tab.locator(".token").nth(1).hover()
    for text in tab.locator(".ticks, .ranking .number, .tooltip .number").all_inner_texts():
        assert "+" not in text
