"""`tensorlens paper`: every table to its end on tiny random weights, its numbers against a few independent lines."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
import zoo
from one_module_decoder import write_decoder
from PIL import Image
from tiny_language import save_tiny, write_relation
from tiny_language import tokenizer as byte_tokenizer
from tiny_study import WORDS, tokenizer
from typer.testing import CliRunner

import tensorlens as tl
from tensorlens.app.cli import app
from tensorlens.errors import InputError, LoadError
from tensorlens.studies.paper import training
from tensorlens.studies.paper.protocol import Protocol, read_protocol
from tensorlens.studies.paper.run import TABLES, PaperTable

SMALL = {
    "perturbation": {"n_tokens": 10, "min_tokens": 10, "grid": [0.0, 0.2, 0.4], "n_random": 2},
    "training": {"epochs": 1, "batch_size": 8, "n_tokens": 10},
    "relations": {"n_splits": 2, "top_k": 300, "min_test": 2, "max_test": 2, "starts": [0, 1, 9]},
}
TEXT = {"vocab_size": 25, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
GEMMA = TEXT | {"num_key_value_heads": 1, "head_dim": 4, "max_position_embeddings": 64}
VISION = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
PLACES = {"max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "bert": lambda: hf.BertForSequenceClassification(hf.BertConfig(**TEXT, **PLACES, pad_token_id=0)),
    "roberta": lambda: hf.RobertaForSequenceClassification(hf.RobertaConfig(**TEXT, **PLACES, pad_token_id=0)),
    "modernbert": lambda: hf.ModernBertForMaskedLM(hf.ModernBertConfig(**TEXT, **PLACES, **SPECIAL)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**GEMMA, **SPECIAL)),
    "pythia": lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**TEXT, **PLACES)),
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**TEXT, **PLACES)),
}
ENCODERS = ("bert", "roberta", "modernbert")


def small_protocol(folder, **changes):
    path = folder / "protocol.json"
    path.write_text(json.dumps(SMALL | changes))
    return path


def write_model(folder, name):
    """The folder of a random model of the right class with its tokenizer or image processor."""
    if name == "pico":
        write_decoder(folder, tokenizer(wrapped=False))
        return str(folder)
    if name.startswith("deit"):
        labels = {i: f"class {i}" for i in range(3)}
        config = hf.DeiTConfig(**VISION, intermediate_size=24, id2label=labels, num_labels=3)
        model, processor = hf.DeiTForImageClassification(config), hf.ViTImageProcessor(size={"height": 8, "width": 8})
    else:
        torch.manual_seed(0)
        model, processor = MODELS[name](), tokenizer(wrapped=name in ENCODERS)
    zoo.randomise(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    return str(folder)


def write_reviews(path, n=24, *, label="label"):
    """Reviews sorted by label, as IMDB's test part is; every third is too short."""
    draw = random.Random(0)
    lines = [f"text,{label},source"]
    for i in range(n):
        words = draw.choices(WORDS, k=4 if i % 3 == 2 else 20)
        lines.append(f"{' '.join(words)},{int(i >= n // 2)},page {i}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines))
    return path


def write_articles(path):
    draw = random.Random(1)
    lines = []
    for article in range(3):
        lines += [f" = Title {article} = ", " = = Part = = "]
        lines += [" ".join(draw.choices(WORDS, k=9)) for _ in range(6 + 4 * article)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def write_classes(folder, *, per_class=2):
    for label in range(3):
        (folder / f"{label}").mkdir(parents=True)
        for number in range(per_class):
            pixels = np.random.default_rng([label, number]).integers(0, 255, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{label}" / f"{number}.png")
    return folder


def write_data(folder, kind):
    """Data of one kind, as people have it."""
    if kind == "imagenet":
        return write_classes(folder / "imagenet")
    if kind == "imdb":
        return write_reviews(folder / "imdb" / "reviews.csv")
    if kind == "wikitext":
        return write_articles(folder / "wikitext-103" / "wiki.test.tokens")
    write_relation(folder / "relations" / "commonsense" / "fruit.json")
    return folder / "relations"


def made(folder, name, data=None, *, limit=4, **options):
    """One table by the command; its lines and its Markdown."""
    model = options.pop("model", None) or write_model(folder / "model", name)
    data = data or write_data(folder / "data", TABLES[name].kind)
    protocol = options.pop("protocol", None) or small_protocol(folder)
    given = ["paper", name, "--model", model, "--data", str(data), "--out", str(folder / "out"), "--device", "cpu"]
    given += ["--limit", str(limit), "--protocol", str(protocol), *options.pop("more", ())]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.output + repr(result.exception)
    lines = [json.loads(line) for line in (folder / "out" / "samples.jsonl").read_text().splitlines()]
    return lines, (folder / "out" / "table.md").read_text()


def watched_state(model, inputs, place):
    """X^N at one token, and the logits that decide, by the model alone."""
    kept = {}
    if hasattr(model, "decoder"):  # one module does everything: what the unembedding reads
        read = model.decoder.to_words.register_forward_pre_hook
        hook = read(lambda module, args: kept.update(state=args[0]))
    else:
        hook = model.base_model.register_forward_hook(lambda module, args, output: kept.update(state=output[0]))
    logits = model(**inputs).logits[0]
    hook.remove()
    return kept["state"][0, place], logits if logits.dim() == 1 else logits[-1]


def curves_by_hand(model, clean, masked, scores, maskable, place, label):
    """HS-MSE, drop of probability and accuracy at 0, 20 and 40 % of the maskable tokens, highest scores first."""
    state, logits = watched_state(model, clean, place)
    best = int(logits.argmax())
    order = sorted(maskable, key=lambda token: (-float(scores[token]), token))
    found = {"hs_mse": [0.0], "aopc": [0.0], "accuracy": [float(best == label)]}
    for share in (0.2, 0.4):
        changed, other = watched_state(model, masked(order[: math.ceil(round(share * len(maskable), 9))]), place)
        found["hs_mse"].append(float((changed - state).square().mean()))
        found["aopc"].append(float(logits.softmax(-1)[best] - other.softmax(-1)[best]))
        found["accuracy"].append(float(int(other.argmax()) == label))
    return found | {"abs_aopc": [abs(value) for value in found["aopc"]]}


def check_curves(line, condition, method, expected):
    """The curves of a line are those by hand."""
    found = line["conditions"][condition][method]["most"]
    assert found.keys() == expected.keys()
    for metric, curve in expected.items():
        assert found[metric] == pytest.approx(curve, rel=1e-3, abs=1e-6), metric


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "gemma3", "pythia", "phi", "pico"])
@torch.no_grad()
def test_tables_of_texts(tmp_path, name):
    with torch.enable_grad():  # two of them are fine-tuned first
        lines, table = made(tmp_path, name, more=["--trust-remote-code"] if name == "pico" else [])
    is_trained = name in ("modernbert", "gemma3")
    where = tmp_path / "out" / "model" if is_trained else tmp_path / "model"
    model = tl.load(str(where), device="cpu", trust_remote_code=name == "pico")
    is_encoder, has_reviews = name in ENCODERS, TABLES[name].kind == "imdb"
    assert len(lines) == 4 and {line["n_tokens"] for line in lines} == {10}
    assert all("label" in line for line in lines)
    if has_reviews:
        assert [line["label"] for line in lines] == [0, 1] * 2  # drawn in turn, though the file is sorted
        assert all(line["columns"]["source"].startswith("page") for line in lines)
    condition = "token" if is_encoder else "paper-like, token"
    text = (
        {
            line.split(",")[2]: line.split(",")[0]
            for line in (tmp_path / "data/imdb/reviews.csv").read_text().split("\n")
        }
        if has_reviews
        else {}
    )
    place, own = 0 if name in ("bert", "roberta") else -1, tokenizer(wrapped=is_encoder)
    for line in lines:
        if has_reviews:
            inner = own(text[line["columns"]["source"]], add_special_tokens=False)["input_ids"]
            ids = torch.tensor([[1, *inner[:8], 2] if is_encoder else inner[:10]])
        else:
            title, number = line["unit"], int(line["name"].rsplit(" ", 1)[1])
            body = articles(tmp_path / "data/wikitext-103/wiki.test.tokens")[title.split(" (")[0]]
            stream = own(" ".join(body))["input_ids"]
            ids = torch.tensor([stream[10 * number : 10 * number + 10]])
            assert line["label"] == stream[10 * number + 10]
        maskable = list(range(1, 9)) if is_encoder else list(range(10))

        def masked(tokens, ids=ids):
            other = ids.clone()
            other[0, tokens] = own.mask_token_id
            return {"input_ids": other}

        scores = model({"input_ids": ids}).map("tensor.in_out", place).scores[0]
        label = int(line["label"])
        expected = curves_by_hand(model.model, {"input_ids": ids}, masked, scores, maskable, place, label)
        check_curves(line, condition, "tensor.in_out", expected)
    heights = [
        np.trapezoid(one["conditions"][condition]["tensor.in_out"]["most"]["hs_mse"], [0, 0.2, 0.4]) for one in lines
    ]
    row = next(row for row in table.splitlines() if row.startswith("| HS-MSE ↑, area"))
    cells = [cell.strip(" *<u>/") for cell in row.strip("|").split("|")]
    assert float(cells[2]) == pytest.approx(np.mean(heights), rel=6e-3)
    assert "## Deviations" in table and f"model: {tmp_path / 'model'}" in table
    if TABLES[name].paper.get("hs_mse"):
        assert TABLES[name].paper["hs_mse"]["mean.attn"] in table
    assert (tmp_path / "out" / "figures" / f"{condition.replace(', ', '-')}-hs_mse.pdf").is_file()
    tex = (tmp_path / "out" / "table.tex").read_text()
    assert r"\textbf{" in tex and r"\underline{" in tex and tex.count(r"\begin{") == tex.count(r"\end{") == 2
    assert ("strict, token" in table) != is_encoder


def articles(path):
    found, title = {}, None
    for line in path.read_text().splitlines():
        if line.strip().startswith("= = "):
            continue
        if line.strip().startswith("= "):
            title = line.strip(" =")
            found[title] = []
        else:
            found[title].append(line)
    return found


def test_pico_is_measured_where_its_unembedding_reads(tmp_path):
    lines, table = made(tmp_path, "pico", more=["--trust-remote-code"])
    lens = tl.load(str(tmp_path / "model"), device="cpu", trust_remote_code=True)
    assert lens("the cat sat on a mat").shape[1] == lens.model.config.width
    assert all("missing" not in cell for line in lines for cell in line["conditions"]["strict, token"].values())
    assert "watched: the state of the last token" in table and "N.A" not in table


@pytest.mark.parametrize("name", ["deit-base", "deit-small"])
def test_tables_of_pictures(tmp_path, name):
    lines, table = made(tmp_path, name, limit=6)
    assert sorted(line["label"] for line in lines) == ["0", "0", "1", "1", "2", "2"]
    assert {line["label"] for line in lines[:3]} == {"0", "1", "2"}  # one of each class before the second of any
    lens, processor = (
        tl.load(str(tmp_path / "model"), device="cpu"),
        hf.ViTImageProcessor(size={"height": 8, "width": 8}),
    )
    for line in lines:
        given = processor(Image.open(tmp_path / "data" / "imagenet" / line["name"]), return_tensors="pt")

        def masked(patches, given=given):
            other = given["pixel_values"].clone()
            for patch in patches:  # 2 × 2 of them after [CLS] and the token of distillation; black is 0 before scaling
                row, column = divmod(patch - 2, 2)
                other[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = -1.0
            return {"pixel_values": other}

        scores = lens(given).map("tensor.in_out", 0).scores[0]
        expected = curves_by_hand(lens.model, given, masked, scores, [2, 3, 4, 5], 0, int(line["label"]))
        check_curves(line, "black", "tensor.in_out", expected)
    assert "accuracy ↓" in table


def test_class_folders_are_counted_in_alphabetical_order():
    from tensorlens.studies.perturbation_study.samples import class_index

    model = hf.DeiTForImageClassification(hf.DeiTConfig(**VISION, intermediate_size=24, num_labels=3))
    names = ["n01440764", "n01443537", "n01484850"]
    assert [class_index(name, model, names) for name in names] == [0, 1, 2]
    assert class_index(names[0], model, names[:2]) is None  # some of the classes: their numbers are not known
    assert [class_index(label, None, ["neg", "pos"]) for label in ("pos", "neg", "1")] == [1, 0, 1]


@pytest.mark.parametrize("name", ["modernbert", "gemma3"])
def test_models_are_fine_tuned_and_then_measured(tmp_path, name, monkeypatch):
    trained_on, train = [], training._train
    monkeypatch.setattr(training, "_train", lambda *given: (trained_on.extend(given[2]), train(*given)))
    lines, table = made(tmp_path, name)
    rows = [line.split(",") for line in (tmp_path / "data/imdb/reviews.csv").read_text().split("\n")[1:]]
    text = {source: (review, int(label)) for review, label, source in rows}
    measured = {text[line["columns"]["source"]] for line in lines}
    assert set(trained_on) <= set(text.values()) and len(trained_on) == 12 and not measured & set(trained_on)
    about = json.loads((tmp_path / "out" / "model" / "trained.json").read_text())
    assert about["n_training"] + about["n_held_out"] == 24 and "fine-tuned here on 12 reviews" in table
    assert "watched: the state of the last token" in table and len(lines) == 4
    model = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out" / "model")
    assert type(model).__name__.endswith("ForSequenceClassification")
    forbidden = small_protocol(tmp_path, training={"epochs": 0})
    given = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "data"), "--out", str(tmp_path / "other")]
    result = CliRunner().invoke(app, ["paper", name, *given, "--limit", "4", "--protocol", str(forbidden)])
    assert isinstance(result.exception, InputError) and "fine-tunes it before measuring" in str(result.exception)


def test_a_model_is_fine_tuned_where_samples_are_drawn_without_regard_to_labels(tmp_path):
    lines, table = made(tmp_path, "modernbert", protocol=small_protocol(tmp_path, stratify=False))
    assert "drawn without regard to labels" in table and "label" not in lines[0]


def test_training_and_test_part_are_found_where_the_reader_finds_them(tmp_path):
    """Parquet files named after their part; and without a part for training, two halves of what there is."""
    from datasets import Dataset

    rows = [line.split(",") for line in write_reviews(tmp_path / "all.csv").read_text().split("\n")[1:]]
    kept = Dataset.from_list([{"text": text, "label": int(label)} for text, label, _ in rows])
    for part, some in (("train", kept.select(range(0, 24, 2))), ("test", kept.select(range(1, 24, 2)))):
        (tmp_path / "hub").mkdir(exist_ok=True)
        some.to_parquet(tmp_path / "hub" / f"{part}-00000-of-00001.parquet")
    model = write_model(tmp_path / "model", "modernbert")
    for data, split, n_measured in (("hub", "test", 12), ("hub", "train", 6), ("all.csv", "test", 12)):
        protocol = read_protocol(small_protocol(tmp_path, perturbation=SMALL["perturbation"] | {"split": split}))
        table = PaperTable("modernbert", tmp_path / data, tmp_path / "out", model=model, protocol=protocol, limit=4)
        table.check()
        assert len(table.samples) == n_measured and not set(table.samples.items) & set(table.training.items)


def test_relations_by_category_with_error_bars_and_random_baselines(tmp_path):
    model = save_tiny(tmp_path / "model", "neox")
    lines, table = made(tmp_path, "relations", model=model, limit=1)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    scores = [line["methods"]["tensor.full.beta1@0"]["agreement"] for line in lines]
    shares = [score.count("1") / len(score) for score in scores]
    row = next(row for row in table.splitlines() if row.startswith("| Tensor |"))
    assert f"{np.mean(shares):.3f} ± {np.std(shares):.3f}" in row
    said = [fact[2] for line in lines for fact in line["facts"]]
    per_line = [said[i : i + 2] for i in range(0, len(said), 2)]
    guess = np.mean([sum((some.count(one) / 2) ** 2 for one in set(some)) for some in per_line])
    assert f"| random guess | {guess:.3f} |" in table
    assert "Tensor from 0" in table and "LRE from 1" in table and "starting layers (0, 1)" in table
    assert summary["n_survived"] == 1 and r"\textbf{" in (tmp_path / "out" / "table.tex").read_text()


def test_all_tables_from_one_root_and_a_run_resumes(tmp_path):
    for kind in ("imagenet", "imdb", "wikitext", "relations"):
        write_data(tmp_path / "data", kind)
    for name in TABLES:
        if name == "relations":
            continue
        write_model(tmp_path / "models" / name, name)
    quick = SMALL["perturbation"] | {"methods": ["tensor.in_out", "mean.attn"]}
    protocol = small_protocol(tmp_path, perturbation=quick)
    given = ["paper", "all", "--model", str(tmp_path / "models"), "--data", str(tmp_path / "data"), "--limit", "2"]
    given += ["--out", str(tmp_path / "out"), "--protocol", str(protocol), "--device", "cpu", "--trust-remote-code"]
    first = CliRunner().invoke(app, given)
    assert first.exit_code == 0, first.output + repr(first.exception)
    assert {one.name for one in (tmp_path / "out").iterdir()} == set(TABLES)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/model/model.safetensors")}
    texts = {
        path: path.read_bytes() for name in ("table.*", "figures/*") for path in (tmp_path / "out").glob(f"*/{name}")
    }
    again = CliRunner().invoke(app, given)
    assert again.exit_code == 0 and len(texts) > 4 * len(TABLES)
    assert texts == {path: path.read_bytes() for path in texts}
    assert before == {path: path.stat().st_mtime_ns for path in before} and len(before) == 2


# The protocol ---------------------------------------------------------------------------------------------------------


def test_the_protocol_is_a_file_and_wrong_settings_are_named(tmp_path):
    (tmp_path / "a.toml").write_text(
        "n_samples = 20\n[perturbation]\nkeep_first = 2\nwatch = 'mean'\nraw_norms = true\n"
    )
    found = read_protocol(tmp_path / "a.toml")
    assert (found.n_samples, found.perturbation.keep_first, found.perturbation.watch) == (20, 2, "mean")
    assert found.perturbation.min_tokens == 128 and found.perturbation.draw == "random"  # the rest is the paper's
    (tmp_path / "b.json").write_text('{"perturbation": {"gird": [0, 1]}}')
    with pytest.raises(InputError, match="gird"):
        read_protocol(tmp_path / "b.json")
    (tmp_path / "c.json").write_text('{"perturbation": {"n_tokens": "many"}}')
    with pytest.raises(InputError, match="n_tokens"):
        read_protocol(tmp_path / "c.json")
    with pytest.raises(InputError, match=r"\.json or \.toml"):
        read_protocol(tmp_path / "d.yaml")
    assert read_protocol(None) == Protocol()


OTHER = {
    "methods": ["tensor.in_out"],
    "draw": "file",
    "watch": "mean",
    "presets": ["strict"],
    "keep_first": 2,
    "replacements": ["attention"],
    "grid": [0.0, 0.5],
    "n_tokens": 64,
    "min_tokens": 9,
    "cut": "windows",
    "column": "text",
    "label": "label",
    "split": "train",
    "absolute": True,
    "raw_norms": True,
    "seed": 3,
    "n_random": 9,
    "norm_probes": 8,
    "batch_size": 4,
    "group_size": 2,
}


@pytest.mark.parametrize("way", ["perturbation", "tables"])
def test_every_setting_of_a_file_is_obeyed_and_said(tmp_path, way):
    """By the file alone: for each field another value than the paper's, for all tables or for one."""
    fields = set(Protocol().perturbation.__struct_fields__)
    assert OTHER.keys() == fields - {"limit"}, "a field that this test does not know"
    data = write_reviews(tmp_path / "reviews.csv")
    for name, value in OTHER.items():
        changes = {name: value} if way == "perturbation" else {"bert": {name: value}}
        (tmp_path / "one.json").write_text(json.dumps({"n_samples": 7, way: changes}))
        table = PaperTable("bert", data, tmp_path / "out", protocol=read_protocol(tmp_path / "one.json"))
        found = getattr(table.options, name)
        assert (list(found) if isinstance(found, tuple) else found) == value, name
        assert table.options.limit == 7
        said = table._said(table.options, {"watched": "", "data": {}}, {"conditions": {}})
        own = ("methods", "column", "label", "seed")  # what a run is asked for anyway
        assert any(line.startswith(f"{name} = ") for line in said) == (name not in own), name


@torch.no_grad()
def test_settings_that_authors_may_correct_are_obeyed(tmp_path):
    data = write_articles(tmp_path / "data.txt")
    changes = {
        "keep_first": 2,
        "watch": "mean",
        "raw_norms": True,
        "draw": "file",
        "methods": ["tensor.in_out", "rollout.w_attn"],
    }
    protocol = small_protocol(tmp_path, perturbation=SMALL["perturbation"] | changes)
    lines, table = made(tmp_path, "pythia", data, limit=2, protocol=protocol)
    assert "watched: the state of the mean of all tokens" in table and "keep_first = 2 instead of 0" in table
    lens, own = tl.load(str(tmp_path / "model"), device="cpu"), tokenizer(wrapped=False)
    stream = own(" ".join(line for body in articles(data).values() for line in body))["input_ids"]
    for number, line in enumerate(lines):
        ids = torch.tensor([stream[10 * number : 10 * number + 10]])
        T = lens({"input_ids": ids})
        rows = torch.stack([T.rows(i) for i in range(10)])
        full = torch.einsum("idje,je->ijd", rows, T.input)
        scores = (full.mean(0) * T.output.mean(0)).sum(-1)
        order = sorted(range(2, 9), key=lambda token: -float(scores[token]))
        other = ids.clone()
        other[0, order[: math.ceil(0.4 * 7)]] = own.mask_token_id
        states = [lens.model.base_model(input_ids=one)[0][0].mean(0) for one in (ids, other)]
        expected = float((states[0] - states[1]).square().mean())
        assert line["conditions"]["strict, token"]["tensor.in_out"]["most"]["hs_mse"][2] == pytest.approx(
            expected, rel=1e-3
        )


def test_test_prompts_with_all_examples(tmp_path):
    write_relation(tmp_path / "data" / "fruit.json")
    sizes = {"n_splits": 1, "top_k": 300, "min_test": 2, "max_test": 2, "with_lre": False, "scales": (1.0,)}
    from tiny_language import tiny_lens

    found = {}
    for kind in ("m-1", "m"):
        tl.studies.relations(
            tiny_lens("neox"), tmp_path / "data", tmp_path / kind, test_examples=kind, progress=False, **sizes
        )
        found[kind] = json.loads((tmp_path / kind / "samples.jsonl").read_text())["n_tokens"]
    line = len(byte_tokenizer()("apple are red\n")["input_ids"])
    assert abs(found["m"] - found["m-1"] - line) <= 1


# Bad input ------------------------------------------------------------------------------------------------------------


def refused(monkeypatch, name, data, **options):
    """The sentence of a refusal, before any model is loaded."""
    monkeypatch.setattr("tensorlens.studies.paper.run.load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises((InputError, LoadError)) as caught:
        PaperTable(name, data, options.pop("out", "nowhere"), **options).run()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_bad_input_is_one_sentence_before_a_model_is_loaded(tmp_path, monkeypatch):
    protocol = read_protocol(small_protocol(tmp_path))
    bert, deit = write_model(tmp_path / "bert", "bert"), write_model(tmp_path / "deit", "deit-base")
    (tmp_path / "plain.csv").write_text("text\nthe cat sat\n")
    assert "has none. Add a column called label" in refused(monkeypatch, "bert", tmp_path / "plain.csv", model=bert)
    pictures = write_classes(tmp_path / "pictures")
    (pictures / "empty").mkdir()
    assert "class folder 'empty'" in refused(monkeypatch, "deit-base", pictures, model=deit, limit=2)
    (pictures / "empty").rmdir()
    assert "Pass --limit 6" in refused(monkeypatch, "deit-base", pictures, model=deit)
    reviews = write_reviews(tmp_path / "reviews.csv")
    said = refused(monkeypatch, "bert", reviews, model=bert, protocol=protocol)
    assert "1000 samples of at least 10 tokens were asked for" in said and "Pass --limit 16" in said
    assert "there is none" in refused(monkeypatch, "bert", reviews, model=str(tmp_path / "absent"))
    assert "pass it with --data" in refused(monkeypatch, "deit-base", None, model=deit)
    assert "there is none at" in refused(monkeypatch, "pythia", tmp_path / "absent.txt", model=bert)
    assert "needs ImageNet (a folder of pictures by class)" in refused(monkeypatch, "deit-base", reviews, model=deit)
    assert "TABLE must be one of" in refused(monkeypatch, "gpt", reviews)
    (tmp_path / "file").write_text("")
    assert "is a file" in refused(monkeypatch, "bert", reviews, model=bert, out=tmp_path / "file")
    assert "needs the relations data set (a folder of files by category)" in refused(
        monkeypatch, "relations", tmp_path / "nothing" / "here", model=bert
    )
    pico, articles = write_model(tmp_path / "pico", "pico"), write_articles(tmp_path / "articles.txt")
    assert "pass --trust-remote-code" in refused(monkeypatch, "pico", articles, model=pico)
    root = tmp_path / "root"
    write_data(root, "imdb")
    assert "needs WikiText-103" in refused(monkeypatch, "pythia", root, model=bert)
    (tmp_path / "stars.csv").write_text("text,label\n" + "the cat sat on a mat and saw red green birds fly,7\n" * 4)
    modern = write_model(tmp_path / "modern", "modernbert")
    monkeypatch.setattr("transformers.AutoModelForSequenceClassification.from_pretrained", lambda *_, **__: 1 / 0)
    assert "needs labels 0 and 1, or neg and pos; got 7" in refused(
        monkeypatch, "modernbert", tmp_path / "stars.csv", model=modern, protocol=protocol, limit=2, out=tmp_path / "o"
    )


def test_a_wrong_study_folder_is_named_before_a_model_is_loaded(tmp_path, monkeypatch):
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text('{"study": "judge", "settings": {}, "versions": {}, "origin": {}}')
    model, data = write_model(tmp_path / "bert", "bert"), write_reviews(tmp_path / "reviews.csv")
    assert "holds a run of judge" in refused(monkeypatch, "bert", data, model=model, limit=4, out=out)
    monkeypatch.setattr("tensorlens.app.options.ModelOptions.lens", lambda *_, **__: pytest.fail("a model was loaded"))
    relations = write_data(tmp_path / "data", "relations")
    for command, given in (
        ("perturb", ["--data", data]),
        ("relations", ["--data", relations]),
        ("fidelity", ["a text"]),
    ):
        found = CliRunner().invoke(app, list(map(str, [command, model, *given, "--out", out])))
        assert "holds a run of judge" in str(found.exception), found.output


# Data as people have it -----------------------------------------------------------------------------------------------


def test_data_as_people_have_it(tmp_path):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value

    from tensorlens.studies.datasets import read_dataset

    rows = {"text": ["one", "two", "three"], "label": [0, 1, 1], "page": ["a", "b", "c"]}
    features = Features({"text": Value("string"), "label": ClassLabel(names=["neg", "pos"]), "page": Value("string")})
    saved = Dataset.from_dict(rows, features=features)
    saved.to_parquet(tmp_path / "rows.parquet")
    saved.save_to_disk(tmp_path / "one")
    DatasetDict(train=saved, test=saved.select([2])).save_to_disk(tmp_path / "several")
    for source in ("rows.parquet", "one"):
        found = read_dataset(tmp_path / source)
        assert (
            found.items == ("one", "two", "three") and found.labels == (0, 1, 1) and found.columns[1] == {"page": "b"}
        )
    assert read_dataset(tmp_path / "several").items == ("three",)
    assert len(read_dataset(tmp_path / "several", split="train")) == 3
    (tmp_path / "hub" / "data").mkdir(parents=True)
    saved.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    saved.select([0]).to_parquet(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet")
    assert read_dataset(tmp_path / "hub").items == ("one",)
    for part in ("train", "test"):
        for sentiment in ("pos", "neg", "unsup"):
            (tmp_path / "aclImdb" / part / sentiment).mkdir(parents=True)
            (tmp_path / "aclImdb" / part / sentiment / "0_9.txt").write_text(f"{part} {sentiment}")
    found = read_dataset(tmp_path / "aclImdb")
    assert found.items == ("test neg", "test pos") and found.labels == ("neg", "pos")


def test_pictures_in_rows_are_decoded_when_they_are_asked_for(tmp_path):
    from datasets import Dataset, Features, Value
    from datasets import Image as Picture

    from tensorlens.studies.datasets import LazyImage, read_dataset

    paths = [str(path) for path in sorted(write_classes(tmp_path / "pictures").rglob("*.png"))]
    features = Features({"image": Picture(), "label": Value("int64")})
    saved = Dataset.from_dict({"image": paths, "label": [0, 0, 1, 1, 2, 2]}, features=features)
    saved.save_to_disk(tmp_path / "saved")
    found = read_dataset(tmp_path / "saved")
    assert found.kind == "image" and found.labels == (0, 0, 1, 1, 2, 2)
    assert isinstance(found.items[0], LazyImage) and found.items[0].load().size == (9, 9)
    whole = [{"bytes": Path(path).read_bytes(), "path": None} for path in paths]
    Dataset.from_dict({"image": whole, "label": [0] * 6}, features=features).to_parquet(tmp_path / "rows.parquet")
    assert read_dataset(tmp_path / "rows.parquet").items[3].size == (9, 9)
