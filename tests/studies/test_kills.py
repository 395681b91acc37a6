"""SIGKILL at random moments, over every study and `tensorlens maps`: the files end up the same, to the byte."""

from __future__ import annotations

import multiprocessing
import random
import re
import signal
import time
from pathlib import Path

import pytest
from killed_studies import STUDIES, child

ENDED_BY_KILL = -signal.SIGKILL
RESULTS = ("summary.json", "samples.jsonl")
PRELOADED = [
    "tensorlens.studies",
    "tokenizers",
    "matplotlib.figure",
    "transformers.models.bert.modeling_bert",
    "transformers.models.gpt_neox.modeling_gpt_neox",
    "transformers.models.llama.modeling_llama",
]
"""Imported once by the server that forks the processes, else every process would spend its time on it."""


def started(name: str, folder: Path):
    """A study in a process of its own, from the moment at which it begins."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(name, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    ours.recv()
    ours.close()
    return process


def timeless(content: bytes) -> bytes:
    """All but what judges measure by the clock."""
    return re.sub(rb'"seconds":\s*\{[^}]*\}', b"", content)


def finished(name: str, folder: Path) -> dict[str, bytes]:
    process = started(name, folder)
    process.join()
    assert process.exitcode == 0
    assert not list(folder.glob(".*.tmp")) and not list(folder.glob("samples.*.jsonl"))
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    kept = {file: timeless(found[file]) for file in found if file in RESULTS or file.startswith("part-")}
    assert len(kept) == (4 if name == "maps" else len(RESULTS))
    return kept


def kill_often(name: str, folder: Path, n_kills: int, seed: int = 0) -> None:
    """Kill a study `n_kills` times, at moments over its whole length, and compare what it ends with each time."""
    process, began = started(name, folder / "whole"), time.monotonic()
    process.join()
    seconds = time.monotonic() - began
    whole = finished(name, folder / "whole")
    draw, killed, number = random.Random(seed), 0, 0
    while killed < n_kills:
        process = started(name, folder / str(number))
        time.sleep(draw.random() * seconds)
        process.kill()
        process.join()
        killed += process.exitcode == ENDED_BY_KILL
        if (
            process.exitcode != ENDED_BY_KILL or draw.random() < 0.15
        ):  # there is little left to kill in a run that ended
            assert finished(name, folder / str(number)) == whole
            print(f"{name}: {killed} kills, {number + 1} runs, all the same", flush=True)
            number += 1
    assert finished(name, folder / str(number)) == whole


@pytest.mark.parametrize("name", STUDIES)
def test_a_killed_study_ends_with_the_same_files(tmp_path, name):
    kill_often(name, tmp_path, 3)


@pytest.mark.large
@pytest.mark.parametrize("name", STUDIES)
def test_two_hundred_kills_over_all_studies(tmp_path, name):
    kill_often(name, tmp_path, 40, seed=1)
