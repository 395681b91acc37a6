"""A job queue: `Job`, one question on its way, and `Worker`, which answers them in turn, one thread for one device.

A job is stopped by a flag that the work looks at (`Job.check`): between outputs, and wherever long work calls
`cancel.check`, such as before each block of the model. None of these is in the middle of putting something back, so the
model is left as it was found. Work that looks at no flag until long after its time is given up: its thread is told to
end, another takes the queue over, and what the old one may have left half done is forgotten.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

from tensorlens import cancel
from tensorlens.errors import TensorLensError

Event = dict[str, Any]
Work = Callable[["Job"], Event]
_LAST = ("done", "error")
GRACE = 5.0
"""Seconds after its time in which a job may still look at the flag."""
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
        client: Who asks. Clients take turns, so that one with many questions does not keep the others waiting.
    """

    def __init__(
        self, work: Work, *, seconds: float, notify: Callable[[], None] = lambda: None, client: str = ""
    ) -> None:
        self._work, self._seconds, self.notify, self.client = work, seconds, notify, client
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
        if self.is_overdue():
            raise Busy(self._too_long())

    def is_overdue(self, grace: float = 0.0) -> bool:
        """Whether its time, and the grace after it, is over."""
        return time.monotonic() > self._deadline + grace

    def refuse(self, message: str) -> None:
        """End it without an answer; whatever still works for it is told to stop and is not heard any more."""
        self.tell("error", message=message)
        self.cancel()

    def give_up(self) -> None:
        """End a job that is overdue and looks at no flag."""
        self.refuse(self._too_long())

    def _too_long(self) -> str:
        return (
            f"Expected an answer within {self._seconds:g} s, got none in that time. Ask for one output only, for "
            "fewer blocks or a shorter input, or start the explorer with a longer --time-limit."
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
        self._work = _nothing  # what the work held on to goes now, not when the reader goes
        self.tell(last.pop("type"), **last)


class Worker:
    """A thread that does jobs one after the other, with a bounded queue in front of it in which clients take turns.

    Args:
        most_waiting: Length of the queue.

    Attributes:
        on_stuck: Called when a thread had to be given up, before another takes over.
    """

    def __init__(self, most_waiting: int) -> None:
        self._most = most_waiting
        self.on_stuck: Callable[[], None] = lambda: None
        self._queues: OrderedDict[str, deque[Job]] = OrderedDict()
        self._wake = threading.Condition()
        self._running: Job | None = None
        self._is_closed = False
        self._thread = self._new_thread()
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Put a job in the queue. In a full one, the client with most questions gives up its latest.

        Raises:
            Busy: the queue is full, and nobody has more questions in it than this client.
        """
        with self._wake:
            self._forget_cancelled()
            own = self._queues.get(job.client, ())
            n_waiting = sum(map(len, self._queues.values()))
            if self._is_closed or n_waiting >= self._most:
                longest = max(self._queues.values(), key=len, default=deque())
                if self._is_closed or len(longest) <= len(own) + 1:
                    raise Busy(_full(n_waiting))
                longest.pop().refuse(_full(n_waiting))
            self._queues.setdefault(job.client, deque()).append(job)
            self._wake.notify_all()

    def ahead_of(self, job: Job) -> int | None:
        """How many jobs come before this one, or None if it has left the queue."""
        with self._wake:
            waiting = [one for one in self._in_turn() if not one.is_cancelled or one is job]
            return waiting.index(job) + (self._running is not None) if job in waiting else None

    def rescue(self) -> bool:
        """If the running job is long overdue and does not stop, give it and its thread up, and go on with another."""
        with self._wake:
            job, stuck = self._running, self._thread
            if job is None or self._is_closed or not job.is_overdue(GRACE):
                return False
            self._running, self._thread = None, self._new_thread()
        _log.error("a question did not stop after its time; its thread is given up")
        job.give_up()
        _interrupt(stuck)
        self.on_stuck()
        self._thread.start()
        return True

    def close(self) -> None:
        """Stop the running job, forget the queue, end the thread."""
        with self._wake:
            self._is_closed = True
            jobs = [*self._in_turn(), *([self._running] if self._running else [])]
            self._wake.notify_all()
        for job in jobs:
            job.cancel()
        self._thread.join(timeout=10)

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._go, name="tensorlens-worker", daemon=True)

    def _go(self) -> None:
        me = threading.current_thread()
        while (job := self._next(me)) is not None:
            try:
                job.run()
            except BaseException:  # an interrupt that came too late for the job itself
                _log.exception("a question ended late")
            with self._wake:
                if self._thread is me:
                    self._running = None

    def _next(self, me: threading.Thread) -> Job | None:
        with self._wake:
            self._wake.wait_for(lambda: self._queues or self._is_closed or self._thread is not me)
            if self._is_closed or self._thread is not me:
                return None
            client, queue = self._queues.popitem(last=False)
            self._running = queue.popleft()
            if queue:
                self._queues[client] = queue  # behind the others
            return self._running

    def _in_turn(self) -> list[Job]:
        queues = [list(queue) for queue in self._queues.values()]
        return [queue[k] for k in range(max(map(len, queues), default=0)) for queue in queues if k < len(queue)]

    def _forget_cancelled(self) -> None:
        for client, queue in list(self._queues.items()):
            kept = deque(job for job in queue if not job.is_cancelled)
            if kept:
                self._queues[client] = kept
            else:
                del self._queues[client]


def _interrupt(thread: threading.Thread) -> None:
    """Raise `Cancelled` in a thread at its next step in Python; one inside a kernel hears of it when that returns."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Cancelled))


def _full(n_waiting: int) -> str:
    return f"Expected room for one more question, got {n_waiting} ahead of you. Try again when they are answered."


def _nothing(job: Job) -> Event:
    return {"type": "error", "message": "Already answered."}


def _unexpected(error: BaseException) -> str:
    if isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return "This needs more memory than is free. Ask for one output only, for fewer blocks, or for a shorter input."
    _log.exception("a question failed")
    return (
        f"The explorer met something it did not expect ({type(error).__name__}: {error}). The server goes on; the "
        "whole trace is in its terminal. Please report it."
    )
