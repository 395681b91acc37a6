"""Checkpoints with code of their own: tables that no file holds, no `post_init`, logits from one module; revisions."""

from __future__ import annotations

import pytest
import torch
from one_module_decoder import write_decoder
from tiny_language import save_tiny, tokenizer

import tensorlens as tl
from tensorlens.errors import LoadError

TEXT = "the cat sat"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "model"


def test_a_decoder_that_returns_logits_is_loaded_and_ends_before_its_unembedding(folder):
    saved = write_decoder(folder, tokenizer())
    lens = tl.load(str(folder), device="cpu", trust_remote_code=True)
    ids = torch.tensor([tokenizer()(TEXT)["input_ids"]])
    assert torch.equal(lens.model(ids).logits, saved(ids).logits)
    T = lens(TEXT)
    n, width = ids.shape[1], saved.config.width
    assert T.shape == (n, width, n, width)
    # F(X) by hand: what the unembedding reads.
    read = []
    hook = saved.decoder.to_words.register_forward_pre_hook(lambda module, taken: read.append(taken[0][0]))
    saved(ids)
    hook.remove()
    assert torch.allclose(T.output, read[0], atol=1e-5) and torch.allclose(T @ T.input + T.bias, read[0], atol=1e-4)
    assert T.certificate().passed
    found = T.map("tensor.in_class", out_token=-1)
    best = int(saved(ids).logits[0, -1].argmax())
    assert float(found.scores.sum()) == pytest.approx(float(saved(ids).logits[0, -1, best]), rel=1e-4)


def test_angles_stay_complex_and_weights_are_cast(folder):
    write_decoder(folder, tokenizer())
    model = tl.load(str(folder), device="cpu", dtype="bfloat16", trust_remote_code=True).model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {table.dtype for table in model.buffers()} == {torch.complex64}


def test_code_does_not_run_unless_it_is_trusted(folder):
    write_decoder(folder, tokenizer())
    with pytest.raises(LoadError, match=r"code of its own.* pass --trust-remote-code"):
        tl.load(str(folder), device="cpu")


def test_weights_that_are_missing_are_named(folder):
    from safetensors.torch import load_file, save_file

    write_decoder(folder, tokenizer())
    weights = load_file(folder / "model.safetensors")
    del weights["decoder.last.gain"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match=r"lacks decoder\.last\.gain"):
        tl.load(str(folder), device="cpu", trust_remote_code=True)


def test_a_revision_of_a_folder_is_a_checkpoint_in_it(tmp_path):
    save_tiny(tmp_path / "run" / "checkpoint-1", "llama")
    save_tiny(tmp_path / "run" / "checkpoint-2", "neox")
    kinds = [type(tl.load(str(tmp_path / "run"), revision=f"checkpoint-{n}").model).__name__ for n in (1, 2)]
    assert kinds == ["LlamaForCausalLM", "GPTNeoXForCausalLM"]
    with pytest.raises(LoadError, match=r"'checkpoint-3' .* Its checkpoints: checkpoint-1, checkpoint-2"):
        tl.load(str(tmp_path / "run"), revision="checkpoint-3")
    with pytest.raises(LoadError, match="has only one revision"):
        tl.load("minilm", revision="main")


def test_a_revision_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    place = cache / "models--some--model"
    (place / "refs").mkdir(parents=True)
    for commit, kind, name in (("a" * 40, "llama", "main"), ("b" * 40, "neox", "step1000")):
        save_tiny(place / "snapshots" / commit, kind)
        (place / "refs" / name).write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(cache))

    def nobody(*given, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", nobody)
    assert type(tl.load("some/model").model).__name__ == "LlamaForCausalLM"
    assert type(tl.load("some/model", revision="step1000").model).__name__ == "GPTNeoXForCausalLM"
    with pytest.raises(LoadError):
        tl.load("some/model", revision="step7")
