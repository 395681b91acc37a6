"""A run: a study in a folder, which can be stopped at any moment and started again.

| file             | holds                                                                               |
|------------------|-------------------------------------------------------------------------------------|
| `config.json`    | the study, all its settings and versions, and where and from which commit it began  |
| `samples.jsonl`  | one line a sample, on the disk before the next sample begins                        |
| `summary.json`   | what the samples say together; the same bytes however often the run was interrupted |
| `sessions.jsonl` | how long each process worked, and how fast                                          |

Several processes (torchrun, `accelerate launch`) share the folder: process r of w takes samples r, r + w, … and writes
`samples.r.jsonl`; process 0 joins the files. Nothing is sent between them, so a file system they share is enough.
What a study measures, and its report, belong to the studies.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from tensorlens.errors import InputError, TensorLensError

POLL_SECONDS = 0.2
STALLED_AFTER_SECONDS = 3600.0
_PACKAGES = {"tensorlens": "attention-tensorlens", "torch": "torch", "transformers": "transformers"}


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


class Run:
    """A study's folder, opened for this process.

    Started again with the same settings it goes on where it stopped; with other settings it refuses.

    Args:
        folder: Made if it is not there.
        study: Name of the study.
        settings: Everything the result depends on, as plain data.
        processes: This process among others; by default as the launcher says.
    """

    def __init__(
        self, folder: str | Path, study: str, settings: dict[str, Any], processes: Processes | None = None
    ) -> None:
        self.folder, self.study = Path(folder), study
        self.settings = json.loads(json.dumps(settings))
        self.processes = processes or Processes.from_environment()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._open_config()
        except OSError as error:
            raise InputError(f"Expected a folder for the run that can be written in; got {error}.") from error

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        return json.loads((self.folder / "config.json").read_text("utf-8"))

    @property
    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` holds; None before the end."""
        path = self.folder / "summary.json"
        return json.loads(path.read_text("utf-8")) if path.is_file() else None

    def records(self) -> list[dict[str, Any]]:
        """The samples finished so far, by any process, in the order of their index."""
        found: dict[int, dict[str, Any]] = {}
        for path in self._sample_files():
            for record in _read_lines(path):
                found.setdefault(record["index"], record)
        return [found[index] for index in sorted(found)]

    def work(self, n_samples: int, measure: Callable[[int], dict[str, Any]], progress: bool | None = None) -> None:
        """Measure this process's share of the samples that are not on the disk yet.

        Args:
            n_samples: How many there are, over all processes.
            measure: From a sample's index to its record. What it raises ends the run, to be continued later.
            progress: Whether to show a bar; None shows it in a terminal.
        """
        pending = self._pending(n_samples)
        started, done = time.perf_counter(), 0
        with self._appending() as write, self._bar(n_samples, len(pending), progress) as bar:
            for index in pending:
                write({"index": index} | measure(index))
                done += 1
                bar.update(self.processes.count)
        if done:
            self._note_session(done, time.perf_counter() - started)

    def complete(self, n_samples: int, summarise: Callable[[list[dict[str, Any]]], dict[str, Any]]) -> dict[str, Any]:
        """The summary of all samples: made by the first process when the last sample is in; the others wait for it."""
        if not self.processes.is_first:
            self._wait(lambda: self.summary is not None, "process 0 has not written the summary")
            return self.summary or {}
        self._wait(lambda: len(self.records()) >= n_samples, "other processes have samples outstanding")
        records = self.records()
        self._join(records)
        self.write_json("summary.json", summarise(records))
        return self.summary or {}

    def write_json(self, name: str, document: dict[str, Any]) -> Path:
        """Write a document into the folder, whole or not at all; numbers that are not finite have no place in it."""
        return self.write_text(name, json.dumps(document, indent=1, allow_nan=False, ensure_ascii=False) + "\n")

    def write_text(self, name: str, text: str) -> Path:
        """Write a file into the folder, whole or not at all."""
        path = self.folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}.tmp")
        temporary.write_text(text, "utf-8")
        temporary.replace(path)
        return path

    # Settings -----------------------------------------------------------------------------------------------------

    def _open_config(self) -> None:
        document = {"study": self.study, "settings": self.settings, "versions": versions(), "origin": _origin()}
        temporary = self.folder / f".config.json.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")
        try:
            # A link fails if the name is taken: of several processes that start at once exactly one writes it.
            os.link(temporary, self.folder / "config.json")
        except FileExistsError:
            self._compare(document)
        finally:
            temporary.unlink()

    def _compare(self, document: dict[str, Any]) -> None:
        there = self.config
        differences = [
            difference
            for part in ("study", "settings", "versions")
            for difference in _differences(part, there.get(part), document[part])
        ]
        if differences:
            raise InputError(
                f"The run in {str(self.folder)!r} was started with other settings, and results must not mix: "
                f"{'; '.join(differences)}. Choose another folder, or the settings of its config.json to go on with it."
            )

    # Samples ------------------------------------------------------------------------------------------------------

    @property
    def _own_file(self) -> Path:
        shard = f".{self.processes.rank}" if self.processes.count > 1 else ""
        return self.folder / f"samples{shard}.jsonl"

    def _sample_files(self) -> list[Path]:
        return sorted(self.folder.glob("samples*.jsonl"))

    def _pending(self, n_samples: int) -> list[int]:
        done = {record["index"] for record in self.records()}
        share = range(self.processes.rank, n_samples, self.processes.count)
        return [index for index in share if index not in done]

    def _appending(self) -> _Appender:
        return _Appender(self._own_file)

    def _join(self, records: Sequence[dict[str, Any]]) -> None:
        self.write_text("samples.jsonl", "".join(_line(record) for record in records))
        for path in self._sample_files():
            if path.name != "samples.jsonl":
                path.unlink()

    def _bar(self, n_samples: int, n_pending: int, progress: bool | None) -> tqdm:
        shown = self.processes.is_first and progress is not False
        initial = max(0, n_samples - n_pending * self.processes.count)
        disable = not shown if progress is not None or not shown else None  # tqdm's None: only in a terminal
        return tqdm(total=n_samples, initial=initial, disable=disable, unit="sample", desc=self.study, smoothing=0.05)

    def _note_session(self, n_samples: int, seconds: float) -> None:
        note = {
            "rank": self.processes.rank,
            "processes": self.processes.count,
            "samples": n_samples,
            "seconds": round(seconds, 3),
            "samples_per_second": round(n_samples / seconds, 4),
            "device": _device(),
        }
        with (self.folder / "sessions.jsonl").open("a", encoding="utf-8") as file:
            file.write(_line(note))

    def _wait(self, is_done: Callable[[], bool], reason: str) -> None:
        deadline = time.monotonic() + STALLED_AFTER_SECONDS
        sizes: dict[str, int] = {}
        while not is_done():
            now = {path.name: path.stat().st_size for path in self._sample_files() if path.is_file()}
            if now != sizes:
                sizes, deadline = now, time.monotonic() + STALLED_AFTER_SECONDS
            if time.monotonic() > deadline:
                raise TensorLensError(
                    f"The run in {str(self.folder)!r} cannot be completed: {reason}, and nothing has been written for "
                    f"{STALLED_AFTER_SECONDS / 60:.0f} minutes. Start it again; it goes on where it stopped."
                )
            time.sleep(POLL_SECONDS)


class _Appender:
    """A file of lines, each on the disk before the next: after a kill at most the last one is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: BinaryIO | None = None

    def __enter__(self) -> Callable[[dict[str, Any]], None]:
        _drop_cut_line(self.path)
        self.file = self.path.open("ab")
        return self.write

    def __exit__(self, *exception: object) -> None:
        assert self.file is not None, "entered"
        self.file.close()

    def write(self, record: dict[str, Any]) -> None:
        assert self.file is not None, "entered"
        self.file.write(_line(record).encode())
        self.file.flush()
        os.fsync(self.file.fileno())


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n"


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file; one without its end was cut short and never counted."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:  # another process has joined it into samples.jsonl meanwhile
        return
    for line in text.split(b"\n")[:-1]:
        yield json.loads(line)


def _drop_cut_line(path: Path) -> None:
    if path.is_file():
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)


def _differences(name: str, there: Any, here: Any) -> Iterator[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from _differences(f"{name}.{key}", there.get(key), here.get(key))
    elif there != here:
        yield f"{name.removeprefix('settings.')} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "…"


# Where and with what -------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    found = {}
    for name, distribution in _PACKAGES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


def _origin() -> dict[str, Any]:
    """Noted, not compared: where a run began does not change what it means."""
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": _device(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit of this package's sources; None where they are not a checkout."""
    here = Path(__file__)
    try:
        # Tracked there, or the repository is somebody else's, with this package installed inside it.
        tracked = _git(here.parent, "ls-files", "--error-unmatch", here.name)
        return (_git(here.parent, "rev-parse", "HEAD") or None) if tracked else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def _git(folder: Path, *command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(folder), *command], capture_output=True, text=True, timeout=10
    ).stdout.strip()


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
