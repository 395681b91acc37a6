"""TransformerLens as a witness, in a place of its own: direct logit attribution, and the J-lens.

The packages lie in a folder that `make test-all` fills and that no other test sees.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.judges.run import judge
from tiny_language import tiny_lens, tokenizer
from tiny_study import lens_on

import tensorlens as tl

TEXT, POSITIVE, NEGATIVE = "The cat sat there. Who", 40, 41
PACKAGES = Path(os.environ.get("TRANSFORMER_LENS", Path(sys.prefix) / "transformer-lens"))
pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="TransformerLens is not there; `make test-all` installs it"),
]


def asked(script: str, lens: tl.Lens, folder: Path, *arguments: str) -> Any:
    """What a script says of a model, in a process of its own."""
    model: Any = lens.model
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    command = [sys.executable, str(Path(__file__).with_name(script)), str(folder), *arguments]
    environment = os.environ | {"PYTHONPATH": str(PACKAGES), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("model")
    return asked("transformer_lens_says.py", tiny_lens(), folder, TEXT, str(POSITIVE), str(NEGATIVE))


def test_direct_effects_are_its_direct_logit_attribution(said: dict[str, Any]) -> None:
    d = tiny_lens()(said["ids"]).components(-1, (POSITIVE, NEGATIVE), "direct")
    ours = dict(zip(map(str, d.labels), d.scores[:, -1].tolist(), strict=True))
    theirs = dict(zip(said["labels"], said["values"], strict=True))
    assert len(theirs) == 16
    for n in range(3):
        for h in range(4):
            assert ours[f"block {n}, attention head {h}"] == pytest.approx(theirs[f"L{n}H{h}"], rel=1e-4, abs=1e-5)
        assert ours[f"block {n}, feed-forward"] == pytest.approx(theirs[f"{n}_mlp_out"], rel=1e-4, abs=1e-5)
    assert ours["embedding"] == pytest.approx(theirs["embed"], rel=1e-4, abs=1e-5)


def test_by_the_jacobian_the_operator_of_a_corpus_is_its_j_lens(said: dict[str, Any]) -> None:
    model = tiny_lens().model
    lens = tl.Lens(model, tokenizer(), rules=tl.Rules.jacobian(include_final_norm=False))
    fitted = tl.CorpusTensor.fit(lens, [said["ids"]], outputs="later", skip_first=2, skip_last=1, progress=False)
    assert set(said["jacobians"]) == {"0", "1"}
    for layer, rows in said["jacobians"].items():  # the state that leaves a block enters the next
        torch.testing.assert_close(fitted.matrices[int(layer) + 1], torch.tensor(rows), rtol=1e-3, atol=1e-4)


def test_as_a_peer_it_judges_components_as_the_jacobians_member_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data" / "pairs").mkdir(parents=True)
    names = [("cat", "mat"), ("mat", "cat"), ("red", "green"), ("green", "red")]  # the model is right about some
    rows = [
        f"the {a} and a {b} saw the {a},the {a} and a {b} saw the tall,the {a} and a {b} saw the {b}" for a, b in names
    ]
    (tmp_path / "data" / "pairs" / "ioi.csv").write_text("\n".join(["clean,corrupted,corrupted_hard", *rows]))
    monkeypatch.setenv("PYTHONPATH", str(PACKAGES))
    lens = lens_on("llama")
    lens.model.float()
    methods = ("tensor.in_class@jacobian",)
    found = judge(
        lens,
        tmp_path / "data",
        tmp_path / "run",
        judges=["patching"],
        methods=methods,
        peers=["transformer_lens"],
        progress=False,
    )
    about = found["peers"]["transformer_lens"]
    assert "error" not in about and about["check"].startswith("the model's own logits") and about["n"] > 0
    by_method = found["judges"]["patching"]["measures"]["pearson"]["methods"]
    theirs, ours = by_method["transformer_lens"], by_method["patching@jacobian"]
    assert theirs["n"] == ours["n"] and theirs["mean"] == pytest.approx(ours["mean"], abs=1e-4)
    assert by_method["patching@paper"]["mean"] != pytest.approx(ours["mean"], abs=1e-3)


def test_circuits_recover_what_its_faithfulness_says(tmp_path: Path) -> None:
    """On the same edges and weights; `neox` has a key head for each head, which the package asks for."""
    lens = tiny_lens("neox")
    clean, corrupted = ([5, 6, 7, 8, 9, 10, 11], [5, 6, 30, 8, 9, 10, 11])
    circuit = tl.circuit(lens, clean, corrupted, (POSITIVE, NEGATIVE), progress=False)
    chosen = [circuit.select(share=share) for share in (0.1, 0.3, 0.6)]

    def name(component: Any) -> list[Any]:
        if component.block is None:
            return [component.kind]
        return ["mlp", component.block] if component.head is None else ["head", component.block, component.head]

    question = {
        "clean": clean,
        "corrupted": corrupted,
        "target": [POSITIVE, NEGATIVE],
        "circuits": [
            [[name(one.writers[b]), name(one.readers[r])] for r, b in one.kept.nonzero().tolist()]
            for one in chosen
            if one.kept is not None
        ],
    }
    (tmp_path / "question.json").write_text(json.dumps(question))
    theirs = asked("transformer_lens_judges.py", lens, tmp_path, str(tmp_path / "question.json"))
    ours = [found.selected[1] for one in chosen if (found := one.faithfulness((), progress=False)).selected]
    assert ours == pytest.approx(theirs, abs=1e-3)
    assert max(abs(one - 1) for one in ours) > 1e-2


def test_a_lens_fitted_here_opens_there_and_reads_the_same_words_and_back(tmp_path: Path) -> None:
    model = tiny_lens().model
    lens = tl.Lens(model, tokenizer(), rules=tl.Rules.jacobian(include_final_norm=False))
    ids = [0, *tokenizer()(TEXT)["input_ids"]]  # it puts a token at the start
    fitted = tl.CorpusTensor.fit(lens, [ids], outputs="later", skip_first=2, skip_last=1, progress=False)
    fitted.save(tmp_path / "ours.pt", format="jacobian-lens")
    paths = [str(tmp_path / "ours.pt"), TEXT, str(tmp_path / "theirs.pt")]
    said = asked("transformer_lens_reads.py", tiny_lens(), tmp_path, *paths)
    ours = tl.CorpusTensor.load(tmp_path / "ours.pt").read(lens(said["tokens"]), k=3)
    assert len(said["words"]) >= 2
    for layer in ("0", "1"):
        for token, words in enumerate(said["words"][layer]):
            assert words == [word.index for word in ours.corpus[int(layer) + 1][token]]
    theirs = tl.CorpusTensor.load(tmp_path / "theirs.pt")
    assert theirs.first == 1 and said["tokens"] == ids
    torch.testing.assert_close(theirs.matrices, fitted.matrices[1:], rtol=1e-3, atol=1e-4)
    back = theirs.read(lens(ids), k=3)
    assert [[w.name for w in token] for token in back.corpus[0]] == [
        [w.name for w in token] for token in ours.corpus[1]
    ]
