"""`Mapper` and `tensorlens maps`: maps as columns of a table, on one machine or several, stopped and started again."""

from __future__ import annotations

import csv
import itertools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tiny_language import save_tiny, tiny_lens
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens import mapper
from tensorlens.app import maps_command
from tensorlens.app.cli import app

pytestmark = pytest.mark.usefixtures("unchecked")
TEXTS = [f"{'the cat sat on it '[: 3 + 5 * (i % 4)]}{i}" for i in range(12)]
COLUMNS = ["tokens", "scores", "target", "logit", "bias_share", "prediction"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """The folder of a tiny model, since a mapper takes a name."""
    return save_tiny(tmp_path_factory.mktemp("model"), "neox")


@pytest.fixture
def data(tmp_path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "utf-8")
    return path


def run(*arguments: object) -> dict:
    made = CliRunner().invoke(app, ["maps", *map(str, arguments), "--json"], catch_exceptions=False)
    assert made.exit_code == 0, made.output
    return json.loads(made.stdout)


def table(folder: Path) -> list[dict]:
    parquet = pytest.importorskip("pyarrow.parquet")
    return parquet.read_table(folder).sort_by("id").to_pylist()


# Mapper --------------------------------------------------------------------------------------------------------------


def test_columns_are_what_the_lens_says(model):
    lens, rows = tl.load(model), {"text": TEXTS[:3], "label": [0, 1, 0]}
    made = tl.Mapper(model, target=7)(rows)
    assert list(made) == ["text", "label", *COLUMNS] and made["label"] == [0, 1, 0]
    for i, text in enumerate(TEXTS[:3]):
        found = lens(text).map("tensor.in_class", -1, 7)
        assert made["tokens"][i] == list(found.in_tokens)
        assert made["scores"][i] == pytest.approx(found.scores[0].tolist(), rel=1e-3, abs=1e-5)
        assert made["logit"][i] == pytest.approx(found.meta["logit"][0], rel=1e-4)
        assert made["bias_share"][i] == pytest.approx(float(found.bias_share[0]), rel=1e-3)
        assert made["prediction"][i] == lens(text).predictions(1)[0].name
        assert made["target"][i] == found.meta["target"]


def test_it_is_plain_until_it_is_called(model, monkeypatch):
    loads, load = [], mapper.load
    monkeypatch.setattr(mapper, "load", lambda *given, **named: loads.append(given) or load(*given, **named))
    monkeypatch.setattr(mapper, "_lenses", {})
    one = pickle.loads(pickle.dumps(tl.Mapper(model, "tensor.in_out")))
    assert loads == [] and len(pickle.dumps(one)) < 1000
    made, _ = (one({"text": np.array(TEXTS[:2], dtype=object)}) for _ in range(2))
    assert len(loads) == 1 and made["target"] == ["", ""] and np.isnan(made["logit"]).all()
    assert len(made["scores"][0]) == len(made["tokens"][0]) == len(TEXTS[0])


def test_bad_rows_keep_their_place(model):
    rows = {"text": ["a cat", "", "x" * 500, None, "a dog"]}
    made = tl.Mapper(model, on_error="skip")(rows)
    assert [bool(tokens) for tokens in made["tokens"]] == [True, False, False, False, True]
    assert [bool(error) for error in made["error"]] == [False, True, True, True, False]
    with pytest.raises(tl.InputError, match="Row 1"):
        tl.Mapper(model)(rows)
    assert len(tl.Mapper(model, truncate=True)({"text": ["x" * 500]})["tokens"][0]) == 400


def test_mistakes_are_named_at_once(model):
    with pytest.raises(tl.MethodError, match="no method"):
        tl.Mapper(model, "tensor.in_clas")
    with pytest.raises(tl.InputError, match="by name"):
        tl.Mapper(tiny_lens())  # type: ignore[arg-type]
    with pytest.raises(tl.InputError, match="column 'text'"):
        tl.Mapper(model)({"words": ["a"]})


@pytest.mark.filterwarnings("ignore")
def test_in_the_datasets_library(model):
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": TEXTS[:5]}).map(tl.Mapper(model), batched=True, batch_size=2)
    one_by_one = tl.Mapper(model, batch_size=1)({"text": TEXTS[:5]})
    assert made.column_names == ["text", *COLUMNS]
    assert made["tokens"][:] == one_by_one["tokens"] and made["target"][:] == one_by_one["target"]
    for scores, alone in zip(made["scores"][:], one_by_one["scores"], strict=True):
        assert scores == pytest.approx(alone, rel=1e-3, abs=1e-5)


# The command ---------------------------------------------------------------------------------------------------------


def test_a_file_becomes_a_table(model, data, tmp_path):
    said = run(model, "--data", data, "--out", tmp_path / "maps.parquet", "--part-rows", 5)
    assert said["maps"] == 12 and said["skipped"] == []
    rows = table(tmp_path / "maps.parquet")
    assert [row["id"] for row in rows] == list(range(12)) and list(rows[0]) == ["id", *COLUMNS, "sink", "text"]
    assert [row["text"] for row in rows] == TEXTS
    alone = tl.Mapper(model, batch_size=1)({"text": TEXTS})
    for row in rows:
        assert row["tokens"] == alone["tokens"][row["id"]]
        assert row["scores"] == pytest.approx(alone["scores"][row["id"]], rel=1e-3, abs=1e-5)
    assert run(model, "--data", data, "--out", tmp_path / "maps.parquet", "--part-rows", 5)["new_rows"] == 0


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_one_file_by_suffix_with_the_columns_of_the_data(model, suffix, tmp_path):
    data, out = tmp_path / "data.jsonl", tmp_path / f"maps.{suffix}"
    rows = [{"id": f"r{k}", "text": text, "label": k % 2, "target": None} for k, text in enumerate(TEXTS[:5])]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    said = run(model, "--data", data, "--out", out, "--part-rows", 2, "--words", "--method", "tensor.in_out")
    assert said["maps"] == 5 and len(list((tmp_path / f"maps.{suffix}.parts").glob("part-*"))) == 3
    if suffix == "csv":
        with out.open(newline="", encoding="utf-8") as file:
            found = [row | {"scores": json.loads(row["scores"])} for row in csv.DictReader(file)]
    else:
        found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [str(row["label"]) for row in found] == [str(row["label"]) for row in rows] and "data_target" in found[0]
    lens = tl.load(model)
    for row, text in zip(found, TEXTS, strict=False):
        words = lens(text).map("tensor.in_out", -1).group("words")
        assert row["scores"] == pytest.approx(words.scores[0].tolist(), rel=1e-3, abs=1e-5)
        sink = words.scores[0, words.meta["sink"]].sum() if "sink" in words.meta else 0.0
        assert float(row["sink"]) == pytest.approx(float(sink), rel=1e-3, abs=1e-5)
    before = out.read_bytes()
    assert (
        run(model, "--data", data, "--out", out, "--part-rows", 2, "--words", "--method", "tensor.in_out")["new_rows"]
        == 0
    )
    assert out.read_bytes() == before


def test_parts_are_cut_by_time_and_continued(model, data, tmp_path, monkeypatch):
    monkeypatch.setattr(maps_command, "FIRST_ROWS", 3)
    clock = itertools.count(step=2.0)  # each part takes two seconds
    monkeypatch.setattr(maps_command.time, "perf_counter", lambda: next(clock))
    options = ["--data", data, "--out", tmp_path / "maps", "--part-seconds", 1]
    run(model, *options)
    parts = sorted(path.name for path in (tmp_path / "maps").glob("part-*"))
    assert parts[:4] == [f"part-{first:09}.parquet" for first in (0, 3, 4, 5)] and len(parts) == 10
    for name in parts[1:3]:
        (tmp_path / "maps" / name).unlink()
    assert run(model, *options)["new_rows"] == 2 and [row["id"] for row in table(tmp_path / "maps")] == list(range(12))


def test_other_settings_are_refused(model, data, tmp_path):
    run(model, "--data", data, "--out", tmp_path / "maps", "--limit", 2)
    for change in (["--limit", "3"], ["--limit", "2", "--method", "tensor.in_out"], ["--limit", "2", "--target", "5"]):
        with pytest.raises(tl.InputError, match="different settings"):
            run(model, "--data", data, "--out", tmp_path / "maps", *change)
    data.write_text('{"text": "other"}\n', "utf-8")
    with pytest.raises(tl.InputError, match="data is"):
        run(model, "--data", data, "--out", tmp_path / "maps", "--limit", 2)


def test_bad_rows_are_reported_by_row(model, tmp_path):
    data = tmp_path / "data.jsonl"
    texts = ["a cat", "", 7, "x" * 500, "a dog"]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    with pytest.raises(tl.InputError, match="Row 1: "):
        run(model, "--data", data, "--out", tmp_path / "a")
    said = run(model, "--data", data, "--out", tmp_path / "b", "--on-error", "skip", "--truncate", "--part-rows", 2)
    assert [one["row"] for one in said["skipped"]] == [1, 2]
    rows = table(tmp_path / "b")
    assert [row["id"] for row in rows] == [0, 3, 4] and len(rows[1]["tokens"]) == 400


def test_a_damaged_folder_is_answered_in_a_sentence(model, tmp_path):
    data, folder = tmp_path / "data.jsonl", tmp_path / "maps"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("a cat", "", "a dog")), "utf-8")
    options = ["--data", data, "--out", folder, "--on-error", "skip", "--part-rows", 2]
    run(model, *options)
    for name, content in (
        ("_config.json", b'{"study": "maps"}'),
        ("_config.json", None),
        ("_skipped-000000000.jsonl", b"{\n"),
        ("_skipped-000000000.jsonl", b'{"row": 1}\n'),
        ("part-000000000.parquet", b"PAR1"),
        ("part-000000002.parquet", None),
    ):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
        with pytest.raises(tl.InputError, match=name):
            run(model, *options)
        (folder / name).rmdir() if content is None else (folder / name).unlink()
        (folder / name).write_bytes(kept)
    assert run(model, *options)["maps"] == 2


@pytest.mark.parametrize("kind", ["csv", "txt", "parquet", "folder"])
@pytest.mark.filterwarnings("ignore")
def test_every_kind_of_file(model, kind, tmp_path):
    datasets = pytest.importorskip("datasets")
    rows, data = datasets.Dataset.from_dict({"review": TEXTS[:3]}), tmp_path / f"data.{kind}"
    if kind == "txt":
        data.write_text("\n".join(TEXTS[:3]) + "\n", "utf-8")
    elif kind == "folder":
        rows.save_to_disk(data)
    else:
        getattr(rows, f"to_{kind}")(data)
    assert run(model, "--data", data, "--out", tmp_path / "maps")["maps"] == 3
    assert ["".join(row["tokens"]) for row in table(tmp_path / "maps")] == TEXTS[:3]


@pytest.mark.large  # as `studies/test_kills.py`, where no process imports torch for itself
def test_killed_at_random_and_started_again(model, data, tmp_path):
    options = ["--data", str(data), "--part-rows", "2", "--batch-size", "2", "--device", "cpu"]
    run(model, *options, "--out", tmp_path / "whole")
    whole = {path.name: path.read_bytes() for path in (tmp_path / "whole").glob("[!_]*")}
    folder, chance, killed = tmp_path / "killed", random.Random(0), 0
    command = [sys.executable, "-m", "tensorlens", "maps", model, *options, "--out", str(folder)]
    for n_parts in (1, 3, 4):
        process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while len(list(folder.glob("part-*"))) < n_parts and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.03)
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert killed >= 1
    run(model, *options, "--out", folder)
    assert {path.name: path.read_bytes() for path in folder.glob("[!_]*")} == whole
