"""`Job`, one question, and `Worker`, one thread that answers questions in turn, since there is one device.

A job is stopped by a flag that the work checks (`Job.check`): between outputs, and wherever long work calls
`check_cancelled`, such as before each block of the model. None of these places is in the middle of restoring state,
so the model stays as it was.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from tensorlens.errors import TensorLensError
from tensorlens.progress import cancelled_by

Event = dict[str, Any]
Work = Callable[["Job"], Event]
_LAST = ("done", "error")
_log = logging.getLogger("tensorlens.explorer")


class Cancelled(BaseException):
    """The work of a job must stop. Not an `Exception`, so that no handler of those swallows it."""


class Busy(TensorLensError):
    """The time is up, or too much arrives at once."""


class Job:
    """One question: its work, and its unread events.

    Only the latest news of each kind is kept, so that a slow reader costs no memory.

    Args:
        work: Called in the worker's thread with this job; returns the last event.
        seconds: How long it may run.
        notify: Called, from any thread, when there is news.
    """

    def __init__(self, work: Work, *, seconds: float, notify: Callable[[], None] = lambda: None) -> None:
        self._work: Work | None = work
        self._seconds, self._notify = seconds, notify
        self._news: dict[str, Event] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._deadline = float("inf")
        self.stage, self.is_over = "", False

    def tell(self, kind: str, /, **content: Any) -> None:
        """Post news for the reader, in place of unread news of the same kind; after the end it is dropped."""
        with self._lock:
            if self.is_over:
                return
            self.stage = content.get("stage", self.stage)
            self._news[kind] = {"type": kind, **content}
            self.is_over = kind in _LAST
        self._notify()

    def news(self) -> list[Event]:
        """Events since the last call, the end last. When the time is up, the job has ended, whatever the work does."""
        if time.monotonic() > self._deadline:
            self.tell("error", message=self._too_long())
            self.cancel()
        with self._lock:
            events, self._news = list(self._news.values()), {}
        return sorted(events, key=lambda event: event["type"] in _LAST)

    def cancel(self) -> None:
        """Stop at the next check of the flag; a job that is still queued never starts."""
        self._stop.set()

    @property
    def is_waiting(self) -> bool:
        """Whether it has not begun."""
        return self._work is not None

    @property
    def is_cancelled(self) -> bool:
        """Whether it was asked to stop."""
        return self._stop.is_set()

    def check(self, part: float | None = None) -> None:
        """Raise `Cancelled` if the reader is gone, `Busy` if time is up; report the part of the stage that is done."""
        if part is not None:
            self.tell("progress", stage=self.stage, part=part)
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
        work, self._work = self._work, None  # free the work's memory now, not when the reader has gone
        assert work is not None, "a job runs once"
        try:
            with cancelled_by(self.check):
                self.check()
                last = work(self)
        except Cancelled:
            last = {"type": "error", "message": "Cancelled.", "is_cancelled": True}
        except TensorLensError as error:
            last = {"type": "error", "message": str(error)}
        except BaseException as error:  # noqa: BLE001  the server outlives any request, also a model that exits
            last = {"type": "error", "message": _unexpected(error)}
        del work
        self.tell(last.pop("type"), **last)


class Worker:
    """A thread that does jobs one after the other."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._running: Job | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._go, name="tensorlens-worker", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job at the end of the queue."""
        self._waiting.put(job)

    @property
    def stage(self) -> str:
        """The stage of the running job, for those that wait."""
        running = self._running
        return "" if running is None else running.stage

    def close(self) -> None:
        """Stop the running job, forget the queue, end the thread."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _go(self) -> None:
        while (job := self._waiting.get()) is not None and not self._is_closed:
            self._running = job
            job.run()
            self._running = job = None


def _unexpected(error: BaseException) -> str:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "This needs more memory than is free. Ask for one output only, for fewer blocks, or for a shorter input."
    _log.exception("a question failed")
    return (
        f"Something unexpected happened ({type(error).__name__}: {error}). The server is still running; the full "
        "traceback is in its terminal. Please report it."
    )
