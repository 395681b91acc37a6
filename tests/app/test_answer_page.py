"""The explorer's page of answers: the route, the page in a real browser, links, contrasts, streaming and stopping."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch
from explorer_samples import events, make_client, serving
from playwright.sync_api import expect
from tiny_language import tiny_lens

import tensorlens as tl
from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.library import Library

PROMPT = "The cat sat. It was dark!\nWho sat there?"
ANSWER = " A cat did. So it goes."
ASK = {"model": "tiny", "prompt": PROMPT, "answer": ANSWER}


def slow_lens(seconds: float = 0.0) -> tl.Lens:
    """Each token takes a while, so that there is something to stop."""
    lens = tiny_lens()
    lens.model.register_forward_pre_hook(lambda *_: time.sleep(seconds))
    return lens


def shelf() -> Library:
    return Library(names=("tiny", "slow"), load=lambda name: slow_lens(0.15) if name == "slow" else tiny_lens())


# The route -----------------------------------------------------------------------------------------------------------


def test_an_answer_is_told_mapped_certified_and_kept():
    with make_client(shelf()) as client:
        found = events(client.post("/api/answer", json=ASK))
        (done,) = [event for event in found if event["type"] == "done"]
        (sent,) = [event["map"] for event in found if event["type"] == "map"]
        assert done["certificate"]["passed"] and not done["is_kept"] and done["text"] == ANSWER
        expected = (
            tiny_lens()
            .with_rules(tl.recommended("passage"))
            .answer(PROMPT, ANSWER)
            .map("sentences", "sentences", set_aside=(0,))
        )
        assert sent["inTokens"] == list(expected.in_tokens) and sent["setAside"] == [0]
        assert sent["answer"]["answer"] == [[" A cat did.", 0, 4], [" So it goes.", 1, 4]]
        assert sum(sent["answer"]["values"]) == pytest.approx(sum(expected.meta["logit"]), rel=1e-5)
        again = events(client.post("/api/answer", json=ASK | {"against": " No one.", "groups": "lines"}))
        assert again[-1]["is_kept"]
        page = client.get(f"/api/results/{again[-1]['result']}.html").text
        assert "No one." in page and "Who sat there?" in page


def test_a_generated_answer_is_told_while_it_comes():
    with make_client(shelf()) as client:
        found = events(client.post("/api/answer", json={"model": "slow", "prompt": PROMPT, "max_new_tokens": 6}))
    said = [event["text"] for event in found if event["type"] == "said"]
    assert len(set(said)) > 2 and found[-1]["text"] == tiny_lens().answer(PROMPT, max_new_tokens=6).text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": " "}, "some text"),
        ({"prompt": None}, "`$.prompt`"),
        ({"prompt": 3}, "`$.prompt`"),
        ({"answer": ""}, "some text"),
        ({"answer": 3}, "`$.answer`"),
        ({"groups": "pages"}, "Invalid enum value 'pages' - at `$.groups`"),
        ({"rows": ["a"]}, "`$.rows`"),
        ({"max_new_tokens": 0}, ">= 1 - at `$.max_new_tokens`"),
        ({"max_new_tokens": True}, "`$.max_new_tokens`"),
        ({"against": ANSWER}, "a different answer"),
        ({"groups": "turns"}, "chat"),
        ({"is_chat": True}, "chat template"),
        ({"prompt": "a" * 300}, "at most 200 tokens"),
        ({"model": "gpt9"}, "started with"),
    ],
)
def test_what_cannot_be_asked(change, words):
    with make_client(shelf(), Limits(tokens=200)) as client:
        response = client.post("/api/answer", json=ASK | change)
        assert words in events(response)[-1]["message"]


def test_a_prompt_that_ends_like_a_picture_is_a_text(tmp_path):
    found = tiny_lens().answer("What is in /etc/shadow.png", " No.")
    assert found.prompt.text == "What is in /etc/shadow.png" and found.map().scores.isfinite().all()


# The page ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    with serving(shelf()) as (address, inside):
        yield address, inside


@pytest.fixture
def tab(browser, server):
    context = browser.new_context(viewport={"width": 1360, "height": 1000})
    page, problems = context.new_page(), []
    page.set_default_timeout(90_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    page.goto(f"{server[0]}/")
    page.wait_for_selector(".panel")
    page.get_by_role("link", name="Answer").click()
    page.wait_for_selector(".answer-panel")
    yield page
    context.close()
    assert problems == []


def ask(tab, prompt: str = PROMPT, answer: str = ANSWER, against: str = ""):
    tab.get_by_label("Prompt", exact=True).first.fill(prompt)
    tab.get_by_label("Answer", exact=True).first.fill(answer)
    tab.get_by_label("Rather than", exact=True).first.fill(against)
    tab.locator("button.main").click()
    return certified(tab)


def certified(tab):
    tab.locator(".progress").wait_for(state="hidden")
    tab.locator(".verdict", has_text=re.compile("Certified")).wait_for()
    return tab.locator(".answer")


def shades(answer, kind: str) -> list[str]:
    return answer.locator(f".answer-text .{kind}").evaluate_all(
        "nodes => nodes.map((node) => node.style.backgroundColor)"
    )


NAMED = {"answer": "the answer before each word"}
"""Columns that the table calls otherwise than the map."""


def lines(answer) -> dict[str, str]:
    """The table: names and scores."""
    rows = answer.locator(".passages tbody tr")
    return {row.locator("th").inner_text(): row.locator("td").first.inner_text() for row in rows.all()}


@pytest.mark.browser
@pytest.mark.usefixtures("unchecked")
def test_a_part_lights_passages_and_a_passage_lights_parts(tab):
    answer = ask(tab)
    lens = tiny_lens().with_rules(tl.recommended("passage"))
    expected = lens.answer(PROMPT, ANSWER).map("sentences", "sentences", set_aside=(0,))
    whole = expected.scores.sum(0)
    found = lines(answer)
    assert list(found)[-3:] == ["Set aside: T", "Bias", "Sum: the target"]
    number = lambda text: float(text.replace("−", "-"))  # noqa: E731
    for j, label in list(enumerate(expected.in_tokens))[1:]:
        assert number(found[NAMED.get(label, label)]) == pytest.approx(
            float(whole[j]), abs=0.06
        )  # three digits are shown
    assert number(found["Sum: the target"]) == pytest.approx(sum(expected.meta["logit"]), abs=0.02)
    assert "aside" in (answer.locator(".answer-text span").first.get_attribute("class") or "")

    before = shades(answer, "passage")
    answer.locator(".part").nth(1).click()
    assert "So it goes." in answer.locator(".answer-says").inner_text()
    assert shades(answer, "passage") != before
    for j, label in list(enumerate(expected.in_tokens))[1:]:
        assert number(lines(answer)[NAMED.get(label, label)]) == pytest.approx(float(expected.scores[1, j]), abs=0.06)

    answer.locator(".passage", has_text="It was dark").click()
    parts = lines(answer)
    assert list(parts) == ["A cat did.", "So it goes."]
    assert number(parts["A cat did."]) == pytest.approx(float(expected.scores[0, 2]), abs=0.06)
    assert all(shades(answer, "part")) and not any(shades(answer, "passage"))
    answer.get_by_role("button", name="What the whole answer is based on").click()
    assert shades(answer, "passage") == before
    answer.locator(".passages button.name", has_text="The cat sat.").press("Enter")
    assert "The cat sat." in answer.locator(".answer-says").inner_text()


@pytest.mark.browser
@pytest.mark.usefixtures("unchecked")
def test_a_contrast_a_link_and_a_saved_page(tab, tmp_path, server):
    answer = ask(tab, against=" No one.")
    assert "No one." in answer.locator(".against").inner_text() and "against" in lines(answer)
    link = tab.url
    tab.goto("about:blank")
    tab.goto(link)
    assert "against" in lines(certified(tab))
    with tab.expect_download() as saved:
        tab.locator('.saves a[data-kind="html"]').click()
    path = tmp_path / "answer.html"
    saved.value.save_as(path)
    other = tab.context.new_page()
    other.goto(path.as_uri())
    other.wait_for_selector("[data-ready]", state="attached")
    assert lines(other.locator(".answer")) == lines(tab.locator(".answer"))
    tab.get_by_role("link", name="Map", exact=True).click()
    tab.locator(".panel:not(.answer-panel)").wait_for()
    expect(tab.get_by_role("link", name="Map", exact=True)).to_have_attribute("aria-current", "page")


@pytest.mark.browser
@pytest.mark.usefixtures("unchecked")
def test_the_answer_streams_and_can_be_stopped(tab, server):
    tab.get_by_role("combobox", name="Model").select_option("slow")
    tab.get_by_label("Longest answer, in tokens").fill("200")
    tab.get_by_label("Answer", exact=True).first.fill("")
    tab.locator("button.main").click()
    tab.locator(".said").wait_for()
    first = tab.locator(".said").inner_text()
    expect(tab.locator(".said")).not_to_have_text(first)
    tab.get_by_role("button", name="Stop").click()
    tab.locator(".progress").wait_for(state="hidden")
    worker = server[1].worker
    deadline = time.monotonic() + 10
    while worker._running is not None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert worker._running is None and threading.active_count() > 0
    assert torch.is_grad_enabled()


@pytest.mark.browser
@pytest.mark.usefixtures("unchecked")
def test_text_of_a_stranger_stays_text(tab):
    answer = ask(tab, prompt="<img src=x onerror=window.hacked=1>. Hi!", answer=" </script><b>x</b>.")
    assert answer.locator("img, b").count() == 0 and tab.evaluate("window.hacked") is None
    assert "<b>x</b>" in answer.locator(".part").first.inner_text()
