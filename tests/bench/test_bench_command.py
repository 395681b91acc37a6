"""`python -m bench judge`: from the command to the table and to records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import records
from bench.__main__ import app
from bench.published import judge_table
from tiny_study import lens_on
from typer.testing import CliRunner

ROWS = (
    "prefix,good,bad,evidence\nthe cat sat on a,mat,birds,cat\nseven tall grey,houses,fly,seven\nthe cat,sat,sat,cat\n"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """A finished run of a tiny decoder, and what the command printed."""
    folder = tmp_path_factory.mktemp("judge")
    lens = lens_on("llama")
    lens.model.float().save_pretrained(folder / "model")
    lens.processor.save_pretrained(folder / "model")
    (folder / "data").mkdir()
    (folder / "data" / "animals.csv").write_text(ROWS)
    arguments = [
        "judge",
        folder / "model",
        "--data",
        folder / "data",
        "--out",
        folder / "runs" / "tiny" / "evidence",
        "--methods",
        "tensor.in_class,tensor.in_class@attn_lrp,control.recency",
    ]
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return folder, result.output


def test_the_table_and_the_rows_that_could_not_be_used(run):
    _, said = run
    for word in ("evidence:", "of 2 items measured", "animals.csv, row 3", "tensor.in_class@attn_lrp", "report.html"):
        assert word in said


def test_wrong_names_are_answered_before_torch(tmp_path):
    command = ["judge", "minilm", "--data", str(tmp_path), "--out", str(tmp_path / "run"), "--judges", "evidense"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code != 0 and "must be among evidence" in str(found.exception)


def test_it_says_at_once_what_it_does(run):
    _, said = run
    first = next(line for line in said.splitlines() if line)
    assert first.startswith("bench judge, 0 s: evidence of ") and "loading the model" in first


def test_quick_takes_few_items_and_methods(run):
    folder, _ = run
    command = ["judge", folder / "model", "--data", folder / "data", "--out", folder / "quick", "--quick", "--json"]
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    assert "tensor.in_class@jacobian" in result.output and "alti" not in result.output


def test_a_run_becomes_records_from_which_its_table_comes(run, monkeypatch, tmp_path):
    folder, _ = run
    monkeypatch.setattr("bench.records.FOLDER", tmp_path)
    out = CliRunner().invoke(app, ["keep", str(folder / "runs" / "tiny" / "evidence"), "--model", "tiny"])
    assert out.exit_code == 0 and "evidence-tiny.jsonl.gz: " in out.output, out.output
    (kept,) = records.read(tmp_path)
    assert kept.model == "tiny" and {"tensor.in_class", "control.recency"} <= kept.lines[0]["scores"].keys()


def test_methods_are_added_to_the_items_of_records(run, monkeypatch, tmp_path):
    folder, _ = run
    monkeypatch.setattr("bench.records.FOLDER", tmp_path)
    before = folder / "runs" / "tiny" / "evidence"
    assert CliRunner().invoke(app, ["keep", str(before), "--model", "tiny"]).exit_code == 0
    lines = [json.loads(line) for line in (before / "samples.jsonl").read_text().splitlines()]
    (tmp_path / "run" / "peers").mkdir(parents=True)
    (tmp_path / "run" / "samples.jsonl").write_text("")
    more = [line | {"scores": {"lxt.cp_lrp": line["truth"]}} for line in lines if "truth" in line]
    more.append(more[0] | {"item": "animals:99"})  # not in the records
    (tmp_path / "run" / "peers" / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in more))
    given = [str(tmp_path / "evidence-tiny.jsonl.gz"), str(tmp_path / "run")]
    out = CliRunner().invoke(app, ["keep", *given, "--model", "tiny"])
    assert out.exit_code == 0, out.output
    (kept,) = records.read(tmp_path)
    assert len(kept.lines) == len(more) - 1
    assert all({"lxt.cp_lrp", "control.recency"} <= line["scores"].keys() for line in kept.lines)


def test_texts_made_by_template_become_lines_and_it_says_how_far_it_is(run, monkeypatch, tmp_path):
    folder, _ = run
    made = [{"judge": "edits", "item": f"edits:{k}:0"} for k in range(3)]
    monkeypatch.setattr("bench.judges.edits.lines", lambda lens, n: iter(made[:n]))
    monkeypatch.setattr("bench.__main__.SECONDS_BETWEEN", 0.0)
    command = [
        "templates",
        str(folder / "model"),
        "--judge",
        "edits",
        "--out",
        str(tmp_path / "lines.jsonl"),
        "--n",
        "2",
    ]
    for _ in range(2):  # the file is written anew
        found = CliRunner().invoke(app, command)
        assert found.exit_code == 0 and "2 items in" in found.stdout
        assert [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()] == made[:2]
    said = found.stderr.splitlines()
    assert said[0].startswith("bench templates, 0 s: edits on ") and any(line.endswith("edits: 2") for line in said)
    wrong = CliRunner().invoke(app, [*command[:3], "edit", *command[4:]])
    assert wrong.exit_code != 0 and "must be among reactions, edits, concepts" in str(wrong.exception)


def test_packages_keep_the_items_that_they_were_asked_about(run, monkeypatch, tmp_path):
    folder, _ = run
    monkeypatch.setattr("bench.records.FOLDER", tmp_path)
    before = folder / "runs" / "tiny" / "evidence"
    lines = [json.loads(line) for line in (before / "samples.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "truth" in line]
    half = [line | {"scores": {name: line["truth"] for name in ("flashtrace", "tensor.in_out")}} for line in lines[:1]]
    about = {"peers": {"flashtrace": {"version": "1", "n": 1}, "inseq.x": {"error": "is missing", "n": 0}}}
    (tmp_path / "more.jsonl").write_text("".join(json.dumps(one) + "\n" for one in [about, *half]))
    found = CliRunner().invoke(app, ["keep", str(before), str(tmp_path / "more.jsonl"), "--model", "tiny"])
    assert found.exit_code == 0, found.output
    (kept,) = records.read(tmp_path)
    assert sum("flashtrace" in line["scores"] for line in kept.lines) == 1 < len(kept.lines)
    assert not any("tensor.in_out" in line["scores"] for line in kept.lines)  # ours is asked about every item
    table = judge_table(kept)
    assert "Packages: flashtrace 1, inseq.x (is missing)." in table
    (row,) = (one for one in records.rows(kept) if one.method == "flashtrace")
    assert (f"flashtrace ({row.n} items)" in table) == (row.n < len(lines))
