"""The explorer's doors: sockets that wait, files that are hostile, readers who go away."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
import weakref
from contextlib import suppress

import pytest
import torch
from explorer_samples import SENTENCE, library, make_client, png, serving, status_of
from view_samples import patience

import tensorlens as tl
from tensorlens.app.explorer import Limits

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def client():
    with make_client() as client:
        yield client


def _half_sent(address: str, n: int, data: bytes = b"POST /api/map HTTP/1.1\r\nHost: 127.0.0.1\r\n"):
    host, port = address.removeprefix("http://").split(":")
    sockets = [socket.create_connection((host, int(port))) for _ in range(n)]
    for one in sockets:
        one.sendall(data)
    return sockets


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n"])
def test_a_hundred_half_sent_requests_stop_nobody(data):
    with serving(library("gpt2"), Limits(header_seconds=1.5)) as (address, _):
        sockets = _half_sent(address, 100, data)
        start = time.monotonic()
        assert status_of(address, "/api/start") == 200
        assert time.monotonic() - start < patience()
        sockets[0].settimeout(5)
        assert sockets[0].recv(10) == b"", "and is closed when its time is over"
        for one in sockets:
            one.close()


def test_a_second_request_may_not_be_half_sent_either():
    with serving(library("gpt2"), Limits(header_seconds=0.5)) as (address, _):
        (one,) = _half_sent(address, 1, b"GET /static/icon.svg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        one.settimeout(5)
        assert one.recv(20).startswith(b"HTTP/1.1 200")
        one.sendall(b"GET /")
        while one.recv(65536):
            pass
        one.close()


def test_the_socket_that_waited_longest_gives_way():
    with serving(library("gpt2"), Limits(connections=20)) as (address, _):
        sockets = _half_sent(address, 30)
        sockets[0].settimeout(30)
        with suppress(ConnectionResetError):  # or an end in good order: it depends on what was still to be read
            assert sockets[0].recv(10) == b""
        assert status_of(address, "/api/start") == 200
        for one in sockets:
            one.close()


def test_slow_uploads_take_no_decoder():
    head = b"POST /api/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc"
    with serving(library("gpt2")) as (address, _):
        sockets = _half_sent(address, 8, head)
        time.sleep(0.3)
        start = time.monotonic()
        assert status_of(address, "/api/images", png()) == 200 and time.monotonic() - start < 5 * patience()
        for one in sockets:
            one.close()


def test_bodies_that_arrive_at_once_are_bounded(client):
    with make_client(limits=Limits(body_bytes=1000)) as bounded:
        response = bounded.post("/api/images", content=b"x" * 2000)
        assert response.status_code == 503 and "in a moment" in response.json()["message"]
        assert bounded.app.state.explorer.arriving == 0


ODD = [
    ("GET", "/api/saved/" + "9" * 5000, None),
    ("GET", "/api/saved/-1", None),
    ("GET", "/api/saved/²", None),
    ("GET", "/api/results/saved-" + "9" * 5000 + ".json", None),
    ("GET", "/reports/" + "9" * 5000, None),
    ("POST", "/api/map", {"heads": {"0": [1e999]}}),
    ("POST", "/api/map", {"heads": {"9" * 5000: [0]}}),
    ("POST", "/api/map", {"heads": {"0": [0.5]}}),
    ("POST", "/api/map", {"out_token": 10**300}),
    ("POST", "/api/map", {"at": -(10**300)}),
    ("POST", "/api/map", {"blocks": [0, 10**300]}),
    ("POST", "/api/map", {"target": 10**300, "method": "tensor.in_class"}),
    ("POST", "/api/map", {"target": "\ud800", "method": "tensor.in_class"}),
    ("POST", "/api/map", {"model": "\ud800"}),
    ("POST", "/api/open", {"model": "\ud800"}),
    ("POST", "/api/map", {"blocks": "\ud800"}),
    ("POST", "/api/map", {"\ud800": 1, "method": "\ud800"}),
    ("POST", "/api/map", {"rules": "gate=,="}),
]


@pytest.mark.parametrize("case", range(len(ODD)))
def test_odd_numbers_are_refused_with_safe_headers(client, case):
    method, path, question = ODD[case]
    body = None if question is None else json.dumps({"model": "gpt2", "text": "a"} | question)
    response = client.request(method, path, content=body)
    assert response.status_code in (200, 400, 404, 422)
    assert response.headers["x-content-type-options"] == "nosniff"
    last_line = json.loads(response.text.splitlines()[-1])
    assert last_line["type"] == "error" and "did not expect" not in last_line["message"]


ODD_META = [
    {"certificate": {"passed": True, "errors": {"value": float("nan")}}},
    {"certificate": {"passed": "x", "errors": ["a"]}},
    {"certificate": {"passed": True, "errors": {"value": "x"}}},
    {"certificate": 3},
    {"model": "\ud800", "text": "\udfff"},
    {"grid": {"rows": "1"}},
    {"image": 3},
    {"target": float("inf"), "logit": [float("nan")]},
]


@pytest.mark.parametrize("case", range(len(ODD_META)))
def test_a_saved_map_with_odd_meta_is_shown_or_refused(case):
    found = tl.TokenMap(
        scores=torch.tensor([[float("nan"), 1.0]]),
        out_tokens=("\ud800",),
        in_tokens=("a", "\udc00"),
        method="tensor.in_out",
        bias_share=torch.tensor([float("inf")]),
        meta=ODD_META[case],
    )
    with make_client(library("gpt2", maps=(("odd.json", found),))) as client:
        for path in ("/api/saved/0", "/api/results/saved-0.html", "/api/results/saved-0.svg"):
            response = client.get(path)
            assert response.status_code in (200, 400) and response.headers["x-content-type-options"] == "nosniff"
            assert "did not expect" not in response.text
        assert "NaN" not in client.get("/api/saved/0").text


def test_even_what_nobody_expected_has_safe_headers(client, monkeypatch, caplog):
    monkeypatch.setattr(client.app.state.explorer, "_kept", lambda name: 1 / 0)
    response = client.get("/api/results/x.json")
    assert response.status_code == 500 and "ZeroDivisionError" in response.json()["message"]
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_a_reader_who_goes_away_stops_the_work_and_leaves_nothing():
    with serving(library("gpt2")) as (address, explorer):
        host, running = address.removeprefix("http://"), threading.Event()
        seen, ballasts = [], []

        def endless(job, ask):
            seen.append(job)
            ballast = torch.zeros(1_000_000)
            ballasts.append(weakref.ref(ballast))
            running.set()
            while True:
                job.check()
                job.tell("progress", stage="Computing", done=int(ballast[0]), total=2)
                time.sleep(0.01)

        explorer.answers.map = endless
        for _ in range(3):
            running.clear()
            connection = http.client.HTTPConnection(host, timeout=30)
            connection.request("POST", "/api/map", json.dumps({"model": "gpt2", "text": SENTENCE}))
            response = connection.getresponse()
            assert running.wait(20)
            response.read(10)
            response.close()
            connection.close()
            deadline = time.monotonic() + 60
            while not seen[-1].is_over and time.monotonic() < deadline:
                time.sleep(0.02)
            assert seen[-1].is_over and seen[-1].is_cancelled
        deadline = time.monotonic() + 60
        while any(ballast() is not None for ballast in ballasts) and time.monotonic() < deadline:
            time.sleep(0.05)  # the worker lets go of its frame after it has said that it is over
            gc.collect()
        assert [ballast() for ballast in ballasts] == [None] * 3
