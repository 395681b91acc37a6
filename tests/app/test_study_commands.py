"""`tensorlens perturb`, `relations` and `fidelity`: from the command to the run's folder and back to the terminal."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, lens_on
from typer.testing import CliRunner, Result

from tensorlens.app.cli import app
from tensorlens.studies.processes import hand_over

LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
ALONE = {name: value for name, value in os.environ.items() if name not in LAUNCHED} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> str:
    return saved(tiny_lens(), tmp_path_factory.mktemp("decoder"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    return saved(lens_on("bert"), tmp_path_factory.mktemp("encoder"))


def saved(lens, folder: Path) -> str:
    lens.model.float().save_pretrained(folder)
    lens.processor.save_pretrained(folder)
    return str(folder)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code != 0
    return " ".join(f"{result.output} {result.exception}".split())


def test_perturb_ranks_the_methods_and_refuses_to_mix_settings(encoder, tmp_path):
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS[:3]))
    command = ("perturb", encoder, "--data", data, "--out", tmp_path / "run", "--methods", "tensor.in_out,rollout.attn")
    first = run(*command)
    for word in ("3 samples measured", "tensor.in_out", "rollout.attn", "report.html"):
        assert word in first.output
    summary = json.loads(run(*command, "--json").stdout)
    assert summary["n_measured"] == 3
    assert "must not mix" in refused(*command, "--seed", "7")
    assert "`grid` such as" in refused(*command, "--grid", "a,b")


@pytest.mark.parametrize("wrong", [(), ("--replacement", "black")])
def test_several_processes_share_a_run_and_one_of_them_speaks(encoder, tmp_path, wrong):
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    command = ["perturb", encoder, "--data", str(data), "--methods", "tensor.in_out,rollout.attn", *wrong]
    shared = [sys.executable, "-m", "tensorlens", *command, "--out", str(tmp_path / "two"), "--processes", "2"]
    two = subprocess.run(shared, capture_output=True, text=True, env=ALONE, check=False)
    alone = [*command, "--out", tmp_path / "one", "--processes", "1"]
    if wrong:
        assert two.returncode == 2 and "Expected `replacements`" in refused(*alone)
        assert two.stderr.count("tensorlens: Expected `replacements`") == 1
        return
    assert two.returncode == 0, two.stderr
    assert [run(*alone).stdout.count("6 samples measured"), two.stdout.count("6 samples measured")] == [1, 1]
    assert (tmp_path / "two" / "summary.json").read_bytes() == (tmp_path / "one" / "summary.json").read_bytes()


def test_a_process_that_fails_alone_is_heard_and_ends_the_others(monkeypatch, capfd):
    """One of two is killed; the first would take an hour."""
    script = "import os, time; os.environ['RANK'] == '1' and os.kill(os.getpid(), 9); time.sleep(3600)"
    monkeypatch.setattr(sys, "argv", ["tensorlens"])
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        hand_over(2, ("-c", script))
    logging.disable(logging.NOTSET)
    assert ended.value.code == 1
    heard = capfd.readouterr().err
    assert (
        heard.startswith("tensorlens: process 1 of 2 ended with -9") and "run the same command again to resume" in heard
    )


def test_relations_counts_what_survives_and_names_what_does_not(decoder, tmp_path):
    write_relation(tmp_path / "data" / "commonsense" / "colours.json")
    write_relation(tmp_path / "data" / "commonsense" / "broken.json", prompt_templates=["no place for it"])
    options = ("--splits", "1", "--examples", "2", "--max-test", "3", "--starts", "0,1")
    result = run("relations", decoder, "--data", tmp_path / "data", "--out", tmp_path / "run", *options)
    assert "broken.json" in result.output and "{}" in result.output
    assert " | " not in result.output  # a table, not the source of one
    assert (tmp_path / "run" / "report.html").exists()
    again = run("relations", decoder, "--data", tmp_path / "data", "--out", tmp_path / "run", *options, "--json")
    assert set(json.loads(again.stdout)) >= {"survived", "left_out", "problems"}


def test_relations_says_what_starts_should_be(decoder, tmp_path):
    assert "`starts` such as 0" in refused(
        "relations", decoder, "--data", tmp_path, "--out", tmp_path / "run", "--starts", "one"
    )


def test_fidelity_prints_bounds_errors_and_properties(decoder, tmp_path):
    command = ("fidelity", decoder, "Red and blue", "--out", tmp_path / "run", "--directions", "1", "--stride", "2")
    result = run(*command)
    for word in ("norm", "tensor", "jacobian", "report.html"):
        assert word in result.output
    assert " | " not in result.output and "direction" in result.output
    summary = json.loads(run(*command, "--json").stdout)
    assert summary["holds"] and summary["properties"]
