"""The explorer's server: answers, refusals, limits, the queue, and readers who go away."""

from __future__ import annotations

import base64
import io
import json
import zlib

import pytest
import torch
from explorer_samples import HOST, SENTENCE, events, library, load, make_client, png
from msgspec.structs import replace
from PIL import Image
from tiny_study import tokenizer as wrapped_tokenizer
from zoo import build

import tensorlens as tl
from tensorlens.app.explorer.answers import ROWS_AT_A_TIME, _joined
from tensorlens.app.explorer.library import Library, open_library
from tensorlens.maps.methods import METHODS

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def client():
    with make_client() as client:
        yield client


def ask(client, path="/api/map", **question):
    body = {"model": "gpt2", "method": "tensor.in_out"} | ({} if "image" in question else {"text": SENTENCE}) | question
    return client.post(path, json=body)


def last(client, **question):
    response = ask(client, **question)
    assert response.status_code == 200, response.text
    found = events(response)
    of_map = [{"map": event["map"]} for event in found if event["type"] == "map"]
    return (of_map[-1] if of_map else {}) | found[-1]


def _like(found, expected):
    is_floats = isinstance(expected, list) and any(isinstance(value, float) for value in expected)
    return found == (pytest.approx(expected) if is_floats else expected)


def kept_map(client, event):
    return client.app.state.explorer.answers.results.get(event["result"])


# Answers -------------------------------------------------------------------------------------------------------------


def test_the_warning_of_any_row_is_that_of_the_joined_map():
    T = load("gpt2")(SENTENCE)
    parts = [T.map("tensor.in_class", [place]) for place in range(len(T.tokens))]
    parts[1] = replace(parts[1], meta=parts[1].meta | {"warning": "rounding"})
    found = _joined(parts, T.out_tokens)
    assert found.meta["warning"] == "rounding" and found.meta["kept"] == [part.meta["kept"][0] for part in parts]
    assert torch.equal(found.scores, torch.cat([part.scores for part in parts]))


def test_the_page_and_its_files_are_there(client):
    page = client.get("/")
    assert page.status_code == 200 and "TensorLens" in page.text
    assert "script-src 'self'" in page.headers["content-security-policy"]
    for name in ("main.js", "panel.js", "explorer.css", "icon.svg"):
        assert client.get(f"/static/{name}").status_code == 200
    assert "window.TensorLens" in client.get("/component.js").text
    start = client.get("/api/start").json()
    assert [model["name"] for model in start["models"]] == ["gpt2", "vit", "bert-classifier"]
    assert [method["name"] for method in start["methods"]] == list(METHODS)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_the_map_of_the_library(client, method):
    event = last(client, method=method)
    assert event["type"] == "done", event
    T = load("gpt2")(SENTENCE)
    found, expected = kept_map(client, event), T.map(method)
    assert torch.allclose(found.scores, expected.scores, rtol=1e-9, atol=1e-12)
    assert found.out_tokens == expected.out_tokens
    for name, value in expected.meta.items():
        assert name in ("certificate", "versions") or _like(found.meta[name], value), name
    if method.startswith("tensor."):
        assert event["is_of_tensor"] and event["certificate"]["passed"] and event["certificate"]["error"] < 1e-6
    else:
        assert not event["is_of_tensor"] and event["certificate"] is None
        assert ["Certificate", "not derived from T"] in event["caption"]


@pytest.mark.parametrize("method", ["tensor.in_out", "tensor.in_class", "tensor.norm"])
def test_rows_in_groups_are_the_map_at_once(method, monkeypatch):
    monkeypatch.setitem(ROWS_AT_A_TIME, method, 2)
    with make_client() as client:
        found = ask(client, method=method)
        kinds = [event["type"] for event in events(found)]
        event = events(found)[-1]
        expected = load("gpt2")(SENTENCE).map(method)
        assert kinds[-1] == "done" and "input" in kinds
        result = kept_map(client, event)
        assert torch.allclose(result.scores, expected.scores, rtol=1e-9)
        assert torch.allclose(result.bias_share, expected.bias_share, rtol=1e-6)
        for name in ("target", "logit", "out_positions"):
            assert _like(result.meta.get(name), expected.meta.get(name))


def test_one_output_a_contrast_blocks_and_heads(client):
    event = last(client, method="tensor.in_class", out_token=3, target=" cat", against=" dog", blocks=[1, 3])
    expected = load("gpt2")(SENTENCE).blocks(1, 3).map("tensor.in_class", 3, (" cat", " dog"))
    assert torch.allclose(kept_map(client, event).scores, expected.scores, rtol=1e-9)
    event = last(client, blocks=[1, 3], heads={"2": [0, 3]})
    expected = load("gpt2")(SENTENCE).blocks(1, 3).without_heads({1: [0, 3]}).map("tensor.in_out")
    assert torch.allclose(kept_map(client, event).scores, expected.scores, rtol=1e-9)


def test_one_output_that_is_not_named_is_the_one_looked_at_first(client):
    event = last(client, is_one=True)
    expected = load("gpt2")(SENTENCE).map("tensor.in_out", -1)
    assert torch.allclose(kept_map(client, event).scores, expected.scores, rtol=1e-9)
    assert event["result"] == last(client, out_token=expected.meta["out_positions"][0])["result"]


def test_an_image_and_a_head_that_pools(client):
    image = client.post("/api/images", content=png()).json()["image"]
    event = last(client, model="vit", image=image, method="tensor.in_class", target=1)
    assert event["map"]["grid"] == {"rows": 2, "columns": 2, "first": 1}
    assert event["map"]["image"].startswith("data:image/jpeg")
    event = last(client, model="bert-classifier", method="tensor.in_class")
    assert event["map"]["outTokens"] == ["LABEL_0"] or event["map"]["outTokens"][0].startswith("LABEL")


def test_predictions_are_the_models_own(client):
    event = events(ask(client, "/api/predictions", out_token=2))[-1]
    expected = load("gpt2")(SENTENCE).predictions(8, 2)
    assert [one["index"] for one in event["predictions"]] == [one[1] for one in expected]
    assert event["predictions"][0]["probability"] == pytest.approx(expected[0].probability)


@pytest.mark.parametrize("model", ["gpt2", "bert-classifier"])
def test_the_model_does_not_run_for_a_click(model):
    """Predictions, maps, the inside and scores come from the one recorded pass of an input."""
    n_runs = []
    with make_client() as client:
        client.post("/api/open", json={"model": model})
        lens = client.app.state.explorer.library.opened[model]
        lens.model.register_forward_pre_hook(lambda *_: n_runs.append(1))
        assert last(client, model=model, method=None)["type"] == "done"
        assert n_runs, "a pass, and the certificate's own"
        n_runs.clear()
        for question in ({"method": "tensor.in_out"}, {"method": "tensor.norm"}, {"method": "rollout.attn"}):
            assert last(client, model=model, **question)["type"] == "done"
        for output in (0, 1, 2):
            asked = {"model": model, "text": SENTENCE, "out_token": output}
            assert events(client.post("/api/predictions", json=asked))[-1]["predictions"]
        assert events(client.post("/api/inside", json={"model": model, "text": SENTENCE}))[-1]["type"] == "done"
        assert not n_runs
        last(client, model=model, text="The dog sat")
        assert n_runs


def test_a_circuit_is_that_of_the_library(client):
    """The text against another one, for the target of the inside."""
    asked = {"model": "gpt2", "text": SENTENCE, "corrupted": SENTENCE.replace("cat", "dog"), "rules": "jacobian"}
    event = events(client.post("/api/circuit", json=asked))[-1]
    assert event["type"] == "done", event
    lens = load("gpt2").with_rules("jacobian")
    expected = tl.circuit(lens, asked["text"], asked["corrupted"], progress=False)
    f = expected.faithfulness([share for share, _ in event["curve"]], progress=False)
    assert [f for _, f in event["curve"]] == pytest.approx([f for _, f in f.curve], abs=1e-6)
    assert event["cpr"] == pytest.approx(f.cpr) and event["size"] == expected.size
    assert len(event["inside"]["graph"]["edges"]) == round(0.005 * expected.size) > 0
    longer = events(client.post("/api/circuit", json=asked | {"corrupted": f"{SENTENCE} and the mat"}))[-1]
    assert "same length" in longer["message"]


def test_downloads_are_the_files_of_the_library(client, tmp_path):
    event = last(client, method="tensor.in_out")
    for kind in ("html", "json", "csv", "safetensors", "png", "svg"):
        response = client.get(f"/api/results/{event['result']}.{kind}")
        assert response.status_code == 200 and response.content
        assert response.headers["content-disposition"] == f'attachment; filename="tensor-in_out.{kind}"'
    path = tmp_path / "map.json"
    path.write_bytes(client.get(f"/api/results/{event['result']}.json").content)
    assert torch.equal(tl.TokenMap.load(path).scores, kept_map(client, event).scores)


def test_saved_maps_and_reports_of_the_command_line(tmp_path):
    found = load("gpt2")(SENTENCE).map("tensor.in_out")
    found.save(tmp_path / "one.json")
    found.save(tmp_path / "two.safetensors")
    study = tmp_path / "study"
    study.mkdir()
    (study / "report.html").write_text("<h1>Areas</h1>")
    arguments = [str(tmp_path / "one.json"), "gpt2", str(study), str(tmp_path / "two.safetensors"), "gpt2"]
    shelf = open_library(arguments, load)
    assert shelf.names == ("gpt2",)
    with make_client(shelf) as client:
        start = client.get("/api/start").json()
        assert start["maps"] == ["one.json", "two.safetensors"] and start["reports"] == ["study"]
        assert client.get("/api/saved/1").json()["map"]["title"] == "tensor.in_out"
        assert client.get("/api/results/saved-0.csv").status_code == 200
        report = client.get("/reports/0")
        assert "Areas" in report.text and report.headers["content-security-policy"].startswith("sandbox")
        assert client.get("/api/saved/2").status_code == 400
        assert client.get("/reports/1").status_code == 400


# Refusals ------------------------------------------------------------------------------------------------------------

BAD_QUESTIONS = {
    "no object": ([], "Expected `object`, got `array`"),
    "no model": ({"text": "a"}, "required field `model`"),
    "no input": ({"model": "gpt2"}, "text or an image"),
    "both inputs": ({"model": "gpt2", "text": "a", "image": "b"}, "text or an image"),
    "blank text": ({"model": "gpt2", "text": " \n "}, "some text"),
    "long text": ({"model": "gpt2", "text": "a" * 20_001}, "20000 characters"),
    "half a character": ({"model": "gpt2", "text": "a\ud800"}, "surrogate"),
    "text of another kind": ({"model": "gpt2", "text": 3}, "`$.text`"),
    "unknown method": ({"model": "gpt2", "text": "a", "method": "magic"}, "tensor.in_out"),
    "method of another kind": ({"model": "gpt2", "text": "a", "method": {}}, "`$.method`"),
    "output of another kind": ({"model": "gpt2", "text": "a", "out_token": "1"}, "`$.out_token`"),
    "true for a number": ({"model": "gpt2", "text": "a", "out_token": True}, "got `bool` - at `$.out_token`"),
    "blocks of another kind": ({"model": "gpt2", "text": "a", "blocks": [1]}, "`$.blocks`"),
    "heads of another kind": ({"model": "gpt2", "text": "a", "heads": [1]}, "`$.heads`"),
    "a contrast to nothing": ({"model": "gpt2", "text": "a", "against": 1}, "Choose what to explain"),
    "a long target": ({"model": "gpt2", "text": "a", "target": "x" * 201}, "length <= 200 - at `$.target`"),
}


def test_the_rules_are_those_recommended_for_the_question():
    with make_client(library("gpt2", is_recommended=True)) as client:
        found = kept_map(client, last(client))
        assert found.meta["rules"] == tl.recommended("word").rules.as_dict()
        chosen = kept_map(client, last(client, rules="paper"))
        assert chosen.meta["rules"] == tl.Rules.paper().as_dict()


def test_a_model_of_a_link_is_added_and_a_path_is_not(tmp_path):
    with make_client(library("gpt2", load=lambda name: load("gpt2"))) as client:
        added = events(client.post("/api/add", json={"model": "some/model"}))[-1]
        assert added["type"] == "done" and added["kind"] == "text"
        assert last(client, model="some/model")["type"] == "done"
        for path in (str(tmp_path), "../secret", "~/model", "a/b/c", "./x"):
            refused = events(client.post("/api/add", json={"model": path}))[-1]
            assert refused["type"] == "error" and "Only bundled models" in refused["message"], path


@pytest.mark.parametrize("case", BAD_QUESTIONS)
def test_a_bad_question_is_refused_with_a_reason(client, case):
    question, words = BAD_QUESTIONS[case]
    response = client.post("/api/map", content=json.dumps(question))
    assert response.status_code == 400
    assert words in response.json()["message"]


LATE = {
    "unknown model": (dict(model="../../etc/passwd"), "started with (gpt2"),
    "unknown output": (dict(out_token=99), "position from"),
    "unknown blocks": (dict(blocks=[2, 99]), "within 0:3"),
    "heads outside": (dict(blocks=[0, 1], heads={"2": [0]}), "heads of blocks 0 to 0"),
    "unknown head": (dict(heads={"2": [77]}), "`head of block 2` must be a whole number from 0 to 3"),
    "unknown target": (dict(method="tensor.in_class", target="nowhere to be found"), "must be one token"),
    "no such image": (dict(model="vit", image="0" * 32), "upload it again"),
    "image for a text model": (dict(model="vit"), "does not take text"),
    "too many tokens": (dict(text="The cat sat " * 20), "at most 40 tokens"),
}


@pytest.mark.parametrize("case", LATE)
def test_what_the_model_cannot_do_is_said(client, case):
    question, words = LATE[case]
    event = last(client, **question)
    assert event["type"] == "error" and words in event["message"], event


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000])
def test_a_body_that_is_no_json(client, body):
    response = client.post("/api/map", content=body)
    assert response.status_code == 400 and "JSON" in response.json()["message"]


def test_a_body_that_is_too_long(client):
    assert client.post("/api/map", content=b" " * 200_000).status_code == 413
    response = client.post("/api/images", content=b"\0" * (12 * 2**20 + 1))
    assert response.status_code == 413 and "smaller" in response.json()["message"]


def test_a_path_in_the_text_is_text(client, tmp_path):
    picture = tmp_path / "secret.png"
    picture.write_bytes(png())
    event = last(client, text=f"{picture}")
    assert event["type"] == "done"
    assert last(client, text="/nowhere/at all.png")["type"] == "done"


@pytest.mark.parametrize(
    "path", ["/static/../server.py", "/static/..%2Fserver.py", "/static/%2Fetc%2Fpasswd", "/api/results/..%2Fx.html"]
)
def test_no_path_reaches_the_disk(client, path):
    assert client.get(path).status_code in (400, 404)


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims to be huge."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


HOSTILE_IMAGES = {
    "bomb": (_bomb(60_000, 60_000), "cannot be read|pixels"),
    "just above the limit": (_bomb(7_000, 6_000), "pixels"),
    "cut short": (png()[:60], "cannot be read"),
    "no image": (b"<svg onload=alert(1)></svg>", "cannot be read"),
    "empty": (b"", "cannot be read"),
}


@pytest.mark.parametrize("case", HOSTILE_IMAGES)
def test_a_hostile_image_is_refused(client, case):
    data, words = HOSTILE_IMAGES[case]
    response = client.post("/api/images", content=data)
    assert response.status_code == 400
    assert any(word in response.json()["message"] for word in words.split("|"))


def test_a_failing_question_leaves_the_server_up(client, monkeypatch, caplog):
    monkeypatch.setattr(tl.AttentionTensor, "map", lambda *_, **__: 1 / 0)
    event = last(client, method="mean.attn", out_token=0)
    assert event["type"] == "error" and "ZeroDivisionError" in event["message"]
    monkeypatch.undo()
    assert last(client, method="mean.attn", out_token=0)["type"] == "done"


def test_hostile_tokens_are_data(client):
    event = last(client, text="<script>alert(1)</script> شمس 👩‍🚀 w1")
    assert event["map"]["inTokens"][0] == "<script>alert(1)</script>"
    page = client.get(f"/api/results/{event['result']}.html").text
    assert "<script>alert" not in page


# Who may ask ---------------------------------------------------------------------------------------------------------


WRONG_HOSTS = (
    "evil.example",
    "127.0.0.1.evil.example",
    "",
    "evil.example:8765",
    "[::1]evil.com",
    "[::1]:80evil.com",
    "[::1].evil.com:80",
    "[::1",
    "::1",
    "[evil.com]",
    "127.0.0.1:evil.com",
    "127.0.0.1:80:evil.com",
    "localhost:80@evil.com",
    "evil.com#@localhost",
    "localhost:",
    "localhost, evil.com",
    "localhost\tevil.com",
    "localhost:123456",
)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8765", "LOCALHOST", "[::1]", "[::1]:8765"])
def test_this_machine_by_any_of_its_names_is_welcome(client, host):
    assert client.get("/api/start", headers={"host": host}).status_code == 200


def test_even_where_any_name_will_do_it_must_be_a_name():
    with make_client(hosts=None) as client:
        for host, status in (("a.example:8765", 200), ("[2001:db8::1]:8765", 200), ("[::1]evil.com", 421), ("", 421)):
            assert client.get("/api/start", headers={"host": host}).status_code == status


@pytest.mark.parametrize("host", WRONG_HOSTS)
def test_another_host_name_is_refused(client, host):
    response = client.get("/api/start", headers={"host": host})
    assert response.status_code == 421 and "127.0.0.1" in response.json()["message"]


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8765"])
def test_another_origin_is_refused(client, origin):
    assert client.post("/api/map", json={}, headers={"origin": origin}).status_code == 403


def test_this_origin_is_welcome(client):
    assert client.get("/api/start", headers={"origin": HOST}).status_code == 200
    assert client.post("/api/map", json={}, headers={"sec-fetch-site": "cross-site"}).status_code == 403


def test_a_token_is_asked_for_and_kept_in_a_cookie():
    token = "correct horse battery"
    with make_client(hosts=None, token=token) as client:
        for shown in ({}, {"cookie": "tensorlens_token=wrong"}):
            assert client.get("/api/start", headers=shown).status_code == 401
        assert client.get("/?token=wrong", follow_redirects=False).status_code == 401
        entered = client.get("/", params={"token": token}, follow_redirects=False)
        assert entered.status_code == 303 and entered.headers["location"] == "/"
        cookie = entered.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert client.get("/api/start").status_code == 200


# The first question --------------------------------------------------------------------------------------------------


def test_a_model_with_a_head_is_asked_why_this_word(client):
    found = events(ask(client, method=None))
    told = next(event for event in found if event["type"] == "input")
    first = load("gpt2")(SENTENCE).predictions(1, -1)[0]
    assert told["method"] == "tensor.in_class" and not told["every"] and told["out_token"] == 5
    assert told["predictions"][0]["index"] == first[1]
    result = kept_map(client, found[-1])
    assert result.shape == (1, 6) and result.meta["target"] == first.name
    sums = next(event for event in found if event["type"] == "map")["map"]["sums"]
    assert sums[0].startswith("inputs sum to ") and f"the logit is {first.logit:.2f}".replace("-", "−") in sums[0]


def test_a_model_without_a_head_is_asked_what_made_its_outputs():
    with make_client(library("bert")) as client:
        told = next(event for event in events(ask(client, model="bert", method=None)) if event["type"] == "input")
    assert told["method"] == "tensor.in_out" and told["every"]


def test_a_masked_model_is_asked_about_its_masked_token():
    words = wrapped_tokenizer(wrapped=True)
    shelf = Library(names=("bert-mlm",), load=lambda name: tl.Lens(build(name), words, name=name))
    with make_client(shelf) as client:
        found = events(ask(client, model="bert-mlm", text="the cat [MASK] on a mat", method=None))
    told = next(event for event in found if event["type"] == "input")
    assert told["method"] == "tensor.in_class" and told["tokens"][told["out_token"]] == "[MASK]"


def test_a_picture_without_a_head_is_asked_about_its_class_token():
    with make_client(library("dinov2")) as client:
        image = client.post("/api/images", content=png()).json()["image"]
        found = events(ask(client, model="dinov2", text=None, image=image, method=None))
    told = next(event for event in found if event["type"] == "input")
    assert told["method"] == "tensor.contribution" and not told["every"] and told["out_token"] == 0


def test_an_estimate_comes_before_a_map_that_takes_long(monkeypatch):
    monkeypatch.setattr("tensorlens.app.explorer.answers.MANY_INPUTS", 2)
    with make_client(library("dinov2")) as client:
        image = client.post("/api/images", content=png()).json()["image"]
        found = events(ask(client, model="dinov2", text=None, image=image, method=None))
        lens = client.app.state.explorer.library.opened["dinov2"]
        kept = kept_map(client, found[-1])
    by_kind = {event["type"]: event for event in found}
    note = dict(map(tuple, by_kind["preview"]["map"]["caption"]))["Note"]
    assert note == "An estimate from 16 random probes, each score within about 18 %; the exact map follows."
    assert (
        by_kind["preview"]["map"]["title"]
        == by_kind["map"]["map"]["title"]
        == "Why the output “[CLS]” for this picture?"
    )
    assert "folded" not in kept.meta["certificate"]["errors"]  # that of the exact map, which does not need it
    estimate, exact = (base64.b64decode(by_kind[kind]["map"]["scores"]["data"]) for kind in ("preview", "map"))
    assert estimate != exact and "probes" not in kept.meta
    exactly = lens(Image.open(io.BytesIO(png()))).map("tensor.contribution", 0)
    assert torch.allclose(kept.scores, exactly.scores, rtol=1e-9)


def test_a_map_is_there_before_its_certificate(client, monkeypatch):
    seen = []

    def measured(T):
        explorer = client.app.state.explorer
        seen.extend(client.get(f"/api/results/{key}.json").status_code for key in list(explorer.answers.results._kept))
        return tl.operators.certificate.certify(T.operator)

    monkeypatch.setattr(tl.AttentionTensor, "certificate", measured)
    found = events(ask(client, text="The dog sat on the mat"))
    kinds = [event["type"] for event in found]
    assert kinds.index("map") < kinds.index("done") and found[-1]["certificate"]["passed"]
    assert seen and set(seen) == {200}


def test_words_and_causality_reach_the_map(client):
    event = last(client, text="The cat sat")
    found = kept_map(client, event)
    assert found.meta["causal"] is True and found.meta["offsets"] == [[0, 3], [3, 7], [7, 11]]
    response = client.get(f"/api/results/{event['result']}.json?words=1")
    assert response.json()["meta"]["grouped"] == "words"
