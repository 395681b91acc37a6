"""The command line, as a stranger would use it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner
from zoo import build

import tensorlens as tl
from tensorlens.app import cli, options
from tensorlens.app.inspect_commands import print_certificate
from tensorlens.app.maps_command import _check
from tensorlens.errors import InputError

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model on disk, without a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    model: Any = build("bert").float()
    model.save_pretrained(path)
    return str(path)


def test_every_command_has_help_with_an_example():
    names = [str(command.name) for command in cli.app.registered_commands]
    assert {"map", "check", "methods"} <= set(names)
    for name in names:
        found = runner.invoke(cli.app, [name, "--help"])
        assert found.exit_code == 0
        assert "Example: tensorlens" in " ".join(found.output.split())


def test_map_prints_json_for_scripts_and_writes_files(tmp_path):
    path = tmp_path / "map.json"
    found = runner.invoke(
        cli.app, ["map", "minilm", "A cat sat.", "--out-token", "0", "--blocks", "2:5", "--json", "--out", str(path)]
    )
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert content["in_tokens"] == ["[CLS]", "a", "cat", "sat", ".", "[SEP]"]
    assert content["meta"]["blocks"] == [2, 5]
    assert content["meta"]["certificate"]["passed"]
    assert tl.TokenMap.load(path).scores.tolist() == content["scores"]


def test_map_in_the_terminal_shows_tokens_and_certificate():
    found = runner.invoke(cli.app, ["map", "minilm", "A cat sat.", "--out-token", "0", "--heads", "0:1,2"])
    assert found.exit_code == 0, found.output
    for word in ("cat", "[CLS]", "Bias share", "Certificate"):
        assert word in found.stdout


def test_check_exits_by_its_verdict(folder, monkeypatch):
    found = runner.invoke(cli.app, ["check", folder, "--json"])
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    laws = {"value", "structure", "capture", "linearity", "adjoint", "completeness", "composition"}
    assert content["passed"] and set(content["errors"]) == laws
    said = runner.invoke(cli.app, ["check", folder]).stdout
    assert "exact and linear" in said

    from tensorlens.recording.tape import RULES

    monkeypatch.setitem(RULES, "layer_norm", RULES["clone"])
    failed = runner.invoke(cli.app, ["check", folder])
    assert failed.exit_code == 1
    assert "NOT CERTIFIED" in failed.stdout


def test_what_a_certificate_holds_back_is_printed(capsys):
    proved = tl.Lens(build("bert"))([5, 7, 9]).certificate()
    print_certificate(replace(proved, reservations=("block 3 passes nothing of its input on",)), "bert")
    assert "but: block 3 passes nothing" in capsys.readouterr().out


def test_mistakes_are_one_message_and_exit_code_two(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tensorlens", "map", "minlm", "A cat sat."])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "minilm" in message and "Traceback" not in message


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("map minilm The cat sat", "Put a text of several words in quotes."),
        ("map", "Missing argument 'MODEL'"),
        ("maps minilm", "Missing option '--data'"),
        ("answer minilm A --agianst B", "--against"),
        ("explore --port high", "valid integer"),
    ],
)
def test_a_command_that_cannot_be_read_is_answered_with_one_that_works(written, said):
    found = runner.invoke(cli.app, written.split())
    assert found.exit_code == 2
    mistake, example, help_line = found.stderr.splitlines()
    assert mistake.startswith("tensorlens: ") and said in mistake
    name = written.split()[0]
    assert example.startswith(f"Example: tensorlens {name} ") and help_line.endswith(f"{name} --help")


@pytest.mark.parametrize("option", ["--method", "--rules", "--words"])
def test_an_option_of_another_command_is_answered_with_that_command(option):
    said = runner.invoke(cli.app, ["explain", "minilm", "A cat", option]).stderr
    assert said.startswith(
        f"tensorlens: No such option: {option}. `tensorlens map` has it.\nExample: tensorlens explain"
    )


@pytest.mark.parametrize(
    ("typed", "line"),
    [(["The cat sat"], 'explain smollm2-135m "The cat sat"'), (["minilm", "The cat"], 'explain minilm "The cat"')],
)
def test_a_text_or_a_model_without_a_command_is_answered_with_one(typed, line):
    found = runner.invoke(cli.app, typed)
    assert str(found.exception) == f"Expected a command first: tensorlens {line}"


def test_mistakes_without_an_example():
    assert "requires an argument" in runner.invoke(cli.app, ["map", "minilm", "A", "--target"]).stderr
    assert "Did you mean 'explain'" in runner.invoke(cli.app, ["explian"]).stderr
    assert runner.invoke(cli.app, []).stdout.count("Usage") == 1


def test_the_name_of_a_text_file_is_not_a_text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "story.txt").write_text("Once upon a time")
    with pytest.raises(InputError, match="- < story.txt"):
        options.read_input("story.txt")
    assert options.read_input("other.txt") == "other.txt"


def test_a_place_that_cannot_be_written_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(InputError, match="can be written"):
        options.check_file(tmp_path / "map.html")


def test_maps_are_not_a_folder_with_the_name_of_a_file(tmp_path):
    (tmp_path / "old.parquet").touch()
    for name in ("maps.xlsx", "old.parquet"):
        with pytest.raises(InputError, match=r"\.csv or \.jsonl file, or a folder"):
            _check("tensor.in_class", "raise", tmp_path / name)
    for name in ("run-0.5", "maps.parquet"):
        _check("tensor.in_class", "raise", tmp_path / name)


def test_ranges_heads_and_targets_are_read_as_written():
    assert options.block_range("3:9") == (3, 9)
    assert options.block_range("3:") == (3, None)
    assert options.block_range("4") == (4, 5)
    assert options.head_choice(["3:0,2", "5:"]) == {3: [0, 2], 5: []}
    assert options.target_of(" Paris", " Rome") == (" Paris", " Rome")
    assert options.target_of("42", "#42") == ("42", 42) and options.target_of("#4a", None) == "#4a"
    for wrong in (
        lambda: options.block_range("a:b"),
        lambda: options.head_choice(["x"]),
        lambda: options.target_of(None, "b"),
    ):
        with pytest.raises(tl.InputError):
            wrong()


def test_the_version():
    found = runner.invoke(cli.app, ["--version"])
    assert found.exit_code == 0 and found.stdout.strip() == f"tensorlens {tl.__version__}"
