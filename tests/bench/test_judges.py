"""Judges: what a perfect and a random ranking get, rows that cannot be used, runs that go on, peers that fail."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench.judges import JUDGES, peers
from bench.judges.compiled import CompiledModel
from bench.judges.pairs import patched, patching_pairs
from bench.judges.peer_process import without_opening
from bench.judges.run import BenchOptions, judge
from bench.records import correlation
from tiny_study import lens_on

import tensorlens as tl
from tensorlens.errors import InputError, MethodError
from tensorlens.studies.judge_study import MEASURES, reciprocal_rank

ROOT = Path(__file__).parents[2]
FEW = ("tensor.in_class", "tensor.in_class@attn_lrp", "mean.attn", "control.recency", "control.word_overlap")
GOOD_ROWS = "the cat sat on a,mat,birds,cat\nseven tall grey,houses,fly,seven\nred green birds fly,over,while,birds\n"


def write_sets(folder: Path, rows: str = GOOD_ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "animals.csv").write_text("prefix,good,bad,evidence\n" + rows)
    return folder


def judged(tmp_path: Path, **options):
    folder = options.pop("folder", None) or write_sets(tmp_path / "data")
    settings = {"methods": FEW, "group_size": 2} | options
    return judge(lens_on("llama"), folder, tmp_path / "run", progress=False, **settings)


# Measures -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MEASURES)
def test_a_perfect_ranking_gets_the_perfect_value(name):
    truth = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0] if name != "pearson" else [1.0, -2.0, 3.0, 0.5]
    assert MEASURES[name](truth, truth) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["reciprocal_rank", "top_1"])
@pytest.mark.parametrize("n_evidence", [1, 2, 3])
def test_chance_is_the_mean_over_random_rankings(name, n_evidence):
    truth = [1.0] * n_evidence + [0.0] * (9 - n_evidence)
    random = np.random.default_rng(0)
    drawn = [MEASURES[name](random.permutation(9).tolist(), truth) for _ in range(4000)]
    assert MEASURES[name]([0.0] * 9, truth) == pytest.approx(np.mean(drawn), abs=0.02)


def test_ties_are_worth_what_chance_makes_of_them():
    assert reciprocal_rank([3, 2, 1], [0, 1, 0]) == 0.5
    assert reciprocal_rank([3, 3, 1], [0, 1, 0]) == pytest.approx((1 + 1 / 2) / 2)
    assert reciprocal_rank([5, 3, 3, 3], [0, 1, 0, 1]) == pytest.approx((2 / 3) / 2 + (1 / 3) / 3)
    assert reciprocal_rank([None, math.nan, 0.0], [1, 0, 0]) == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert correlation(np.array([1.0, 1, 2]), np.array([1.0, 2, 3])) == pytest.approx(0.8660254)


# Runs -----------------------------------------------------------------------------------------------------------------


def test_wrong_names_are_refused_before_anything_is_done(tmp_path, unchecked):
    for changes, message in (
        ({"judges": "evidense"}, "Did you mean 'evidence'"),
        ({"methods": ["tensor.in_class@attnlrp"]}, "after the @ of a map of T"),
        ({"methods": ["tensor.in_clas"]}, "Expected `methods` among"),
        ({"peers": ["lxd"]}, "Expected `peers` among"),
    ):
        with pytest.raises((InputError, MethodError), match=message):
            judged(tmp_path, **changes)
    with pytest.raises(InputError, match="No row could be used; the first: animals.csv, row 1"):
        judged(tmp_path, folder=write_sets(tmp_path / "none", "the cat sat,mat,mat,cat\n"))
    with pytest.raises(InputError, match="needs .*tracr"):
        judged(tmp_path, judges="tracr")
    assert not (tmp_path / "run").exists()


def test_judges_are_known_by_name():
    assert tuple(dict.fromkeys(JUDGES)) == JUDGES
    assert BenchOptions(judges=("tracr",)).judges == ("tracr",)


def test_peers_keep_special_tokens_that_stand_in_the_text():
    tokenizer = SimpleNamespace(all_special_ids=[0, 1])
    assert without_opening([1, 1, 7, 0, 8], tokenizer) == [7, 0, 8]


def test_peers_that_hang_or_crash_or_are_missing_are_listed(tmp_path, monkeypatch):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys, time\n"
        "name, _, asked, answers = sys.argv[1:]\n"
        "file = open(answers, 'a')\n"
        "for about in ({'version': '1.0'}, {'version': '1.0', 'check': 'fine'}):\n"
        "    print(json.dumps({'index': 0, 'about': about}), file=file, flush=True)\n"
        "for line in open(asked):\n"
        "    one = json.loads(line)\n"
        "    if name == 'lxt.cp_lrp': time.sleep(60)\n"
        "    if name == 'flashtrace': sys.exit('flashtrace: no such thing')\n"
        "    scores = list(range(len(one['ids']) - (name == 'inseq.input_x_gradient')))\n"
        "    if name == 'context_cite': print('no JSON', file=file, flush=True)\n"
        "    answer = {'index': one['index'], 'scores': scores}\n"
        "    print(json.dumps(answer), file=file, flush=True)\n"
    )
    monkeypatch.setattr(peers, "SCRIPT", script)
    monkeypatch.setattr(peers, "ITEM_SECONDS", 1.0)
    names = ["lxt.attn_lrp", "lxt.cp_lrp", "flashtrace", "context_cite", "inseq.input_x_gradient"]
    said = list[str]()
    result = judged(tmp_path, peers=names, tell=said.append)
    about = result["peers"]
    assert any(re.fullmatch(r"lxt.cp_lrp: 0 of \d items done", one) for one in said)
    own = [json.loads(line) for line in (tmp_path / "run" / "peers" / "samples.jsonl").read_text().splitlines()]
    assert own and all({"lxt.attn_lrp", "context_cite"} == set(one["scores"]) for one in own if one["index"])
    assert list(about) == names
    lacking = result["judges"]["evidence"]["missing"]["inseq.input_x_gradient"]
    assert re.fullmatch(r"it gave (\d) scores for (\d) tokens", lacking["reason"])
    assert about["lxt.cp_lrp"]["error"] == "gave nothing for 1 seconds and was ended"
    assert about["flashtrace"]["error"] == "flashtrace: no such thing"
    assert "error" not in about["lxt.attn_lrp"] and about["lxt.attn_lrp"]["version"] == "1.0"
    ranks = result["judges"]["evidence"]["measures"]["reciprocal_rank"]["methods"]
    for name in ("lxt.attn_lrp", "context_cite"):
        assert ranks[name]["mean"] == pytest.approx(ranks["control.recency"]["mean"])
    assert "lxt.cp_lrp" not in ranks
    missing = judged(tmp_path / "other", peers=["lxt.cp_lrp"], peer_python=str(tmp_path / "nowhere"))
    assert "could not be started" in missing["peers"]["lxt.cp_lrp"]["error"]


def test_a_peer_of_components_is_asked_about_pairs_alone(tmp_path, monkeypatch):
    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys\n"
        "file = open(sys.argv[4], 'a')\n"
        "for line in ['{}', '{}', *open(sys.argv[3])]:\n"
        "    one = json.loads(line)\n"
        "    scores = [float(len(label)) for label in one.get('labels', '')][one.get('index', 0) % 2:]\n"
        "    answer = {'index': one['index'], 'scores': scores} if one else {'index': 0, 'about': {}}\n"
        "    print(json.dumps(answer), file=file, flush=True)\n"
    )
    monkeypatch.setattr(peers, "SCRIPT", script)
    write_sets(tmp_path / "data" / "evidence")
    (tmp_path / "data" / "pairs").mkdir()
    both = [("cat", "mat"), ("mat", "cat"), ("red", "green"), ("green", "red"), ("cat", "red"), ("red", "cat")]
    rows = [
        f"the {a} and a {b} saw the {a},the {a} and a {b} saw the tall,the {a} and a {b} saw the {b}" for a, b in both
    ]
    (tmp_path / "data" / "pairs" / "ioi.csv").write_text("\n".join(["clean,corrupted,corrupted_hard", *rows]))
    found = judged(
        tmp_path,
        folder=tmp_path / "data",
        judges=["evidence", "patching"],
        methods=("tensor.in_class",),
        peers=["transformer_lens"],
    )
    questions = tmp_path / "run" / "peers" / "transformer_lens.questions.jsonl"
    asked = [json.loads(line) for line in questions.read_text().splitlines()]
    assert asked and all({"corrupted", "weights", "labels"} <= set(one) and "target" not in one for one in asked)
    components = found["judges"]["patching"]
    n_whole = sum(one["index"] % 2 == 0 for one in asked)
    assert components["measures"]["pearson"]["methods"]["transformer_lens"]["n"] == n_whole > 0
    assert components["missing"]["transformer_lens"]["reason"] == "it gave 17 scores for 18 components"
    assert "transformer_lens" not in found["judges"]["evidence"]["measures"]["reciprocal_rank"]["methods"]


# Compiled programs ----------------------------------------------------------------------------------------------------


def test_a_compiled_block_reads_what_it_is_told_to():
    """A hand-made program: every token reads the first one, by the value way alone."""
    width, one = 4, 30.0
    zeros = {
        f"transformer/layer_0/{part}": (width, width)
        for part in ("attn/query", "attn/key", "attn/value", "attn/linear")
    }
    weights = {f"{name}/w": np.zeros(shape) for name, shape in zeros.items()}
    weights |= {f"{name}/b": np.zeros(width) for name in zeros}
    mlp = "transformer/layer_0/mlp/linear"
    weights |= {
        f"{mlp}_1/w": np.zeros((width, 1)),
        f"{mlp}_1/b": np.zeros(1),
        f"{mlp}_2/w": np.zeros((1, width)),
        f"{mlp}_2/b": np.zeros(width),
        "token_embed/embeddings": np.eye(3, width),
        "pos_embed/embeddings": np.zeros((5, width)),
    }
    weights["transformer/layer_0/attn/query/b"][0] = one
    weights["transformer/layer_0/attn/key/w"][0, 0] = one  # token 0 is looked at
    weights["transformer/layer_0/attn/value/w"] = np.eye(width)
    weights["transformer/layer_0/attn/linear/w"] = np.roll(np.eye(width), 3, 1)  # channel 0 into channel 3
    lens = tl.Lens(CompiledModel(weights, {"heads": 1, "layers": 1}))
    found = lens([1, 0, 2, 1])
    assert float(found.output[3, 3]) == pytest.approx(1.0)
    scores = found.map("tensor.in_class", out_token=3, target=3).scores[0]
    assert torch.allclose(scores, torch.tensor([0.0, 1, 0, 0], dtype=scores.dtype), atol=1e-9)


def test_patching_judges_components(tmp_path):
    (tmp_path / "pairs").mkdir()
    rows = [
        "the cat and a mat saw the cat,the cat and a mat saw the red,the cat and a mat saw the mat",
        "the cat and a mat saw,the cat and a,the cat and a mat saw",
    ]
    (tmp_path / "pairs" / "ioi.csv").write_text("clean,corrupted,corrupted_hard\n" + "\n".join(rows) + "\n")
    lens = lens_on("llama")
    judge_of = patching_pairs(lens, tmp_path / "pairs")
    (item,) = judge_of.items
    assert "ioi.csv, row 2: The two prompts have 6 and 4 tokens" in judge_of.problems[0]
    mat, cat = (lens.processor(word)["input_ids"][0] for word in ("mat", "cat"))
    assert item.extra["weights"] == {mat: 1.0, cat: -1.0}
    flipped = replace(item, extra={**item.extra, "weights": {mat: -1.0, cat: 1.0}})
    records = [patched(lens, one, ["tensor.in_class@jacobian"]) for one in (item, flipped)]
    left, kept = sorted(records, key=lambda record: "truth" in record)
    assert left == {"left_out": "the model is wrong"}
    # Three blocks: attention, feed-forward and four heads each.
    assert len(kept["truth"]) == len(kept["labels"]) == len(kept["scores"]["patching@jacobian"]) == 18
