"""`Job`, one question on its way, and `Worker`, one thread that answers them in turn, since there is one device.

A job is stopped by a flag that the work looks at (`Job.check`): between outputs, and wherever long work calls
`cancel.check`, such as before each block of the model. None of these places is in the middle of putting something back,
so the model is left as it was found.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from tensorlens import cancel
from tensorlens.errors import TensorLensError

Event = dict[str, Any]
Work = Callable[["Job"], Event]
_LAST = ("done", "error")
_log = logging.getLogger("tensorlens.explorer")


class Cancelled(BaseException):
    """The work of a job must stop. Not an `Exception`: nothing that handles those may swallow it."""


class Busy(TensorLensError):
    """The queue is full, the server is stopping, or time is up."""


class Job:
    """One question: its work, and the news of it that nobody has read yet.

    Only the latest news of each kind is kept, so that a slow reader costs no memory.

    Args:
        work: Called in the worker's thread with this job; returns the last event.
        seconds: How long it may run.
        notify: Called, from any thread, when there is news.
    """

    def __init__(self, work: Work, *, seconds: float, notify: Callable[[], None] = lambda: None) -> None:
        self._work, self._seconds, self._notify = work, seconds, notify
        self._news: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._deadline = float("inf")
        self.is_over = False

    def tell(self, kind: str, /, **content: Any) -> None:
        """Post news for the reader, in place of unread news of the same kind; after the end there is none."""
        with self._lock:
            if self.is_over:
                return
            self._news[kind] = {"type": kind, **content}
            self.is_over = kind in _LAST
        self._notify()

    def news(self) -> list[Event]:
        """What came since the last time, the end last. When time is up, that is the end, whatever the work does."""
        if time.monotonic() > self._deadline:
            self.tell("error", message=self._too_long())
            self.cancel()
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
        """Raise `Cancelled` if the reader is gone, `Busy` if time is up."""
        if self._stop.is_set():
            raise Cancelled
        if time.monotonic() > self._deadline:
            raise Busy(self._too_long())

    def _too_long(self) -> str:
        return (
            f"This took longer than {self._seconds:g} s. Ask for one output only, for fewer blocks or a shorter input, "
            "or start the explorer with a longer --time-limit."
        )

    def run(self) -> None:
        """Do the work; whatever happens becomes the last event."""
        self._deadline = time.monotonic() + self._seconds
        try:
            with cancel.checking(self.check):
                self.check()
                last = self._work(self)
        except Cancelled:
            last = {"type": "error", "message": "Cancelled.", "is_cancelled": True}
        except TensorLensError as error:
            last = {"type": "error", "message": str(error)}
        except BaseException as error:  # noqa: BLE001  the server outlives any request, also a model that exits
            last = {"type": "error", "message": _unexpected(error)}
        self._work = _nothing  # free what the work refers to now, not when the reader has gone
        self.tell(last.pop("type"), **last)


class Worker:
    """A thread that does jobs one after the other, with a bounded queue in front of it.

    Args:
        most_waiting: Length of the queue.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._is_closed = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._go, name="tensorlens-worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue.

        Raises:
            Busy: the queue is full, or the server is stopping.
        """
        with self._wake:
            self._waiting = deque(one for one in self._waiting if not one.is_cancelled)
            if self._is_closed or len(self._waiting) >= self._most:
                raise Busy(f"The queue is full: {len(self._waiting)} questions are waiting. Try again in a moment.")
            self._waiting.append(job)
            self._wake.notify()

    def ahead_of(self, job: Job) -> int | None:
        """How many jobs come before this one, or None if it has left the queue."""
        with self._wake:
            waiting = [one for one in self._waiting if not one.is_cancelled or one is job]
            return waiting.index(job) + (self._running is not None) if job in waiting else None

    def close(self) -> None:
        """Stop the running job, forget the queue, end the thread."""
        with self._wake:
            self._is_closed = True
            for job in (*self._waiting, *([self._running] if self._running else ())):
                job.cancel()
            self._wake.notify()
        self._thread.join(timeout=10)

    def _go(self) -> None:
        while True:
            with self._wake:
                self._running = None
                self._wake.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                self._running = self._waiting.popleft()
            self._running.run()


def _nothing(job: Job) -> Event:
    return {"type": "error", "message": "Already answered."}


def _unexpected(error: BaseException) -> str:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "This needs more memory than is free. Ask for one output only, for fewer blocks, or for a shorter input."
    _log.exception("a question failed")
    return (
        f"Something unexpected happened ({type(error).__name__}: {error}). The server is still running; the full "
        "traceback is in its terminal. Please report it."
    )
