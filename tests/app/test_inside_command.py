"""`tensorlens inside`, and the inside in the explorer: the same numbers as Python gives."""

from __future__ import annotations

import json

import pytest
from explorer_samples import SENTENCE, events, load, make_client
from playwright.sync_api import expect
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app import cli

runner = CliRunner()
PROMPT = "The cat sat. Who sat there?"


def test_the_command_prints_writes_a_page_and_switches_heads_off(folder, tmp_path):
    page = tmp_path / "inside.html"
    shown = runner.invoke(
        cli.app, ["inside", folder, PROMPT, "--out", str(page), "--without", "0:1", "--max-nodes", "9"]
    )
    assert shown.exit_code == 0, shown.output
    assert "total effects" in shown.stdout and "ComponentGraph" in shown.stdout and "true" in shown.stdout
    text = page.read_text("utf-8")
    assert "script-src 'sha256-" in text and 'data-tensorlens="inside"' in text
    found = runner.invoke(cli.app, ["inside", folder, PROMPT, "--json", "--without", "0:1", "--max-nodes", "9"])
    content = json.loads(found.stdout)
    T = tl.load(folder)(PROMPT)
    assert content["total"]["scores"] == T.components().as_dict()["scores"]
    assert content["without"]["true"] == pytest.approx(T.ablate((0, 1)).true, rel=1e-5)
    assert len(content["graph"]["nodes"]) == 9


def test_wrong_options_are_refused(folder, tmp_path):
    for options in (["--out", str(tmp_path / "x.csv")], ["--without", "a"], ["--against", "b"]):
        assert runner.invoke(cli.app, ["inside", folder, PROMPT, *options]).exit_code != 0


# The explorer --------------------------------------------------------------------------------------------------------


def test_the_explorer_gives_the_page_and_the_model_without_a_head(unchecked):
    with make_client() as client:
        question = {"model": "gpt2", "text": SENTENCE}
        made = events(client.post("/api/inside", json=question))[-1]
        assert made["type"] == "done", made
        T = load("gpt2")(SENTENCE)
        assert made["inside"]["value"] == pytest.approx(T.components().value)
        assert len(made["inside"]["components"]["total"]) == 3
        one = events(client.post("/api/ablate", json=question | {"component": "block 1, attention head 2"}))[-1]
        assert one["ablation"]["true"] == pytest.approx(T.ablate((1, 2)).true)
        for component in (None, "", "x" * 200, "block 9, attention head 0"):
            refused = client.post("/api/ablate", json=question | {"component": component})
            assert events(refused)[-1]["type"] == "error"
        assert "class Inside" in client.get("/component.js").text


def test_the_explorer_says_why_a_head_looked_there(unchecked):
    with make_client() as client:
        question = {"model": "gpt2", "text": SENTENCE}
        made = events(client.post("/api/inside", json=question))[-1]
        look = made["inside"]["components"]["details"][2][1]["look"]
        assert look["why"] is None and 0 < look["attention"] <= 1 and look["key"] <= look["query"]
        place = {"block": 2, "head": 1, "query": look["query"], "key": look["key"]}
        why = events(client.post("/api/why", json=question | place))[-1]["why"]
        score = float(load("gpt2")(SENTENCE).score(2, 1, look["query"], look["key"]).scores.sum())
        for by in ("token", "component"):
            assert sum(map(sum, why[by]["cells"])) == pytest.approx(score, rel=1e-9)
        assert why["score"] == pytest.approx(score, rel=1e-9) and "embedding" in why["component"]["rows"]
        for wrong in (place | {"key": None}, place | {"head": 9}, place | {"query": "a"}):
            assert events(client.post("/api/why", json=question | wrong))[-1]["type"] == "error"


def test_the_inside_by_another_member(unchecked):
    with make_client() as client:
        question = {"model": "gpt2", "text": SENTENCE, "rules": "attn_lrp"}
        found = events(client.post("/api/inside", json=question))[-1]["inside"]
        held = load("gpt2")
        other = tl.Lens(held.model, held.processor, rules=tl.Rules.attn_lrp())(SENTENCE).components()
        assert found["components"]["flow"] == pytest.approx(other.flow().numpy(), rel=1e-6, abs=1e-9)
        assert held(SENTENCE).components().flow()[0].tolist() != pytest.approx(other.flow()[0].tolist(), rel=1e-3)
        assert events(client.post("/api/inside", json=question | {"rules": "lime"}))[-1]["type"] == "error"


@pytest.mark.browser
def test_from_a_map_to_the_inside_and_a_head_switched_off(open_tab, unchecked):  # noqa: F811
    tab = open_tab("#model=gpt2&text=The+cat+sat+on+the+mat&method=tensor.in_class&only=1")
    tab.get_by_role("button", name="Look inside").click()
    inside = tab.locator(".card.inside")
    expect(inside.locator(".about h3")).to_contain_text("attention head")
    expect(inside.locator("canvas.graph")).to_be_visible()
    inside.get_by_role("button", name="Why did").click()
    pairs = inside.get_by_role("combobox", name="Pairs")
    expect(inside.locator(".look")).to_contain_text("The score before softmax is")
    expect(inside.locator(".look .pair")).to_contain_text("Strongest pair: query")
    by_component = inside.locator(".look .pair").inner_text()
    pairs.select_option("token")
    assert inside.locator(".look .pair").inner_text() != by_component
    inside.get_by_role("button", name="Switch it off").click()
    expect(inside.locator(".said")).to_contain_text("the model gives")
    expect(inside.locator(".said")).to_contain_text("without it, it says")
    tab.set_viewport_size({"width": 390, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
