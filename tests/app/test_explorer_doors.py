"""The explorer's doors: the queue, sockets that wait, files that are hostile, readers who go away."""

from __future__ import annotations

import gc
import http.client
import json
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
import torch
from explorer_samples import SENTENCE, library, load, make_client, png, serving

import tensorlens as tl
from tensorlens import cancel
from tensorlens.app.explorer import jobs as jobs_module
from tensorlens.app.explorer import server as server_module
from tensorlens.app.explorer.jobs import Busy, Cancelled, Job, Worker, watch
from tensorlens.app.explorer.limits import Limits
from tensorlens.app.explorer.recent import Recent

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def client():
    with make_client() as client:
        yield client


def _post(address: str, timeout: float = 60.0, **question):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=timeout)
    body = {"model": "gpt2", "text": SENTENCE, "method": "tensor.in_out"} | question
    connection.request("POST", "/api/map", json.dumps(body))
    response = connection.getresponse()
    lines = response.read().decode().splitlines()
    connection.close()
    return response.status, json.loads(lines[-1])


def _get(address: str, path: str, data: bytes | None = None) -> int:
    with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
        connection.request("GET" if data is None else "POST", path, data)
        response = connection.getresponse()
        response.read()
        return response.status


# The queue -----------------------------------------------------------------------------------------------------------


def test_the_queue_is_bounded_and_forgets_the_cancelled():
    worker, gate, started = Worker(2), threading.Event(), threading.Event()

    def hold(job):
        started.set()
        gate.wait(10)
        return {"type": "done"}

    jobs = [Job(hold, seconds=60.0) for _ in range(4)]
    worker.submit(jobs[0])
    assert started.wait(5)
    worker.submit(jobs[1])
    worker.submit(jobs[2])
    assert worker.ahead_of(jobs[2]) == 2
    with pytest.raises(Busy, match="queue of 2"):
        worker.submit(jobs[3])
    jobs[1].cancel()
    worker.submit(jobs[3])
    gate.set()
    worker.close()


def test_a_job_stops_between_blocks_and_leaves_the_model_whole():
    worker, lens = Worker(4), load("gpt2")
    n_runs, before = [], lens(SENTENCE).output
    watch(lens.anatomy.blocks)
    job = Job(lambda _: {"type": "done", "map": lens(SENTENCE)}, seconds=60.0)
    lens.anatomy.blocks[1].register_forward_pre_hook(lambda *_: n_runs.append(1) or job.cancel())
    worker.submit(job)
    while not job.is_over:
        time.sleep(0.01)
    event = job.news()[-1]
    assert event["is_cancelled"] and len(n_runs) == 1
    assert torch.equal(lens(SENTENCE).output, before)
    worker.close()


def test_a_job_stops_where_long_work_checks():
    steps = []

    def work(_):
        for step in range(10):
            cancel.check()
            steps.append(step)
            if step == 3:
                job.cancel()
        return {"type": "done"}

    job = Job(work, seconds=60.0)
    job.run()
    assert job.news()[-1]["is_cancelled"] and steps == [0, 1, 2, 3]
    cancel.check()  # outside of a job nothing is asked


def test_time_is_limited():
    with make_client(limits=Limits(seconds=0.0)) as client:
        time.sleep(0.5)
        response = client.post("/api/map", json={"model": "gpt2", "text": SENTENCE})
    event = json.loads(response.text.splitlines()[-1])
    assert event["type"] == "error" and "within 0 s" in event["message"]


def test_unread_news_of_a_kind_is_replaced():
    job = Job(lambda _: {"type": "done"}, seconds=1.0)
    for done in range(1000):
        job.tell("progress", done=done)
    job.run()
    assert job.news() == [{"type": "progress", "done": 999}, {"type": "done"}]
    assert issubclass(Cancelled, BaseException) and not issubclass(Cancelled, Exception)


def test_recent_is_bounded_in_number_and_bytes():
    recent = Recent(3, 100)
    for key in range(5):
        recent.put(key, str(key), 10)
    assert len(recent) == 3 and recent.get(1) is None and recent.get(2) == "2"
    recent.put(9, "large", 500)
    assert len(recent) == 1 and recent.get(9) == "large" and recent.n_bytes == 500


def test_a_hundred_at_once_are_all_answered():
    with serving(library("gpt2")) as (address, _), ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda k: _post(address, out_token=k % 6), range(100)))
    assert {status for status, _ in found} == {200}
    assert {event["type"] for _, event in found} == {"done"}


def test_a_full_queue_refuses_with_a_reason():
    with serving(library("gpt2"), Limits(waiting=2)) as (address, explorer), ThreadPoolExecutor(12) as pool:
        gate = threading.Event()
        explorer.answers.map = lambda job, ask: gate.wait(20) and {"type": "done"}
        waiting = [pool.submit(_post, address) for _ in range(12)]
        while sum(one.done() for one in waiting) < 9:
            time.sleep(0.02)
        gate.set()
        found = [one.result() for one in waiting]
    assert sorted({status for status, _ in found}) == [200, 503]
    assert all(status == 200 or "Try again" in event["message"] for status, event in found)


def test_clients_take_turns_and_the_greedy_one_makes_room():
    worker, gate, order = Worker(4), threading.Event(), []

    def job(client, name):
        def work(_):
            gate.wait(10)
            order.append(name)
            return {"type": "done"}

        return Job(work, seconds=60.0, client=client)

    first = job("greedy", "g0")
    worker.submit(first)
    while worker.ahead_of(first) is not None:
        time.sleep(0.01)
    greedy = [job("greedy", f"g{k}") for k in range(1, 5)]
    for one in greedy:
        worker.submit(one)
    polite = job("polite", "p")
    worker.submit(polite)
    assert greedy[-1].is_over and "Try again" in greedy[-1].news()[-1]["message"]
    assert worker.ahead_of(polite) == 2, "after the one that runs and the first that waits"
    gate.set()
    while not greedy[2].is_over:
        time.sleep(0.01)
    assert order == ["g0", "g1", "p", "g2", "g3"]
    worker.close()


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_model_that_exits_does_not_take_the_worker_with_it(error):
    def leave(_):
        raise error

    worker = Worker(4)
    bad, good = Job(leave, seconds=60.0), Job(lambda _: {"type": "done"}, seconds=60.0)
    for job in (bad, good):
        worker.submit(job)
        while not job.is_over:
            time.sleep(0.01)
    assert type(error).__name__ in bad.news()[-1]["message"]
    assert good.news()[-1] == {"type": "done"}
    worker.close()


def test_a_question_that_never_looks_up_is_given_up(monkeypatch):
    monkeypatch.setattr(jobs_module, "GRACE", 0.2)
    ended = threading.Event()

    def stuck(job, ask):
        try:
            while True:
                time.sleep(0.01)
        finally:
            ended.set()

    with serving(library("gpt2"), Limits(seconds=0.5)) as (address, explorer):
        while "gpt2" not in explorer.library.opened:
            time.sleep(0.05)
        lens, right = explorer.library.opened["gpt2"], explorer.answers.map
        explorer.answers.map = stuck
        start = time.monotonic()
        status, event = _post(address)
        assert status == 200 and "within 0.5 s" in event["message"] and time.monotonic() - start < 5
        assert ended.wait(5), "the thread that was given up has ended"
        explorer.answers.map = right
        explorer.answers.limits = Limits()
        explorer.limits = Limits()
        assert _post(address)[1]["type"] == "done"
        assert explorer.library.opened["gpt2"] is not lens, "a model that may be half changed is loaded again"


# Doors ---------------------------------------------------------------------------------------------------------------


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
        assert _get(address, "/api/start") == 200
        assert time.monotonic() - start < 1
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
        assert _get(address, "/api/start") == 200
        for one in sockets:
            one.close()


def test_slow_uploads_take_no_decoder():
    head = b"POST /api/images HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nabc"
    with serving(library("gpt2")) as (address, _):
        sockets = _half_sent(address, 8, head)
        time.sleep(0.3)
        start = time.monotonic()
        assert _get(address, "/api/images", png()) == 200 and time.monotonic() - start < 5
        for one in sockets:
            one.close()


def test_bodies_that_arrive_at_once_are_bounded(client):
    with make_client(limits=Limits(body_bytes=1000)) as bounded:
        response = bounded.post("/api/images", content=b"x" * 2000)
        assert response.status_code == 503 and "in a moment" in response.json()["message"]
        assert bounded.app.state.explorer.arriving == 0


def test_forty_downloads_at_once_are_made_two_at_a_time_and_once(monkeypatch):
    running, most, calls, saved = [0], [0], [], server_module._saved

    def counted(found, suffix):
        running[0] += 1
        most[0] = max(most[0], running[0])
        calls.append(suffix)
        time.sleep(0.05)
        running[0] -= 1
        return saved(found, suffix)

    monkeypatch.setattr(server_module, "_saved", counted)
    with serving(library("gpt2")) as (address, _):
        result = _post(address)[1]["result"]

        def one(k):
            return _get(address, f"/api/results/{result}.{('csv', 'json', 'html', 'safetensors')[k % 4]}")

        with ThreadPoolExecutor(40) as pool:
            assert set(pool.map(one, range(40))) == {200}
    assert most[0] <= 2 and len(calls) <= 8


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
        scores=torch.tensor([[float("nan"), 1.0]]), out_tokens=("\ud800",), in_tokens=("a", "\udc00"),
        method="tensor.in_out", bias_share=torch.tensor([float("inf")]), meta=ODD_META[case],
    )  # fmt: skip
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
