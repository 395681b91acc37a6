from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from view_samples import HOSTILE, PIXEL, SCRIPT, map_view

from tensorlens.views import page
from tensorlens.views.record import PatchGrid


class Tags(HTMLParser):
    """Every tag of a document, and what its script tags hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.scripts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._in_script = tag == "script"
        if self._in_script:
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data


def data_of(text: str) -> dict:
    return json.loads(Tags(text).scripts[0])


def decode(scores: dict) -> np.ndarray:
    kind = {"float32": "<f4", "float16": "<f2"}[scores["dtype"]]
    return np.frombuffer(base64.b64decode(scores["data"]), kind).astype(np.float64) * scores["unit"]


def test_numbers_arrive_exactly_up_to_512_tokens():
    scores = np.random.default_rng(0).normal(size=(300, 512)).astype(np.float32)
    found = page.payload(map_view(scores))["scores"]
    assert found["dtype"] == "float32"
    assert np.array_equal(decode(found).reshape(300, 512), scores)


def test_long_maps_keep_three_digits():
    scores = np.random.default_rng(0).lognormal(size=(4, 600)) * 1e6
    found = page.payload(map_view(scores))["scores"]
    assert found["dtype"] == "float16"
    assert np.allclose(decode(found).reshape(4, 600), scores, rtol=1e-3, atol=1e-6 * scores.max())


@pytest.mark.parametrize("size", [1e-60, 1e60])
def test_sizes_beyond_single_precision(size):
    assert np.allclose(decode(page.payload(map_view([[size, -size / 2]]))["scores"]), [size, -size / 2], rtol=1e-6)


def test_nan_and_infinity_travel():
    found = decode(page.payload(map_view([[np.nan, np.inf, -np.inf, 1.0]]))["scores"])
    assert np.array_equal(found, [np.nan, np.inf, -np.inf, 1.0], equal_nan=True)


def test_the_same_text_travels_once():
    assert page.payload(map_view(np.eye(2), labels=("a", "b")))["outTokens"] is None
    assert page.payload(map_view([[1.0, 2.0]], labels=("a", "b")))["outTokens"] == ["a"]


def test_labels_arrive_as_they_are():
    n = len(HOSTILE)
    text = page.page([map_view(np.zeros((n, n)), labels=HOSTILE)], title="t")
    assert data_of(text)["inTokens"] == list(HOSTILE)


@pytest.mark.parametrize("build", [page.fragment, lambda view: page.page([view], title=view.title)])
def test_no_label_becomes_markup(build):
    n = len(HOSTILE)
    caption = ((SCRIPT, SCRIPT), ("Target", "<img src=x onerror=1>"))
    names = dict.fromkeys(("title",), SCRIPT) | {"caption": caption}
    wild = Tags(build(map_view(np.eye(n), labels=HOSTILE, **names)))
    tame = Tags(build(map_view(np.eye(n), labels=[f"w{k}" for k in range(n)])))
    assert [tag for tag, _ in wild.tags] == [tag for tag, _ in tame.tags]
    assert [attributes.keys() for _, attributes in wild.tags] == [attributes.keys() for _, attributes in tame.tags]
    assert wild.scripts[-1] == tame.scripts[-1]
    assert not set("<>&") & set(wild.scripts[0])


def test_the_document_can_be_written_as_utf8():
    page.page([map_view(np.zeros((1, 20)), labels=HOSTILE, title="\ud800")], title="\ud800").encode()


def test_only_our_script_may_run_and_nothing_may_be_fetched():
    text = page.page([map_view(np.eye(2))], title="t")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    ours = base64.b64encode(hashlib.sha256(Tags(text).scripts[-1].encode()).digest()).decode()
    assert f"script-src 'sha256-{ours}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert not re.search(r"(src|href)=\W?(http|//)", text)
    assert "http://" not in text
    assert "https://" not in text


def test_one_page_holds_many_maps_and_one_script():
    text = page.page([map_view(np.eye(2)), map_view(np.eye(3))], title="two")
    tags = Tags(text).tags
    assert sum("data-tensorlens" in attributes for _, attributes in tags) == 2
    assert sum(tag == "script" and "type" not in attributes for tag, attributes in tags) == 1


def test_without_scripts_the_strongest_inputs_are_still_read():
    text = page.fragment(map_view([[0.1, -5.0, 2.0]]))
    assert "Output w0 from: w1 -5, w2 +2, w0 +0.1" in text


def test_pictures_travel_with_their_grid():
    view = map_view(np.ones((1, 5)), grid=PatchGrid(rows=2, columns=2, first=1), image=PIXEL)
    found = page.payload(view)
    assert found["grid"] == {"rows": 2, "columns": 2, "first": 1}
    assert found["image"] == PIXEL


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1)])
def test_small_and_empty_maps(shape):
    assert data_of(page.fragment(map_view(np.zeros(shape))))["scores"]["dtype"] == "float32"


def test_200_tokens_take_less_than_a_megabyte():
    labels = [f" word{k}" for k in range(200)]
    text = page.page([map_view(np.random.default_rng(0).normal(size=(200, 200)), labels=labels)], title="t")
    assert len(text.encode()) < 400_000
