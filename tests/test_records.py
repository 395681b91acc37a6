"""Records of every kind: they come back as they were, and damaged files are refused or read, never a raw error.

A file that is read must also be printed, shown, drawn for a notebook and saved again.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from damage import ALL, BYTES, WORDS, header_words, refusals
from matplotlib.figure import Figure
from msgspec.structs import replace
from rich.console import Console
from zoo import build, sample

import tensorlens as tl
from tensorlens.errors import TensorLensError
from tensorlens.inside.circuit import faithfulness_of
from tensorlens.inside.stream import Component
from tensorlens.maps.targets import Said
from tensorlens.records import MOST_NESTED, Record
from tensorlens.views.labels import visible

SAMPLE = 60
DRAWN = {".html"}
"""Of what can only be looked at, the page stands for the figures, which take a second each."""


@cache
def tensor() -> Any:
    return tl.Lens(build("gpt2"))(sample("gpt2"))


def token_map() -> tl.TokenMap:
    """A map with all that its `meta` may hold."""
    return tl.TokenMap(
        scores=torch.tensor([[1.0, -2.0, float("nan"), 0.5, 0.0], [float("inf"), 1.0, 2.0, 3.0, 4.0]]),
        out_tokens=("a", "b"),
        in_tokens=("c", "d", "e", "f", "g"),
        method="tensor.in_class",
        bias_share=torch.tensor([0.25, float("nan")]),
        meta={
            "model": "tiny",
            "target": "x − y",
            "logit": [1.0, 2.0],
            "text": "cdefg",
            "out_positions": [0, 1],
            "offsets": [[k, k + 1] for k in range(5)],
            "causal": True,
            "set_aside": [0],
            "blocks": [0, 2],
            "heads": {"0": [1]},
            "rules": {"gate": "half"},
            "certificate": {"passed": True, "errors": {"value": float("nan")}},
        },
    )


def picture_map() -> tl.TokenMap:
    """A map of patches."""
    grid = {"rows": 2, "columns": 2, "first": 1}
    return tl.TokenMap(
        scores=torch.rand(1, 5),
        out_tokens=("cls",),
        in_tokens=("cls", *"abcd"),
        method="tensor.norm",
        bias_share=torch.rand(1),
        meta={"grid": grid, "standard_error": [[0.1]]},
    )


def answer_map() -> tl.TokenMap:
    """A map of an answer, with prompt and answer as text."""
    return tl.TokenMap(
        scores=torch.rand(1, 3),
        out_tokens=("yes",),
        in_tokens=("Is it", " so?", "answer"),
        method="tensor.in_class",
        bias_share=torch.rand(1),
        meta={
            "text": "Is it so?yes",
            "offsets": [[0, 5], [5, 9], [9, 12]],
            "answer": "yes",
            "answer_parts": [[0, 3]],
            "logit": [2.0],
            "against": "no",
            "sums_to": "the target",
            "grouped": "answer",
        },
    )


def reading() -> tl.CorpusReading:
    said = tuple(Said(name, k, 0.5) for k, name in enumerate("ab"))
    return tl.CorpusReading(tokens=("x", "y"), corpus=((said, said),) * 2, plain=((said, said),) * 2)


def corpus_tensor() -> tl.CorpusTensor:
    meta = {"model": "tiny", "rules": {"include_final_norm": True}, "probes": None}
    return tl.CorpusTensor(matrices=torch.rand(2, 3, 3), bias=torch.rand(2, 3), outputs="own", n_texts=4, meta=meta)


def patching() -> tl.Patching:
    labels = tuple(Component(kind="attention head", block=n, head=h) for n in range(2) for h in range(2))
    true = torch.tensor([0.1, float("nan"), 0.3, 0.2])
    return tl.Patching(labels=labels, predicted=torch.rand(4), true=true, target="x", clean=1.5, meta={"model": "t"})


def comparison() -> tl.Comparison:
    found = tl.compare(tensor(), tl.Lens(build("gpt2"), rules=tl.Rules.jacobian())(sample("gpt2")), probes=2)
    assert found.per_pair is not None
    return found


def pair_map() -> tl.PairMap:
    scores = torch.tensor([[0.5, -0.25, 0.0], [float("nan"), 0.1, 0.2]])
    meta = {"model": "tiny", "pooling": "mean", "groups": "tokens", "a": "x", "b": "u v"}
    labels = {"out_tokens": ("x", "bias"), "in_tokens": ("u", "v", "bias")}
    return tl.PairMap(scores=scores, **labels, measure="cosine", value=0.55, n_against=1, meta=meta)


KINDS: dict[str, Callable[[], Record]] = {
    "token map": token_map,
    "map of a picture": picture_map,
    "map of an answer": answer_map,
    "pair map": pair_map,
    "components": lambda: tensor().components(target=5),
    "graph": lambda: tensor().graph(target=5, max_nodes=12),
    "inside": lambda: tensor().inside(target=5, max_nodes=8, n_whys=1),
    "ablation": lambda: tensor().ablate((0, 1), target=5),
    "patching": patching,
    "corpus tensor": corpus_tensor,
    "corpus reading": reading,
    "comparison": comparison,
    "faithfulness": lambda: faithfulness_of([[0.0, 0.7, 1.0]], (0.0, 0.1, 1.0), unit="edges", size=40),
}

FILES = [
    (kind, suffix)
    for kind, suffixes in {name: (".json",) for name in KINDS}.items()
    for suffix in ((".json", ".safetensors") if kind in ("token map", "pair map", "components") else suffixes)
    if kind != "corpus tensor"
] + [("corpus tensor", ".safetensors")]


@cache
def record(kind: str) -> Record:
    return KINDS[kind]()


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own type checks would speak first; users have none."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.mark.parametrize(("kind", "suffix"), FILES)
def test_a_record_comes_back_as_it_was(kind: str, suffix: str, tmp_path: Path) -> None:
    found = record(kind)
    back = type(found).load(found.save(tmp_path / f"record{suffix}"))
    assert str(back.as_dict()) == str(found.as_dict())  # NaN is not equal to itself
    assert repr(back) == repr(found) and back._repr_html_() == found._repr_html_()


def use(found: Record, folder: Path) -> None:
    """Everything that can be done with a record that was loaded."""
    assert repr(found).encode()
    found.show(console=Console(file=io.StringIO(), width=100))
    assert found._repr_html_()
    for suffix in found._writers():
        if suffix in (*found.loadable, *DRAWN, ".csv"):
            found.save(folder / f"again{suffix}")
    for name in ("top", "heads", "correlation", "view", "flow"):
        method = getattr(type(found), name, None)
        if callable(method):
            method(found)


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.large)])
@pytest.mark.parametrize(("kind", "suffix"), FILES)
def test_a_damaged_record_is_refused_or_can_be_used(kind: str, suffix: str, count: int, tmp_path: Path) -> None:
    found = record(kind)
    file = found.save(tmp_path / f"record{suffix}")
    damages = WORDS if suffix == ".json" else (*BYTES, header_words, header_words)

    def read(path: Path) -> None:
        use(type(found).load(path), tmp_path)

    assert refusals(f"{kind} {suffix}", count, file, damages, read) > 0.3 * count


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.large)])
def test_a_damaged_tensor_is_refused_or_can_be_used(count: int, tmp_path: Path) -> None:
    file = tensor().save(tmp_path / "T.safetensors")

    def read(path: Path) -> None:
        T = tl.AttentionTensor.load(path)
        assert repr(T).encode() and T._repr_html_()
        T.save(tmp_path / "again.safetensors")
        T.map("tensor.in_class", -1, 5)
        T.components(target=5)

    assert refusals("tensor", count, file, (*BYTES, *[header_words] * 4), read) > 0.3 * count


def hostile() -> Iterator[tuple[str, str]]:
    yield "deep", "[" * 100_000 + "]" * 100_000
    yield "deep meta", '{"a":' * 500 + "1" + "}" * 500
    yield "large", "1" + "0" * 5_000
    yield "larger than a float", "1" + "0" * 400
    yield "infinite", "1e999"
    yield "not JSON", "NaN"
    yield "surrogate", '"\\ud800"'
    yield "markup", '"[/bold]<script>"'


@pytest.mark.parametrize("kind", [kind for kind, suffix in FILES if suffix == ".json"])
@pytest.mark.parametrize("value", dict(hostile()))
def test_hostile_values_in_every_field(kind: str, value: str, tmp_path: Path) -> None:
    """Each field in turn is replaced as text, since most of these are not what a JSON writer gives."""
    found, text, refused = record(kind), dict(hostile())[value], 0
    document = json.loads(found.save(tmp_path / "record.json").read_text())
    for name in document:
        parts = [f"{json.dumps(key)}: {text if key == name else json.dumps(one)}" for key, one in document.items()]
        (tmp_path / "bad.json").write_text("{" + ", ".join(parts) + "}")
        try:
            use(type(found).load(tmp_path / "bad.json"), tmp_path)
        except TensorLensError as error:
            refused += 1
            assert len(str(error)) < 2_000
    assert refused >= 1


def test_meta_may_be_deep_but_not_without_end() -> None:
    deep: Any = 1
    for _ in range(MOST_NESTED + 1):
        deep = [deep]
    with pytest.raises(tl.InputError, match=f"at most {MOST_NESTED} levels"):
        replace(token_map(), meta={"a": deep})


def test_every_kind_of_record_is_tried_here() -> None:
    assert {type(record(kind)) for kind in KINDS} == set(Record.__subclasses__())


def test_everything_a_user_holds_has_a_form_for_notebooks() -> None:
    lens = tl.Lens(build("gpt2"))
    held = [lens, tensor(), tensor().program, tensor().certificate(), *(record(kind) for kind in KINDS)]
    held += [lens.answer(list(range(1, 6)), [3, 4]), lens.explain(sample("gpt2")), lens.batch([[1, 2], [3, 4]])]
    held += [tl.Rules(), tl.recommended("word"), tl.MeanTensor([tensor()])]
    held += [tl.spectrum(tensor(), k=2), tl.Mapper("minilm")]
    for one in held:
        html = one._repr_html_()
        assert html.lstrip().startswith("<") and "<html" not in html
    seen = {type(one) for one in held} | {tl.Prediction}  # a tuple
    public = {value for value in map(tl.__dict__.get, tl.__all__) if isinstance(value, type)}
    authors = {tl.Question, tl.Scored}  # held by who writes a method, not by who asks for a map
    public = {one for one in public - authors if not issubclass(one, Exception)}
    without = [one.__name__ for one in public - seen if not hasattr(one, "_repr_html_")]
    assert without == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_is_a_frame_an_array_and_a_plot(kind: str) -> None:
    found = record(kind)
    frame, array = found.to_pandas(), np.asarray(found)
    assert frame.shape == array.shape and frame.size and found.headline and found.headline == found.headline.strip()
    is_same = (frame.to_numpy() == array) | ((frame.to_numpy() != frame.to_numpy()) & (array != array))
    assert is_same.all()
    if array.dtype == object:
        with pytest.raises(tl.InputError, match="no numbers"):
            found.plot()
        return
    axes = Figure().add_subplot()
    assert found.plot(ax=axes) is axes and axes.get_title().split() == visible(found.headline).split()
    assert len(axes.patches) or len(axes.images)


def test_an_array_of_a_record_is_a_copy() -> None:
    found = token_map()
    np.asarray(found)[0, 1] = 7.0
    assert float(found.scores[0, 1]) == -2.0 and np.asarray(found, dtype="float64").dtype == np.float64
    frame = found.to_pandas()
    assert list(frame.index) == ["a", "b"] and frame.loc["a", "d"] == -2.0
    half = replace(found, scores=found.scores.bfloat16())
    assert np.asarray(half).dtype == np.float32
    names = replace(found, in_tokens=("\ud83d", *found.in_tokens[1:])).to_pandas().columns  # half a character
    assert list(names) == ["\\ud83d", *found.in_tokens[1:]]


def test_an_explanation_and_an_answer_are_frames_too() -> None:
    lens = tl.Lens(build("gpt2"))
    told = lens.explain(sample("gpt2"))
    assert np.array_equal(np.asarray(told), told.map.scores.numpy()) and told.to_pandas().shape == tuple(
        told.map.scores.shape
    )
    answer = lens.answer(list(range(1, 6)), [3, 4])
    assert answer.headline.startswith("Why “") and answer.to_pandas().shape == answer.map().shape


def test_other_versions_are_told_apart(tmp_path: Path) -> None:
    for version, words in (("1", "older TensorLens"), ("9", "newer TensorLens"), ("x" * 99, "newer TensorLens")):
        (tmp_path / "found.json").write_text(f'{{"format": "tensorlens.component_map/{version}"}}')
        with pytest.raises(tl.InputError, match=words):
            tl.ComponentMap.load(tmp_path / "found.json")


def test_a_comparison_that_was_loaded_has_no_tensors(tmp_path: Path) -> None:
    back = tl.Comparison.load(record("comparison").save(tmp_path / "found.json"))
    assert back.per_pair is not None and back.distance == record("comparison").distance  # type: ignore[attr-defined]
    with pytest.raises(tl.errors.MethodError, match="without its tensors"):
        _ = replace(back, pairs=None).per_pair
