"""Make the pictures in docs/assets: `python docs/_code/figures.py [operator] [map] [explorer]`, all if none is named.

`operator` is drawn, from the numbers of a real pass; the others are taken from the pages themselves by Chromium.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import tensorlens as tl

ASSETS = Path(__file__).parents[1] / "assets"
SENTENCE = "The Eiffel Tower is located in the city of"
INK = {"light": "#14181d", "dark": "#eef1f4"}
MARK = {"light": "#0b6bcb", "dark": "#6cb6ff"}
N_SHOWN = 6
OUT, IN = 2, 1


def operator() -> None:
    """X^N = T·X + B for a short sentence, once for light pages and once for dark ones."""
    T = tl.load("minilm")("The cat sat on the mat")
    tokens = T.tokens[1:-1][:N_SHOWN]
    dense = np.stack([T.rows(i + 1)[:, 1:-1].numpy() for i in range(len(tokens))])[:, :, : len(tokens)]
    blocks = _pooled(dense, axes=(1, 3), size=6)
    states = {
        name: _pooled(getattr(T, name)[1:-1][: len(tokens)].numpy(), axes=(1,), size=6)
        for name in ("output", "input", "bias")
    }
    for shade in INK:
        figure = _draw(blocks, states, tokens, shade)
        figure.savefig(ASSETS / f"operator-{shade}.svg", transparent=True, metadata={"Date": None})


def _pooled(values: np.ndarray, axes: tuple[int, ...], size: int) -> np.ndarray:
    """Channels in a few groups, each as its first entry: enough to see, and still the model's numbers."""
    for axis in axes:
        values = np.take(values, np.linspace(0, values.shape[axis] - 1, size).astype(int), axis=axis)
    return values


def _draw(blocks: np.ndarray, states: dict[str, np.ndarray], tokens: tuple[str, ...], shade: str) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "tensorlens", "svg.fonttype": "path", "mathtext.fontset": "cm"})
    n = len(tokens)
    figure = Figure(figsize=(9.6, 3.9))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(-1.4, 17.0), ylim=(7.55, -0.75), aspect="equal")
    axes.axis("off")
    ink = INK[shade]
    places = {"output": 0.0, "input": 11.2, "bias": 15.0}
    for name, left in places.items():
        _state(axes, states[name], left, shade, marked={"output": OUT, "input": IN}.get(name))
    _tensor(axes, blocks, 3.6, shade)
    for left, text in ((2.6, "="), (10.55, "·"), (14.35, "+")):
        axes.text(left, n / 2, text, size=22, ha="center", va="center", color=ink)
    for left, text in ((0.8, "$F(X)$"), (6.6, "$T$"), (12.0, "$X$"), (15.8, "$B$")):
        axes.text(left, -0.4, text, size=16, ha="center", va="center", color=ink)
    for i, token in enumerate(tokens):
        axes.text(-0.2, i + 0.5, token, size=10, ha="right", va="center", color=MARK[shade] if i == OUT else ink)
        axes.text(13.0, i + 0.5, token, size=10, ha="left", va="center", color=MARK[shade] if i == IN else ink)
    note = f"The block $T_{{ij}}$ carries input “{tokens[IN]}” to output “{tokens[OUT]}”. "
    note += "A map makes one number of each block."
    axes.text(8, n + 0.85, note, size=11, ha="center", va="center", color=ink)
    return figure


def _state(axes: Any, values: np.ndarray, left: float, shade: str, marked: int | None) -> None:
    n_tokens, n_channels = values.shape
    limit = np.abs(values).max()
    axes.imshow(values, extent=(left, left + 1.6, n_tokens, 0), cmap=_colours(shade), vmin=-limit, vmax=limit)
    if marked is not None:
        _frame(axes, left, marked, 1.6, shade)


def _tensor(axes: Any, blocks: np.ndarray, left: float, shade: str) -> None:
    n = len(blocks)
    limit = np.quantile(np.abs(blocks), 0.97)
    for i in range(n):
        for j in range(n):
            extent = (left + j + 0.05, left + j + 0.95, i + 0.95, i + 0.05)
            axes.imshow(blocks[i, :, j], extent=extent, cmap=_colours(shade), vmin=-limit, vmax=limit)
    _frame(axes, left + IN, OUT, 1, shade)


def _frame(axes: Any, left: float, top: float, width: float, shade: str) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(Rectangle((left, top), width, 1, fill=False, edgecolor=MARK[shade], linewidth=2.2, zorder=3))


def _colours(shade: str) -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    middle = {"light": "#f2f3f4", "dark": "#20262c"}[shade]
    return LinearSegmentedColormap.from_list("signed", ["#2a6fbb", middle, "#c43c39"])


def map_() -> None:
    """The first picture of the README: a contrast as the HTML file shows it."""
    told = tl.load("smollm2-135m").explain(SENTENCE, against=" London")
    told.certificate()
    with tempfile.TemporaryDirectory() as folder, _browser() as browser:
        path = told.save(Path(folder) / "map.html")
        tab = browser.new_page(viewport={"width": 1100, "height": 390})
        tab.goto(path.as_uri())
        tab.wait_for_selector("[data-ready]", state="attached")
        tab.screenshot(path=ASSETS / "map.png")


def explorer() -> None:
    """Why the first choice, two methods side by side in the dark, and an image."""
    from matplotlib.cbook import get_sample_data

    photograph = get_sample_data("grace_hopper.jpg", asfileobj=False)
    with _server("smollm2-135m", "dinov2-small-saliency") as address, _browser() as browser:
        tab = browser.new_page(viewport={"width": 1280, "height": 1100})
        tab.set_default_timeout(600_000)
        tab.goto(address)
        tab.get_by_label("Text", exact=True).fill(SENTENCE)
        tab.get_by_role("button", name="Map", exact=True).click()
        _settled(tab)
        tab.screenshot(path=ASSETS / "explorer.png")
        tab.locator(".tools").get_by_role("button", name="Switch between light and dark").click()
        tab.get_by_role("button", name="Show a second map beside this one").click()
        _settled(tab)
        second = tab.locator(".panel").nth(1)
        second.get_by_text("More", exact=True).click()
        second.get_by_role("combobox", name="Method").select_option("rollout.attn")
        _settled(tab)
        tab.screenshot(path=ASSETS / "explorer-compare.png")
        tab = browser.new_page(viewport={"width": 1280, "height": 1000})
        tab.set_default_timeout(600_000)
        tab.goto(address)
        tab.get_by_label("Choose a picture").set_input_files(photograph)
        _settled(tab)
        tab.screenshot(path=ASSETS / "explorer-image.png")


def _settled(tab: Any) -> None:
    """Until no panel works any more and every map has its verdict."""
    tab.wait_for_timeout(1500)
    tab.wait_for_function("() => !document.querySelector('.card.progress:not([hidden])')")
    for verdict in tab.locator(".verdict").all():
        verdict.filter(has_text=re.compile("Certified|derived")).wait_for()
    tab.wait_for_timeout(800)


@contextmanager
def _browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def _server(*models: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorlens", "explore", *models, "--port", str(port), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        for _ in range(240):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/"
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    makers = {"operator": operator, "map": map_, "explorer": explorer}
    for name in sys.argv[1:] or makers:
        makers[name]()
