"""Modes are put back as they were found."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from tensorlens.models.runner import matmul_precision, tf32, tf32_allowed

MATMUL = torch.backends.cuda.matmul
USERS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "the older flag": lambda: setattr(MATMUL, "allow_tf32", True),
    "the newer setting": lambda: setattr(MATMUL, "fp32_precision", "tf32"),
    "the newer setting of everything": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture(params=USERS)
def user(request: pytest.FixtureRequest) -> Iterator[str]:
    """What a user may have told torch before."""
    USERS[request.param]()
    yield request.param
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    MATMUL.fp32_precision = "none"


def settings() -> list[object]:
    """All that torch says; it refuses to say some of it once the older and the newer settings disagree."""
    found: list[object] = []
    for read in (lambda: MATMUL.fp32_precision, lambda: MATMUL.allow_tf32, torch.get_float32_matmul_precision):
        try:
            found.append(read())
        except RuntimeError as error:
            found.append(type(error))
    return found


def test_tf32_is_put_back_whatever_the_user_said(user: str) -> None:
    before = settings()
    for allowed in (True, False):
        with tf32(allowed):
            assert tf32_allowed() == allowed
            with tf32(not allowed):
                assert tf32_allowed() != allowed
            assert tf32_allowed() == allowed
        assert settings() == before
    assert tf32_allowed() == (user != "nothing")
    assert matmul_precision() in ("highest", "high", "medium", "tf32")


def test_threads_that_set_it_take_turns(user: str) -> None:
    before, seen = settings(), list[bool]()

    def work(allowed: bool) -> None:
        with tf32(allowed):
            time.sleep(0.01)
            seen.append(tf32_allowed() == allowed)

    threads = [threading.Thread(target=work, args=(k % 2 == 0,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [True] * 4 and settings() == before
