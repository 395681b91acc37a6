"""The explorer's first two minutes in a real browser: the example, badges, popovers, files, words."""

from __future__ import annotations

import re
import shlex
import threading
from pathlib import Path

import pytest
from explorer_samples import library, load, serving, tokenizer
from explorer_tabs import caption, mapped
from playwright.sync_api import expect

import tensorlens as tl

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("unchecked")]


def test_the_example_runs_on_load_and_says_what_the_model_says_first(open_tab):
    tab = open_tab()
    panel = mapped(tab)
    text = tab.get_by_label("Text", exact=True).input_value()
    (first,) = load("gpt2")(tokenizer()(text)["input_ids"]).predictions(1, -1)
    expect(panel.locator(".lens h2")).to_have_text(re.compile(rf"^Why “.*{first.name.strip()}” \(.*%\) after"))
    expect(panel.locator(".says")).to_be_hidden()  # the headline says it
    expect(panel.locator(".sum")).to_have_text(re.compile("^inputs sum to .*; the bias gives .*; the logit is "))
    pressed = panel.get_by_role("group", name="Explain", exact=True).locator(".chip[aria-pressed=true] bdi")
    expect(pressed).to_have_text(first.name)
    assert (
        panel.get_by_role("combobox", name="Method").evaluate("node => node.selectedOptions[0].text")
        == "Why this word?"
    )
    expect(panel.locator(".summary code")).to_have_text("tensor.in_class")
    assert re.search(r"#model=gpt2&text=The\+Eiffel\+Tower", tab.url)


def test_example_chips_and_an_edited_text_dims_the_old_map(open_tab):
    tab = open_tab()
    panel = mapped(tab)
    panel.get_by_role("group", name="Examples").get_by_role("button").nth(2).click()
    tab.locator(".caption", has_text="One, two").wait_for(state="attached")
    panel = mapped(tab)
    opacity = "node => getComputedStyle(node).opacity"
    assert panel.locator(".host").evaluate(opacity) == "1"
    tab.get_by_label("Text", exact=True).fill("One, two, three")
    assert float(panel.locator(".host").evaluate(opacity)) < 0.5
    expect(panel.locator(".age")).to_be_visible()
    tab.get_by_label("Text", exact=True).fill("One, two, three, four,")
    assert panel.locator(".host").evaluate(opacity) == "1"
    expect(panel.locator(".age")).to_be_hidden()


def test_only_maps_of_T_wear_the_green_badge(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat&method=rollout.attn")
    verdict = mapped(tab).locator(".verdict")
    expect(verdict).to_have_text("Not derived from T")
    grey = verdict.evaluate("node => getComputedStyle(node).color")
    tab.get_by_role("combobox", name="Method").select_option("tensor.in_out")
    expect(verdict).to_contain_text("Certified", timeout=30_000)
    assert verdict.evaluate("node => getComputedStyle(node).color") != grey
    assert "not derived" not in caption(tab.locator(".panel"))


def test_the_heads_close_by_escape_and_by_a_click_outside(open_tab):
    tab = open_tab()
    box = mapped(tab).locator(".head-box")
    box.locator("summary").click()
    box.locator(".head").first.wait_for()
    tab.keyboard.press("Escape")
    expect(box.locator(".popover")).to_be_hidden()
    box.locator("summary").click()
    expect(box.locator(".popover")).to_be_visible()
    tab.locator(".lens h2").click()
    expect(box.locator(".popover")).to_be_hidden()


@pytest.mark.parametrize("width", [390, 1000, 1280])
@pytest.mark.parametrize("fragment", ["", "#page=answer"])
def test_no_page_scrolls_sideways_not_even_with_the_heads_open(open_tab, width, fragment):
    tab = open_tab(fragment)
    tab.set_viewport_size({"width": width, "height": 800})
    if not fragment:
        box = mapped(tab).locator(".head-box")
        box.locator("summary").click()
        place = box.locator(".popover").bounding_box()
        assert place["x"] >= 0 and place["x"] + place["width"] <= width
        head = box.locator(".head").first
        head.click(trial=True)  # nothing lies above it
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_a_target_that_is_refused_leaves_the_one_that_the_map_explains(open_tab):
    tab = open_tab()
    panel = mapped(tab)
    pressed = panel.get_by_role("group", name="Explain", exact=True).locator(".chip[aria-pressed=true] bdi")
    (before,) = pressed.all_inner_texts()
    tab.get_by_label("Another token to explain").fill("xyzzy")
    tab.get_by_label("Another token to explain").press("Enter")
    expect(tab.get_by_role("alert").first).to_contain_text("must be one token")
    expect(pressed).to_have_text(before)


def test_files_can_be_saved_before_the_certificate_is_there(browser, monkeypatch):
    gate = threading.Event()
    certify = tl.AttentionTensor.certificate
    monkeypatch.setattr(tl.AttentionTensor, "certificate", lambda T: gate.wait(30) and certify(T))
    with serving(library("gpt2")) as (address, _):
        tab = browser.new_page()
        tab.goto(address)
        tab.locator(".saves a[data-kind=svg]").wait_for()
        assert tab.locator(".verdict").inner_text() == ""
        with tab.expect_download() as download:
            tab.locator(".saves a[data-kind=svg]").click()
        assert b"<svg" in Path(download.value.path()).read_bytes()
        gate.set()
        expect(tab.locator(".verdict")).to_contain_text("Certified", timeout=30_000)
        expect(tab.locator(".caption")).to_contain_text("passed")
        tab.close()


def test_a_view_can_be_copied_as_python_and_as_a_command(open_tab, server):
    link = "#model=gpt2&text=It's+%22The%22+cat&method=tensor.in_class&output=2&only=1&blocks=1:3"
    tab = open_tab(link + "&without=%7B%222%22:[0]%7D")
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server)
    panel = mapped(tab)
    clipboard = "navigator.clipboard.readText()"
    panel.get_by_role("button", name="Copy as Python").click()
    tab.locator(".toast.shown").wait_for()
    expected = [
        "import tensorlens as tl",
        "",
        'lens = tl.load("gpt2")',
        'T = lens("It\'s \\"The\\" cat")',
        "T = T.blocks(1, 3)",
        "T = T.without_heads({1: [0]})",
        'T.map("tensor.in_class", out_token=2)',
        "",
    ]
    assert tab.evaluate(clipboard).splitlines() == expected[:-1]
    compile("\n".join(expected), "snippet", "exec")
    panel.get_by_role("button", name="Copy as Command").click()
    tab.wait_for_function("navigator.clipboard.readText().then((text) => text.startsWith('tensorlens'))")
    words = shlex.split(tab.evaluate(clipboard))
    assert words == [
        "tensorlens",
        "map",
        "--method",
        "tensor.in_class",
        "--out-token",
        "2",
        "--blocks",
        "1:3",
        "--without-heads",
        "1:0",
        "--",
        "gpt2",
        'It\'s "The" cat',
    ]


def test_words_are_saved_as_they_are_shown(open_tab, tmp_path):
    tab = open_tab("#model=gpt2&text=%3Cscript%3Ealert(1)%3C/script%3Ew1+w2&method=tensor.in_out")
    panel = mapped(tab)
    if panel.get_by_label("Whole words").count():
        panel.get_by_label("Whole words").check()
    with tab.expect_download() as download:
        panel.locator(".saves a[data-kind=json]").click()
    download.value.save_as(tmp_path / "map.json")
    n_shown = panel.locator(".text.row .token").count()
    assert tl.TokenMap.load(tmp_path / "map.json").shape[1] == n_shown


def test_enter_asks_and_shift_enter_begins_a_line(open_tab):
    tab = open_tab()
    panel = mapped(tab)
    box = tab.get_by_label("Text", exact=True)
    box.fill("The dog sat")
    box.press("Shift+Enter")
    assert box.input_value() == "The dog sat\n"
    expect(panel.locator(".age")).to_be_visible()
    box.fill("The dog sat")
    box.press("Enter")
    tab.locator(".caption", has_text="The dog sat").wait_for(state="attached")
    expect(panel.locator(".age")).to_be_hidden()
    assert box.input_value() == "The dog sat"
