"""Maps of single blocks in the shape of `output_attentions`, and a tool that takes them as they are."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from zoo import build, sample

import tensorlens as tl


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_they_have_the_shape_of_output_attentions(name):
    model = build(name)
    T = tl.Lens(model)(sample(name))
    expected = model(input_ids=torch.tensor([sample(name)]), output_attentions=True).attentions
    whole, by_head = T.attentions(), T.attentions(per_head=True)
    assert len(whole) == len(by_head) == len(expected)
    assert [tuple(part.shape) for part in by_head] == [tuple(part.shape) for part in expected]
    assert {tuple(part.shape) for part in whole} == {(1, 1, 7, 7)}
    for part in (*whole, *by_head):
        torch.testing.assert_close(part.sum(-1), torch.ones_like(part[..., 0]))
    alone = T.blocks(1, 2).map("tensor.norm").normalised()
    torch.testing.assert_close(whole[1][0, 0], alone.scores)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.large  # bertviz comes with the oracles, in `make test-all`
def test_bertviz_draws_them(monkeypatch):
    display = ModuleType("IPython.display")  # bertviz wants it for its output alone
    display.display, display.HTML, display.Javascript = print, _Page, _Page  # type: ignore[attr-defined]
    notebook = ModuleType("IPython")
    notebook.display = display  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    import bertviz

    T = tl.Lens(build("bert"))(sample("bert"))
    for view in (bertviz.head_view, bertviz.model_view):
        page = view(T.attentions(per_head=True), list(T.tokens), html_action="return")
        assert page.data.count(f'"{T.tokens[3]}"') >= 1


class _Page:
    def __init__(self, data: str = "") -> None:
        self.data = data
