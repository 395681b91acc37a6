from __future__ import annotations

import csv
import json
import stat
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from view_samples import HOSTILE

from tensorlens.errors import InputError
from tensorlens.files import write_whole
from tensorlens.maps.methods import METHODS
from tensorlens.maps.token_map import TokenMap, Top


def make(scores: torch.Tensor, meta: dict | None = None, **changes) -> TokenMap:
    n_out, n_in = scores.shape
    fields = {
        "out_tokens": tuple(f"out{i}" for i in range(n_out)),
        "in_tokens": tuple(f"in{j}" for j in range(n_in)),
        "method": "tensor.in_out",
        "bias_share": torch.linspace(0, 1, n_out).to(scores.dtype),
        "meta": meta or {},
    }
    return TokenMap(scores=scores, **(fields | changes))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.numpy(force=True).tobytes() == b.numpy(force=True).tobytes()


AWKWARD = torch.tensor([[0.1, float("nan"), float("inf")], [-float("inf"), -0.0, 1e-38]], dtype=torch.float64)


def test_scores_are_detached_copies_on_the_cpu():
    source = torch.ones(2, 2, requires_grad=True)
    tmap = make(source)
    with torch.no_grad():
        source[0, 0] = 7.0
    assert not tmap.scores.requires_grad
    assert tmap.scores.device.type == "cpu"
    assert tmap.scores[0, 0] == 1.0


def test_a_map_cannot_be_changed():
    with pytest.raises(AttributeError):
        make(torch.ones(1, 1)).method = "other"  # pyright: ignore


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out_tokens": ("a",)}, r"scores of shape \(1, 3\).*got \(2, 3\)"),
        ({"in_tokens": ("a", "b")}, r"scores of shape \(2, 2\).*got \(2, 3\)"),
        ({"bias_share": torch.ones(3)}, r"bias_share of shape \(2,\).*got \(3,\)"),
        ({"scores": torch.ones(2, 3, dtype=torch.int64)}, "tensor of floats, got torch.int64"),
        ({"out_tokens": "ab"}, "sequence of strings"),
        ({"meta": {"model": object()}}, "written as JSON"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words, monkeypatch):
    # The tests' own type checks would speak first; users have none.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    fields = {"scores": torch.ones(2, 3), "out_tokens": ("a", "b"), "in_tokens": ("a", "b", "c"), "method": "m"}
    with pytest.raises(InputError, match=words):
        TokenMap(**(fields | {"bias_share": torch.ones(2), "meta": {}} | changes))


def test_shape_and_sign():
    assert make(torch.ones(2, 3)).shape == (2, 3)
    assert not make(torch.ones(2, 3), method="tensor.norm").is_signed
    assert make(torch.tensor([[1.0, -1.0]]), method="mine").is_signed


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_has_one_palette_whatever_its_scores(name):
    positive = make(torch.ones(2, 3), method=name)
    assert positive.is_signed == positive.view().is_signed == METHODS[name].summary.endswith("; signed")


def test_repr_is_one_short_line():
    text = repr(make(torch.ones(200, 200), meta={"target": " Paris"}))
    assert text == "TokenMap(tensor.in_out, 200 × 200, target=' Paris')"


def test_row_keeps_what_belongs_to_it():
    meta = {"target": [" a", " b"], "standard_error": [[0.1], [0.2]], "out_positions": [4, 5], "blocks": [0, 30]}
    row = make(torch.tensor([[1.0], [2.0]]), meta=meta).row(-1)
    assert row.scores.tolist() == [[2.0]]
    assert row.out_tokens == ("out1",)
    assert row.bias_share.tolist() == [1.0]
    assert row.meta == {"target": [" b"], "standard_error": [[0.2]], "out_positions": [5], "blocks": [0, 30]}


@pytest.mark.parametrize("out_token", [2, -3])
def test_row_out_of_range(out_token):
    with pytest.raises(InputError, match=rf"from -2 to 1 .*; got {out_token}"):
        make(torch.ones(2, 1)).row(out_token)


def test_normalised_rows_sum_to_one_by_size():
    scores = torch.tensor([[1.0, -3.0], [0.0, 0.0], [float("nan"), 2.0]])
    result = make(scores).normalised().scores
    assert result[0].tolist() == [0.25, -0.75]
    assert result[1].tolist() == [0.0, 0.0]
    assert result[2, 1] == 1.0


def test_top_ranks_by_size_and_keeps_the_sign():
    tmap = make(torch.tensor([[9.0, 9.0, 9.0, 9.0], [0.5, -2.0, float("nan"), 0.5]]))
    assert tmap.top(3) == [Top(1, "in1", -2.0), Top(0, "in0", 0.5), Top(3, "in3", 0.5)]
    assert [entry.index for entry in tmap.top(99)] == [1, 0, 3, 2]
    assert tmap.top(1, out_token=0)[0].score == 9.0


def test_top_keeps_the_order_of_equals():
    assert [entry.index for entry in make(torch.ones(1, 3000)).top(2000)] == list(range(2000))


def test_top_needs_a_count():
    with pytest.raises(InputError, match="at least 1; got 0"):
        make(torch.ones(1, 1)).top(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_roundtrip(tmp_path, dtype, suffix):
    meta = {"heads": {3: (0, 1)}, "note": float("nan"), "image": None, "float": "nan"}
    saved = make(AWKWARD.to(dtype), meta=meta)
    back = TokenMap.load(saved.save(tmp_path / f"map{suffix}"))
    assert back.scores.dtype == dtype
    mine, theirs = (tmap.scores.nan_to_num(nan=5.0) for tmap in (saved, back))
    assert torch.equal(theirs, mine)
    assert torch.equal(theirs.signbit(), mine.signbit())
    assert torch.equal(back.bias_share, saved.bias_share)
    assert (back.out_tokens, back.in_tokens, back.method) == (saved.out_tokens, saved.in_tokens, saved.method)
    assert str(back.meta) == str(saved.meta)


def test_safetensors_keep_every_bit(tmp_path):
    bits = torch.tensor([[0x7FC00001, 0x7F800000, 0x00000001, -0x80000000]], dtype=torch.int32)
    saved = make(bits.view(torch.float32))
    back = TokenMap.load(saved.save(tmp_path / "map.safetensors"))
    assert same_bits(back.scores, saved.scores)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
def test_hostile_labels_survive(tmp_path, suffix):
    n = len(HOSTILE)
    saved = make(torch.zeros(n, n), out_tokens=HOSTILE, in_tokens=HOSTILE)
    assert TokenMap.load(saved.save(tmp_path / f"map{suffix}")).in_tokens == HOSTILE


@settings(max_examples=40, deadline=None)
@given(labels=st.lists(st.text(), max_size=4), values=st.lists(st.floats(width=32), min_size=4, max_size=4))
def test_any_map_survives_both_files(tmp_path_factory, labels, values):
    folder = tmp_path_factory.mktemp("maps")
    saved = make(torch.tensor([values[: len(labels)]]).reshape(1, len(labels)), in_tokens=tuple(labels))
    for name in ("map.json", "map.safetensors"):
        back = TokenMap.load(saved.save(folder / name))
        assert back.in_tokens == saved.in_tokens
        assert torch.equal(back.scores.nan_to_num(nan=3e38), saved.scores.nan_to_num(nan=3e38))


def test_json_is_strict(tmp_path):
    def refuse(constant):
        raise AssertionError(constant)

    text = make(AWKWARD, meta={"note": float("inf")}).save(tmp_path / "map.json").read_text()
    document = json.loads(text, parse_constant=refuse)
    assert document["format"] == "tensorlens.token_map/1"


def test_csv_has_one_line_a_pair(tmp_path):
    labels = ('a,"b', "c\nd")
    path = make(torch.tensor([[0.1, -2.0]], dtype=torch.float64), in_tokens=labels).save(tmp_path / "map.csv")
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    assert lines[0] == ["out_token", "out_text", "in_token", "in_text", "score"]
    assert lines[1:] == [["0", "out0", "0", 'a,"b', "0.1"], ["0", "out0", "1", "c\nd", "-2.0"]]


def test_csv_takes_any_label(tmp_path):
    make(torch.zeros(1, len(HOSTILE)), in_tokens=HOSTILE).save(tmp_path / "map.csv")


@pytest.mark.parametrize(
    "name", ["map.html", "map.png", "map.svg", "map.pdf", "map.JSON", "map.csv", "map.safetensors"]
)
def test_every_suffix_writes_one_readable_file(tmp_path, name):
    path = make(torch.rand(3, 3)).save(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]
    assert path.stat().st_size > 50
    assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


@pytest.mark.parametrize("name", ["map.txt", "map"])
def test_unknown_suffix_lists_the_known(tmp_path, name):
    with pytest.raises(InputError, match=r"\.html \.png \.svg \.pdf \.csv \.json \.safetensors"):
        make(torch.ones(1, 1)).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_missing_folder_and_folder_as_file(tmp_path):
    with pytest.raises(InputError, match="existing folder"):
        make(torch.ones(1, 1)).save(tmp_path / "no" / "map.json")
    (tmp_path / "map.json").mkdir()
    with pytest.raises(InputError, match="got the folder"):
        make(torch.ones(1, 1)).save(tmp_path / "map.json")


def test_a_failed_save_leaves_the_old_file_alone(tmp_path):
    path = make(torch.ones(1, 1)).save(tmp_path / "map.json")
    before = path.read_bytes()

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(InputError, match=r"map.json' cannot be written: disk full\."):
        write_whole(path, fail)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_load_names_what_is_wrong_with_a_file(tmp_path):
    (tmp_path / "foreign.json").write_text('{"format": "something/1"}')
    (tmp_path / "list.json").write_text("[1, 2]")
    (tmp_path / "newer.json").write_text('{"format": "tensorlens.token_map/2"}')
    (tmp_path / "map.txt").write_text("")
    for name, words in {
        "foreign.json": "got 'something/1' as its format",
        "list.json": "got None as its format",
        "newer.json": "newer TensorLens.*wheel or clone",
        "map.txt": r"\.json or \.safetensors",
        "absent.json": "does not exist",
    }.items():
        with pytest.raises(InputError, match=words):
            TokenMap.load(tmp_path / name)


@pytest.mark.parametrize("suffix", [".safetensors", ".json"])
@pytest.mark.parametrize("part", [0, 0.3, 0.95])
def test_a_truncated_file_is_refused(tmp_path, suffix, part):
    path = make(torch.rand(4, 4)).save(tmp_path / f"map{suffix}")
    path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)])
    with pytest.raises(InputError, match="complete file that `TokenMap.save` wrote"):
        TokenMap.load(path)


def test_foreign_and_newer_safetensors(tmp_path):
    from safetensors.torch import save_file

    save_file({"scores": torch.ones(1, 1)}, tmp_path / "weights.safetensors")
    with pytest.raises(InputError, match="got None as its format"):
        TokenMap.load(tmp_path / "weights.safetensors")
    save_file({"scores": torch.ones(1, 1)}, tmp_path / "new.safetensors", metadata={"format": "tensorlens.token_map/9"})
    with pytest.raises(InputError, match="newer TensorLens"):
        TokenMap.load(tmp_path / "new.safetensors")


def test_a_file_whose_parts_disagree_is_refused(tmp_path, monkeypatch):
    path = make(torch.rand(2, 2)).save(tmp_path / "map.json")
    document = json.loads(path.read_text())
    document["in_tokens"] = ["only one"]
    path.write_text(json.dumps(document))
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=r"Could not load 'map.json'.*shape \(2, 1\)"):
        TokenMap.load(path)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty_maps(tmp_path, shape):
    tmap = make(torch.ones(shape))
    for suffix in (".json", ".safetensors"):
        assert TokenMap.load(tmap.save(tmp_path / f"map{suffix}")).shape == shape
    tmap.save(tmp_path / "map.html")
    tmap.show()
    with pytest.raises(InputError, match="with scores to draw"):
        tmap.save(tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()


def test_show_prints_one_row(capsys):
    make(torch.rand(3, 2)).show(out_token=1)
    printed = capsys.readouterr().out
    assert "output 0 out1 × 2 inputs" in printed


def test_html_of_200_tokens_is_small(tmp_path):
    path = make(torch.randn(200, 200)).save(tmp_path / "map.html")
    assert path.stat().st_size < 400_000


def test_notebook_form_is_a_fragment():
    html = make(torch.rand(2, 2))._repr_html_()
    assert html.startswith("<div data-tensorlens")
    assert "<html" not in html


@pytest.mark.parametrize("label", ["=1+1", "+1", "-1", "−1", "@SUM(A1)", "\tx", "\rx", "＝1"])
def test_a_spreadsheet_sees_no_formula_in_a_label(tmp_path, label):
    path = make(torch.ones(1, 2), in_tokens=(label, " fine"), out_tokens=(label,)).save(tmp_path / "map.csv")
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    assert [row[3] for row in rows] == [f"'{label}", " fine"]
    assert {row[1] for row in rows} == {f"'{label}"}


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_odd_numbers_in_meta_are_written_as_strict_json(tmp_path, suffix):
    found = make(torch.ones(1, 1), meta={"certificate": {"errors": {"value": float("nan")}}})
    path = found.save(tmp_path / f"map{suffix}")
    assert b"NaN" not in path.read_bytes()
    assert TokenMap.load(path).meta["certificate"]["errors"]["value"] != 0.0


@pytest.mark.parametrize(
    "meta",
    [
        {"grid": 3},
        {"grid": {"rows": "1", "columns": 1, "first": 0}},
        {"grid": {"rows": 1, "columns": 1, "first": 0, "more": 1}},
        {"grid": {"rows": 1, "columns": 1, "first": 0}, "image": 3},
    ],
)
def test_meta_of_wrong_types_is_refused_with_a_reason(meta):
    with pytest.raises(InputError, match="Expected"):
        make(torch.ones(1, 1), meta=meta).view()


@pytest.mark.parametrize("name", ["out_positions", "logit", "target", "set_aside", "offsets", "text", "certificate"])
@pytest.mark.parametrize("value", [None, 3, "x", [None], [{}], ["x"], {"passed": []}, float("nan")])
def test_meta_that_is_odd_is_still_drawn(name, value):
    found = make(torch.ones(1, 2), meta={name: value})
    found.view()
    found.words().view()
    assert "<" in found._repr_html_()
