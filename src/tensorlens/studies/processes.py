"""Several processes that share a run: who this one is, how a command starts them, and which of them speaks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from tensorlens.errors import InputError, TensorLensError

POLL_SECONDS = 0.2
REFUSED = 2
"""Exit code of a command that cannot be run as it stands."""
SPEAKER = "TENSORLENS_SPEAKER"
"""Environment variable with the path of a file: the process that creates it reports the error of all."""


@dataclass(frozen=True, kw_only=True)
class Processes:
    """This process among those that share a run."""

    rank: int = 0
    count: int = 1

    @classmethod
    def from_environment(cls) -> Processes:
        """As torchrun and `accelerate launch` say in RANK and WORLD_SIZE; one process without them."""
        rank, count = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not (rank.isdecimal() and count.isdecimal() and int(rank) < int(count)):
            raise InputError(f"Expected RANK from 0 to below WORLD_SIZE; got RANK={rank}, WORLD_SIZE={count}.")
        return cls(rank=int(rank), count=int(count))

    @staticmethod
    def device() -> str | None:
        """The GPU of this process among those of its machine; None without a launcher or a GPU."""
        import torch

        local = os.environ.get("LOCAL_RANK")
        return (
            None if local is None or not torch.cuda.is_available() else f"cuda:{int(local) % torch.cuda.device_count()}"
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the process that draws the bar and writes the summary."""
        return self.rank == 0


def hand_over(count: int, program: Sequence[str] = ("-m", "tensorlens")) -> bool:
    """Run this very command in `count` processes and wait for them; False if it is to be run here.

    The output of the first one is shown. When a process fails, all end, one error is shown, and the samples that are
    finished stay on the disk.
    """
    if count == 1 or "RANK" in os.environ:
        return False
    with ExitStack() as open_files:
        token = Path(open_files.enter_context(TemporaryDirectory())) / "speaker"
        logs = [None, *(open_files.enter_context(TemporaryFile()) for _ in range(1, count))]
        children = [_start([*program, *sys.argv[1:]], rank, count, token, log) for rank, log in enumerate(logs)]
        try:
            while any(child.poll() is None for child in children) and not any(child.poll() for child in children):
                time.sleep(POLL_SECONDS)
            failed = _first_failure(children, token)
        finally:
            _end(children)
        if failed is not None:
            _repeat(logs[failed])
            code = children[failed].returncode
            if code != REFUSED:
                what = f"process {failed} of {count} ended with {code}"
                _say(f"tensorlens: {what}; started again, the run goes on where it stopped.\n")
            sys.exit(code if code > 0 else 1)
    return True


@contextmanager
def one_voice() -> Iterator[None]:
    """Of processes started by `hand_over` that fail alike, let one raise its error and the others exit silently.

    All of them check the same arguments, so all of them meet the same mistake; which is first depends on the machine.
    """
    try:
        yield
    except Exception as error:
        if _may_speak():
            raise
        sys.exit(REFUSED if isinstance(error, TensorLensError) else 1)


def _may_speak() -> bool:
    if SPEAKER not in os.environ:
        return True
    token, rank = Path(os.environ[SPEAKER]), os.environ["RANK"]
    own = token.with_suffix(f".{rank}")
    own.write_text(rank)
    try:
        os.link(own, token)  # fails if the name is taken: exactly one process succeeds, and its rank is in the file
    except FileExistsError:
        return False
    return True


def _first_failure(children: list[subprocess.Popen[bytes]], token: Path) -> int | None:
    """The rank whose error is shown: that of the process that speaks, else of the first that ended badly."""
    if token.exists():
        speaker = int(token.read_text())
        children[speaker].wait()  # it is failing: what it says must be complete
        return speaker
    return next((rank for rank, child in enumerate(children) if child.poll()), None)


def _start(command: list[str], rank: int, count: int, token: Path, log: IO[bytes] | None) -> subprocess.Popen[bytes]:
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    share = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": threads}
    environment = os.environ | share | {SPEAKER: str(token)}
    quiet = None if log is None else subprocess.STDOUT
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=quiet)


def _end(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.terminate()
    for child in children:
        child.wait()


def _repeat(log: IO[bytes] | None) -> None:
    """What a process that is not shown had to say; the first has said it itself."""
    if log is not None:
        log.seek(0)
        _say(log.read().decode("utf-8", "replace"))


def _say(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
