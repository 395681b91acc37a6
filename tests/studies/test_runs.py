"""Runs: interrupted anywhere, shared by several processes, the same summary to the byte."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tensorlens.errors import InputError
from tensorlens.studies.runs import Processes, Run

SETTINGS = {"data": "toy", "grid": [0.0, 0.1], "seed": 0}


def measure(index: int) -> dict[str, Any]:
    return {"value": index / 7, "text": "ü" * (index % 3)}


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"n": len(records), "mean": sum(record["value"] for record in records) / len(records)}


def finish(folder: Path, n_samples: int = 20, processes: Processes | None = None) -> Run:
    run = Run(folder, "toy", SETTINGS, processes)
    run.work(n_samples, measure, progress=False)
    run.complete(n_samples, summarise)
    return run


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "summary.json").read_bytes(), (folder / "samples.jsonl").read_bytes()


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    run = finish(tmp_path / "deep" / "run")
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "config.json", "samples.jsonl", "sessions.jsonl", "summary.json",
    ]  # fmt: skip
    assert run.config["settings"] == SETTINGS
    assert set(run.config["origin"]) >= {"commit", "python", "device"}
    assert [record["index"] for record in run.records()] == list(range(20))
    session = json.loads((run.folder / "sessions.jsonl").read_text())
    assert session["samples"] == 20 and session["samples_per_second"] > 0


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    finish(tmp_path)
    with pytest.raises(InputError, match=r"seed is 0 there and 1 here.*another folder"):
        Run(tmp_path, "toy", SETTINGS | {"seed": 1})
    with pytest.raises(InputError, match="grid is"):
        Run(tmp_path, "toy", SETTINGS | {"grid": [0.0]})
    with pytest.raises(InputError, match="study is"):
        Run(tmp_path, "other", SETTINGS)


def test_a_cut_line_is_dropped(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    finish(whole)
    cut.mkdir()
    (cut / "config.json").write_bytes((whole / "config.json").read_bytes())
    text = (whole / "samples.jsonl").read_bytes()
    for end in (0, 1, 30, len(text) // 2, len(text) - 1):
        (cut / "samples.jsonl").write_bytes(text[:end])
        finish(cut)
        assert files(cut) == files(whole)


def test_an_exception_keeps_what_was_done(tmp_path: Path) -> None:
    def fail_at_five(index: int) -> dict[str, Any]:
        if index == 5:
            raise RuntimeError("boom")
        return measure(index)

    run = Run(tmp_path / "failed", "toy", SETTINGS)
    with pytest.raises(RuntimeError, match="boom"):
        run.work(20, fail_at_five, progress=False)
    assert len(run.records()) == 5 and run.summary is None
    assert files(finish(tmp_path / "failed").folder) == files(finish(tmp_path / "whole").folder)


def test_any_number_of_processes_gives_the_same(tmp_path: Path) -> None:
    one = files(finish(tmp_path / "one").folder)
    shared = tmp_path / "shared"
    for rank in (2, 1):
        Run(shared, "toy", SETTINGS, Processes(rank=rank, count=3)).work(20, measure, progress=False)
    finish(shared, processes=Processes(rank=0, count=3))
    assert files(shared) == one
    assert not list(shared.glob("samples.*.jsonl"))


def test_continued_with_another_number_of_processes(tmp_path: Path) -> None:
    one = files(finish(tmp_path / "one").folder)
    Run(tmp_path / "many", "toy", SETTINGS, Processes(rank=3, count=4)).work(20, measure, progress=False)
    assert files(finish(tmp_path / "many").folder) == one


def test_the_launcher_tells_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Processes.from_environment() == Processes(rank=1, count=2)
    for wrong in ("2", "x", "-1"):
        monkeypatch.setenv("RANK", wrong)
        with pytest.raises(InputError, match=f"RANK={wrong}, WORLD_SIZE=2"):
            Processes.from_environment()


def test_a_folder_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="Expected a folder for the run"):
        Run(tmp_path / "file", "toy", SETTINGS)


def test_a_kill_at_any_moment(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_runs
        plain = test_runs.measure
        test_runs.measure = lambda index: (time.sleep(0.02), plain(index))[1]
        test_runs.finish(test_runs.Path(sys.argv[1]), 40)
        """)
    )
    killed = tmp_path / "killed"
    command = [sys.executable, str(script), str(killed)]
    for n_before in (3, 11):
        process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
        while _n_lines(killed / "samples.jsonl") < n_before and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "summary.json").exists()
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert files(killed) == files(finish(tmp_path / "whole", 40).folder)


def _n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0
