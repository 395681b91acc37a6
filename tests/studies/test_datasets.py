"""Samples from files, lists and the `datasets` library."""

from __future__ import annotations

import sys

import pytest

import tensorlens as tl
from tensorlens.errors import InputError
from tensorlens.studies.datasets import RowFile, read_dataset


def test_data_comes_from_files_lists_and_the_library(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text('id,sentiment,review\n1,0,"one, two"\n2,1,three\n')
    (tmp_path / "a.jsonl").write_text('{"text": "one, two", "label": 0}\n{"text": "three", "label": 1}\n')
    (tmp_path / "a.txt").write_text("one, two\n\nthree\n")
    found = [read_dataset(tmp_path / name) for name in ("a.csv", "a.jsonl", "a.txt")]
    assert [data.items for data in found] == [("one, two", "three")] * 3
    assert len({data.fingerprint for data in found}) == 1
    with pytest.raises(InputError, match="Name the column"):
        read_dataset(tmp_path / "a.csv", column="body")
    with pytest.raises(InputError, match="does not exist"):
        read_dataset(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="does not exist"):
        RowFile(tmp_path / "absent.csv")
    with pytest.raises(InputError, match="--column"):
        RowFile(tmp_path / "a.csv", "body")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="found none"):
        read_dataset(tmp_path / "empty")
    rows = [{"text": "one, two", "label": 0}, {"text": "three", "label": 1}]
    assert {read_dataset(some).fingerprint for some in (rows, iter(rows), ["one, two", "three"])} == {
        found[0].fingerprint
    }
    (tmp_path / "marked.csv").write_bytes("\ufefftext,label\none,0\n".encode())
    assert read_dataset(tmp_path / "marked.csv").items == ("one",)
    (tmp_path / "odd.jsonl").write_text('{"label": 1}\n{"text": "a\u2028b"}\n', "utf-8")
    assert read_dataset(tmp_path / "odd.jsonl").items == ("", "a\u2028b")
    (tmp_path / "odd.txt").write_bytes("a\x85b\r\nc\n".encode())
    assert read_dataset(tmp_path / "odd.txt").items == ("a\x85b", "c")
    (tmp_path / "latin.csv").write_bytes("text\ncaf\xe9\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        read_dataset(tmp_path / "latin.csv")
    library = type(sys)("datasets")
    library.load_from_disk = lambda name: []  # type: ignore[attr-defined]
    library.load_dataset = lambda name, configuration, split: [{"text": f"{name} {configuration} {split}"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_dataset("owner/data:part", split="train").items == ("owner/data part train",)
    library.load_dataset = lambda *names, split: [][0]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="could not be loaded: IndexError"):
        read_dataset("nofile")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(tl.MissingExtraError, match="studies"):
        read_dataset("owner/data")
