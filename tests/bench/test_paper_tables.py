"""The paper's tables: every command to its end on a tiny random model of the same class; what is missing is named."""

from __future__ import annotations

import json

import pytest
import torch
import zoo
from bench.studies import paper
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, tokenizer, vision_lens, write_pictures

import tensorlens as tl
from tensorlens.errors import LoadError
from tensorlens.maps.methods import METHODS

TABLES = json.loads(paper.CONFIG.read_text("utf-8"))
TINY = {
    "bert": "bert-classifier",
    "roberta": "roberta",
    "modernbert": "modernbert",
    "gemma3": "gemma3",
    "pythia": "neox-parallel",
    "pico": "llama",
    "phi": "phi",
}
"""A tiny model of the same class, or of the same blocks where the zoo has it without its head."""


@pytest.mark.parametrize("name", TINY)
def test_tables_of_texts(tmp_path, name):
    kind = TINY[name] if TINY[name] in zoo.ZOO else "bert"
    lens = tl.Lens(zoo.build(kind, dtype=torch.float32), tokenizer(wrapped=not zoo.ZOO[kind].causal), name=name)
    said = paper.run(
        TABLES["perturbation"][name],
        lens,
        TEXTS,
        tmp_path,
        TABLES["options"],
        limit=2,
        cut="each",
        progress=False,
        methods=["tensor.in_out", "mean.attn"],
        n_tokens=8,
    )
    expected = TABLES["perturbation"][name]["paper"]["hs_mse"].get("mean.attn", "–")
    row = next(line for line in said.splitlines() if line.startswith("| mean.attn"))
    assert f"| {expected} |" in row and "[" in row
    assert ("paper-like" in said) == zoo.ZOO[kind].causal


@pytest.mark.parametrize("name", ["deit-base", "deit-small"])
def test_tables_of_pictures(tmp_path, name):
    pictures = write_pictures(tmp_path / "pictures")
    said = paper.run(
        TABLES["perturbation"][name],
        vision_lens("deit"),
        pictures,
        tmp_path / "run",
        TABLES["options"],
        limit=2,
        methods=["tensor.in_out", "mean.attn"],
        progress=False,
    )
    assert "tensor.in_out" in said and "hs_mse" in said


def test_relations(tmp_path):
    write_relation(tmp_path / "data" / "fruit.json")
    changes = {"n_splits": 1, "top_k": 300, "min_test": 2, "max_test": 2, "with_lre": False, "progress": False}
    said = paper.run(TABLES["relations"], tiny_lens("neox"), tmp_path / "data", tmp_path / "run", {}, **changes)
    assert said.startswith("| number | ours |")


def test_a_missing_file_is_named(monkeypatch):
    module = paper

    def refuse(name, **options):
        raise LoadError("the hub could not be reached")

    monkeypatch.setattr(module.tl, "load", refuse)
    expected = r"config\.json of EleutherAI/pythia-1b is neither .*models--EleutherAI--pythia-1b"
    with pytest.raises(LoadError, match=expected):
        module.load(TABLES["perturbation"]["pythia"], None)
    with pytest.raises(LoadError, match="a folder of ImageNet photographs; pass it with --data"):
        module.data_of(TABLES["perturbation"]["deit-base"], None)


def test_the_paper_s_numbers_are_of_methods_we_have():
    for table in TABLES["perturbation"].values():
        for numbers in table["paper"].values():
            assert {name for name in numbers if not name.startswith("every")} <= set(METHODS)
