"""A tiny model in a folder, as commands take it; the explorer in a browser, on tiny models."""

from __future__ import annotations

import pytest
import torch
from explorer_samples import SENTENCE, library, load, serving
from explorer_tabs import long_map
from tiny_language import tiny_lens, tokenizer

import tensorlens as tl


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny language model with the tokenizer of bytes."""
    path = tmp_path_factory.mktemp("tiny-model")
    tiny_lens().model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def server():
    """The address of an explorer with maps that are long, hostile and short."""
    hostile = load("gpt2")(SENTENCE).map("tensor.in_out")
    labels = (
        "<img src=x onerror=window.hacked=1>",
        "</script><script>window.hacked=1</script>",
        "שלום",
        "e\u0301\u0301",
        "👩‍🚀",
        "x" * 5000,
    )
    named = tl.TokenMap(
        scores=hostile.scores.clone().fill_diagonal_(torch.nan),
        out_tokens=labels,
        in_tokens=labels,
        method="<b>bold</b>",
        bias_share=hostile.bias_share,
        meta={"model": "<script>window.hacked=1</script>"},
    )
    maps = (("long.json", long_map(2000)), ("<i>hostile</i>.json", named), ("one.json", long_map(1)))
    with serving(library(maps=maps)) as (address, _):
        yield address


@pytest.fixture
def open_tab(browser, server):
    """Open the explorer; at the end nothing may have failed, left the server's address, or run a label."""
    contexts, problems = [], []

    def open_it(fragment: str = "", **options):
        context = browser.new_context(viewport={"width": 1360, "height": 1000}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.set_default_timeout(90_000)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        tab.on(
            "request", lambda r: problems.append(r.url) if not r.url.startswith((server, "blob:", "data:")) else None
        )
        tab.goto(f"{server}/{fragment}")
        tab.wait_for_selector(".panel")
        tab.evaluate("document.querySelectorAll('.more').forEach((more) => (more.open = true))")
        return tab

    yield open_it
    hacked = [tab.evaluate("window.hacked") for context in contexts for tab in context.pages]
    for context in contexts:
        context.close()
    assert problems == []
    assert not any(hacked)
