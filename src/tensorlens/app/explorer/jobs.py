"""Work in a line: `Worker`, one thread for one device, and `Job`, one question on its way.

A job is stopped by a flag that the work looks at (`Job.check`): between outputs, whenever a block of the model is
about to run (`Worker.watch`), and between the steps of long matrix products (`Job.watching`). None of these is in the
middle of putting something back, so the model is always left as it was found.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn

from tensorlens.errors import TensorLensError

Event = dict[str, Any]
Work = Callable[["Job"], Event]
_LAST = ("done", "error")
_log = logging.getLogger("tensorlens.explorer")


class Cancelled(BaseException):
    """The work of a job must stop. Not an `Exception`: nothing that deals with those may swallow it."""


class Busy(TensorLensError):
    """The queue is full, or the server is stopping."""


class Job:
    """One question: its work, and the news of it that nobody has read yet.

    Only the latest of each kind of news is kept, so that a slow reader costs no memory.

    Args:
        work: Called in the worker's thread with this job; gives the last event.
        seconds: How long it may run.
        notify: Called, from any thread, when there is news.
    """

    def __init__(self, work: Work, *, seconds: float, notify: Callable[[], None] = lambda: None) -> None:
        self._work, self._seconds, self.notify = work, seconds, notify
        self._news: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._deadline = float("inf")
        self.is_over = False

    def tell(self, kind: str, /, **content: Any) -> None:
        """Post news for the reader, in place of unread news of the same kind."""
        with self._lock:
            self._news[kind] = {"type": kind, **content}
            self.is_over = self.is_over or kind in _LAST
        self.notify()

    def news(self) -> list[Event]:
        """What came since the last time, the end last."""
        with self._lock:
            events, self._news = list(self._news.values()), {}
        return sorted(events, key=lambda event: event["type"] in _LAST)

    def cancel(self) -> None:
        """Stop at the next look at the flag; a job that still waits never starts."""
        self._stop.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether someone asked it to stop."""
        return self._stop.is_set()

    def check(self) -> None:
        """Raise `Cancelled` if the reader is gone, an error if time is up."""
        if self._stop.is_set():
            raise Cancelled
        if time.monotonic() > self._deadline:
            raise Busy(
                f"Expected an answer within {self._seconds:g} s, got none in that time. Ask for one output only, for "
                "fewer blocks or a shorter input, or start the explorer with a longer --time-limit."
            )

    @contextmanager
    def watching(self, files: Container[str]) -> Iterator[None]:
        """Look at the flag at each call of a function in these files, which must hold no state that is put back.

        They are mathematics that knows of no jobs and goes on for half a minute at a time.
        """
        before = sys.getprofile()

        def look(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename in files:
                self.check()

        sys.setprofile(look)
        try:
            yield
        finally:
            sys.setprofile(before)

    def run(self) -> None:
        """Do the work; whatever happens becomes the last event."""
        self._deadline = time.monotonic() + self._seconds
        try:
            self.check()
            last = self._work(self)
        except Cancelled:
            last = {"type": "error", "message": "Cancelled.", "is_cancelled": True}
        except TensorLensError as error:
            last = {"type": "error", "message": str(error)}
        except Exception as error:  # noqa: BLE001  the server outlives any request
            last = {"type": "error", "message": _unexpected(error)}
        self._work = _nothing  # what the work held on to goes now, not when the reader goes
        self.tell(last.pop("type"), **last)


class Worker:
    """A thread that does jobs one after the other, with a bounded line in front of it.

    Args:
        most_waiting: Length of the line.
        name: Of the thread.
    """

    def __init__(self, most_waiting: int, name: str = "tensorlens-worker") -> None:
        self._most = most_waiting
        self._line: deque[Job] = deque()
        self._wake = threading.Condition()
        self._running: Job | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._go, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job in the line.

        Raises:
            Busy: the line is full.
        """
        with self._wake:
            self._line = deque(waiting for waiting in self._line if not waiting.is_cancelled)
            if self._is_closed or len(self._line) >= self._most:
                raise Busy(
                    f"Expected room for one more question, got a line of {len(self._line)} before you. "
                    "Try again when they are answered."
                )
            self._line.append(job)
            self._wake.notify()

    def ahead_of(self, job: Job) -> int | None:
        """How many jobs come before this one, or None if it has left the line."""
        with self._wake:
            waiting = [one for one in self._line if not one.is_cancelled or one is job]
            return waiting.index(job) + (self._running is not None) if job in waiting else None

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """From now on look at the running job's flag before each of these modules runs."""
        for module in modules:
            module.register_forward_pre_hook(self._look)

    def close(self) -> None:
        """Stop the running job, forget the line, end the thread."""
        with self._wake:
            self._is_closed = True
            jobs = [*self._line, *([self._running] if self._running else [])]
            self._wake.notify()
        for job in jobs:
            job.cancel()
        self._thread.join(timeout=10)

    def _look(self, module: nn.Module, inputs: Any) -> None:
        if self._running is not None and threading.current_thread() is self._thread:
            self._running.check()

    def _go(self) -> None:
        while (job := self._next()) is not None:
            try:
                job.run()
            finally:
                self._running = None

    def _next(self) -> Job | None:
        with self._wake:
            self._wake.wait_for(lambda: self._line or self._is_closed)
            self._running = self._line.popleft() if self._line and not self._is_closed else None
            return self._running


def _nothing(job: Job) -> Event:
    return {"type": "error", "message": "Already answered."}


def _unexpected(error: Exception) -> str:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "This needs more memory than is free. Ask for one output only, for fewer blocks, or for a shorter input."
    _log.exception("a question failed")
    return (
        f"The explorer met something it did not expect ({type(error).__name__}: {error}). The server goes on; the "
        "whole trace is in its terminal. Please report it."
    )
