"""The explorer's queue: cancelled where asked, and never stopped by one question."""

from __future__ import annotations

import http.client
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
import torch
from explorer_samples import SENTENCE, library, load, make_client, post_question, serving
from view_samples import patience

from tensorlens.app.explorer import Limits
from tensorlens.app.explorer.jobs import Cancelled, Job, Worker
from tensorlens.app.explorer.library import Recent
from tensorlens.progress import check_cancelled

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def client():
    with make_client() as client:
        yield client


def test_a_job_stops_between_blocks_and_leaves_the_model_whole():
    worker, lens = Worker(), load("gpt2")
    n_runs, before = [], lens(SENTENCE).output
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
            check_cancelled()
            steps.append(step)
            if step == 3:
                job.cancel()
        return {"type": "done"}

    job = Job(work, seconds=60.0)
    job.run()
    assert job.news()[-1]["is_cancelled"] and steps == [0, 1, 2, 3]
    check_cancelled()  # outside of a job nothing is asked


def test_time_is_limited():
    with make_client(limits=Limits(seconds=0.0)) as client:
        time.sleep(0.5)
        response = client.post("/api/map", json={"model": "gpt2", "text": SENTENCE})
    event = json.loads(response.text.splitlines()[-1])
    assert event["type"] == "error" and "longer than 0 s" in event["message"]


def test_a_question_that_waits_says_what_for():
    release = threading.Event()

    def slow(job, ask):
        job.tell("progress", stage="Loading gpt2")
        return release.wait(30) and {"type": "done"}

    with serving(library("gpt2")) as (address, explorer), ThreadPoolExecutor(1) as pool:
        explorer.answers.map = slow
        first = pool.submit(post_question, address)
        while explorer.worker.stage != "Loading gpt2":
            time.sleep(0.01)
        with closing(http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)) as connection:
            connection.request("POST", "/api/map", json.dumps({"model": "gpt2", "text": SENTENCE}))
            response = connection.getresponse()
            assert json.loads(response.readline()) == {"type": "waiting", "stage": "Loading gpt2"}
            release.set()
            assert json.loads(response.read().splitlines()[-1])["type"] == "done"
        assert first.result()[0] == 200


def test_a_part_that_is_done_is_told_with_its_stage():
    def work(job):
        job.tell("progress", stage="Computing")
        check_cancelled(0.5)
        return {"type": "done"}

    job = Job(work, seconds=60.0)
    job.run()
    assert job.news() == [{"type": "progress", "stage": "Computing", "part": 0.5}, {"type": "done"}]


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
        found = list(pool.map(lambda k: post_question(address, out_token=k % 6), range(100)))
    assert {status for status, _ in found} == {200}
    assert {event["type"] for _, event in found} == {"done"}


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_model_that_exits_does_not_take_the_worker_with_it(error):
    def leave(_):
        raise error

    worker = Worker()
    bad, good = Job(leave, seconds=60.0), Job(lambda _: {"type": "done"}, seconds=60.0)
    for job in (bad, good):
        worker.submit(job)
        while not job.is_over:
            time.sleep(0.01)
    assert type(error).__name__ in bad.news()[-1]["message"]
    assert good.news()[-1] == {"type": "done"}
    worker.close()


def test_the_reader_of_a_question_that_never_looks_up_is_told_when_time_is_up():
    release = threading.Event()
    with serving(library("gpt2"), Limits(seconds=0.5)) as (address, explorer):
        right, explorer.answers.map = explorer.answers.map, lambda job, ask: release.wait(30) and {"type": "done"}
        start = time.monotonic()
        status, event = post_question(address)
        assert status == 200 and "longer than 0.5 s" in event["message"] and time.monotonic() - start < 5 * patience()
        release.set()
        explorer.answers.map, explorer.limits = right, Limits()
        assert post_question(address)[1]["type"] == "done", "the next question is answered"
