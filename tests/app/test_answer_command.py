"""`tensorlens answer`, as a stranger would use it."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app import cli

runner = CliRunner()
PROMPT = "The cat sat. It was dark! Who sat there?"


def test_a_given_answer_in_the_terminal_in_a_file_and_for_scripts(folder, tmp_path):
    path = tmp_path / "answer.json"
    command = ["answer", folder, PROMPT, "--answer", " A cat. Yes.", "--rows", "sentences"]
    shown = runner.invoke(cli.app, command)
    assert shown.exit_code == 0, shown.output
    assert "\nWhy “A cat. Yes.” after “" in shown.stdout and "Versions" not in shown.stdout
    assert "The answer: A cat. Yes." in shown.stdout and "the target; “T”, set aside, " in shown.stdout
    found = runner.invoke(cli.app, [*command, "--json", "--out", str(path), "--no-certify"])
    assert found.exit_code == 0, found.output
    content = json.loads(found.stdout)
    assert content["in_tokens"] == ["T", "The cat sat.", "It was dark!", "Who sat there?", "answer"]
    assert content["answer"]["text"] == " A cat. Yes." and len(content["answer"]["log_probabilities"]) == 12
    assert tl.TokenMap.load(path).scores.tolist() == content["scores"]


def test_a_generated_answer(folder):
    found = runner.invoke(cli.app, ["answer", folder, PROMPT, "--max-new-tokens", "2", "--no-certify", "--json"])
    assert found.exit_code == 0, found.output
    assert 1 <= len(json.loads(found.stdout)["answer"]["ids"]) <= 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--groups", "paragraphs"], "--groups"),
        (["--rows", "all"], "--rows"),
        (["--target", "logits"], "--target"),
        (["--answer", ""], "--answer"),
        (["--against", " x", "--rows", "words"], "--against"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--out", "answer.txt"], "--out"),
    ],
)
def test_mistakes_are_answered_before_a_model_is_loaded(options, words, monkeypatch):
    monkeypatch.setattr(cli.sys, "argv", ["tensorlens", "answer", "smollm2-135m", PROMPT, *options])
    monkeypatch.setattr("tensorlens.lens.load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2


def test_what_mistakes_say(capsys, monkeypatch):
    monkeypatch.setattr(cli.sys, "argv", ["tensorlens", "answer", "smollm2-135m", PROMPT, "--groups", "pages"])
    with pytest.raises(SystemExit):
        cli.main()
    assert "`--groups` must be one of tokens, words, sentences, lines; got 'pages'" in capsys.readouterr().err
