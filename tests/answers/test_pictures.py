"""Answers to prompts with pictures: sums, places of tokens in the picture, and a model that looks at one patch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from playwright.sync_api import expect
from tiny_study import lens_on
from typer.testing import CliRunner
from vision_language import PICTURE, SPECIAL, TALL, TYPES, WORDS, ask, ids, lens_of

import tensorlens as tl
from tensorlens.app import cli
from tensorlens.models.pictures import Looking, find_pictures

# A processor of transformers hands tensors to numpy in a way that it is told to leave.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

COUNTS = {"llava": 16, "qwen2.5-vl": 8, "gemma3": 4, "idefics3": 20, "smolvlm": 20, "paligemma": 16}
"""Tokens for a picture of 30 × 20."""


def total(found: tl.TokenMap) -> torch.Tensor:
    values = torch.tensor(found.meta["logit"], dtype=torch.float64)
    return found.scores.double().sum(1) + found.bias_share.double() * values - values


@pytest.mark.parametrize("name", TYPES)
def test_rows_sum_to_the_target_with_text_and_image_columns(name: str) -> None:
    answer = lens_of(name).answer(ask(PICTURE), ids("red", "cup"))
    (picture,) = answer.prompt.pictures
    assert len(picture.tokens) == COUNTS[name] and all(box is not None for box in picture.boxes)
    for groups in (None, "words", "tokens", {"regions": (2, 2)}, {"regions": {"left": (0, 0, 0.5, 1)}}):
        found = answer.map(groups, rows="tokens", target="logit")
        assert total(found).abs().max() < 1e-6  # the models compute norms in float32
    found = answer.map(rows="tokens")
    places = found.meta["pictures"][0]["places"]
    assert [found.in_tokens[place[0]] for place in places] == [label for label in found.in_tokens if "patch" in label]
    assert found.scores[:, [place[0] for place in places]].abs().max() > 1e-3
    pulled, pushed = (answer.map("words", "tokens", engine=engine).scores for engine in ("pulls", "pushes"))
    assert (pulled - pushed).abs().max() < 1e-6 * pulled.abs().max()


@pytest.mark.parametrize("name", TYPES)
def test_an_answer_is_what_the_model_generates(name: str) -> None:
    lens = lens_of(name)
    answer = lens.answer(ask(PICTURE), max_new_tokens=3)
    logits = lens.model(**answer.tensor.operator.recording.from_model("A test").inputs).logits[0]
    assert logits[list(answer.positions)].argmax(-1).tolist() == list(answer.ids)


@pytest.mark.parametrize("name", TYPES)
def test_several_pictures_have_their_own_tokens(name: str) -> None:
    prompt = ask(PICTURE, TALL)
    answer = lens_of(name).answer(prompt, ids("red"))
    first, second = answer.prompt.pictures
    assert not set(first.tokens) & set(second.tokens) and first.image != second.image
    alone = lens_of(name).answer(ask(PICTURE), ids("red")).prompt.pictures[0]
    assert first.boxes == alone.boxes
    assert total(answer.map()).abs().max() < 1e-6
    assert any(label.startswith("image 2: patch") for label in answer.map().in_tokens)


def test_a_wide_picture_is_merged_tiled_or_cropped() -> None:
    boxes = {name: lens_of(name).answer(ask(PICTURE), ids("red")).prompt.pictures[0].boxes for name in COUNTS}
    assert boxes["qwen2.5-vl"][5] == (0.25, 0.5, 0.5, 1.0)  # 2 × 4 after merging
    assert boxes["idefics3"][4] == (0.5, 0.0, 0.75, 0.25)  # the first of the second tile
    assert boxes["idefics3"][-4:] == ((0, 0, 0.5, 0.5), (0.5, 0, 1, 0.5), (0, 0.5, 0.5, 1), (0.5, 0.5, 1, 1))
    assert boxes["smolvlm"] == boxes["idefics3"]
    assert boxes["gemma3"][1] == (0.5, 0.0, 1.0, 0.5)
    assert boxes["llava"][0] == pytest.approx((1 / 6, 0.0, 1 / 3, 0.25))  # a square is cropped out of 3 : 2


def test_tiles_with_a_token_at_the_end_of_each_row() -> None:
    """As LLaVA-NeXT lays them out: its own code is the witness."""
    from types import SimpleNamespace

    from transformers.models.llava_next import modeling_llava_next as theirs

    pins = [[16, 32], [32, 16], [32, 32]]
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=16, patch_size=4), image_grid_pinpoints=pins)
    for height, width in ((20, 30), (30, 12), (16, 16)):
        tall, wide = theirs.get_anyres_image_grid_shape((height, width), pins, 16)
        kept = theirs.unpad_image(torch.zeros(1, tall * 4, wide * 4), (height, width))
        n = 16 + kept.shape[1] * (kept.shape[2] + 1)
        sizes = {"image_sizes": torch.tensor([[height, width]])}
        looking = Looking([Image.new("RGB", (width, height))], range(n), lambda *_: "", sizes, config, None)
        (picture,) = find_pictures(looking)
        ends = [k for k, box in enumerate(picture.boxes) if box is None]
        assert ends == [16 + kept.shape[2] + r * (kept.shape[2] + 1) for r in range(kept.shape[1])]
        assert picture.boxes[-2] == pytest.approx((1 - 1 / kept.shape[2], 1 - 1 / kept.shape[1], 1, 1))


@pytest.mark.parametrize("name", TYPES)
def test_a_box_is_where_the_pixels_of_its_token_are(name: str) -> None:
    """In a vision tower whose attention writes nothing, a change in the middle of a box changes that token most."""
    lens = lens_of(name)
    for path, module in lens.model.named_modules():
        if ("vision" in path or "visual" in path) and path.endswith(("self_attn.out_proj", "attn.proj")):
            module.weight.data.zero_()
            module.bias.data.zero_()
    picture = PICTURE.resize((300, 200))

    def seen(image: Any) -> tuple[Any, torch.Tensor]:
        answer = lens.answer(ask(image), ids("red"))
        (found,) = answer.prompt.pictures
        return found.boxes, answer.tensor.input[list(found.tokens)]

    boxes, plain = seen(picture)
    sizes = [round(box[2] - box[0], 6) for box in boxes]
    for k in range(0, len(boxes), 3):
        left, top, right, bottom = boxes[k]
        middle = [300 * (2 * left + right) / 3, 200 * (2 * top + bottom) / 3]
        end = [300 * (left + 2 * right) / 3, 200 * (top + 2 * bottom) / 3]
        changed = picture.copy()
        changed.paste((255, 0, 255), tuple(map(int, (*middle, *end))))
        moved = (seen(changed)[1] - plain).norm(dim=1)
        assert max((i for i, size in enumerate(sizes) if size == sizes[k]), key=lambda i: float(moved[i])) == k


# One patch decides ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TYPES)
def test_the_patch_that_decides_is_found(name: str) -> None:
    """A model set by hand: one patch alone has channel 0, and attention copies it into the logit of “red”."""
    lens = lens_of(name)
    model: Any = lens.model
    language = getattr(model.model, "language_model", None) or model.model.text_model
    with torch.no_grad():
        for path, weight in language.named_parameters():
            weight.fill_(float("norm" in path))
        layer = language.layers[0].self_attn
        layer.v_proj.weight[0, 0] = 1.0  # channel 0 of what is seen …
        layer.o_proj.weight[1, 0] = 1.0  # … is written into channel 1
        model.lm_head.weight.zero_()
        model.lm_head.weight[ids("red")[0], 1] = 1.0
    tokens = lens.answer(ask(PICTURE), ids("red")).prompt.pictures[0].tokens
    decides = tokens[len(tokens) // 2]

    def show(_: Any, args: Any, given: dict[str, Any]) -> Any:
        embeds = given["inputs_embeds"].clone()
        embeds[..., 0] = 0.0
        embeds[0, decides, 0] = 5.0
        return args, given | {"inputs_embeds": embeds}

    handle = language.register_forward_pre_hook(show, with_kwargs=True)
    try:
        found = lens.answer(ask(PICTURE), ids("red")).map("tokens", target="logit")
    finally:
        handle.remove()
    column = found.meta["pictures"][0]["places"][len(tokens) // 2][0]
    scores = found.scores[0]
    others = scores.abs().sum() - scores[column].abs()
    assert int(scores.abs().argmax()) == column and float(scores[column]) > 0.05 and float(others) < 1e-9
    assert float(scores[column]) == pytest.approx(found.meta["logit"][0], rel=1e-6)


# Ways in -------------------------------------------------------------------------------------------------------------


def test_what_a_processor_made_is_a_prompt() -> None:
    lens = lens_of("paligemma")
    made = lens.processor(text="<image> what is on the table ?", images=PICTURE, return_tensors="pt")
    answer = lens.answer(made, ids("red", "cup"))
    assert len(answer.prompt.pictures[0].tokens) == 16 and answer.prompt.pictures[0].image is None
    assert total(answer.map()).abs().max() < 1e-6


def test_messages_in_parts_without_pictures_are_texts() -> None:
    lens = lens_of("llava")
    answer = lens.answer(ask(), ids("red"))
    assert not answer.prompt.pictures and "what is on the table ?" in (answer.prompt.text or "")
    assert total(answer.map()).abs().max() < 1e-6
    plain = lens.answer([{"role": "user", "content": "what is on the table ?"}], ids("red"))
    assert plain.prompt.ids == answer.prompt.ids


def test_bad_input_is_answered_in_one_sentence(tmp_path: Path) -> None:
    lens, bare = lens_of("llava"), lens_of("gemma3")
    bare.processor.chat_template = None
    (tmp_path / "no.png").write_text("no picture")
    cases = [
        ("take text only", lens_on(), ask(PICTURE)),
        ("no chat template", bare, ask(PICTURE)),
        ("Found no image", lens, ask(tmp_path / "none.png")),
        ("cannot be read as an image", lens, ask(tmp_path / "no.png")),
        ("must be a PIL image", lens, ask("https://example.org/cat.png")),
        ("A part of a message is", lens, [{"role": "user", "content": [{"type": "sound"}]}]),
        ("A chat message is", lens, [{"content": [{"type": "text", "text": "a"}]}]),
    ]
    for said, one, prompt in cases:
        with pytest.raises(tl.InputError, match=said) as caught:
            one.answer(prompt, [1])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 320
    gemma, options = lens_of("gemma3"), {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 4}
    made = gemma.processor(text="<start_of_image> look", images=PICTURE, return_tensors="pt", **options)
    with pytest.raises(tl.InputError, match="Leave `do_pan_and_scan` out"):
        gemma.answer(made, ids("red"))
    answer = lens.answer(ask(PICTURE), ids("red"))
    for wrong in ((0, 2), {"sky": (0, 0, 2, 1)}, {"a": (0, 0, 1, 1), "b": (0, 0, 1, 1)}, "left"):
        with pytest.raises(tl.InputError, match="egions"):
            answer.map({"regions": wrong})


def test_a_folder_and_the_command(tmp_path: Path) -> None:
    lens = lens_of("llava")
    lens.model.float().save_pretrained(tmp_path / "model")
    lens.processor.save_pretrained(tmp_path / "model")
    PICTURE.save(tmp_path / "a.png")
    given = ["answer", str(tmp_path / "model"), "what is on the table ?", "--answer", "a red cup"]
    shown = CliRunner().invoke(cli.app, [*given, "--image", str(tmp_path / "a.png"), "--out", str(tmp_path / "a.html")])
    assert shown.exit_code == 0, shown.output
    page = (tmp_path / "a.html").read_text("utf-8")
    assert "data:image/jpeg" in page and '"places":[[' in page
    again = tl.TokenMap.load(lens.answer(ask(PICTURE), ids("red")).map().save(tmp_path / "a.json"))
    assert len(again.view().answer.pictures[0].places) == 16


def _opacity(tab: Any, place: list[float]) -> int:
    """How much a box covers of the picture, at its middle."""
    x, y = (int(224 * (place[k] + place[k + 2])) for k in (1, 2))
    read = f"node => node.getContext('2d').getImageData({x}, {y}, 1, 1).data[3]"
    return tab.locator(".pictures canvas").evaluate(read)


@pytest.mark.browser
def test_the_map_lies_over_the_picture_for_the_word_that_is_clicked(browser: Any, tmp_path: Path) -> None:
    answer = lens_of("idefics3").answer(ask(PICTURE), ids("red", "cup"))
    found = answer.map(rows="tokens")
    problems: list[str] = []
    tab = browser.new_page()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(found.save(tmp_path / "a.html").as_uri())
    expect(tab.locator(".pictures canvas")).to_have_count(1)
    row = found.scores[1]
    places = [place for place in found.meta["pictures"][0]["places"] if place[3] - place[1] < 0.3]  # tiles
    strongest = max(places, key=lambda place: abs(float(row[place[0]])))
    weakest = min(places, key=lambda place: abs(float(row[place[0]])))
    seen = []
    for k in range(2):
        tab.locator(".part").nth(k).click()
        seen.append([_opacity(tab, place) for place in (strongest, weakest)])
    assert seen[1][0] > seen[1][1] and seen[0] != seen[1]
    assert not problems
    tab.close()


def test_the_vocabulary_of_the_tiny_models_fits() -> None:
    assert len(SPECIAL + WORDS) <= 64
