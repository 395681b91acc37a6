"""Modes are put back as they were found."""

from __future__ import annotations

import threading

import pytest
import torch

from tensorlens.models.modes import tf32


def allowed() -> bool:
    return bool(torch.backends.cuda.matmul.allow_tf32)


@pytest.mark.parametrize("own", [False, True])
def test_tf32_is_put_back_one_inside_the_other(own: bool) -> None:
    with tf32(own):
        with tf32(True):
            with tf32(False):
                assert not allowed()
            assert allowed()
        assert allowed() == own


def test_tf32_is_put_back_when_the_first_thread_leaves_first() -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with tf32(False):
            first_is_in.set()
            second_is_in.wait()
        first_is_out.set()

    def second() -> None:
        first_is_in.wait()
        with tf32(False):
            second_is_in.set()
            first_is_out.wait()

    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        threads = [threading.Thread(target=work) for work in (first, second)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert allowed()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
