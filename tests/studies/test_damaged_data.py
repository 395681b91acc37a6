"""Damaged data of studies: a problem that is named, an error of ours, or rows that are read; never a raw traceback."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from bench.judges.compiled import compiled_programs
from bench.judges.pairs import patching_pairs
from bench.passages.items import needles
from damage import ALL, BYTES, SAMPLE, WORDS, Damage, cut, flip, refusals, splice
from tiny_language import write_relation
from tiny_study import WORDS as VOCABULARY
from tiny_study import lens_on

from tensorlens.studies.datasets import RowFile, read_dataset
from tensorlens.studies.judge_study import evidence, items_digest
from tensorlens.studies.relation_prompts import load_relations
from tensorlens.studies.runs import Run, as_line

ROWS = [
    {"prefix": "the cat sat on a", "good": "mat", "bad": "birds", "evidence": "cat"},
    {"prefix": "seven tall grey", "good": "houses", "bad": "fly", "evidence": "seven"},
]
NEEDLE = {"question": "where sat the cat?", "needles": ["the cat sat on houses."]}
TEXT: tuple[Damage, ...] = (flip, cut, splice)
SETTINGS = {"seed": 0, "methods": ["tensor.norm"]}


def lines(draw, content: bytes) -> bytes:
    """One line of JSON lines replaced."""
    rows = content.splitlines()
    place = draw.randrange(len(rows))
    rows[place] = draw.choice(WORDS)(draw, rows[place])
    return b"\n".join(rows) + b"\n"


def deep(draw, content: bytes) -> bytes:
    """Brackets in brackets, or a number of thousands of digits."""
    return draw.choice((b"[" * 100_000, b'{"a":' * 100_000, b"9" * 100_000))


# Files ----------------------------------------------------------------------------------------------------------------


def _csv(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("\n".join([",".join(rows[0]), *(",".join(row.values()) for row in rows)]) + "\n", "utf-8")


def _jsonl(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def _parquet(path: Path, rows: list[dict[str, str]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows * 50), path)


def _pairs(path: Path) -> None:
    _csv(
        path,
        [
            {
                "clean": "the cat and a mat saw the cat",
                "corrupted": "the cat and a mat saw the red",
                "corrupted_hard": "the cat and a mat saw the mat",
            }
        ],
    )


def _relation(path: Path) -> None:
    write_relation(path)


def _needles(path: Path) -> None:
    path.with_name("single.json").write_text(json.dumps([NEEDLE, NEEDLE]))
    sentences = (" ".join(VOCABULARY[k % len(VOCABULARY)] for k in range(i, i + 9)) for i in range(40))
    path.with_name("hay.txt").write_text(". ".join(sentences) + ".\n")


def _program(path: Path) -> None:
    """A program of one block that does nothing, with its outputs."""
    width, draw = 4, np.random.default_rng(0)
    weights = {"token_embed/embeddings": draw.standard_normal((3, width)), "pos_embed/embeddings": np.zeros((5, width))}
    shapes = {
        "attn/query": (width, 2),
        "attn/key": (width, 2),
        "attn/value": (width, 2),
        "attn/linear": (2, width),
        "mlp/linear_1": (width, 1),
        "mlp/linear_2": (1, width),
    }
    for name, shape in shapes.items():
        weights |= {
            f"transformer/layer_0/{name}/w": np.zeros(shape),
            f"transformer/layer_0/{name}/b": np.zeros(shape[1]),
        }
    np.savez(path.with_suffix(".npz"), **weights)
    about = {
        "program": "hist",
        "heads": 1,
        "layers": 1,
        "encoding": {"BOS": 0, "a": 1, "b": 2},
        "residual_labels": ["one", "tokens:a", "hist_1:1", "hist_1:2"],
        "output_is_categorical": True,
        "examples": [
            {
                "tokens": ["BOS", "a", "b"],
                "decoded": ["BOS", 1, 1],
                "transformer_output": weights["token_embed/embeddings"][[0, 1, 2]].tolist(),
            }
        ],
    }
    path.with_suffix(".json").write_text(json.dumps(about))


def _run(path: Path) -> None:
    run = Run(path.parent, "perturbation", SETTINGS)
    (path.parent / "samples.jsonl").write_text("".join(as_line({"index": k, "scores": [0.5, 1.0]}) for k in range(4)))
    run.write_text("summary.json", '{"mean": 0.5}')


# Readers --------------------------------------------------------------------------------------------------------------


def _read_rows(file: Path) -> None:
    rows = RowFile(file, "prefix")
    assert rows.digest and any(rows)


def _read_samples(file: Path) -> None:
    assert len(read_dataset(file, column="prefix")) > 0


def _read_set(file: Path) -> None:
    assert items_digest(evidence(lens_on("llama"), file.parent)[0])


def _read_run(file: Path) -> None:
    run = Run(file.parent, "perturbation", SETTINGS)
    assert all(0 <= record["index"] < 4 for record in run.records(4))
    assert run.summary is None or isinstance(run.summary, dict)


def _read_needles(file: Path) -> None:
    folder = file.parent
    assert needles(folder, folder / "hay.txt", (36,), 2, lambda text: len(text.split()))


FORMATS = {
    "relation": (_relation, "fruit.json", lambda file: load_relations(file.parent), (*WORDS, deep)),
    "evidence": (partial(_csv, rows=ROWS), "set.csv", _read_set, TEXT),
    "evidence lines": (partial(_jsonl, rows=ROWS), "set.jsonl", _read_set, (lines, lines, *TEXT, deep)),
    "pairs": (_pairs, "ioi.csv", lambda file: patching_pairs(lens_on("llama"), file.parent).about(), TEXT),
    "needles": (_needles, "single.json", _read_needles, (*WORDS, deep)),
    "hay": (_needles, "hay.txt", _read_needles, TEXT),
    "program": (_program, "hist.json", lambda file: compiled_programs(file.parent).about(), (*WORDS, deep)),
    "weights of a program": (_program, "hist.npz", lambda file: compiled_programs(file.parent).about(), BYTES),
    "rows": (partial(_csv, rows=ROWS), "rows.csv", _read_rows, TEXT),
    "row lines": (partial(_jsonl, rows=ROWS), "rows.jsonl", _read_rows, (lines, lines, *TEXT, deep)),
    "row columns": (partial(_parquet, rows=ROWS), "rows.parquet", _read_rows, BYTES),
    "samples": (partial(_csv, rows=ROWS), "data.csv", _read_samples, TEXT),
    "sample lines": (partial(_jsonl, rows=ROWS), "data.jsonl", _read_samples, (lines, *TEXT, deep)),
    "run": (_run, "config.json", _read_run, (*WORDS, deep)),
    "lines of a run": (_run, "samples.jsonl", _read_run, (lines, *TEXT, deep)),
    "summary of a run": (_run, "summary.json", _read_run, (*WORDS, deep)),
}
NAMES_PROBLEMS = {
    "relation",
    "evidence",
    "evidence lines",
    "pairs",
    "program",
    "weights of a program",
    "lines of a run",
}
"""What is wrong in these is told beside what could be used, and raised only where nothing could."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_data_are_refused_named_or_read(name: str, count: int, tmp_path: Path):
    make, file, read, damages = FORMATS[name]
    make(tmp_path / file)
    read(tmp_path / file)  # whole, it is read: otherwise nothing would be shown by refusing the others
    refused = refusals(name, count, tmp_path / file, damages, read)
    assert refused > 0 or name in NAMES_PROBLEMS


def test_a_whole_file_of_each_judge_gives_items(tmp_path: Path):
    """Otherwise nothing would be shown by reading the others."""
    lens, n_items = lens_on("llama"), {"evidence": 2, "pairs": 1, "program": 2}
    for name in n_items:
        make, file, _, _ = FORMATS[name]
        (tmp_path / name).mkdir()
        make(tmp_path / name / file)
    judges = [
        patching_pairs(lens, tmp_path / "pairs"),
        compiled_programs(tmp_path / "program"),
    ]
    found = [evidence(lens, tmp_path / "evidence"), *((one.items, one.problems) for one in judges)]
    assert [(len(items), problems) for items, problems in found] == [(n, ()) for n in n_items.values()]
