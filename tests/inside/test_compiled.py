"""Compiled programs: the component that the program names is found first, and a selector's pair map is on its pair."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.judges.compiled import load_compiled

import tensorlens as tl

DATA = Path(os.environ.get("TENSORLENS_DATA", "data")) / "tracr"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="no compiled programs; TENSORLENS_DATA names the folder")

WRITERS = {
    ("hist", "hist_7:"): "block 0, feed-forward",
    ("hist", "hist_7_selector_width"): "block 0, attention head 0",
    ("first", "first_18:"): "block 0, attention head 0",
    ("reverse", "reverse_1:"): "block 3, attention head 0",
    ("reverse", "opp_idx_4:"): "block 1, feed-forward",
    ("reverse", "opp_idx-1_3:"): "block 2, feed-forward",
    ("sort_unique", "sort_9:"): "block 1, attention head 0",
    ("sort_unique", "target_pos_11:"): "block 0, feed-forward",
    ("fraction_of_x", "frac_prevs_13"): "block 1, attention head 0",
    ("fraction_of_x", "is_x_15"): "block 0, feed-forward",
}
"""What writes a variable of a program: an aggregate is a head's, a map of one token's values a feed-forward's."""


class Program:
    """A program's model, a lens on it, and what it calls its tokens and channels."""

    def __init__(self, name: str) -> None:
        model, self.about = load_compiled(DATA / f"{name}.json")
        self.lens = tl.Lens(model, blocks="blocks")

    def ids(self, tokens: list[Any]) -> list[int]:
        return [self.about["encoding"][str(token)] for token in tokens]

    def channel(self, name: str) -> int:
        return self.about["residual_labels"].index(name)


def examples(model: Program) -> list[tuple[list[Any], torch.Tensor]]:
    found = [one for one in model.about["examples"] if one["transformer_output"] is not None]
    return [(one["tokens"], torch.tensor(one["transformer_output"])) for one in found]


@pytest.mark.parametrize(("program", "variable"), WRITERS)
def test_the_component_that_the_program_names_comes_first(program: str, variable: str) -> None:
    model = Program(program)
    lens, n_asked = model.lens, 0
    for tokens, output in examples(model)[:4]:
        T = lens(model.ids(tokens))
        assert (T.output - output).abs().max() < 1e-5  # the port is right
        for name in [name for name in model.about["residual_labels"] if name.startswith(variable)]:
            for i in range(1, len(tokens)):
                if output[i, model.channel(name)] > 0.1:
                    n_asked += 1
                    best = T.components(i, model.channel(name), "direct").top(1)[0]
                    assert (str(best.component), best.token) == (WRITERS[program, variable], i)
    assert n_asked >= 4


def test_what_the_last_head_of_a_reversal_reads_is_the_token_that_it_shows() -> None:
    model = Program("reverse")
    lens = model.lens
    for tokens, _ in examples(model)[:4]:
        T, n = lens(model.ids(tokens)), len(tokens) - 1
        for i in range(1, n + 1):
            shown = model.channel(f"reverse_1:{tokens[n + 1 - i]}")
            reads = T.inside(i, shown, max_nodes=5).reads
            last = next(row for head, row in reads.items() if head.block == 3)
            assert int(last.abs().argmax()) == n + 1 - i


def test_the_pair_map_of_a_selector_is_on_the_pair_that_it_compares() -> None:
    model = Program("hist")  # select where the tokens at query and key are the same
    lens = model.lens
    for tokens, _ in examples(model)[:6]:
        T = lens(model.ids(tokens))
        for i in range(1, len(tokens)):
            for j in range(1, len(tokens)):
                pairs = T.score(0, 0, i, j).scores
                inner = pairs[:-1, :-1]
                if tokens[i] == tokens[j]:
                    assert divmod(int(inner.abs().argmax()), inner.shape[1]) == (i, j)
                    assert float(inner[i, j]) > 0.9 * float(pairs.abs().sum())
                else:
                    assert float(inner.abs().max()) < 1e-6
