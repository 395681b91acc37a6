"""The blocks of docs/how-to/porting.md, each in the environment of its host, with numbers equal to ours.

`PORTING` names a folder with `smollm2-135m` and `minilm` as transformers saves them; `make plugins` makes it.
"""

from __future__ import annotations

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import tensorlens as tl

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS / "_code"))
from execute import blocks  # noqa: E402

FOLDER = Path(os.environ.get("PORTING", "."))
NAMES = {"HuggingFaceTB/SmolLM2-135M": "smollm2-135m", "sentence-transformers/all-MiniLM-L6-v2": "minilm"}
PAGE = (DOCS / "how-to" / "porting.md").read_text("utf-8")
HOSTS = {block.title: block for block in blocks(PAGE) if block.title}
pytestmark = pytest.mark.skipif("PORTING" not in os.environ, reason="`make plugins` sets PORTING")


@pytest.mark.parametrize("host", [host for host in HOSTS if find_spec(host)])
def test_a_quick_start_with_one_line_changed_gives_our_numbers(host, tmp_path):
    source = HOSTS[host].source
    for name, folder in NAMES.items():
        source = source.replace(name, str(FOLDER / folder))
    (tmp_path / "quick_start.py").write_text(source, "utf-8")  # nnsight reads the code of its trace from a file
    names = runpy.run_path(str(tmp_path / "quick_start.py"))
    found = names["scores"]
    if host == "sentence_transformers":
        lens = tl.load(str(FOLDER / "minilm"))
        expected = tl.similarity(lens, *names["sentences"], pooling="mean").scores
        assert names["value"] == pytest.approx(float(expected.sum()), abs=1e-5)
    else:
        text = "The Eiffel Tower is located in the city of"
        expected = tl.load(str(FOLDER / "smollm2-135m"))(text).map("tensor.in_class", -1, " Paris").scores[0]
    torch.testing.assert_close(torch.as_tensor(found), expected, rtol=1e-3, atol=1e-4)
