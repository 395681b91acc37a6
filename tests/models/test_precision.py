"""Modes are put back as they were found."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tensorlens.models.precision import matmul_precision, tf32, tf32_allowed

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


def test_tf32_is_put_back_when_the_first_thread_leaves_first(user: str) -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))
    before = settings()

    def first() -> None:
        with tf32(False):
            first_is_in.set()
            second_is_in.wait(10)
        first_is_out.set()

    def second() -> None:
        first_is_in.wait(10)
        with tf32(False):
            second_is_in.set()
            first_is_out.wait(10)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert settings() == before
