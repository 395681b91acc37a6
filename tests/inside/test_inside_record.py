"""The record and page of a whole inside: what heads read sums to what they carry, and a label is never markup."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zoo
from msgspec.structs import replace
from playwright.sync_api import expect
from test_components import FAMILIES, OUT, TARGET, family, found, tolerance

import tensorlens as tl
from tensorlens.files import from_json
from tensorlens.inside.stream import Component


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_head_read_sums_to_its_effect_and_maps_are_those_of_components(name: str) -> None:
    _, T = family(name)
    record = T.inside(OUT, TARGET, max_nodes=12)
    c = found(name)
    assert (record.total.scores - c.scores).abs().max() < tolerance(name)
    assert (record.direct.scores - found(name, "direct").scores).abs().max() < tolerance(name)
    sums = dict(zip(c.labels, c.scores.sum(1).tolist(), strict=True))
    assert len(record.reads) == 12
    for head, row in record.reads.items():
        assert float(row.sum()) == pytest.approx(sums[head], rel=1e-6, abs=1e-7)


def test_a_head_reads_at_the_tokens_that_it_attends_to() -> None:
    """In the last block the output alone counts: r_j = A_j ⟨λ, v_j⟩, with one λ of four channels for seven tokens."""
    model: Any = zoo.build("gpt2", "eager")
    ids, kept = [5, 6, 7, 8, 9, 10, 11], list[torch.Tensor]()
    handle = model.transformer.h[-1].attn.c_attn.register_forward_hook(lambda m, args, y: kept.append(y.detach()))
    attention = model(torch.tensor([ids]), output_attentions=True).attentions[-1].detach()
    handle.remove()
    values = kept[0][0].chunk(3, -1)[2].unflatten(-1, (4, 4))  # (token, head, channel)
    record = tl.Lens(model)(ids).inside(-1, TARGET, n_whys=0)
    for head in range(4):
        name = Component(kind="attention head", block=2, head=head)
        read, look, v = record.reads[name], record.looks[name], values[:, head]
        assert (look.query, look.key) == (len(ids) - 1, int(read.abs().argmax()))
        assert look.attention == pytest.approx(float(attention[0, head, look.query, look.key]))
        read = read / attention[0, head, -1]
        torch.testing.assert_close(v @ torch.linalg.lstsq(v, read[:, None]).solution[:, 0], read, rtol=1e-9, atol=1e-9)
        assert read.abs().max() > 1e-4


def test_a_head_reads_only_what_its_attention_lets_it(tmp_path: Any) -> None:
    _, T = family("gpt2")
    record = T.inside(OUT, TARGET, max_nodes=12)
    assert max(float(row[OUT + 1 :].abs().max()) for row in record.reads.values()) == 0.0  # later than the output
    path = record.save(tmp_path / "inside.json")
    content = from_json(path.read_text("utf-8"))
    assert content["total"]["scores"]["values"] == record.total.scores.flatten().tolist()
    assert len(content["graph"]["nodes"]) == len(record.graph.nodes)
    back = tl.Inside.load(path)
    assert back.as_dict() == record.as_dict() and back.payload() == record.payload()
    assert back.reads.keys() == record.reads.keys() and back.whys.keys() == record.whys.keys()
    with pytest.raises(tl.InputError, match="html"):
        record.save(tmp_path / "inside.txt")


@pytest.mark.browser
def test_the_page_in_a_browser(browser: Any, tmp_path: Any) -> None:
    _, T = family("gpt2")
    hostile = ("<img src=x onerror=window.hacked=1>", "</script><script>window.hacked=1</script>", *"abcde")
    record = T.inside(OUT, TARGET, max_nodes=20)
    graph = replace(record.graph, tokens=hostile)
    record = replace(record, graph=graph, total=replace(record.total, tokens=hostile))
    problems: list[str] = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.goto(record.save(tmp_path / "inside.html").as_uri())
    expect(tab.locator(".about h3")).to_contain_text("attention head")
    first = tab.locator(".about h3").text_content()
    tab.locator(".figure canvas").first.click(position={"x": 40, "y": 4})  # head 0 of the last block
    expect(tab.locator(".about h3")).to_have_text("block 2, attention head 0")
    assert first is not None
    graph_canvas = tab.locator("canvas.graph")
    before = tab.evaluate("document.querySelector('[data-tensorlens]').tensorlens.graph.view.scale")
    graph_canvas.hover()
    tab.mouse.wheel(0, -300)
    after = tab.evaluate("document.querySelector('[data-tensorlens]').tensorlens.graph.view.scale")
    assert after > before
    tab.evaluate(
        "const g = document.querySelector('[data-tensorlens]').tensorlens.graph; g.pick(g.data.graph.nodes[1])"
    )
    expect(tab.locator(".edges li").first).to_contain_text(" at ")
    assert tab.evaluate("window.hacked") is None and not problems
    tab.close()
