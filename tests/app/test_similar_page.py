"""The explorer's page of similar texts: the route, and the page in a real browser with its link."""

from __future__ import annotations

import pytest
from explorer_samples import events, make_client, serving
from playwright.sync_api import expect
from tiny_language import tiny_lens

import tensorlens as tl
from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.library import Library

FIRST, SECOND, THIRD = "The cat sat there.", "A cat lay.", "see /etc/shadow.png"


def shelf() -> Library:
    return Library(names=("tiny",), load=lambda _: tiny_lens())


def test_two_and_three_texts():
    with make_client(shelf()) as client:
        asked = {"model": "tiny", "first": FIRST, "second": SECOND}
        sent = events(client.post("/api/similar", json=asked))[-1]["pairs"]
        expected = tl.similarity(tiny_lens(), FIRST, SECOND, groups="words")
        assert sent["rows"] == list(expected.out_tokens) and sent["value"] == pytest.approx(expected.value)
        assert sum(map(sum, sent["cells"])) == pytest.approx(expected.value, rel=1e-6)
        third = events(client.post("/api/similar", json=asked | {"against": THIRD, "groups": "tokens"}))[-1]["pairs"]
        assert third["nAgainst"] == len(tiny_lens()(list(THIRD.encode())).tokens)  # a text, not a picture to open


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"first": " "}, "some text"),
        ({"second": 3}, "`$.second`"),
        ({"groups": "pages"}, "`$.groups`"),
        ({"first": "a" * 300}, "at most 200 tokens"),
        ({"model": "gpt9"}, "started with"),
    ],
)
def test_what_cannot_be_asked(change, words):
    with make_client(shelf(), Limits(tokens=200)) as client:
        asked = {"model": "tiny", "first": FIRST, "second": SECOND} | change
        assert words in events(client.post("/api/similar", json=asked))[-1]["message"]


@pytest.mark.browser
def test_the_page_and_its_link(browser):
    with serving(shelf()) as (address, _):
        page, problems = browser.new_page(), []
        page.set_default_timeout(90_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{address}/")
        page.get_by_role("link", name="Similar").click()
        page.get_by_label("First text", exact=True).fill(FIRST)
        page.get_by_label("Second text", exact=True).fill(SECOND)
        page.locator(".similar-panel button.main").click()
        expect(page.locator(".pairs-result .token").first).to_have_text("The")
        again = browser.new_page()
        again.goto(page.url)
        expect(again.locator(".pairs-result .token").first).to_have_text("The")
        expect(again.locator(".pages [aria-current=page]")).to_have_text("Similar")
        page.get_by_role("link", name="Map", exact=True).click()
        expect(page.locator(".panel .ask").first).to_be_visible()
        assert not problems
        page.close()
        again.close()


@pytest.mark.browser
def test_a_page_that_was_just_chosen_is_not_replaced_by_the_link_of_the_one_before(browser):
    with serving(shelf()) as (address, _):
        page = browser.new_page()
        page.goto(f"{address}/")
        page.locator(".panel .ask").wait_for()
        # The browser tells of a new link a moment later; until then something may write the link of the old page.
        page.evaluate(
            "location.hash = 'page=similar';"
            "[...document.querySelectorAll('.tools button')].find((one) => one.textContent === 'Copy link').click()"
        )
        expect(page.get_by_label("First text", exact=True)).to_be_visible()
        page.close()
