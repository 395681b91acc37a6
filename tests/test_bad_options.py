"""Options that are none: each is an error that says what was expected and what came."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import tensorlens as tl

pytestmark = pytest.mark.usefixtures("unchecked")


@cache
def lens() -> tl.Lens:
    return tl.Lens(zoo.build("gpt2"))


@cache
def tensor() -> tl.AttentionTensor:
    return lens()(zoo.sample("gpt2"))


@cache
def batch() -> tl.Batch:
    return lens().batch([zoo.sample("gpt2"), zoo.sample("gpt2")[:3]])


ASKED: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "blocks": (lambda v: tensor().blocks(v, 2), (True, 1.0, "a", None)),
    "heads": (lambda v: tensor().heads({0: v}), (torch.tensor(1), "ab", 1)),
    "probes": (lambda v: tensor().map("tensor.norm", probes=v), (True, 0, 2**70, 1.5)),
    "seed": (lambda v: tensor().map("tensor.norm", probes=2, seed=v), (True, 2**70, [], "a", None)),
    "probes of a batch": (lambda v: batch().maps("tensor.norm", probes=v), (True, 0, "a")),
    "seed of a batch": (lambda v: batch().maps("tensor.norm", probes=2, seed=v), (True, [])),
    "targets": (lambda v: batch().maps("tensor.in_class", targets=v), (3, "ab")),
    "seed of a data set": (lambda v: list(lens().maps([[1, 2]], "tensor.norm", probes=2, seed=v)), (True, [])),
    "inputs": (lambda v: lens().batch(v), (1, None, torch.tensor(1), True)),
    "inputs of a data set": (lambda v: list(lens().maps(v)), (1, None, torch.tensor(1))),
    "neurons": (lambda v: tensor().components(neurons=v), (True, "a", [True], ["a"], [9])),
    "share": (lambda v: tensor().graph(share=v), (True, "a", 0, float("nan"))),
    "max_nodes": (lambda v: tensor().graph(max_nodes=v), (True, "a", 0, float("nan"))),
    "share of a page": (lambda v: tensor().inside(share=v), (0, 2)),
    "n_whys": (lambda v: tensor().inside(n_whys=v), (-1, True, 1.5)),
    "block of a score": (lambda v: tensor().score(v, 0, -1, 0), (True, "a")),
    "head of a score": (lambda v: tensor().score(0, v, -1, 0), (True, "a")),
    "attention of a score": (lambda v: tensor().score(0, 0, -1, 0, attention=v), ("a", True)),
    "ablated": (lambda v: tensor().ablate([v]), ([], {}, None)),
    "over": (lambda v: tensor().ablate([(0, 0)], over=v), (None, "a", [None], 1)),
    "k of a spectrum": (lambda v: tl.spectrum(tensor(), k=v), (True, 0, 1.5)),
    "tolerance": (lambda v: tl.spectral_norm(tensor(), tolerance=v), (float("nan"), -1, 0, "a", None)),
    "no tensor": (lambda v: tl.spectral_norm(v), (None, 1, np.ones(3))),
    "top": (lambda v: tensor().map().top(v), (True, "a", 0)),
    "top components": (lambda v: tensor().components().top(v), (True, "a", 0)),
    "final norm": (lambda v: tl.Rules(include_final_norm=v), ("no", 1, None)),
    "path of blocks": (lambda v: tl.Lens(lens().model, blocks=v), (1, [], True)),
}


@pytest.mark.parametrize("option", ASKED)
def test_what_is_no_option_is_refused(option: str) -> None:
    ask, values = ASKED[option]
    for value in values:
        with pytest.raises(tl.TensorLensError):
            ask(value)


def test_whole_numbers_of_numpy_are_numbers() -> None:
    two = np.int64(2)
    assert tensor().blocks(np.int64(0), two).n_blocks == 2
    assert (
        tensor()
        .map("tensor.norm", probes=two, seed=two)
        .scores.equal(tensor().map("tensor.norm", probes=2, seed=2).scores)
    )
    assert len(tensor().map().top(two)) == 2
    assert len(tl.spectrum(tensor(), k=10**6).values) <= tensor().input.numel()
