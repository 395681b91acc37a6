"""The fragment in pages that treat it as notebooks do."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from view_samples import square

from tensorlens.views import page

pytestmark = pytest.mark.browser

DARK = "rgb(17, 20, 23)"
# How two notebooks put HTML into their page: neither runs scripts set with innerHTML, so both run copies of them.
JUPYTER = """([id, html]) => { const cell = document.getElementById(id); cell.innerHTML = html;
for (const old of cell.querySelectorAll('script')) { const copy = document.createElement('script');
for (const { name, value } of old.attributes) copy.setAttribute(name, value);
copy.textContent = old.textContent; old.replaceWith(copy); } }"""
VSCODE = """([id, html]) => { const cell = document.getElementById(id); cell.innerHTML = html;
for (const old of [...cell.getElementsByTagName('script')]) { const copy = document.createElement('script');
copy.text = old.innerText; if (old.type) copy.type = old.type; cell.appendChild(copy).remove(); } }"""
AROUND = """<!doctype html><style>* { color: red !important; font-size: 40px !important; background: lime !important; }
</style><body data-jp-theme-light="false"><div id="one"></div><div id="two"></div>"""


@pytest.mark.parametrize("insert", [JUPYTER, VSCODE])
def test_notebooks_show_the_fragment_untouched_by_their_style(open_html, insert):
    tab = open_html(AROUND, is_mounted=False)
    tab.evaluate(insert, ["one", page.fragment(square())])
    tab.locator(".token").nth(4).click()
    tab.evaluate(insert, ["two", page.fragment(square())])
    expect(tab.locator("[data-ready]")).to_have_count(2)
    expect(tab.locator(".lens").first).to_have_css("background-color", DARK)
    size = tab.locator(".size").first.evaluate(
        "node => [getComputedStyle(node).fontSize, getComputedStyle(node).color]"
    )
    assert size == ["14px", "rgb(147, 157, 170)"]
    tab.locator(".token").nth(7 + 2).click()
    expect(tab.locator(".reading").nth(1)).to_contain_text("(2)")
    expect(tab.locator(".reading").nth(0)).to_contain_text("(4)")
