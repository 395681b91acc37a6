"""Documents opened in a real browser from disk with the network off."""

from __future__ import annotations

import pytest

from tensorlens.views import page


@pytest.fixture
def open_html(browser, tmp_path):
    """Open a document from disk, offline; at the end nothing may have failed, asked the network or run a label."""
    contexts, problems = [], []

    def open_it(html: str, *, is_mounted: bool = True, **options):
        path = tmp_path / f"{len(contexts)}.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(offline=True, viewport={"width": 1180, "height": 900}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: problems.append(request.url) if request.url[:4] == "http" else None)
        tab.goto(path.as_uri())
        if is_mounted:
            tab.wait_for_selector("[data-ready]", state="attached")
        return tab

    yield open_it
    hacked = [tab.evaluate("window.hacked") for context in contexts for tab in context.pages]
    for context in contexts:
        context.close()
    assert problems == []
    assert not any(hacked)


@pytest.fixture
def open_map(open_html):
    return lambda *views, **options: open_html(page.page(views, title="map"), **options)
