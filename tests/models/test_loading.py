"""Loading: which class, which options, and what is said when it fails. Tiny random models, no network."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tensorlens.errors import LoadError, MissingExtraError
from tensorlens.models import loading, resolving
from tensorlens.models.loading import load_pretrained

TINY: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
BERT = transformers.BertConfig(vocab_size=20, max_position_embeddings=32, **TINY)
LLAMA = transformers.LlamaConfig(vocab_size=20, max_position_embeddings=32, num_key_value_heads=1, **TINY)
VIT = transformers.ViTConfig(image_size=8, patch_size=4, **TINY)


def save(model: transformers.PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "model",
    [
        transformers.BertModel(BERT),
        transformers.BertForMaskedLM(BERT),
        transformers.BertForSequenceClassification(BERT),
        transformers.LlamaForCausalLM(LLAMA),
        transformers.ViTForImageClassification(VIT),
    ],
    ids=lambda model: type(model).__name__,
)
def test_the_class_is_the_one_that_was_saved(model: transformers.PreTrainedModel, tmp_path: Path):
    loaded = load_pretrained(save(model, tmp_path), device="cpu")
    assert type(loaded.model) is type(model)
    assert loaded.processor is None
    assert loaded.name == str(tmp_path)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], value)


def test_pretraining_heads_become_masked_lm(tmp_path: Path):
    loaded = load_pretrained(save(transformers.BertForPreTraining(BERT), tmp_path), device="cpu")
    assert type(loaded.model) is transformers.BertForMaskedLM


def test_a_head_without_weights_is_left_out(tmp_path: Path):
    save(transformers.BertModel(BERT), tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    assert type(load_pretrained(tmp_path, device="cpu").model) is transformers.BertModel


def test_an_unknown_architecture_is_read_without_a_head(tmp_path: Path):
    save(transformers.BertForMaskedLM(BERT), tmp_path)
    edit(tmp_path / "config.json", architectures=["MyOwnBert"])
    assert type(load_pretrained(tmp_path, device="cpu").model) is transformers.BertModel


def test_missing_weights_are_never_random(tmp_path: Path):
    save(transformers.LlamaForCausalLM(LLAMA), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LoadError, match="layers.1.mlp.up_proj.weight.*random. Complete the checkpoint"):
        load_pretrained(tmp_path, device="cpu")


def test_a_tokenizer_beside_the_model_is_loaded(tmp_path: Path):
    from tensorlens.models.conversions import build_tokenizer

    save(transformers.BertForMaskedLM(BERT), tmp_path / "model")
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    build_tokenizer(vocabulary, ".", 32).save_pretrained(tmp_path / "model")
    loaded = load_pretrained(tmp_path / "model", device="cpu")
    assert loaded.processor is not None
    assert loaded.processor("ab")["input_ids"] == [2, 5, 6, 3]


def test_an_image_processor_beside_the_model_is_loaded(tmp_path: Path):
    save(transformers.ViTForImageClassification(VIT), tmp_path)
    settings = {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 8, "width": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    assert type(load_pretrained(tmp_path, device="cpu").processor).__name__ == "ViTImageProcessorPil"


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("kernel", ["somebody/kernels", "flash_attention_2"])
def test_a_configuration_names_no_kernels(tmp_path: Path, key: str, kernel: str):
    save(transformers.LlamaForCausalLM(LLAMA), tmp_path)
    edit(tmp_path / "config.json", **{key: kernel})
    assert load_pretrained(tmp_path, device="cpu").model.config._attn_implementation in ("eager", "sdpa")
    edit(tmp_path / "config.json", **{key: "eager"}, per_layer_config={"1": {key: kernel}})
    with pytest.raises(LoadError, match="config.json could not be read"):
        load_pretrained(tmp_path, device="cpu")


def test_precision_and_attention(tmp_path: Path):
    save(transformers.LlamaForCausalLM(LLAMA), tmp_path)
    assert load_pretrained(tmp_path, device="cpu").model.dtype == torch.float32
    loaded = load_pretrained(tmp_path, device="cpu", dtype="bfloat16", attention="eager")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.model.config._attn_implementation == "eager"
    assert load_pretrained(tmp_path, device="cpu", attention="sdpa").model.config._attn_implementation == "sdpa"


def test_device_map_places_the_model(tmp_path: Path):
    save(transformers.LlamaForCausalLM(LLAMA), tmp_path)
    assert load_pretrained(tmp_path, device_map={"": "cpu"}).model.device.type == "cpu"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "toaster"}, "cuda:1"),
        ({"device": "cuda:99"}, "GPUs"),
        ({"dtype": "float7"}, "bfloat16"),
        ({"dtype": torch.int64}, "floating"),
        ({"attention": "glance"}, "sdpa"),
        ({"device": "cpu", "device_map": "auto"}, "Drop one"),
        ({"device": ["cpu"]}, "names such as"),
        ({"revision": 5}, "branch, tag, commit"),
    ],
)
def test_unknown_options_name_the_known(options: dict, said: str):
    with pytest.raises(LoadError, match=said):
        load_pretrained("minilm", **options)


def test_device_map_without_accelerate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="studies"):
        load_pretrained("minilm", device_map="auto")


@pytest.mark.parametrize(
    ("typo", "near"),
    [
        ("minilmm", "minilm"),
        ("SmolLM2-135M", "smollm2-135m"),
        ("gemma3", "gemma3-270m"),
    ],
)
def test_near_names_are_suggested_without_asking_the_hub(typo: str, near: str):
    with pytest.raises(LoadError, match=f"'{near}'.*organisation/name"):
        load_pretrained(typo)


def test_a_model_is_not_a_name():
    with pytest.raises(LoadError, match=r"got Linear\. .*tensorlens\.Lens\(model, tokenizer\)"):
        loading.load_pretrained(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_an_old_name_of_the_hub_is_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    def nobody(self: Any, name: str, **_: Any) -> None:
        raise OSError(name)

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", nobody)
    with pytest.raises(LoadError, match="'gpt2' is not a folder here, and the hub could not be reached.*smollm2-135m"):
        load_pretrained("gpt2")


def test_names_without_an_organisation_are_never_asked_of_the_hub(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(LoadError, match="neither a bundled model nor a folder here.*organisation/name"):
        load_pretrained("something-else-altogether")


def test_a_hub_that_cannot_be_reached_is_asked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def unreachable(self: object, name: str, **options: object) -> None:
        asked.append((name, options))
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked again"))
    with pytest.raises(LoadError, match="is not a folder here, and the hub could not be reached") as caught:
        load_pretrained("someone/minilm")
    assert isinstance(caught.value.__cause__, OSError)
    assert "Did you mean 'minilm'" in str(caught.value)
    assert asked == [("someone/minilm", {"revision": None, "timeout": resolving.PATIENCE_SECONDS})]


def test_what_was_downloaded_is_read_when_the_hub_does_not_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    save(transformers.BertModel(BERT), tmp_path)

    def unreachable(*_: object, **__: object) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file, revision: str(tmp_path / file))
    loaded = load_pretrained("someone/something", device="cpu")
    assert loaded.name == "someone/something" and type(loaded.model) is transformers.BertModel


@pytest.mark.parametrize("pickled", [False, True])
def test_what_is_on_the_hub_is_downloaded_once_and_pickles_only_where_nothing_else_is(
    pickled: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    save(transformers.BertModel(BERT), tmp_path)
    weights = ["pytorch_model.bin"] if pickled else ["pytorch_model.bin", "model.safetensors", "onnx/model.onnx"]
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision, [pattern for pattern in allow_patterns if "model*" in pattern]))
        return str(tmp_path)

    files = [SimpleNamespace(rfilename=name) for name in ("config.json", *weights)]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: SimpleNamespace(siblings=files))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_pretrained("someone/something", device="cpu", revision="v1").name == "someone/something"
    assert asked == [("someone/something", "v1", ["pytorch_model*.bin" if pickled else "*model*.safetensors"])]


def test_the_accelerator_that_torch_offers_is_the_default(monkeypatch: pytest.MonkeyPatch):
    for found, expected in ((torch.device("mps"), "mps"), (torch.device("xpu", 1), "xpu"), (None, "cpu")):
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available, found=found: found)
        assert loading.chosen_device(None).type == expected
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert loading.chosen_device("mps") == torch.device("mps")
    with pytest.raises(LoadError, match="torch sees 0 GPUs of this kind"):
        loading.chosen_device("cuda")


@pytest.mark.parametrize("path", ["./nowhere", "nowhere/", "/no/such/folder", "~/nowhere-at-all", Path("nowhere")])
def test_a_path_is_not_looked_up_on_the_hub(path: str | Path):
    with pytest.raises(LoadError, match="folder was expected"):
        load_pretrained(path)


def test_folders_that_are_not_whole(tmp_path: Path):
    with pytest.raises(LoadError, match=r"config\.json"):
        load_pretrained(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"some\.gguf"):
        load_pretrained(tmp_path)
    BERT.save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="contains weights"):
        load_pretrained(tmp_path)


def test_a_config_that_cannot_be_read(tmp_path: Path):
    save(transformers.BertModel(BERT), tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(LoadError, match=r"config\.json could not be read"):
        load_pretrained(tmp_path)


def test_gguf_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    with pytest.raises(LoadError, match="there is none"):
        load_pretrained(file)
    file.write_bytes(b"<html>")
    with pytest.raises(LoadError, match="begins with"):
        load_pretrained(file)
    file.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(LoadError, match="could not be converted"):
        load_pretrained(file)
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"] == []


def test_transformers_is_as_loud_as_before(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    from transformers.utils import logging

    save(transformers.BertModel(BERT), tmp_path)
    edit(tmp_path / "config.json", architectures=["BertForMaskedLM"])
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    load_pretrained(tmp_path, device="cpu")
    with pytest.raises(LoadError):
        load_pretrained(tmp_path / "nowhere")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")
