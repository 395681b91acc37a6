"""`T.explore()`: what is clicked in a notebook comes back to Python."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from playwright.sync_api import expect
from tiny_language import tiny_lens

import tensorlens as tl

pytest.importorskip("anywidget")

PYTHON = os.environ.get("TENSORLENS_NOTEBOOK_PYTHON", sys.executable)
NOTEBOOK = """
import marimo
app = marimo.App()

@app.cell
def _():
    import sys
    sys.path[:0] = {paths!r}
    import marimo as mo
    from tiny_language import tiny_lens
    widget = mo.ui.anywidget(tiny_lens("neox")("the cat sat").explore())
    return mo, widget

@app.cell
def _(widget):
    widget
    return

@app.cell
def _(mo, widget):
    value = widget.value
    mo.md(f"clicked {{value['out_token']}} {{value['in_token']}} {{widget.widget.map.meta['out_positions']}}")
    return

if __name__ == "__main__":
    app.run()
"""


def test_another_output_or_target_gives_another_map():
    T = tiny_lens("neox")("the cat sat")
    widget = T.explore()
    assert widget.out_token == T.n_tokens - 1 and widget.map.headline == f"Why {widget.map.headline[4:]}"
    widget.out_token = 3
    assert widget.map.meta["out_positions"] == [3] and widget.data["title"] == widget.map.headline
    assert np.allclose(np.asarray(widget.map), np.asarray(T.map("tensor.in_class", 3)))
    widget.target, widget.against = "a", "b"
    assert "“a”" in widget.map.headline and "rather than “b”" in widget.map.headline
    assert np.allclose(np.asarray(widget.map), np.asarray(T.map("tensor.in_class", 3, ("a", "b"))))


def test_a_target_that_is_refused_leaves_the_map_and_says_why():
    widget = tiny_lens("neox")("the cat sat").explore(target="a")
    before = widget.map
    widget.against = "a"
    assert widget.map is before and "must differ" in widget.error
    widget.against = "b"
    assert widget.error == "" and widget.map is not before


def test_without_a_head_there_is_no_target_to_choose():
    lens = tiny_lens("bert")
    widget = tl.Lens(lens.model.base_model, lens.processor)("the cat").explore()
    assert not widget.takes_target and widget.map.method == "tensor.in_out"


@contextmanager
def notebook_server(folder: Path):
    """The address of a marimo server that runs the notebook."""
    root = Path(__file__).parent.parent
    notebook = folder / "notebook.py"
    notebook.write_text(NOTEBOOK.format(paths=[str(root), str(root.parent / "src")]), "utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [PYTHON, "-m", "marimo", "run", str(notebook), "--headless", "--no-token", "--port", str(port)]
    environment = os.environ | {"MARIMO_SKIP_UPDATE_CHECK": "1"}
    server = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            try:
                urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.25)
        yield address
    finally:
        server.terminate()
        server.wait()


@pytest.mark.browser
@pytest.mark.large
@pytest.mark.skipif(
    subprocess.run([PYTHON, "-c", "import marimo"], capture_output=True).returncode != 0,
    reason="needs marimo; TENSORLENS_NOTEBOOK_PYTHON may name a Python that has it beside this one's packages",
)
def test_clicks_in_a_notebook_come_back_to_python(browser, tmp_path):
    with notebook_server(tmp_path) as address:
        tab = browser.new_page()
        tab.goto(address)
        tab.set_default_timeout(120_000)
        expect(tab.get_by_text("clicked 10 None [10]")).to_be_visible(timeout=120_000)
        tab.locator(".text .token", has_text="cat").click()
        expect(tab.get_by_text("clicked 10 4 [10]")).to_be_visible(timeout=30_000)
        tab.get_by_label("Output", exact=True).select_option("4")
        expect(tab.get_by_text("clicked 4 None [4]")).to_be_visible(timeout=30_000)
        expect(tab.locator(".lens h2")).to_contain_text("after “the c”")
        tab.close()
