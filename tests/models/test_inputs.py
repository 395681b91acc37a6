"""What a user may pass, the labels it gets, and what is refused with which words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_study
import torch
from explorer_samples import Pixels
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from zoo import build, sample

import tensorlens as tl
from tensorlens.models.texts import patch_labels, token_labels


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level tokenizer whose vocabulary is the bytes, and the words of one sentence."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġcat", "Ġsat", "The"]
    vocabulary = {piece: index for index, piece in enumerate(["<pad>", "<s>", *words, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", unk_token="<pad>")


def test_text_ids_embeddings_and_processor_output_are_one_input(byte_level):
    model: Any = build("gpt2")
    lens = tl.Lens(model, byte_level)
    T = lens("The cat sat")
    assert T.tokens == ("The", " cat", " sat")
    ids = [4, 2, 3]
    embeddings = model.get_input_embeddings()(torch.tensor(ids)).detach()
    for same in (
        ids,
        np.array(ids),
        torch.tensor(ids),
        {"input_ids": torch.tensor([ids])},
        embeddings,
        embeddings[None],
    ):
        assert torch.equal(lens(same).output, T.output)
    assert lens(embeddings).tokens == ("0", "1", "2")
    assert lens(ids).tokens == T.tokens
    assert [found.tokens for found in lens(["The cat", "The cat sat"])] == [("The", " cat"), T.tokens]


def test_labels_show_special_tokens_word_pieces_and_bytes(byte_level):
    pieces = byte_level.convert_tokens_to_ids(["<s>", "Ġcat", "â", "Ĥ", "a"])
    assert token_labels(pieces, byte_level) == ("<s>", " cat", "⟨E2⟩", "⟨82⟩", "a")
    assert patch_labels(6, 2, 2, ("[CLS]", "[DIST]")) == (
        "[CLS]",
        "[DIST]",
        "patch 0,0",
        "patch 0,1",
        "patch 1,0",
        "patch 1,1",
    )
    assert patch_labels(7, 2, 2)[:3] == ("[CLS]", "[REG1]", "[REG2]")


def test_image_labels_and_grid():
    T = tl.Lens(build("deit-distilled"))(sample("deit-distilled"))
    assert T.tokens == ("[CLS]", "[DIST]", "patch 0,0", "patch 0,1", "patch 1,0", "patch 1,1")
    assert T.map("tensor.in_out", out_token=0).meta["grid"] == {"rows": 2, "columns": 2, "first": 2}


TEXT_ERRORS = {
    "empty text": (" \n", "has no words"),
    "too long": ([5] * 41, "at most 40 tokens; got 41"),
    "no ids": ([], "at least one token"),
    "id out of range": ([1, 60], "0 to 59.*got 60"),
    "negative id": ([-1], "got -1"),
    "an id past all numbers": ([1, 10**30], "got 1000"),
    "truths": ([True, False], "whole numbers; got torch.bool"),
    "a tensor of truths": (torch.tensor([True, False]), "whole numbers; got torch.bool"),
    "bytes": (b"cat", "got bytes"),
    "embeddings too narrow": (torch.zeros(7, 15), r"\(token, 16\); got \(7, 15\)"),
    "embeddings of one axis": (torch.zeros(16), r"\(token, 16\)"),
    "embeddings of whole numbers": (torch.zeros(7, 16, dtype=torch.long), "floating-point"),
    "embeddings with NaN": (torch.full((7, 16), torch.nan), "NaN or infinity"),
    "several samples": ({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}, None),
    "half of a character": ("a\ud800", "surrogate"),
    "something else": (object(), "Expected a text"),
    "image for a text model": ("cat.png", "no image at|takes no pixels"),
}


@pytest.mark.parametrize("case", [name for name in TEXT_ERRORS if name != "several samples"])
def test_bad_input_is_refused_by_name(case, byte_level, unchecked):
    value, words = TEXT_ERRORS[case]
    model: Any = build("gpt2")
    with pytest.raises(tl.InputError, match=words):
        tl.Lens(model, byte_level)(value)


def test_text_without_a_tokenizer(unchecked):
    with pytest.raises(tl.InputError, match="no tokenizer"):
        tl.Lens(build("gpt2"))("The cat")


@pytest.mark.parametrize("mode", ["RGB", "L", "RGBA"])
def test_an_image_as_numpy_gives_it_is_an_image(mode):
    image = Image.linear_gradient("L").resize((12, 10)).convert(mode)
    lens = tl.Lens(build("vit").float(), Pixels())
    torch.testing.assert_close(lens(np.asarray(image)).output, lens(image).output)
    floats = torch.zeros(3, 8, 8)
    assert torch.equal(lens(floats.numpy()).output, lens(floats).output), "numbers stay numbers"


_COLOURS = np.linspace(0, 1, 8 * 8 * 3).reshape(8, 8, 3)
NO_PIXELS = {
    "floats": (_COLOURS, "got float64 of shape (8, 8, 3)", "(255 * numpy.asarray(x)).astype('uint8')"),
    "a tensor": (torch.tensor(_COLOURS).float(), "float32 of", "(255 * numpy.asarray(x)).astype('uint8')"),
    "one sample": (_COLOURS[None], "(1, 8, 8, 3)", "(255 * numpy.asarray(x)[0]).astype('uint8')"),
    "grey": (_COLOURS[..., 0], "(8, 8)", "(255 * numpy.asarray(x)).astype('uint8')"),
    "bytes in a tensor": (torch.tensor(255 * _COLOURS).byte(), "uint8 of", "numpy.asarray(x)"),
    "bytes, colours first": (
        np.uint8(255 * _COLOURS.transpose(2, 0, 1)),
        "uint8",
        "numpy.asarray(x).transpose(1, 2, 0)",
    ),
}


@pytest.mark.parametrize("case", NO_PIXELS)
def test_an_array_that_is_no_image_is_refused_with_what_makes_it_one(case):
    x, came, advice = NO_PIXELS[case]
    lens = tl.Lens(build("vit").float(), Pixels())
    with pytest.raises(tl.InputError) as raised:
        lens(x)
    said = str(raised.value)
    assert "a PIL image, a uint8 array of shape (height, width, 3)" in said and "(3, height, width)" in said
    assert came in said and f"`{advice}`" in said
    made = eval(advice, {"numpy": np, "x": x})
    assert lens(made).output.shape == lens(torch.zeros(3, 8, 8)).output.shape, "what it advises is taken"


def test_an_array_of_a_shape_that_no_image_has_is_refused():
    with pytest.raises(tl.InputError, match=r"or \(1, 3, height, width\); got float32 of shape \(4, 8, 9\)\.$"):
        tl.Lens(build("vit"))(torch.zeros(4, 8, 9))


def test_an_unreadable_image_is_refused(tmp_path):
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"not a picture")
    lens = tl.Lens(build("vit"))
    with pytest.raises(tl.InputError, match="cannot be read as an image"):
        lens(str(broken))
    with pytest.raises(tl.InputError, match="no image at"):
        lens(str(tmp_path / "absent.png"))


def test_targets_are_tokens_of_the_vocabulary(byte_level, unchecked):
    T = tl.Lens(build("gpt2"), byte_level)("The cat sat")
    assert T.map("tensor.in_class", -1, " cat").meta["target"] == " cat"
    assert T.map("tensor.in_class", -1, (" cat", " sat")).meta["target"] == " cat −  sat"
    with pytest.raises(tl.InputError, match="must be one token.*2 of them"):
        T.map("tensor.in_class", -1, "The cat")
    known = tiny_study.lens_on("llama")("the cat sat")
    with pytest.raises(tl.InputError, match="token of the vocabulary; 'Londinium' is not one"):
        known.map("tensor.in_class", -1, "Londinium")


def test_a_model_whose_blocks_cannot_be_found(unchecked):
    with pytest.raises(tl.TensorLensError, match="blocks"):
        tl.Lens(torch.nn.Linear(3, 3))(torch.randn(4, 3))
    with pytest.raises(tl.AnatomyError, match="absent.*transformer.h"):
        tl.Lens(build("gpt2"), blocks="transformer.blocks")
    with pytest.raises(tl.InputError, match="tensorlens.load"):
        tl.Lens("gpt2")  # type: ignore[arg-type]
    with pytest.raises(tl.InputError, match="freeze_gate, freeze_up, half"):
        tl.Rules(gate="both")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize(
    "given",
    [
        {"attention_mask": [[1, 1, 0, 1, 1]]},
        {"attention_mask": [[1, 1, 1, 1, 1]], "position_ids": [[0, 2, 4, 9, 10]]},
        {"position_ids": [[0, 2, 4, 9, 10]]},
        {"attention_mask": [[1, 0, 1, 1, 1]], "position_ids": [[0, 0, 1, 2, 3]]},
    ],
    ids=["a hole", "positions and a mask", "positions", "positions and a hole"],
)
def test_masks_and_positions_mean_what_they_mean_to_the_model(name, given):
    model: Any = build(name)
    inputs = {"input_ids": torch.tensor([[3, 5, 7, 9, 11]])} | {key: torch.tensor(v) for key, v in given.items()}
    T = tl.Lens(model)(inputs)
    with torch.no_grad():
        expected = model.base_model(**inputs).last_hidden_state[0]
    torch.testing.assert_close(T.output, expected, rtol=1e-5, atol=1e-6)


def test_a_label_is_taken_by_its_letters_and_never_by_chance(unchecked):
    from tensorlens.maps.targets import Classes

    classes = Classes(n_classes=4, labels={0: "A", 1: "a", 2: "crane", 3: "crane"})
    assert classes.index("a") == 1
    assert classes.index("A") == 0
    with pytest.raises(tl.InputError, match=r"2 classes are called 'crane'"):
        classes.index("crane")


class _Sum(torch.nn.Module):
    """Takes more than a state."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, x, y):
        return self.blocks[1](self.blocks[0](x)) + y


@pytest.mark.parametrize(
    ("model", "value"),
    [(_Sum(), torch.ones(3, 4)), (_Sum(), {"x": torch.ones(1, 3, 4)}), (torch.nn.Linear(4, 4), torch.ones(3, 4))],
)
def test_a_module_that_does_not_fit_is_told_what_is_needed(model, value):
    with pytest.raises(tl.TensorLensError, match="What is needed: blocks in a list of modules"):
        tl.Lens(model)(value)
