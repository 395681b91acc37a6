"""The explorer in a real browser, on tiny models: the main path, pictures, light and dark, long maps, hostile text."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
import torch
from explorer_samples import SENTENCE, library, load, png, serving
from explorer_tabs import ask, caption, mapped
from playwright.sync_api import expect
from view_samples import patience

import tensorlens as tl

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("unchecked")]


def test_type_map_click_target_blocks_export_and_reload(open_tab, tmp_path):
    tab = open_tab()
    panel = ask(tab)
    assert panel.locator(".text .token").all_inner_texts() == ["The", " cat", " sat", " on", " the", " mat"]
    assert "Bias share" in panel.locator(".facts").inner_text()

    panel.locator(".text .token").nth(2).click()
    tab.get_by_text("Explain a prediction after “sat”").wait_for()
    expected = load("gpt2")(SENTENCE).predictions(8, 2)
    panel.locator(".chip", has_text=expected[0].name).first.wait_for()
    chips = panel.get_by_role("group", name="Explain", exact=True).locator(".chip:not(.none)")
    assert chips.nth(0).locator("bdi").inner_text().strip() == expected[0].name.strip()

    chips.nth(1).click()
    tab.locator(".lens h2", has_text="tensor.in_class").wait_for()
    panel = mapped(tab)
    panel.get_by_role("group", name="Rather than").locator(".chip").nth(1).click()
    tab.locator(".caption", has_text=" − ").wait_for()
    panel = mapped(tab)
    assert panel.locator(".text .token[aria-selected=true]").inner_text() == " sat"

    first = panel.get_by_label("First block")
    first.focus()
    first.press("ArrowRight")
    tab.locator(".caption", has_text="1:3").wait_for()
    panel = mapped(tab)
    assert panel.locator(".range-text").inner_text() == "1 to 2"

    with tab.expect_download() as download:
        panel.locator(".saves a[data-kind=json]").click()
    path = tmp_path / "map.json"
    download.value.save_as(path)
    contrast = (expected[1][1], expected[0][1])
    T = load("gpt2")(SENTENCE)
    assert torch.allclose(
        tl.TokenMap.load(path).scores, T.blocks(1, 3).map("tensor.in_class", target=contrast).scores, rtol=1e-9
    )

    before = caption(panel)
    other = open_tab(tab.url[tab.url.index("#") :])
    panel = mapped(other)
    assert caption(panel) == before
    assert panel.locator(".text .token[aria-selected=true]").inner_text() == " sat"
    assert panel.locator(".chip[aria-pressed=true]").count() == 2


def test_html_and_png_are_saved_too(open_tab, tmp_path):
    tab = open_tab()
    panel = ask(tab)
    for kind, start in (("html", b"<!doctype html>"), ("png", b"\x89PNG")):
        with tab.expect_download() as download:
            panel.locator(f".saves a[data-kind={kind}]").click()
        path = tmp_path / f"map.{kind}"
        download.value.save_as(path)
        assert path.read_bytes().startswith(start)


def test_heads_can_be_left_out(open_tab):
    tab = open_tab()
    panel = ask(tab)
    panel.locator(".head-box summary").click()
    panel.get_by_role("button", name="Block 1, head 2").click()
    tab.locator(".caption", has_text="1: 0, 1, 3").wait_for()
    assert mapped(tab).locator(".head-box summary").inner_text().startswith("1 left out")


def test_two_methods_side_by_side_share_their_selection(open_tab):
    tab = open_tab()
    ask(tab)
    tab.get_by_role("button", name="Show a second map beside this one").click()
    right = mapped(tab, 1)
    right.get_by_role("combobox", name="Method").select_option("rollout.attn")
    right.locator("h2", has_text="rollout.attn").wait_for()
    mapped(tab, 1)
    tab.locator(".panel").nth(0).locator(".text .token").nth(1).click()
    assert right.locator(".text .token[aria-selected=true]").inner_text() == " cat"
    again = open_tab(tab.url[tab.url.index("#") :])
    mapped(again, 0)
    assert mapped(again, 1).locator("h2").inner_text() == "rollout.attn"


def test_two_members_side_by_side_and_the_paper_one_click_away(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat&method=tensor.in_class&only=1&output=5")
    left = mapped(tab)
    tab.get_by_role("button", name="Show a second map beside this one").click()
    right = mapped(tab, 1)
    right.get_by_role("combobox", name="Rules").select_option("attn_lrp")
    right.locator(".caption", has_text="attention half").wait_for(state="attached")
    mapped(tab, 1)
    expect(right.get_by_role("combobox", name="Rules")).to_have_value("attn_lrp")
    assert right.locator(".text").inner_html() != left.locator(".text").inner_html()
    ends = [panel.locator(".side section:first-child .legend").inner_text() for panel in (left, right)]
    assert ends[0] == ends[1]  # one scale
    lengths = [bar_length(panel, " mat") / abs(number(panel, " mat")) for panel in (left, right)]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.02)  # of the bars too
    difference = tab.locator(".difference")
    expect(difference.locator("h2")).to_have_text("Difference: the first map minus the second")
    shown = [number(panel, " mat") for panel in (left, right, difference)]
    assert shown[2] == pytest.approx(shown[0] - shown[1], abs=0.011)
    again = open_tab(tab.url[tab.url.index("#") :])
    assert mapped(again, 1).locator(".text").inner_html() == right.locator(".text").inner_html()
    right.get_by_role("combobox", name="Rules").select_option("paper")
    right.locator(".caption", has_text="attention hold").wait_for(state="attached")
    mapped(tab, 1)
    assert right.locator(".text").inner_html() == left.locator(".text").inner_html()


def test_the_scale_of_two_maps_goes_with_the_second(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat&method=gradient.times_input&only=1&output=5")
    panel = mapped(tab)
    legend = panel.locator(".side section:first-child .legend")
    alone = legend.get_attribute("aria-label")
    tab.get_by_text("Compare", exact=True).click()
    mapped(tab, 1).get_by_role("combobox", name="Method").select_option("tensor.in_class")
    expect(legend).not_to_have_attribute("aria-label", alone)
    tab.get_by_text("One map", exact=True).click()
    expect(legend).to_have_attribute("aria-label", alone)


def bar_length(panel, token: str) -> float:
    """The length of the bar of an input, in pixels."""
    line = panel.locator(".ranking li", has=panel.page.get_by_text(token.strip(), exact=True)).first
    return line.locator(".fill").bounding_box()["width"]


def number(panel, token: str) -> float:
    """The score beside the bar of an input."""
    line = panel.locator(".ranking li", has=panel.page.get_by_text(token.strip(), exact=True)).first
    return float(line.locator(".number").inner_text().replace("−", "-"))


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_words_and_map_are_above_the_fold(browser, server, width, height):
    tab = browser.new_page(viewport={"width": width, "height": height})
    tab.goto(f"{server}/#model=gpt2&text=The+cat+sat+on+the+mat")
    panel = mapped(tab)
    for part in (panel.locator(".text .token").last, panel.locator(".ranking li").first):
        box = part.bounding_box()
        assert box is not None and box["y"] + box["height"] <= height and box["x"] + box["width"] <= width
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    if width > 1000:  # one row of choices
        choices = [tab.get_by_role("combobox", name="Model"), tab.get_by_label("Another token to compare with")]
        model, rather = [choice.bounding_box() for choice in choices]
        assert abs(model["y"] - rather["y"]) < 4
    expect(tab.get_by_role("combobox", name="Method")).to_be_hidden()
    tab.get_by_text("More", exact=True).click()
    expect(tab.get_by_role("combobox", name="Method")).to_be_visible()
    tab.close()


def test_a_link_to_a_model_that_is_not_loaded_says_so(open_tab):
    tab = open_tab("#model=llama-9&text=The+cat+sat")
    expect(tab.locator(".error").first).to_contain_text("llama-9, which is not loaded here")
    expect(tab.locator(".error").first).to_contain_text("tensorlens explore llama-9")
    tab.get_by_role("button", name="Load llama-9").click()
    expect(tab.locator(".error").first).to_contain_text("'llama-9' is neither a bundled model nor a folder here")
    tab = open_tab("#model=llama-9&text=The+cat+sat")
    tab.get_by_role("button", name="Ask gpt2 instead").click()
    assert mapped(tab).locator("h2").inner_text().startswith("Why “")


def test_a_picture_finds_a_model_that_takes_it(open_tab):
    tab = open_tab()
    tab.get_by_label("Choose a picture").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png()})
    tab.locator(".stage img").wait_for()
    panel = mapped(tab)
    assert panel.get_by_role("combobox", name="Model").input_value() == "vit"
    assert "LABEL" in panel.locator("h2").inner_text()
    again = open_tab(tab.url[tab.url.index("#") :])
    again.locator(".stage img").wait_for()
    mapped(again)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(open_tab, scheme):
    tab = open_tab(color_scheme=scheme)
    ask(tab)
    other = {"light": "dark", "dark": "light"}[scheme]
    shade = "document.documentElement.dataset.shade"
    assert tab.evaluate(shade) == scheme
    assert tab.locator(".host").get_attribute("data-shade") == scheme
    tab.locator(".tools").get_by_role("button", name="Switch between light and dark").click()
    assert tab.evaluate(shade) == other
    assert tab.locator(".host").get_attribute("data-shade") == other
    tab.reload()
    mapped(tab)
    assert tab.evaluate(shade) == other


def test_two_thousand_tokens_within_a_second_from_data_to_picture(open_tab):
    tab = open_tab("#saved=0")
    tab.locator(".origin", has_text="long.json").wait_for()
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    took = tab.evaluate("performance.getEntriesByName('explorer:picture')[0].duration")
    print(f"2,000 × 2,000: {took:.0f} ms from data to picture")
    assert took < 1000 * patience()
    canvas = "document.querySelector('.host').shadowRoot.querySelector('canvas.base')"
    pixels = tab.evaluate(f"Array.from({canvas}.getContext('2d').getImageData(300, 300, 40, 40).data)")
    assert np.unique(np.array(pixels).reshape(-1, 4), axis=0).shape[0] > 3


def test_hostile_labels_are_shown_and_not_run(open_tab):
    tab = open_tab("#saved=1")
    tab.locator(".origin", has_text="<i>hostile</i>.json").wait_for()
    assert tab.locator(".lens h2").inner_text() == "<b>bold</b>"
    assert "<img src=x onerror=window.hacked=1>" in tab.locator(".text .token").all_inner_texts()
    tab.goto(tab.url.partition("#")[0] + "#saved=2")
    tab.locator(".origin", has_text="one.json").wait_for()


def test_hostile_text_and_hostile_links(open_tab):
    tab = open_tab()
    panel = ask(tab, "<script>alert(1)</script> شمس 👩‍🚀 w1")
    assert panel.locator(".text .token").nth(0).inner_text() == "<script>alert(1)</script>"
    for fragment in (
        "#%E0%A4%A",
        "#model=%3Cscript%3E&and&x&y&and&z",
        "#text=a&blocks=9:1&without=[1]&target={}",
    ):
        tab = open_tab(fragment)
        assert tab.locator(".panel").count() in (1, 2)


def test_what_goes_wrong_is_said_in_place(open_tab):
    tab = open_tab()
    mapped(tab)
    tab.get_by_label("Text", exact=True).fill("The cat sat " * 30)
    tab.get_by_role("button", name="Map", exact=True).click()
    alert = tab.get_by_role("alert")
    alert.wait_for()
    assert "at most 40 tokens" in alert.inner_text()
    ask(tab)
    assert alert.is_hidden()


def test_cancel_stops_the_work(open_tab, browser):
    stopped, started = threading.Event(), threading.Event()

    def endless(job, ask):
        started.set()
        try:
            while True:
                job.check()
                job.tell("progress", stage="Computing", part=0.25)
                time.sleep(0.02)
        finally:
            stopped.set()

    with serving(library("gpt2")) as (address, explorer):
        explorer.answers.map = endless
        tab = browser.new_page()
        tab.goto(address)
        expect(tab.get_by_role("status").filter(has_text="Computing")).to_have_text("Computing")  # read aloud once
        expect(tab.locator(".ask .left")).to_have_text(re.compile(r"^25 %, about \d+ s left$"))
        assert started.is_set() and not stopped.is_set()
        tab.get_by_role("button", name="Stop the work").click()
        assert stopped.wait(5)
        assert tab.locator(".ask .progress").is_hidden()
        assert tab.locator(".error").first.is_hidden()
        tab.close()


def test_a_map_that_was_replaced_is_let_go(open_tab):
    tab = open_tab("#saved=1")
    tab.locator(".origin", has_text="hostile").wait_for()
    tab.evaluate("""() => {
        const { result } = window.explorer.panels[0];
        window.first = new WeakRef(result.lens);
        for (let k = 0; k < 3; k++) result.show(result.data);
    }""")
    session = tab.context.new_cdp_session(tab)
    for _ in range(3):
        tab.wait_for_timeout(100)
        session.send("HeapProfiler.collectGarbage")
    assert tab.evaluate("window.first.deref() === undefined")


def test_a_circuit_between_two_texts(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat")
    mapped(tab)
    tab.get_by_label("Another text").fill("The dog sat on the mat")
    tab.get_by_role("button", name="Find the circuit").click()
    expect(tab.locator(".recovered caption")).to_contain_text(re.compile(r"CPR -?[\d.]+, CMD [\d.]+"))
    rows = tab.locator(".recovered tr")
    assert rows.count() == 7 and rows.first.inner_text().split() == ["edges", "recovered"]
    assert rows.last.inner_text().split() == ["100.0", "%", "100.0", "%"]
    expect(tab.locator(".inside-host .graph-tools .size")).to_contain_text("edges")
    tab.get_by_label("Another text").fill("The dog")
    tab.get_by_role("button", name="Find the circuit").click()
    expect(tab.locator(".card.inside .error")).to_contain_text(["", "same length"])


def test_predictions_after_another_text_are_dimmed_and_how_a_target_was_read_is_said(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat")
    panel = mapped(tab)
    chips = panel.get_by_role("group", name="Explain", exact=True).first
    faded = "node => getComputedStyle(node.closest('.field')).opacity < 0.5"
    assert not chips.evaluate(faded)
    tab.get_by_label("Text", exact=True).fill("The cat sat on")
    assert chips.evaluate(faded)
    asking = """node => {
        const top = () => node.querySelector(".host").getBoundingClientRect().y;
        const before = top();
        node.querySelector("button.main").click();
        return [node.querySelector(".ask .progress").hidden, top() <= before];
    }"""
    assert panel.evaluate(asking) == [False, True]  # nothing moves down to say how far the work is
    mapped(tab)
    assert not chips.evaluate(faded)
    tab.get_by_label("Another token to explain").fill("mat")
    tab.get_by_label("Another token to explain").press("Enter")
    expect(panel.locator(".lens .note")).to_have_text("“mat” is taken as “ mat”, which is one token.")


def test_look_inside_says_in_words_what_heads_do(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat")
    mapped(tab)
    tab.get_by_role("button", name="Look inside").click()
    heads, others = (tab.locator(".inside-host .ranked-list ol").nth(k).locator("li") for k in (0, 1))
    heads.first.wait_for()
    assert heads.count() == 10 and others.count() == 3
    assert tab.locator(".inside-host .scale").count() == 3  # heads, feed-forwards, flow
    for line in heads.all_inner_texts():
        found = re.fullmatch(r"block \d+, head \d+ reads “(.+)”, moves “.+” (up|down) [\d.]+", line)
        assert found and found[1] in SENTENCE.split()
    assert not any("reads" in line for line in others.all_inner_texts())
    name = heads.first.inner_text().partition(" reads")[0].replace("head", "attention head")
    heads.first.get_by_role("button").click()
    expect(tab.locator(".inside-host .about h3")).to_have_text(name)
    before = tab.locator(".graph-tools .size").inner_text()
    tab.get_by_label("Number of edges drawn").fill("1")
    expect(tab.locator(".graph-tools .size")).to_contain_text("1 of ")
    assert tab.locator(".graph-tools .size").inner_text() != before


def test_work_on_the_inside_is_told_below_its_button_and_can_be_stopped(open_tab, browser):
    stopped = threading.Event()

    def endless(job, ask):
        try:
            while True:
                job.check()
                job.tell("progress", stage="Scoring every edge")
                time.sleep(0.02)
        finally:
            stopped.set()

    with serving(library("gpt2")) as (address, explorer):
        explorer.answers.circuit = explorer.answers.inside = endless
        tab = browser.new_page()
        tab.goto(address)
        mapped(tab)
        for opener, other in (("Find the circuit", "Look inside"), ("Look inside", "Find the circuit")):
            tab.get_by_label("Another text").fill("The dog")
            tab.get_by_role("button", name=opener).click()
            told = tab.get_by_role("status").filter(has_text="Scoring every edge")
            gap = told.bounding_box()["y"] - tab.get_by_role("button", name=opener).bounding_box()["y"]
            assert 0 < gap < 80 and tab.get_by_role("button", name=other).is_visible()
            stopped.clear()
            tab.get_by_role("button", name="Stop the work").click()
            assert stopped.wait(5)
            told.wait_for(state="hidden")
        tab.get_by_role("button", name="Look inside").click()
        told.wait_for()
        stopped.clear()
        tab.get_by_label("Text", exact=True).press("Enter")  # a new question does not wait for it
        assert stopped.wait(5)
        tab.close()


def test_everything_can_be_done_with_the_keyboard_and_is_read_aloud(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat")
    panel = mapped(tab)
    tab.get_by_label("Text", exact=True).focus()
    for name in ("Map", "Choose a picture", "Model", "the output state"):  # the order of what is seen
        tab.keyboard.press("Tab")
        assert focused(tab).startswith(name)
    tab.keyboard.press("Tab")
    tab.keyboard.press("Tab")
    chosen = focused(tab)
    name = tab.locator(":focus bdi").inner_text()
    tab.keyboard.press("Enter")
    expect(panel.locator(".result > .live")).to_have_text(re.compile(f"^Why “{re.escape(name)}”"))
    mapped(tab)
    assert focused(tab) == chosen
    before = panel.locator(".text.row [aria-selected=true]").inner_text()
    tab.get_by_role("listbox", name="Inputs").focus()
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowLeft")
    expect(panel.locator(".text.row [aria-selected=true]")).not_to_have_text(before)
    tab.locator(".head-box summary").focus()
    tab.keyboard.press("Enter")
    for name in ("Keep all heads", "Leave all heads out", "All heads of block 0", "Block 0, head 0"):
        tab.keyboard.press("Tab")
        assert focused(tab) == name
    tab.keyboard.press("Enter")
    expect(panel.locator(".head-box summary")).to_contain_text("1 left out")
    mapped(tab)
    assert focused(tab) == "Block 0, head 0"
    tab.keyboard.press("Escape")
    tab.get_by_role("button", name="Look inside").focus()
    tab.keyboard.press("Enter")
    panel.locator(".ranked").first.wait_for()
    tab.keyboard.press("Tab")  # the button is gone; its answer has the focus
    assert focused(tab).startswith("block ")
    tab.keyboard.press("Tab")
    name = focused(tab).partition(" reads")[0].replace("head", "attention head")
    tab.keyboard.press("Enter")
    expect(tab.locator(".about h3")).to_have_text(name)
    unnamed = """node => [...node.querySelectorAll('button, input, select, textarea, [tabindex="0"]')]
        .filter((it) => !(it.ariaLabel || it.labels?.length || it.textContent.trim())).map((it) => it.outerHTML)"""
    assert panel.evaluate(unnamed) == []
    assert panel.locator(".host").evaluate(f"node => ({unnamed})(node.shadowRoot)") == []
    assert panel.locator(".inside-host").first.evaluate(f"node => ({unnamed})(node.shadowRoot)") == []


def focused(tab) -> str:
    """The name of the control that has the focus."""
    return tab.evaluate("""() => {
        let node = document.activeElement;
        while (node.shadowRoot?.activeElement) node = node.shadowRoot.activeElement;
        return node.ariaLabel ?? node.textContent;
    }""")


def test_the_difference_of_two_maps_is_right_below_them(open_tab):
    tab = open_tab("#model=gpt2&text=The+cat+sat&and&model=gpt2&text=The+cat+sat&rules=attn_lrp")
    for panel in (0, 1):
        tab.locator(".verdict").nth(panel).filter(has_text="Certified").wait_for()
    maps = [tab.locator(".panel > .result").nth(k).bounding_box() for k in (0, 1)]
    difference, inside = (tab.locator(css).first.bounding_box() for css in (".difference", ".card.inside"))
    assert maps[0]["y"] == maps[1]["y"] and maps[0]["x"] < maps[1]["x"]
    assert max(one["y"] + one["height"] for one in maps) <= difference["y"] < inside["y"]


def test_a_link_to_a_picture_shows_it(open_tab):
    tab = open_tab()
    tab.get_by_label("Choose a picture").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": png()})
    tab.locator("canvas.patches").wait_for()
    other = open_tab(tab.url[tab.url.index("#") :])
    other.locator("canvas.patches").wait_for()
    assert other.get_by_alt_text("The picture to explain").evaluate("image => image.complete && image.naturalWidth > 0")
