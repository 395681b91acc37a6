"""`tl.studies.judge`: items from files, every method on them, and what the rows say together."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
import zoo
from tiny_study import WORDS, lens_on
from tokenizers import Tokenizer, models, pre_tokenizers

import tensorlens as tl
from tensorlens.errors import InputError, MethodError
from tensorlens.studies import judge
from tensorlens.studies.judge_study import judge_summary, last_logits, measured_value

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


def test_a_run_has_every_method_and_can_be_recomputed_from_its_rows(tmp_path):
    result = judged(tmp_path)
    found = result["judges"]["evidence"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "left_out" not in row]
    assert measured and found["n_measured"] == len(measured)
    assert found["n_items"] == 3 == len(measured) + found["sets"]["animals"]["left_out"].get("the model is wrong", 0)
    ranks = found["measures"]["reciprocal_rank"]
    assert set(ranks["methods"]) == set(FEW)
    for name in FEW:
        mean = np.mean([measured_value(row, name, "reciprocal_rank") for row in measured])
        assert ranks["methods"][name]["mean"] == pytest.approx(mean, rel=1e-5)
    for row in measured:  # recency knows the order, and the answer is known
        n_words, place = len(row["truth"]), row["truth"].index(1.0)
        assert measured_value(row, "control.recency", "reciprocal_rank") == pytest.approx(1 / (n_words - place))
    assert result.report.is_file() and "evidence" in result.report.read_text()


def test_scores_are_those_of_the_map_alone(tmp_path):
    judged(tmp_path, methods=[*FEW, "gradient.integrated"])
    rows = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    row = next(row for row in rows if "left_out" not in row)
    text = GOOD_ROWS.splitlines()[int(row["item"].split(":")[1]) - 1].split(",")[0]
    lens = lens_on("llama")
    paper, attn_lrp = tl.Rules.paper(), tl.Rules.attn_lrp()
    names = {"tensor.in_class": paper, "tensor.in_class@attn_lrp": attn_lrp, "gradient.integrated": paper}
    for name, rules in names.items():
        alone = tl.Lens(lens.model, lens.processor, rules=rules)(text)
        found = alone.map(name.partition("@")[0], out_token=-1, target=tuple(row["target"])).scores[0]
        assert row["scores"][name] == pytest.approx(found.tolist(), rel=1e-3, abs=1e-5)


def test_items_the_model_gets_wrong_are_left_out(tmp_path):
    lens = lens_on("llama")
    words = lens.processor("the cat sat on a")["input_ids"]
    known = last_logits(lens, [words])[0][5 : 5 + len(WORDS)]
    best, worst = (WORDS[int(k)] for k in (known.argmax(), known.argmin()))
    folder = write_sets(
        tmp_path / "data", f"the cat sat on a,{best},{worst},cat\nthe cat sat on a,{worst},{best},cat\n"
    )
    found = judged(tmp_path, folder=folder)["judges"]["evidence"]
    assert found["sets"]["animals"] == {"n": 2, "n_measured": 1, "left_out": {"the model is wrong": 1}}


def test_rows_that_cannot_be_used_are_named_and_the_rest_is_used(tmp_path):
    folder = write_sets(
        tmp_path / "data",
        GOOD_ROWS + "the cat,mat,mat,cat\nthe cat sat,mat,birds,dog\n,mat,birds,cat\nthe cat sat,mat\n",
    )
    (folder / "lines.jsonl").write_text('{"prefix": "the cat sat", "target": "on", "evidence": "cat"}\n1\n{"prefix"\n')
    (folder / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    problems = judged(tmp_path, folder=folder)["judges"]["evidence"]["problems"]
    said = "\n".join(problems)
    assert len(problems) == 7
    for expected in (
        "animals.csv, row 4: 'mat' and 'mat' begin with the same token",
        "animals.csv, row 5: The evidence 'dog' is not in the prefix",
        "animals.csv, row 6: Expected text in `prefix`; got nothing",
        "animals.csv, row 7: Expected text in `evidence`",
        "lines.jsonl, row 2: Expected text in `prefix`",
        "line 3, one object per line",
        "bytes.csv: Expected text in UTF-8",
    ):
        assert expected in said


def test_a_run_continues_and_refuses_other_items(tmp_path):
    first = judged(tmp_path)
    rows = tmp_path / "run" / "samples.jsonl"
    rows.write_text("".join(rows.read_text().splitlines(keepends=True)[:1]))
    again = judged(tmp_path)
    assert again["judges"]["evidence"]["measures"] == first["judges"]["evidence"]["measures"]
    other = write_sets(tmp_path / "other", GOOD_ROWS.replace("seven tall", "seven red"))
    with pytest.raises(InputError, match=r"judges\.evidence\.items is .* there and .* here"):
        judged(tmp_path, folder=other)


def test_the_example_of_the_how_to_runs(tmp_path):
    """With a tokenizer that knows its words; a random model is right about some of them."""
    folder = ROOT / "examples" / "judge"
    text = " ".join(path.read_text() for path in sorted(folder.iterdir()))
    words = sorted(set(re.findall(r"\w+|[^\w\s]", text)))
    inner = Tokenizer(models.WordLevel({"[UNK]": 0} | {word: i for i, word in enumerate(words, 1)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    sizes: dict = zoo.TEXT | {"vocab_size": len(words) + 1}
    model = zoo.randomise(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, num_key_value_heads=2)), seed=1).eval()
    lens = tl.Lens(model, hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]"), name="tiny")
    found = judge(lens, folder, tmp_path / "run", methods=FEW, progress=False)["judges"]["evidence"]
    assert found["n_problems"] == 0 and found["n_items"] == 6
    assert set(found["sets"]) == {"capitals", "opposites"} and found["n_measured"] >= 1


def test_sets_count_alike_whatever_their_size():
    rows = [{"judge": "evidence", "set": "a", "truth": [1.0, 0.0], "scores": {"m": [1.0, 0.0]}}] * 9
    rows += [{"judge": "evidence", "set": "b", "truth": [1.0, 0.0], "scores": {"m": [0.0, 1.0]}}]
    about = {"question": "word", "measures": ["reciprocal_rank"], "problems": []}
    found = judge_summary(rows, {"seed": 0, "judges": {"evidence": about}})["judges"]["evidence"]
    assert found["measures"]["reciprocal_rank"]["methods"]["m"]["mean"] == pytest.approx(0.75)


def test_one_file_is_one_set(tmp_path):
    file = write_sets(tmp_path / "data") / "animals.csv"
    assert set(judged(tmp_path, folder=file)["judges"]["evidence"]["sets"]) == {"animals"}


def test_wrong_names_are_refused_before_anything_is_done(tmp_path, unchecked):
    for changes, message in (
        ({"methods": ["tensor.in_class@attnlrp"]}, "after the @ of a map of T"),
        ({"methods": ["tensor.in_clas"]}, "Expected `methods` among"),
        ({"judges": "tracr"}, "got 'judges'"),
        ({"folder": tmp_path / "nowhere"}, "there is none at"),
        ({"folder": write_sets(tmp_path / "none", "the cat sat,mat,mat,cat\n")}, "No row could be used; the first"),
    ):
        with pytest.raises((InputError, MethodError), match=message):
            judged(tmp_path, **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("field", ["judge", "scores", "truth"])
@pytest.mark.parametrize("value", [None, "x", [], 3])
def test_samples_with_wrong_values_are_answered_in_a_sentence(tmp_path, field, value):
    run = judged(tmp_path).folder
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    (run / "samples.jsonl").write_text("".join(json.dumps(line | {field: value}) + "\n" for line in lines))
    with pytest.raises(InputError, match="samples of a judge study"):
        judged(tmp_path)
