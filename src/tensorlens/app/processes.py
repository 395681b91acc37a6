"""`--processes`: a command handed to several processes like itself, which share its run on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from tempfile import TemporaryFile
from typing import IO, Annotated

import typer

from tensorlens.app.interrupts import SHARED

NumberOfProcesses = Annotated[
    int, typer.Option(help="Processes that share the run on this machine; it takes several to fill a GPU.", min=1)
]
POLL_SECONDS = 0.2
GRACE_SECONDS = 2.0
REFUSED = 2
"""What a command ends with that cannot be run as it stands."""


def hand_over(count: int, program: Sequence[str] = ("-m", "tensorlens")) -> bool:
    """Run this very command in `count` processes, and wait for them; False if it is to be run here.

    The first one speaks. Of the others only one that fails is heard; then all end, and what is done stays on the disk.
    """
    if count == 1 or "RANK" in os.environ:
        return False
    with ExitStack() as open_files:
        logs = [None, *(open_files.enter_context(TemporaryFile()) for _ in range(1, count))]
        children = [_start([*program, *sys.argv[1:]], rank, count, log) for rank, log in enumerate(logs)]
        try:
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                time.sleep(POLL_SECONDS)
            with suppress(subprocess.TimeoutExpired):  # it may be about to say the same
                children[0].wait(GRACE_SECONDS)
            failed = next((rank for rank, child in enumerate(children) if child.poll()), None)
        finally:
            _end(children)
        if failed is not None:
            _repeat(logs[failed])
            code = children[failed].returncode
            if code != REFUSED:
                what = f"process {failed} of {count} ended with {code}"
                typer.echo(f"tensorlens: {what}; started again, the run goes on where it stopped.", err=True)
            sys.exit(code if code > 0 else 1)
    return True


def _start(command: list[str], rank: int, count: int, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    share = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "OMP_NUM_THREADS": threads,
        SHARED: "1",
    }
    quiet = None if log is None else subprocess.STDOUT
    return subprocess.Popen([sys.executable, *command], env=os.environ | share, stdout=log, stderr=quiet)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        child.wait()


def _repeat(log: IO[bytes] | None) -> None:
    """What a process that is not heard had to say; the first has said it itself."""
    if log is not None:
        log.seek(0)
        typer.echo(log.read().decode("utf-8", "replace"), err=True, nl=False)
