"""Studies of passages: needles and injected instructions. Ranks, runs that go on, files put together."""

from __future__ import annotations

import json
from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from bench.passages import injections, needles, run, scores

LENS: Any = SimpleNamespace(model=SimpleNamespace(device="cpu"))


@pytest.fixture
def studies():
    return SimpleNamespace(passage_run=run, needles=needles, injections=injections)


def test_ranks_with_ties_are_what_chance_makes_of_them(studies):
    place, recall = studies.passage_run.place, studies.passage_run.recall
    assert place([3.0, 5.0, 3.0, 1.0], 0) == (2.5, 1, 2)
    assert recall([3.0, 5.0, 3.0, 1.0], 0, 1) == 0.0
    assert recall([3.0, 5.0, 3.0, 1.0], 0, 2) == 0.5
    assert recall([3.0, 5.0, 3.0, 1.0], 1, 1) == 1.0
    assert recall([3.0, 5.0, 3.0], 0, 1, [0, 2]) == 0.5


def test_needles_are_ranked_among_what_is_no_needle(studies):
    row = {"needles": [1, 3], "used": [1, 3], "decoys": [4]}
    scores = [0.0, 9.0, 1.0, 8.0, 8.5]
    at_1, at_5, rank = studies.needles.placed(row, scores)
    assert (at_1, at_5, rank) == (0.5, 1.0, 1.5)  # the second needle is behind the decoy, not behind the first
    assert not studies.needles.decoy_first(row, scores)
    assert studies.needles.decoy_first(row | {"used": [3]}, scores)


def test_a_run_goes_on_and_files_are_put_together(studies, tmp_path):
    run, read = studies.passage_run.run, studies.passage_run.read
    asked, done = [SimpleNamespace(name=f"i{k}") for k in range(6)], []

    def measure(_lens: Any, item: Any) -> dict[str, Any]:
        done.append(item.name)
        return {"answer": "a", "methods": {"m": {"scores": [1.0]}}}

    options = Namespace(out=tmp_path / "one.jsonl", part="1/2", seconds=1e9)
    run(options, LENS, asked[:4], measure)
    options.out.write_text(options.out.read_text() + '{"item": "i5", "ans')
    rows = run(options, LENS, asked, measure)
    assert done == ["i1", "i3", "i5"] == [row["item"] for row in rows]
    other = {"item": "i3", "answer": "a", "methods": {"peer": {"scores": [2.0]}}}
    changed = {"item": "i1", "answer": "b", "methods": {"peer": {"scores": [2.0]}}}
    (tmp_path / "peer.jsonl").write_text(f"{json.dumps(other)}\n{json.dumps(changed)}\n")
    together = {row["item"]: set(row["methods"]) for row in read([options.out, tmp_path / "peer.jsonl"])}
    assert together == {"i1": {"peer"}, "i3": {"m", "peer"}, "i5": {"m"}}
    run(Namespace(out=tmp_path / "none.jsonl", part="0/1", seconds=-1.0), LENS, asked, measure)
    assert done == ["i1", "i3", "i5"]


def test_long_prompts_run_blocks_again_and_get_the_same_gradients(studies, monkeypatch):
    model, runs = zoo.build("llama", "sdpa"), []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    found = SimpleNamespace(prompt=SimpleNamespace(ids=[3, 1, 4, 1]), ids=[5, 9])
    short = scores.gradients(SimpleNamespace(model=model), found)
    assert len(runs) == 1
    monkeypatch.setattr(scores, "LONG", 3)
    assert torch.equal(scores.gradients(SimpleNamespace(model=model), found), short)
    assert len(runs) == 3 and not model.training and not model.is_gradient_checkpointing


def test_a_method_that_fails_ends_no_other(studies):
    def fails(*_: Any) -> Any:
        raise RuntimeError("out of memory\nand more")

    scores = {"bad": fails, "good": lambda *_: ([0.5, 1.0], 1, 1)}
    found = studies.passage_run.explained(LENS, None, [], scores)
    assert found["bad"] == {"error": "RuntimeError: out of memory"}
    assert found["good"]["scores"] == [0.5, 1.0]
    assert studies.passage_run.methods_of([{"methods": found}]) == ["good"]


def test_injected_documents_are_where_their_groups_say(studies, tmp_path):
    (tmp_path / "single.json").write_text(json.dumps([{"question": "Where?", "needles": ["It is in a drawer."]}] * 3))
    sentences = [f"This is the long and quiet sentence number {k} of a long text ." for k in range(40)]
    (tmp_path / "text.txt").write_text(" ".join(sentences) + "\n")
    made = studies.injections.items(tmp_path, tmp_path / "text.txt", 16)
    assert {item.order for item in made} == set(range(len(studies.injections.ORDERS)))
    for item in made:
        text = item.messages()[0]["content"]
        passages = item.passages(text)
        holding = [k for k, (_, start, stop) in enumerate(passages) if item.word in text[start:stop]]
        assert holding == [item.injected] and item.source != item.injected
        assert [text[start:stop].startswith(f"Document {k + 1}: ") for k, (_, start, stop) in enumerate(passages)]
    rows = [
        {"obeyed": k < 2, "order": k % 2, "injected": k, "methods": {"m": {"scores": [2.0, 1.0], "seconds": 0.1}}}
        for k in range(3)
    ]
    said = studies.injections.table(rows)
    assert "obeyed: 2 of 3" in said and "wording 1: 1 of 1" in said and "| m | 2 | 0.50 | 1.50 | 0.10 |" in said
