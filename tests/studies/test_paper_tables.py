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
from paper_witness import Relation, check_perturbation
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


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "gemma3", "pythia", "phi", "pico"])
@torch.no_grad()
def test_tables_of_texts(tmp_path, name):
    with torch.enable_grad():  # two of them are fine-tuned first
        lines, table = made(tmp_path, name, more=["--trust-remote-code"] if name == "pico" else [])
    where = tmp_path / "out" / "model" if TABLES[name].trains else tmp_path / "model"
    lens = tl.load(str(where), device="cpu", trust_remote_code=name == "pico")
    is_encoder, has_reviews = name in ENCODERS, TABLES[name].kind == "imdb"
    assert len(lines) == 4 and {line["n_tokens"] for line in lines} == {10}
    if has_reviews:
        assert [line["label"] for line in lines] == [0, 1] * 2  # drawn in turn, though the file is sorted
        assert all(line["columns"]["source"].startswith("page") for line in lines)
    maskable = {"token": range(1, 9)} if is_encoder else {"paper-like, token": range(10), "strict, token": range(9)}
    own, samples = tokenizer(wrapped=is_encoder), []
    for line in lines:
        ids = torch.tensor([(review_ids if has_reviews else window_ids)(tmp_path / "data", line, own, is_encoder)])

        def masked(tokens, ids=ids):
            other = ids.clone()
            other[0, tokens] = own.mask_token_id
            return {"input_ids": other}

        place = 0 if name in ("bert", "roberta") else -1
        samples.append((line, {"input_ids": ids}, masked, place, maskable))
    check_perturbation(lens, samples, table)
    assert "## Deviations" in table and f"model: {tmp_path / 'model'}" in table
    if TABLES[name].paper:
        assert TABLES[name].numbers("hs_mse")["mean.attn"] in table
    first = next(iter(maskable)).replace(", ", "-")
    assert (tmp_path / "out" / "figures" / f"{first}-hs_mse.pdf").is_file()
    tex = (tmp_path / "out" / "table.tex").read_text()
    assert r"\textbf{" in tex and r"\underline{" in tex and tex.count(r"\begin{") == tex.count(r"\end{") == 2


def review_ids(data, line, own, is_encoder):
    """The ids of a review, cut to 10 tokens."""
    rows = [row.split(",") for row in (data / "imdb/reviews.csv").read_text().split("\n")]
    text = next(text for text, _, source in rows if source == line["columns"]["source"])
    inner = own(text, add_special_tokens=False)["input_ids"]
    return [1, *inner[:8], 2] if is_encoder else inner[:10]


def window_ids(data, line, own, _):
    """The ids of a window of 10 tokens within its article; its label is the token that follows."""
    number, body = int(line["name"].rsplit(" ", 1)[1]), articles(data / "wikitext-103/wiki.test.tokens")
    stream = own(" ".join(body[line["unit"].split(" (")[0]]))["input_ids"]
    assert line["label"] == stream[10 * number + 10]
    return stream[10 * number : 10 * number + 10]


def articles(path):
    """The lines of each article, without headings."""
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
    samples = []
    for line in lines:
        given = processor(Image.open(tmp_path / "data" / "imagenet" / line["name"]), return_tensors="pt")

        def masked(patches, given=given):
            other = given["pixel_values"].clone()
            for patch in patches:  # 2 × 2 of them after [CLS] and the token of distillation; black is 0 before scaling
                row, column = divmod(patch - 2, 2)
                other[..., 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] = -1.0
            return {"pixel_values": other}

        samples.append((line, given, masked, 0, {"black": [2, 3, 4, 5]}))
    check_perturbation(lens, samples, table)


def test_class_folders_are_counted_in_alphabetical_order():
    from tensorlens.studies.perturbation_samples import class_index

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
    sizes = SMALL["relations"] | {"n_splits": 3, "max_test": 6}
    lines, table = made(tmp_path, "relations", model=model, limit=1, protocol=small_protocol(tmp_path, relations=sizes))
    by_hand = Relation(tl.load(model, device="cpu", rules=tl.Rules(include_final_norm=False)))
    shares = {"Tensor": [], "LRE, β = 2.5": [], "Tensor from 1": [], "random guess": []}
    for line in lines:
        (ours, lre, truth), (from_1, *_) = (by_hand.bits(line, start) for start in (0, 1))
        found = {name: line["methods"][name]["agreement"] for name in line["methods"]}
        assert (found["tensor.full.beta1@0"], found["lre.fixed@embedding"]) == (ours, lre)
        assert found["tensor.full.beta1@1"] == from_1
        guess = sum((truth.count(one) / len(truth)) ** 2 for one in set(truth))
        scores = (*(bits.count("1") / len(bits) for bits in (ours, lre, from_1)), guess)
        for name, score in zip(shares, scores, strict=True):
            shares[name].append(score)
    rows = {
        row[0]: row for row in ([cell.strip(" *") for cell in row.split("|")[1:]] for row in table.splitlines()) if row
    }
    for name in ("Tensor", "LRE, β = 2.5"):
        assert rows[name][1] == f"{np.mean(shares[name]):.3f} ± {np.std(shares[name]):.3f}"
    assert np.mean(shares["Tensor"]) > 0 and np.mean(shares["Tensor"] + shares["LRE, β = 2.5"]) < 1
    assert rows["random guess"][1] == f"{np.mean(shares['random guess']):.3f}"
    over_starts = table[table.index("## Over starting layers") :].splitlines()
    place = over_starts[2].split("|").index(" Tensor from 1 ")
    assert float(over_starts[4].split("|")[place]) == pytest.approx(np.mean(shares["Tensor from 1"]), abs=1e-3)
    assert "starting layers (0, 1)" in table and "1 of 1 relations survive" in table
    assert r"\textbf{" in (tmp_path / "out" / "table.tex").read_text()


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
        again = PaperTable("bert", data, tmp_path / "out", protocol=table.protocol, seed=5, limit=4)
        assert (again.options.seed, again.relation_options.seed, again.options.limit) == (5, 5, 4)
        said = table._said({"watched": "", "data": {}}, {"conditions": {}})
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
    for loader in (
        "tensorlens.studies.paper.run.load",
        "transformers.AutoModelForSequenceClassification.from_pretrained",
    ):
        monkeypatch.setattr(loader, lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises((InputError, LoadError)) as caught:
        PaperTable(name, data, options.pop("out", "nowhere"), **options).run()
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


def test_bad_data_are_one_sentence_before_a_model_is_loaded(tmp_path, monkeypatch):
    protocol, words = read_protocol(small_protocol(tmp_path)), " ".join(WORDS)
    models = {name: write_model(tmp_path / name, name) for name in ("bert", "deit-base", "modernbert", "pythia")}

    def says(name, data, **options):
        options = {
            "model": models["pythia" if name == "relations" else name],
            "protocol": protocol,
            "limit": 2,
        } | options
        return refused(monkeypatch, name, data, **options)

    def written(name, text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
        return tmp_path / name

    assert "9 of 9 in" in says("bert", written("plain.csv", "text\n" + f"{words}\n" * 9))
    some = written("some.csv", "text,label\n" + f"{words},1\n{words},\n" * 3)
    assert "3 of 6 in" in says("bert", some) and "Add a column called label" in says("bert", some)
    stars = written("stars.csv", "text,label\n" + f"{words},7\n" * 4)
    assert "needs labels 0 and 1, or neg and pos; got 7" in says("modernbert", stars)
    assert "got a list. Write a line" in says(
        "bert", written("rows.json", json.dumps([{"text": words, "label": 1}] * 4))
    )
    pictures = write_classes(tmp_path / "pictures")
    (pictures / "empty").mkdir()
    assert "class folder 'empty'" in says("deit-base", pictures)
    (pictures / "empty").rmdir()
    assert "Pass --limit 6" in says("deit-base", pictures, limit=None)
    reviews = write_reviews(tmp_path / "reviews.csv")
    assert "1000 samples of at least 10 tokens were asked for" in says("bert", reviews, limit=None)
    assert "Pass --limit 16" in says("bert", reviews, limit=None)
    assert "pass it with --data" in says("deit-base", None) and "pass it with --data" in says("bert", "")
    assert "there is none at" in says("pythia", tmp_path / "absent.txt")
    assert "needs ImageNet (a folder of pictures by class)" in says("deit-base", reviews)
    assert "needs the relations data set (a folder of files by category)" in says("relations", tmp_path / "no" / "data")
    broken = written("relations/factual/a.json", "{").parent.parent
    assert "No relation in" in says("relations", broken) and "a.json: Input data was truncated" in says(
        "relations", broken
    )
    write_data(tmp_path / "root", "imdb")
    assert "needs WikiText-103" in says("pythia", tmp_path / "root")


def test_bad_models_and_options_are_one_sentence_before_a_model_is_loaded(tmp_path, monkeypatch):
    reviews, pictures = write_reviews(tmp_path / "reviews.csv"), write_classes(tmp_path / "pictures")
    bert, given = write_model(tmp_path / "bert", "bert"), SMALL["perturbation"]

    def says(name="bert", data=reviews, model=bert, **options):
        protocol = read_protocol(small_protocol(tmp_path, **options.pop("protocol", {})))
        return refused(monkeypatch, name, data, model=model, protocol=protocol, limit=2, **options)

    assert "there is none" in says(model=str(tmp_path / "absent"))
    assert "The checkpoint 'step9' was expected" in says(revision="step9")
    assert "TABLE must be one of" in says("gpt")
    assert "needs a model of pictures" in says("deit-base", pictures)
    assert "has no tokenizer" in says(model=write_model(tmp_path / "deit", "deit-base"))
    pico = write_model(tmp_path / "pico", "pico")
    assert "pass --trust-remote-code" in says("pico", write_articles(tmp_path / "articles.txt"), pico)
    (tmp_path / "file").write_text("")
    assert "file' is a file" in says(out=tmp_path / "file") and "file' is a file" in says(
        out=tmp_path / "file" / "below"
    )
    assert "`seed` of at least 0" in says(seed=-1)
    assert "torch sees 0 GPUs" in says(device="mps" if torch.cuda.is_available() else "cuda")
    assert "`replacements` among token" in says(protocol={"perturbation": given | {"replacements": ["black"]}})
    for changes, said in (
        ({"tables": {"brt": {}}}, "got 'brt'. Did you mean 'bert'?"),
        ({"tables": {"pico": {"wach": "first"}}}, "unknown field `wach`"),
        ({"perturbation": {"keep_first": -1}}, "`int` >= 0 - at `$.perturbation.keep_first`"),
        ({"relations": {"starts": [-1]}}, "such as (0,); got (-1,)"),
        ({"training": {"epochs": -1}}, "`int` >= 0 - at `$.training.epochs`"),
        ({"training": {"learning_rate": -1.0}}, "- at `$.training.learning_rate`"),
    ):
        with pytest.raises(InputError) as caught:
            read_protocol(small_protocol(tmp_path, **changes))
        assert said in str(caught.value)
    modern = write_model(tmp_path / "modern", "modernbert")
    weights = tmp_path / "modern" / "model.safetensors"
    assert "fine-tunes it before measuring" in says("modernbert", model=modern, protocol={"training": {"epochs": 0}})
    weights.write_bytes(weights.read_bytes()[:999])
    monkeypatch.undo()
    with pytest.raises(LoadError, match="the checkpoint could not be read"):
        PaperTable(
            "modernbert",
            reviews,
            tmp_path / "o",
            model=modern,
            protocol=read_protocol(small_protocol(tmp_path)),
            limit=2,
        ).run()


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
