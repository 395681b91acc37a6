"""Options that are none: each is an error that says what was expected and what came."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.maps.targets import Classes

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
    "targets of a method without": (lambda v: batch().maps("tensor.in_out", targets=v), ([1, 2],)),
    "target and targets": (lambda v: batch().maps("tensor.in_class", target=v, targets=[1, 2]), (1,)),
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
    "seed of a comparison": (lambda v: tl.compare(tensor(), tensor(), seed=v), (None, 1.5, "a", 2**70)),
    "probes of a comparison": (lambda v: tl.compare(tensor(), tensor(), probes=v), (None, 0, True)),
    "lens of a file": (lambda v: tl.AttentionTensor.load("t.safetensors", lens=v), (1, "a")),
    "groups": (lambda v: tensor().map(groups=v), (np.array([["a", 0, 3]]), 1, [], "syllables", [("a", 0.0, 1)])),
    "weights": (lambda v: tensor().map("tensor.in_class", -1, v), ({}, {3: 0.0}, {3: np.nan}, {3: "a"}, {-1: 1.0})),
    "k of predictions": (lambda v: tensor().predictions(v), (0, True, 1.5)),
    "tokens of an answer": (lambda v: lens().answer([1, 2], v), ([], [-1], [True], [10**9], 3)),
    "tokens set aside": (lambda v: lens().answer([1, 2], [3]).map(set_aside=v), (0, "a", [9], [True])),
    "probes of a corpus": (lambda v: tl.CorpusTensor.fit(lens(), [[1, 2]], probes=v), (0, -1, 1.5)),
    "positions of a corpus": (lambda v: tl.CorpusTensor.fit(lens(), [[1, 2]], skip_first=v), (-1, 1.5, True)),
    "seed of a corpus": (lambda v: tl.CorpusTensor.fit(lens(), [[1, 2]], probes=1, seed=v), (None, "a", 2**70)),
    "one text": (lambda v: lens().explain(v), ({"input_ids": [[1, 2], [3, 4]]}, [[1, 2]], ["a"])),
    "one text of a batch": (lambda v: lens().batch([v]), ({"input_ids": torch.tensor([[1, 2], [3, 4]])},)),
    "basis": (lambda v: tensor().split(0, v), (None, torch.zeros(0, 16), "a")),
    "method of attentions": (lambda v: tensor().attentions(v), ("tensor.in_out", "a", None)),
    "column of a mapper": (lambda v: tl.Mapper("minilm")({"text": v}), ("A cat sat.", None, 3)),
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
    assert tensor().heads({two - 2: [two]}).operator.heads.keys() == {0}
    assert (
        tensor().map("tensor.in_class", -1, two).meta["target"] == tensor().map("tensor.in_class", -1, 2).meta["target"]
    )
    assert tl.compare(tensor(), tensor(), probes=two, seed=two).distance == 0
    assert lens().answer([1, 2], [two]).ids == (2,)
    assert "a" in tensor().map(groups=[("a", two - 2, two)]).in_tokens
    assert tl.CorpusTensor.fit(lens(), [[1, 2, 3]], skip_first=two - 1, probes=two).meta["skip_first"] == 1
    assert len(tensor().map().top(two)) == 2
    assert len(tl.spectrum(tensor(), k=10**6).values) <= tensor().input.numel()


def test_the_weights_of_one_class_are_summed() -> None:
    classes = Classes(n_classes=3, labels={0: "no", 1: "yes", 2: "perhaps"})
    assert classes.weights({"yes": 1.0, 1: 2, 0: 0.0}) == {1: 3.0}
    with pytest.raises(tl.InputError, match="not all zero"):
        classes.weights({"yes": 1.0, 1: -1.0})


def test_a_device_that_is_not_here_is_no_damage_of_the_file(tmp_path: Path) -> None:
    path = tensor().save(tmp_path / "t.safetensors")
    for device in ("cuda:99", "nowhere"):
        with pytest.raises(tl.LoadError, match="device="):
            tl.AttentionTensor.load(path, device=device)


def test_batches_and_circuits_travel() -> None:
    mapped = pickle.loads(pickle.dumps(batch())).maps("tensor.in_out")
    assert all(one.scores.equal(own.scores) for one, own in zip(mapped, batch().maps("tensor.in_out"), strict=True))
    circuit = tl.circuit(lens(), [1, 2, 3], [1, 5, 3], target=(4, 6))
    assert repr(pickle.loads(pickle.dumps(circuit))) == repr(circuit)
