"""Runs: interrupted anywhere, shared by several processes, the same summary to the byte."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tensorlens import studies
from tensorlens.errors import InputError, TensorLensError
from tensorlens.studies.processes import Processes
from tensorlens.studies.runs import Run

SETTINGS = {"data": "toy", "grid": [0.0, 0.1], "seed": 0}


def measure(index: int) -> dict[str, Any]:
    return {"value": index / 7, "text": "ü" * (index % 3)}


def summarise(records: list[dict[str, Any]]) -> dict[str, Any]:
    return {"n": len(records), "mean": sum(record["value"] for record in records) / len(records)}


def finish(folder: Path, n_samples: int = 20, processes: Processes | None = None) -> Run:
    run = Run(folder, "toy", SETTINGS, processes)
    work(run, n_samples)
    run.finish(n_samples, summarise)
    return run


def work(run: Run, n_samples: int, one: Callable[[int], dict[str, Any]] | None = None) -> None:
    """One sample at a time."""
    groups = [[index] for index in range(n_samples)]
    run.work(groups, lambda group: [(one or measure)(index) for index in group], progress=False)


def files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "summary.json").read_bytes(), (folder / "samples.jsonl").read_bytes()


def test_a_run_leaves_its_files(tmp_path: Path) -> None:
    run = finish(tmp_path / "deep" / "run")
    assert sorted(path.name for path in run.folder.iterdir()) == [
        "config.json",
        "samples.jsonl",
        "summary.json",
    ]
    assert run.config["settings"] == SETTINGS
    assert set(run.config["origin"]) == {"python", "platform", "device", "started"}
    assert [record["index"] for record in run.records()] == list(range(20))


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
        work(run, 20, fail_at_five)
    assert len(run.records()) == 5 and run.summary is None
    assert files(finish(tmp_path / "failed").folder) == files(finish(tmp_path / "whole").folder)


def test_any_number_of_processes_gives_the_same(tmp_path: Path) -> None:
    one = files(finish(tmp_path / "one").folder)
    shared = tmp_path / "shared"
    for rank in (2, 1):
        work(Run(shared, "toy", SETTINGS, Processes(rank=rank, count=3)), 20)
    finish(shared, processes=Processes(rank=0, count=3))
    assert files(shared) == one
    assert not list(shared.glob("samples.*.jsonl"))


def test_continued_with_another_number_of_processes(tmp_path: Path) -> None:
    one = files(finish(tmp_path / "one").folder)
    work(Run(tmp_path / "many", "toy", SETTINGS, Processes(rank=3, count=4)), 20)
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


def test_a_kill_in_the_middle_of_a_sample(tmp_path: Path) -> None:
    """The process stops by itself at a sample, so that the kill meets it there however busy the machine is."""
    script = tmp_path / "study.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys, time
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_runs
        plain, last = test_runs.measure, int(sys.argv[2])
        test_runs.measure = lambda index: time.sleep(3600) if index == last else plain(index)
        test_runs.finish(test_runs.Path(sys.argv[1]), 40)
        """)
    )
    killed = tmp_path / "killed"
    command = [sys.executable, str(script), str(killed)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for last in (3, 11):
        process = subprocess.Popen([*command, str(last)], env=environment)
        while _n_lines(killed / "samples.jsonl") < last:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (killed / "summary.json").exists()
    subprocess.run([*command, "-1"], check=True, env=environment)
    assert files(killed) == files(finish(tmp_path / "whole", 40).folder)


# Groups --------------------------------------------------------------------------------------------------------------


GROUPS = [[4, 0], [3, 1], [2]]


def in_groups(folder: Path, processes: Processes | None = None, seen: list[list[int]] | None = None) -> Run:
    """What is measured depends on the company of a sample."""

    def measure_group(group: Sequence[int]) -> list[dict[str, Any]]:
        if seen is not None:
            seen.append(list(group))
        return [{"value": index + sum(group) / 10} for index in group]

    run = Run(folder, "toy", SETTINGS, processes)
    run.work(GROUPS, measure_group, progress=False)
    return run


def test_a_group_cut_short_is_measured_whole_and_written_once(tmp_path: Path) -> None:
    whole = in_groups(tmp_path / "whole")
    whole.finish(5, summarise)
    lines = {json.loads(line)["index"]: line for line in (whole.folder / "samples.jsonl").read_text().splitlines(True)}
    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "samples.jsonl").write_text(lines[4] + lines[0] + lines[3])
    seen: list[list[int]] = []
    run = in_groups(cut, seen=seen)
    assert seen == [[3, 1], [2]]
    assert sorted(json.loads(line)["index"] for line in (cut / "samples.jsonl").read_text().splitlines()) == [
        0,
        1,
        2,
        3,
        4,
    ]
    run.finish(5, summarise)
    assert files(cut) == files(whole.folder)


def test_groups_are_dealt_to_processes(tmp_path: Path) -> None:
    whole = in_groups(tmp_path / "whole")
    whole.finish(5, summarise)
    seen: list[list[int]] = []
    in_groups(tmp_path / "two", Processes(rank=1, count=2), seen)
    assert seen == [[3, 1]]
    in_groups(tmp_path / "two", Processes(rank=0, count=2)).finish(5, summarise)
    assert files(tmp_path / "two") == files(whole.folder)


# Damage --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"not json", "Expecting value"),
        (b'{"index": 3, "value": NaN}', "NaN is not JSON"),
        (b"\xff\xfe", "Expecting value"),
        (b"\0\0\0\0", "Expecting value"),
        (b"[3]", "Expected `object`, got `array`"),
        (b'{"value": 1.0}', "required field `index`"),
        (b'{"index": true, "value": 1.0}', "Expected `int`, got `bool`"),
        (b'{"index": 20, "value": 1.0}', "the index 20 is not one of the run's 20 samples"),
        (b'{"index": -1, "value": 1.0}', "Expected `int` >= 0"),
    ],
)
def test_a_line_that_is_no_sample_is_refused_with_its_place(tmp_path: Path, line: bytes, why: str) -> None:
    whole, damaged = finish(tmp_path / "whole").folder, tmp_path / "damaged"
    damaged.mkdir()
    lines = (whole / "samples.jsonl").read_bytes().splitlines(keepends=True)
    (damaged / "samples.jsonl").write_bytes(b"".join([*lines[:3], line + b"\n", *lines[4:]]))
    with pytest.raises(InputError, match=rf"samples\.jsonl', line 4: .*{why}.*Remove the line"):
        finish(damaged)
    (damaged / "samples.jsonl").write_bytes(b"".join([*lines[:3], *lines[4:]]))
    finish(damaged)
    assert files(damaged) == files(whole)


def test_records_are_counted_by_their_index(tmp_path: Path) -> None:
    """A sample of another run does not stand in for one of this one."""
    (tmp_path / "samples.jsonl").write_text('{"index": 2, "value": 5.0}\n')
    with pytest.raises(InputError, match="the index 2 is not one of the run's 2 samples"):
        work(Run(tmp_path, "toy", SETTINGS), 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b'{"study": "toy",\n "settings": {', "Expecting"), (b"\xff", "byte 0xff"), (b"[]\n", "Expected `object`")],
)
def test_a_config_that_cannot_be_read_says_where_and_how_to_go_on(tmp_path: Path, content: bytes, why: str) -> None:
    whole = files(finish(tmp_path / "whole").folder)
    run = finish(tmp_path / "run").folder
    (run / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=rf"config\.json.*{why}.*delete config\.json"):
        finish(run)
    (run / "config.json").unlink()
    assert files(finish(run).folder) == whole


@pytest.mark.parametrize("field", ["study", "settings", "versions", "origin"])
@pytest.mark.parametrize("value", [None, 3])
def test_a_config_with_wrong_fields_is_answered_in_a_sentence(tmp_path: Path, field: str, value: int | None) -> None:
    config = finish(tmp_path).folder / "config.json"
    document = json.loads(config.read_text())
    config.write_text(json.dumps({key: one for key, one in document.items() if key != field} | {field: value}))
    with pytest.raises(InputError, match=rf"config\.json.*`{field}`|config\.json.*\$\.{field}"):
        finish(tmp_path)


def test_samples_with_wrong_fields_are_answered_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"index": 1, "other": 5.0}\n')
    with pytest.raises(InputError, match=r"samples of a toy study.*other fields \(KeyError: 'value'\)"):
        finish(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "samples.jsonl", "summary.json"])
def test_a_folder_in_the_place_of_a_file_is_answered_in_a_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(TensorLensError, match=rf"{name}.*irectory|folder.*{name}"):
        finish(tmp_path)


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    run = Run(tmp_path, "toy", SETTINGS | {"level": math.inf})
    work(run, 2, lambda index: {"value": math.nan, "deep": [{"x": -math.inf}]})
    run.finish(2, lambda records: {"mean": math.nan, "first": records[0]["value"]})
    assert run.summary == {"mean": None, "first": None}
    for path in tmp_path.iterdir():
        assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    Run(tmp_path, "toy", SETTINGS | {"level": math.inf})  # the same settings still


def test_half_a_character_is_kept(tmp_path: Path) -> None:
    """Such as in the name of a picture on a disk whose names are not UTF-8."""

    def report(run: Run, summary: dict[str, Any]) -> None:
        run.write_text("report.html", summary["first"])

    run = Run(tmp_path, "toy", SETTINGS)
    work(run, 1, lambda index: {"name": "caf\udce9.png"})
    run.finish(1, lambda records: {"first": records[0]["name"]}, report)
    assert run.summary == {"first": "caf\udce9.png"} and run.records() == [{"index": 0, "name": "caf\udce9.png"}]


@pytest.mark.skipif(sys.platform == "win32", reason="no limits of resources")
def test_a_full_disk_is_one_message_and_the_run_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "study.py"
    script.write_text(
        textwrap.dedent(f"""
        import resource, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        import test_runs
        from tensorlens.errors import TensorLensError
        resource.setrlimit(resource.RLIMIT_FSIZE, (1500, 1500))  # no file may grow beyond; config.json fits
        try:
            test_runs.finish(test_runs.Path(sys.argv[1]), 200)
        except TensorLensError as error:
            sys.exit(str(error))
        """)
    )
    full = tmp_path / "full"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, script, full], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 1 and len(ended.stderr.splitlines()) == 1
    assert "samples.jsonl: File too large" in ended.stderr and "continues where it stopped" in ended.stderr
    assert 0 < _n_lines(full / "samples.jsonl") < 200
    assert files(finish(full, 200).folder) == files(finish(tmp_path / "whole", 200).folder)


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".summary.json.1.tmp").write_text("{")
    finish(tmp_path)
    assert not list(tmp_path.glob(".*"))


def _n_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def test_every_public_name_of_studies_is_where_it_is_said_to_be():
    for name in studies._WHERE:
        assert getattr(studies, name).__name__ == name
