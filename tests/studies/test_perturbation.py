"""The perturbation study: what it replaces, what it measures, what it survives."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from tiny_study import METHODS, TEXTS, lens_on, study
from zoo import build

import tensorlens as tl
from tensorlens.errors import InputError, MethodError
from tensorlens.maps.methods import Method
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_study import measures
from tensorlens.studies.perturbation_study.forward import PlainModel
from tensorlens.studies.perturbation_study.run import perturbation
from tensorlens.studies.perturbation_study.subjects import Images, Texts, maskable
from tensorlens.studies.perturbation_study.summary import summarise

TINY = str(Path(__file__).parents[1] / "tiny_study.py")


# What is measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 7, 20, 126])
def test_the_number_replaced_is_the_fraction_rounded_up(n):
    masks = measures.masks_along(list(range(n)), n + 2, measures.GRID)
    assert masks.sum(1).tolist() == [math.ceil(n * percent / 100) for percent in (5, 10, 15, 20, 25, 30)]
    assert not masks[:, n:].any()
    assert bool((masks[1:] >= masks[:-1]).all())


def test_ties_go_by_position_and_signs_count_unless_told():
    scores = torch.tensor([0.0, 2.0, -3.0, 2.0])
    assert measures.ranking(scores, [0, 1, 2, 3], "most", absolute=False) == [1, 3, 0, 2]
    assert measures.ranking(scores, [0, 1, 2, 3], "most", absolute=True) == [2, 1, 3, 0]
    assert measures.ranking(scores, [3, 2, 0], "least", absolute=False) == [2, 0, 3]
    with pytest.raises(InputError, match="cannot be ranked"):
        measures.ranking(torch.tensor([0.0, math.nan]), [0, 1], "most", absolute=False)


def test_measures_by_hand():
    clean, moved = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 4.0], [1.0, 2.0]])
    assert measures.hidden_state_mse(clean, moved).tolist() == [2.0, 0.0]
    logits, others = torch.tensor([0.0, math.log(3)]), torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    assert measures.absolute_aopc(logits, others).tolist() == pytest.approx([0.5, 0.0])
    assert measures.auc([0.0, 1.0, 2.0], [0.0, 0.1, 0.3]) == pytest.approx((0.05 + 0.3) / 0.3)
    for grid in ([0.1, 0.2], [0.0], [0.0, 0.2, 0.2], [0.0, 1.5]):
        with pytest.raises(InputError, match="rising fractions"):
            measures.check_grid(grid)


def test_the_true_order_beats_random_on_a_linear_model():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20, 1, generator=generator).double() * torch.tensor([[1.0, -2.0, 0.5]]).double()

    def area(scores):
        masks = measures.masks_along(measures.ranking(scores, range(20), "most", absolute=False), 20, measures.GRID)
        outputs = (~masks).double() @ weights
        return measures.auc([0.0, *measures.hidden_state_mse(weights.sum(0), outputs).tolist()], measures.GRID)

    oracle = area(weights.norm(dim=1))
    assert all(oracle > area(torch.rand(20, generator=generator)) for _ in range(20))


# What is replaced ----------------------------------------------------------------------------------------------------


def test_special_tokens_and_the_last_of_a_decoder_are_protected():
    encoder = Texts(lens_on("bert"), read_dataset(TEXTS), n_tokens=16)
    sample = encoder.load(1)
    assert not encoder.is_causal
    assert maskable(sample, False, "strict") == [1, 2, 3, 4] == maskable(sample, False, "paper-like")
    decoder = Texts(lens_on("gpt2"), read_dataset(TEXTS), n_tokens=16)
    sample = decoder.load(1)
    assert decoder.is_causal
    assert maskable(sample, True, "strict") == [0, 1, 2]
    assert maskable(sample, True, "paper-like") == [0, 1, 2, 3]


@pytest.mark.parametrize("replacement", ["token", "zero", "mean", "attention", "delete"])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_copies_change_the_chosen_tokens_only(name, replacement):
    texts = Texts(lens_on(name), read_dataset(TEXTS), n_tokens=16)
    sample = texts.load(0)
    ids = sample.inputs["input_ids"][0]
    masks = torch.zeros(2, sample.n_tokens, dtype=torch.bool)
    masks[0, 2] = masks[1, 2] = masks[1, 4] = True
    groups = texts.copies(sample, masks, replacement)
    assert sorted(torch.cat([places for places, _ in groups]).tolist()) == [0, 1]
    if replacement == "delete":
        assert [inputs["input_ids"].shape for _, inputs in groups] == [(1, len(ids) - 1), (1, len(ids) - 2)]
        assert groups[0][1]["input_ids"][0].tolist() == [i for p, i in enumerate(ids.tolist()) if p != 2]
        return
    (_, inputs), *_ = groups
    if replacement == "token":
        assert inputs["input_ids"][0, 2] == 3
        assert torch.equal(inputs["input_ids"][~masks], ids.repeat(2)[~masks.flatten()])
    elif replacement == "attention":
        assert torch.equal(inputs["attention_mask"] == 0, masks)
    else:
        words = texts.lens.model.get_input_embeddings()(ids)
        expected = 0 * words[0] if replacement == "zero" else texts.lens.model.get_input_embeddings().weight.mean(0)
        torch.testing.assert_close(inputs["inputs_embeds"][masks], expected.expand(3, -1))
        torch.testing.assert_close(inputs["inputs_embeds"][0][~masks[0]], words[~masks[0]])


def test_windows_join_texts_and_leave_headings_out():
    texts = Texts(lens_on("gpt2"), read_dataset([*TEXTS, "= the heading ="]), n_tokens=8, cut="windows")
    assert {len(ids) for ids in texts.ids} == {8}
    joined = [i for ids in texts.ids for i in ids]
    assert joined == [i for text in TEXTS for i in texts.tokenizer(text)["input_ids"]][: len(joined)]


def test_a_fresh_encoder_is_no_decoder():
    """Whose first output hardly depends on one token of many."""
    torch.manual_seed(0)
    config = hf.BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, initializer_range=0.01
    )
    lens = tl.Lens(hf.BertModel(config).eval(), lens_on("bert").processor)
    assert not Texts(lens, read_dataset([" ".join(TEXTS * 4)]), n_tokens=128).is_causal


def test_where_positions_are_counted_from_the_mask_hiding_is_deleting_and_refused():
    torch.manual_seed(0)
    config = hf.BloomConfig(vocab_size=40, hidden_size=16, n_layer=2, n_head=2, initializer_range=0.5)
    texts = Texts(tl.Lens(hf.BloomForCausalLM(config).eval(), lens_on("gpt2").processor), read_dataset(TEXTS))
    with pytest.raises(InputError, match="counted from the attention mask.*Use that or"):
        texts.check(["token", "attention"])
    texts.check(["token", "delete"])
    Texts(lens_on("gpt2"), read_dataset(TEXTS)).check(["attention"])


@pytest.mark.parametrize("padding", [None, 3])
def test_a_decoder_that_classifies_is_read_at_its_last_token_whatever_that_is(padding):
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_labels=3,
        pad_token_id=padding,
    )  # fmt: skip
    model = hf.LlamaForSequenceClassification(config).eval()
    ids = torch.tensor([[5, 6, 7, 3], [5, 6, 3, 3]])
    found = PlainModel(tl.Lens(model)).run({"input_ids": ids}, -1)
    torch.testing.assert_close(found.logits, model.score(found.states).detach())
    assert model.config.pad_token_id == padding


def test_a_model_that_pads_by_itself_keeps_its_padding():
    config = hf.LongformerConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        attention_window=8, pad_token_id=0,
    )  # fmt: skip
    lens = tl.Lens(hf.LongformerForSequenceClassification(config).eval(), lens_on("bert").processor)
    assert PlainModel(lens).run({"input_ids": torch.tensor([[1, 5, 6, 7, 2]])}, 0).states.isfinite().all()


def test_deleting_everything_is_a_gap_that_says_why(tmp_path):
    result = study(tmp_path, "gpt2", presets=("paper-like",), replacements=("delete", "token"), grid=(0.0, 0.5, 1.0))
    deleted, replaced = (result.summary["conditions"][f"paper-like, {how}"] for how in ("delete", "token"))
    assert {gap["reason"].split(".")[0] for gap in deleted["missing"].values()} == {
        "To delete every token leaves no input"
    }
    assert "tensor.norm" in replaced["most"]["hs_mse"]["methods"]


def test_a_model_that_gives_no_number_is_skipped(tmp_path):
    lens = lens_on()
    with torch.no_grad():
        lens.model.get_input_embeddings().weight[7] = float("nan")  # "sat"
    result = perturbation(lens, ["the cat on a mat", "the cat sat"], tmp_path, methods=["control.recency"])
    assert (result.summary["n_measured"], result.summary["n_skipped"]) == (1, 1)


@pytest.fixture
def picture_folder(tmp_path):
    from PIL import Image

    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


def vision_lens(name="dinov2"):
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    return tl.Lens(build(name, dtype=torch.float32), processor, name=name)


def test_patches_become_black_before_normalisation(picture_folder):
    images = Images(vision_lens(), read_dataset(picture_folder))
    sample = images.load(0)
    assert (sample.n_tokens, sample.fixed) == (5, frozenset({0}))
    masks = torch.zeros(1, 5, dtype=torch.bool)
    masks[0, 2] = True  # the patch in the first row, second column
    ((_, inputs),) = images.copies(sample, masks, "black")
    before, after = sample.inputs["pixel_values"][0], inputs["pixel_values"][0]
    assert torch.allclose(after[:, :4, 4:], torch.tensor([-0.5 / 0.2, -0.4 / 0.3, -0.3 / 0.4])[:, None, None])
    assert torch.equal(after[:, :, :4], before[:, :, :4]) and torch.equal(after[:, 4:], before[:, 4:])


# The whole path ------------------------------------------------------------------------------------------------------


def test_an_encoder_with_texts_of_every_length(tmp_path):
    result = study(tmp_path, min_tokens=1)
    summary = result.summary
    assert (summary["n_samples"], summary["n_measured"], summary["n_skipped"]) == (6, 6, 0)
    records = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    cell, copy = (records[i]["conditions"]["token"]["tensor.norm"] for i in (0, 4))
    assert cell == copy
    assert all(c[order]["hs_mse"][0] == 0 for c in (cell, copy) for order in ("most", "least"))
    assert set(result.areas()) == set(METHODS) - {"tensor.in_class"}
    gap = summary["conditions"]["token"]["missing"]["tensor.in_class"]
    assert gap["n"] == 6 and "no head" in gap["reason"]
    assert "abs_aopc" not in summary["conditions"]["token"]["most"]
    against = summary["conditions"]["token"]["most"]["hs_mse"]["tensor_against_baseline"]
    assert against["n"] == 6 and 0 <= against["probability"] <= 1
    page = result.report.read_text()
    assert "<svg" in page and "tensor.norm" in page and "no head" in page and "Run it again" in page
    assert "src=" not in page.replace('src="data:', "") and len(list((tmp_path / "figures").iterdir())) == 2


def test_a_decoder_under_both_presets_and_two_replacements(tmp_path):
    result = study(tmp_path, "gpt2", presets=("strict", "paper-like"), replacements=("token", "attention"))
    assert set(result.summary["conditions"]) == {
        "strict, token", "strict, attention", "paper-like, token", "paper-like, attention",
    }  # fmt: skip
    assert result.summary["n_skipped"] == 1  # one token, which is the last
    found = result.summary["conditions"]["paper-like, token"]["most"]
    assert set(found) == {"hs_mse", "abs_aopc"} and "tensor.in_class" in found["abs_aopc"]["methods"]


def test_presets_together_are_the_presets_alone_and_replace_nothing_twice(tmp_path, monkeypatch):
    run_masks, copies = [], Texts.copies

    def counted(self, sample, masks, replacement):
        run_masks.append(masks)
        return copies(self, sample, masks, replacement)

    monkeypatch.setattr(Texts, "copies", counted)
    texts = [text for text in TEXTS if " " in text]  # one token may go under one preset only
    both = study(tmp_path / "both", "gpt2", presets=("strict", "paper-like"), data=texts)
    n_together = sum(map(len, run_masks))
    assert all(len(masks.unique(dim=0)) == len(masks) for masks in run_masks)
    run_masks.clear()
    alone = {
        preset: study(tmp_path / preset, "gpt2", presets=(preset,), data=texts) for preset in ("strict", "paper-like")
    }
    assert n_together < sum(map(len, run_masks))
    for preset, result in alone.items():
        for condition, cells in result.summary["conditions"].items():
            assert condition.startswith(preset)
            for name, found in cells["most"]["hs_mse"]["methods"].items():
                of_both = both.summary["conditions"][condition]["most"]["hs_mse"]["methods"][name]
                assert of_both["curve"] == pytest.approx(found["curve"], rel=1e-5)


def test_a_classifier_has_probabilities(tmp_path):
    result = study(tmp_path, "bert-classifier", limit=2)
    assert result.areas(metric="abs_aopc").keys() == set(METHODS)


def test_pictures_one_of_them_broken(tmp_path, picture_folder):
    result = perturbation(
        vision_lens(),
        picture_folder,
        tmp_path / "run",
        methods=METHODS,
        replacements=("black", "mean", "blur"),
        progress=False,
    )
    summary = result.summary
    assert (summary["n_measured"], summary["n_skipped"]) == (3, 1)
    assert summary["skipped"][0]["name"] == "broken.png" and "cannot be read" in summary["skipped"][0]["reason"]
    assert set(summary["conditions"]) == {"black", "mean", "blur"}
    assert "broken.png" in result.report.read_text()


def test_a_method_that_fails_on_one_sample_loses_that_cell_only(tmp_path, monkeypatch):
    plain = tl.METHODS["rollout.attn"]

    def fails_on_short(question):
        if len(question.operator.input) == 6:
            raise MethodError("not this one")
        return plain.compute(question)

    monkeypatch.setitem(tl.METHODS, "rollout.attn", Method(name="rollout.attn", summary="", compute=fails_on_short))
    broken, whole = study(tmp_path / "broken").summary, None
    monkeypatch.undo()
    whole = study(tmp_path / "whole").summary
    found, expected = (summary["conditions"]["token"]["most"]["hs_mse"]["methods"] for summary in (broken, whole))
    assert found["rollout.attn"]["n"] == 5 and expected["rollout.attn"]["n"] == 6
    assert broken["conditions"]["token"]["missing"]["rollout.attn"]["reason"].endswith("not this one")
    assert {name: cell for name, cell in found.items() if name != "rollout.attn"} == {
        name: cell for name, cell in expected.items() if name != "rollout.attn"
    }


def test_wrong_choices_are_named(tmp_path):
    for options, message in (
        ({"methods": ["tensor.nrom"]}, "methods"), ({"replacements": ["black"]}, "replacements"),
        ({"presets": ["lax"], "name": "gpt2"}, "presets"), ({"min_tokens": 99}, "min_tokens"),
        ({"methods": ["tensor.nrom"]}, "Did you mean 'tensor.norm'"), ({"methods": []}, "methods.*none"),
        ({"presets": "paperlike"}, "Did you mean 'paper-like'"), ({"limit": 0}, "`limit` of at least 1; got 0"),
        ({"n_random": 0}, "n_random"), ({"norm_probes": -3}, "norm_probes"), ({"grid": (0.0, 0.1, math.nan)}, "grid"),
        ({"n_tokens": 2, "cut": "windows"}, "above the 2 special tokens"), ({"data": 3}, "Pass a list"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            study(tmp_path / "x", **options)
    study(tmp_path / "run", limit=2)
    with pytest.raises(InputError, match="limit is 2 there and 3 here"):
        study(tmp_path / "run", limit=3)
    with pytest.raises(InputError, match="fingerprint"):
        study(tmp_path / "run", limit=2, data=[*TEXTS, "another"])


def test_another_model_of_the_same_name_is_refused(tmp_path):
    lens, options = lens_on(), {"methods": ["tensor.in_out"], "progress": False}
    perturbation(lens, TEXTS[:2], tmp_path, **options)
    perturbation(lens_on(), TEXTS[:2], tmp_path, **options)  # the same weights once more
    with torch.no_grad():
        next(lens.model.parameters()).mul_(1.5)
    with pytest.raises(InputError, match="weights is .* there and .* here"):
        perturbation(lens, TEXTS[:2], tmp_path, **options)


def test_another_picture_of_the_same_size_is_other_data(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(b"one picture")
    first = read_dataset(tmp_path).fingerprint
    path.write_bytes(b"two picture")
    assert read_dataset(tmp_path).fingerprint != first


def test_ranked_by_magnitude_position_is_not_recency(tmp_path):
    controls = ["control.position", "control.recency"]
    areas = study(tmp_path, "gpt2", methods=controls, absolute=True).areas()
    assert areas["control.position"] != pytest.approx(areas["control.recency"])
    assert "ranked by magnitude" in (tmp_path / "report.html").read_text("utf-8")


def test_where_nothing_could_be_measured_it_says_why(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    result = perturbation(vision_lens(), tmp_path / "broken.png", tmp_path / "run", methods=METHODS, progress=False)
    assert result.summary["n_measured"] == 0
    with pytest.raises(InputError, match="No sample could be measured; the first: .*cannot be read"):
        result.areas()


def test_the_report_of_few_samples_says_so(tmp_path):
    text = study(tmp_path, limit=2).report.read_text("utf-8")
    assert "Of 2 samples they say little" in text and "<code>token</code> stands for [MASK]" in text


def test_the_model_is_left_in_its_mode(tmp_path):
    lens = lens_on()
    lens.model.train()
    perturbation(lens, TEXTS[:2], tmp_path, methods=["tensor.in_out"], progress=False)
    assert all(module.training for module in lens.model.modules())
    assert not any(module._forward_hooks for module in lens.model.modules())


# The summary ---------------------------------------------------------------------------------------------------------


def test_without_matplotlib_the_report_says_how_to_get_the_curves(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = study(tmp_path, data=TEXTS[:1], methods=["tensor.in_out"]).report.read_text("utf-8")
    assert "attention-tensorlens[plot]" in page and "<table>" in page


def test_a_method_that_is_better_on_every_sample_is_better_for_sure():
    noise = np.random.default_rng(0).random(40)
    records = [
        {"index": i, "n_tokens": 9, "conditions": {"token": {
            "tensor.norm": {"most": {"hs_mse": [0.0, value + 0.1]}},
            "rollout.attn": {"most": {"hs_mse": [0.0, value]}},
        }}}
        for i, value in enumerate(noise)
    ]  # fmt: skip
    summary = summarise(records, {"methods": ["tensor.norm", "rollout.attn"], "grid": [0.0, 0.3], "seed": 0})
    found = summary["conditions"]["token"]["most"]["hs_mse"]
    assert found["tensor_against_baseline"]["probability"] == 1.0
    assert found["tensor_against_baseline"]["advantage"] == pytest.approx(0.05)
    assert found["tensor_against_baseline"]["interval"] == pytest.approx([0.05, 0.05])  # paired: the noise cancels
    low, high = found["methods"]["tensor.norm"]["interval"]
    assert low < found["methods"]["tensor.norm"]["auc"] < high


# Interruptions and processes -----------------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    folders = [str(Path(__file__).parents[1]), str(Path(tl.__file__).parents[1])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(folders)} | more


def test_killed_at_a_random_moment_it_ends_with_the_same_summary(tmp_path):
    study(tmp_path / "whole")
    process = subprocess.Popen([sys.executable, TINY, str(tmp_path / "killed")], env=environment())
    samples = tmp_path / "killed" / "samples.jsonl"
    while process.poll() is None and not (samples.exists() and samples.stat().st_size):
        time.sleep(0.01)
    time.sleep(random.random() / 4)
    process.send_signal(signal.SIGKILL)
    process.wait()
    study(tmp_path / "killed")
    for name in ("summary.json", "samples.jsonl"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.large
def test_two_processes_give_the_summary_of_one(tmp_path):
    lens = lens_on()
    for part in (lens.model, lens.processor):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    # Without GPUs too, `--multi_gpu` is what makes accelerate start several processes.
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command = ["-m", "tensorlens", "perturb", str(tmp_path / "model"), "--data", str(tmp_path / "texts.txt"), "--out"]
    for start, name in (([sys.executable], "one"), (launch, "two")):
        subprocess.run([*start, *command, str(tmp_path / name)], check=True, env=environment(OMP_NUM_THREADS="1"))
    assert (tmp_path / "two" / "summary.json").read_bytes() == (tmp_path / "one" / "summary.json").read_bytes()
    assert len((tmp_path / "two" / "sessions.jsonl").read_text().splitlines()) == 2


# Data ----------------------------------------------------------------------------------------------------------------


def test_data_comes_from_files_lists_and_the_library(tmp_path, monkeypatch):
    (tmp_path / "a.csv").write_text('id,sentiment,review\n1,0,"one, two"\n2,1,three\n')
    (tmp_path / "a.jsonl").write_text('{"text": "one, two", "label": 0}\n{"text": "three", "label": 1}\n')
    (tmp_path / "a.txt").write_text("one, two\n\nthree\n")
    found = [read_dataset(tmp_path / name) for name in ("a.csv", "a.jsonl", "a.txt")]
    assert [data.items for data in found] == [("one, two", "three")] * 3
    assert len({data.fingerprint for data in found}) == 1
    assert found[0].labels == ("0", "1") == found[1].labels
    with pytest.raises(InputError, match="Name the column"):
        read_dataset(tmp_path / "a.csv", column="body")
    with pytest.raises(InputError, match="does not exist"):
        read_dataset(tmp_path / "absent.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="found none"):
        read_dataset(tmp_path / "empty")
    rows = [{"text": "one, two", "label": 0}, {"text": "three", "label": 1}]
    assert {read_dataset(some).fingerprint for some in (rows, iter(rows), ["one, two", "three"])} == {
        found[0].fingerprint
    }
    (tmp_path / "marked.csv").write_bytes("\ufefftext,label\none,0\n".encode())
    assert read_dataset(tmp_path / "marked.csv").items == ("one",)
    (tmp_path / "odd.jsonl").write_text('{"label": 1}\n{"text": "a\u2028b"}\n', "utf-8")
    assert read_dataset(tmp_path / "odd.jsonl").items == ("", "a\u2028b")
    (tmp_path / "odd.txt").write_bytes("a\x85b\r\nc\n".encode())
    assert read_dataset(tmp_path / "odd.txt").items == ("a\x85b", "c")
    (tmp_path / "latin.csv").write_bytes("text\ncaf\xe9\n".encode("latin-1"))
    with pytest.raises(InputError, match="UTF-8"):
        read_dataset(tmp_path / "latin.csv")
    library = type(sys)("datasets")
    library.load_dataset = lambda name, configuration, split: [{"text": f"{name} {configuration} {split}"}]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert read_dataset("owner/data:part", split="train").items == ("owner/data part train",)
    library.load_dataset = lambda *names, split: [][0]  # type: ignore[attr-defined]
    with pytest.raises(InputError, match="no file or folder here, and as an id it could not be loaded: IndexError"):
        read_dataset("nofile")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(tl.MissingExtraError, match="studies"):
        read_dataset("owner/data")
