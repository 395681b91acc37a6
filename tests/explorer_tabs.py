"""What a reader does in a tab of the explorer."""

from __future__ import annotations

import re

import torch
from explorer_samples import SENTENCE

import tensorlens as tl


def long_map(n_tokens: int) -> tl.TokenMap:
    """A map as of a decoder."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(n_tokens, n_tokens, generator=generator).tril()
    words = tuple(f" word{k}" for k in range(n_tokens))
    return tl.TokenMap(
        scores=scores, out_tokens=words, in_tokens=words, method="tensor.in_out", bias_share=torch.zeros(n_tokens)
    )


def mapped(tab, panel: int = 0):
    """Wait until a map with its verdict is there, and give its panel."""
    node = tab.locator(".panel").nth(panel)
    node.locator(".progress").first.wait_for(state="hidden")
    node.locator(".verdict", has_text=re.compile("Certified|Not derived")).wait_for()
    return node


def ask(tab, text: str = SENTENCE, method: str = "tensor.in_out"):
    """Map every output of a text."""
    tab.get_by_label("Text", exact=True).fill(text)
    tab.get_by_role("combobox", name="Method").select_option(method)
    tab.get_by_role("combobox", name="Outputs").select_option("every")
    tab.get_by_role("button", name="Map", exact=True).click()
    tab.locator(".caption", has_text=text).wait_for()
    return mapped(tab)


def caption(panel) -> str:
    """What stands above a map."""
    return panel.locator(".caption").inner_text()
