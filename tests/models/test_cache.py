"""The cache of converted copies: once, whole or not at all, also with two processes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tensorlens.errors import LoadError
from tensorlens.models import conversions as cache
from tensorlens.models.foreign_files import foreign_reader


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_answer(target: Path) -> None:
    (target / "answer").write_text("42")


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_a_copy_is_made_once(folder: Path):
    calls = []

    def make(target: Path) -> None:
        calls.append(target)
        write_answer(target)

    first, second = cache.convert_once("key", make), cache.convert_once("key", make)
    assert first == second == folder / "key"
    assert (first / "answer").read_text() == "42"
    assert len(calls) == 1


def test_a_failure_leaves_nothing_and_the_next_attempt_works(folder: Path):
    def fail(target: Path) -> None:
        write_answer(target)
        raise ValueError("disk of cheese")

    with pytest.raises(ValueError, match="cheese"):
        cache.convert_once("key", fail)
    assert copies(folder) == []
    assert (cache.convert_once("key", write_answer) / "answer").exists()


def test_what_a_killed_process_left_is_replaced(folder: Path):
    half = folder / ".key.partial"
    half.mkdir(parents=True)
    (half / "half").write_text("4")
    done = cache.convert_once("key", write_answer)
    assert copies(folder) == ["key"]
    assert [file.name for file in done.iterdir()] == ["answer"]


def test_two_processes_make_one_copy(folder: Path, tmp_path: Path):
    log = tmp_path / "log"
    program = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from tensorlens.models.conversions import convert_once

        def make(target):
            with Path({str(log)!r}).open("a") as stream:
                stream.write("made\\n")
            (target / "part1").write_text("1")
            time.sleep(0.5)
            (target / "part2").write_text("2")

        print(*sorted(file.name for file in convert_once("key", make).glob("part*")))
        """
    )
    command = [sys.executable, "-c", program]
    runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    assert [run.communicate(timeout=60)[0].split() for run in runs] == [["part1", "part2"]] * 2
    assert log.read_text() == "made\n"
    assert copies(folder) == ["key"]


def test_a_cache_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "file"))
    with pytest.raises(LoadError, match="TENSORLENS_CACHE"):
        cache.convert_once("key", write_answer)


def test_the_key_follows_the_content(tmp_path: Path):
    file = tmp_path / "weights"
    file.write_bytes(bytes(5_000_000))
    key = cache.cache_key("My Model!", [file])
    assert key.startswith("my-model-")
    content = bytearray(5_000_000)
    content[4_999_999] = 1
    file.write_bytes(content)
    assert cache.cache_key("My Model!", [file]) != key


def test_two_files_of_one_size_and_date_are_told_apart(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    for file, byte in ((first, 0), (second, 1)):
        content = bytearray(5_000_000)
        content[100_000] = byte
        file.write_bytes(content)
        os.utime(file, (1, 1))
    assert cache.cache_key("m", [first]) != cache.cache_key("m", [second])


def test_the_date_alone_changes_nothing(tmp_path: Path):
    file = tmp_path / "weights"
    file.write_bytes(b"abc")
    before = cache.cache_key("m", [file])
    os.utime(file, (1, 1))
    assert cache.cache_key("m", [file]) == before


def test_the_version_of_a_package_stands_for_its_files(tmp_path: Path):
    missing = [tmp_path / "never read"]
    assert cache.cache_key("m", missing, version="1.0") != cache.cache_key("m", missing, version="1.1")


def test_a_link_in_the_place_of_a_partial_copy_is_said(folder: Path, tmp_path: Path):
    """What it leads to belongs to somebody else."""
    folder.mkdir()
    (tmp_path / "theirs").write_text("keep")
    (folder / ".key.partial").symlink_to(tmp_path)
    with pytest.raises(LoadError, match="TENSORLENS_CACHE"):
        cache.convert_once("key", write_answer)
    assert (tmp_path / "theirs").read_text() == "keep"


class Full(Exception):
    """As safetensors says it: in words only."""


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), Full("No space left on device")])
def test_a_full_disk_is_said_and_leaves_nothing(folder: Path, error: Exception):
    def fill(target: Path) -> None:
        write_answer(target)
        with foreign_reader(lambda said: f"the file is damaged: {said}"):
            raise error

    with pytest.raises(LoadError, match="is not writable .*No space left.*Make room.*TENSORLENS_CACHE"):
        cache.convert_once("key", fill)
    assert copies(folder) == []


def test_a_copy_that_is_a_file_is_said(folder: Path):
    folder.mkdir()
    (folder / "key").write_text("not a folder")
    with pytest.raises(LoadError, match="TENSORLENS_CACHE"):
        cache.convert_once("key", write_answer)
    assert (folder / "key").read_text() == "not a folder"


def test_the_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORLENS_CACHE", raising=False)
    assert cache.cache_folder().name == "tensorlens"
    monkeypatch.setenv("TENSORLENS_CACHE", "/mine")
    assert cache.cache_folder() == Path("/mine")
