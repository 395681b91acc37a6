"""Damaged files of every format: an error of ours or a model, in bounded time and memory, never a raw traceback."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from damage import ALL, BYTES, MOST_BYTES, SAMPLE, WORDS, peak, refusals
from safetensors.torch import load_file

from tensorlens.errors import LoadError
from tensorlens.models import conversions, foreign_files
from tensorlens.models.bundled import BUNDLED, Installed
from tensorlens.models.conversions import convert_gguf, read_once
from tensorlens.models.loading import load_pretrained
from tensorlens.models.resolving import bundled_folder

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}

# Files ----------------------------------------------------------------------------------------------------------------


def _folder(path: Path, *, pickled: bool = False) -> Path:
    config = transformers.BertConfig(vocab_size=20, max_position_embeddings=32, **TINY)
    model = transformers.BertForMaskedLM(config)
    model.save_pretrained(path)
    if pickled:
        (path / "model.safetensors").unlink()
        torch.save(model.state_dict(), path / "pytorch_model.bin")
    vocabulary = path / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b"]))
    conversions.build_tokenizer(vocabulary, ".", 32).save_pretrained(path)
    return path


def _gguf(path: Path) -> Path:
    """A tiny Llama with a vocabulary of bytes."""
    import gguf

    rng, file = np.random.default_rng(0), path / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(2)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * len(tokens))
    writer.add_token_types([2, 3, 3, *([6] * 256)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    square = {
        "attn_q": (32, 32),
        "attn_k": (32, 32),
        "attn_v": (32, 32),
        "attn_output": (32, 32),
        "ffn_gate": (32, 32),
        "ffn_up": (32, 32),
        "ffn_down": (32, 32),
        "attn_norm": (32,),
        "ffn_norm": (32,),
    }
    shapes = {"token_embd": (len(tokens), 32), "output": (len(tokens), 32), "output_norm": (32,)}
    shapes |= {f"blk.{n}.{name}": shape for n in range(2) for name, shape in square.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _onnx(path: Path) -> Path:
    """Some names of a backbone, with little in them."""
    import onnx

    draw = np.random.default_rng(0)
    made = [
        onnx.numpy_helper.from_array(draw.standard_normal(shape).astype(np.float32), name)
        for name, shape in (
            ("backbone.layernorm.weight", (384,)),
            ("onnx::MatMul_1", (4, 4)),
            ("onnx::Concat_2", (1, 1, 384)),
            ("onnx::Reshape_3", (1, 4, 384)),
        )
    ]
    node = onnx.helper.make_node
    nodes = [
        node("MatMul", ["x", "onnx::MatMul_1"], ["y"], name="/backbone/encoder/layer.0/mlp/fc1/MatMul"),
        node("Concat", ["onnx::Concat_2"], ["z"], name="/backbone/embeddings/Concat", axis=1),
        node("Reshape", ["onnx::Reshape_3", "y"], ["w"], name="/backbone/embeddings/Reshape"),
    ]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "tiny", [], [], made)), path / "tiny.onnx")
    return path / "tiny.onnx"


def _read_folder(file: Path) -> None:
    load_pretrained(file.parent, device="cpu")


def _read_gguf(file: Path) -> None:
    convert_gguf("tiny", [file])


def _read_onnx(file: Path) -> None:
    bundled_folder(Installed(BUNDLED["dinov2-small-saliency"], (file,)))


def _read_bundled(file: Path) -> None:
    """As the bundled packages are read that hold a pickle."""
    bundled_folder(Installed(BUNDLED["antiberty"], (file.parent, file.parent / "vocab.txt")))


FORMATS = {
    "gguf": (_gguf, "tiny.gguf", _read_gguf, BYTES),
    "onnx": (_onnx, "tiny.onnx", _read_onnx, BYTES),
    "safetensors": (_folder, "model.safetensors", _read_folder, BYTES),
    "pickle": (lambda path: _folder(path, pickled=True), "pytorch_model.bin", _read_folder, BYTES),
    "bundled pickle": (lambda path: _folder(path, pickled=True), "pytorch_model.bin", _read_bundled, BYTES),
    "config": (_folder, "config.json", _read_folder, WORDS),
    "tokenizer": (_folder, "tokenizer.json", _read_folder, WORDS),
    "tokenizer config": (_folder, "tokenizer_config.json", _read_folder, WORDS),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.large)])
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_are_refused_or_read(name: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make, changed, read, damages = FORMATS[name]
    whole = tmp_path / "whole"
    whole.mkdir()
    make(whole)
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))

    def read_afresh(file: Path) -> None:
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        read(file)

    assert refusals(name, count, whole / changed, damages, read_afresh) > 0.1 * count


@pytest.mark.parametrize("name", ["gguf", "safetensors", "pickle"])
def test_files_that_are_whole_are_read(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Otherwise nothing would be shown by refusing the others."""
    make, file, read, _ = FORMATS[name]
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))
    make(tmp_path)
    before = (tmp_path / file).stat()
    read(tmp_path / file)
    assert (tmp_path / file).stat().st_size == before.st_size > 0


def test_the_header_of_a_gguf_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A large vocabulary takes a quarter of a minute to read, and transformers asks for it four times."""
    import gguf

    opened, usual = [], gguf.GGUFReader.__init__
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf.GGUFReader, "__init__", lambda self, path: (opened.append(path), usual(self, path))[1])
    before = gguf.GGUFReader
    file = _gguf(tmp_path)
    converted = convert_gguf("tiny", [file])
    assert opened == [file]
    assert gguf.GGUFReader is before
    usual_reader = gguf.GGUFReader(file)
    with read_once():
        assert gguf.GGUFReader(str(file)) is gguf.GGUFReader(file)
        for name, field in gguf.GGUFReader(file).fields.items():
            assert field.contents() == usual_reader.fields[name].contents()
        other = shutil.copy(file, tmp_path / "other.gguf")
        assert gguf.GGUFReader(other) is not gguf.GGUFReader(file)
    saved = load_file(converted / "model.safetensors")["model.norm.weight"]
    (norm,) = (one for one in usual_reader.tensors if one.name == "output_norm.weight")
    assert np.array_equal(saved.numpy(), norm.data)


# Bounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000; at most"),
        ({"text_config": {"n_layers": 10**6}}, "n_layers"),
        ({"num_labels": 10**10}, "num_labels"),
        ({"hidden_size": 2**20}, "parameters, but the weights have"),
        ({"vocab_size": 2**40}, "parameters, but the weights have"),
    ],
)
def test_sizes_out_of_proportion_are_refused_before_they_are_built(tmp_path: Path, changes: dict, said: str):
    _folder(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    before = peak()
    with pytest.raises(LoadError, match=said):
        load_pretrained(tmp_path, device="cpu")
    assert peak() - before < MOST_BYTES


def test_a_checkpoint_that_unpacks_to_far_more_is_refused(tmp_path: Path):
    _folder(tmp_path, pickled=True)
    with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(2**27))
    with pytest.raises(LoadError, match="unpacks to"):
        load_pretrained(tmp_path, device="cpu")


def test_code_in_a_pickle_does_not_run(tmp_path: Path):
    class Surprise:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "surprise"),)

    _folder(tmp_path, pickled=True)
    torch.save({"bert": Surprise()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadError, match="could not read the checkpoint"):
        load_pretrained(tmp_path, device="cpu")
    assert not (tmp_path / "surprise").exists()


def test_a_panic_of_a_parser_is_an_error_of_ours_and_an_interrupt_is_not():
    class Panic(BaseException):
        pass

    with (
        pytest.raises(LoadError, match="damaged: Panic: out of range"),
        foreign_files.foreign_reader("damaged: {}".format),
    ):
        raise Panic("out of range")
    for stop in (KeyboardInterrupt, SystemExit):
        with pytest.raises(stop), foreign_files.foreign_reader("damaged: {}".format):
            raise stop


def test_a_large_config_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(foreign_files, "MOST_JSON_BYTES", 10)
    _folder(tmp_path)
    with pytest.raises(LoadError, match="it is larger"):
        load_pretrained(tmp_path, device="cpu")
