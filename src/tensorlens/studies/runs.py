"""A run: a study in a folder, which can be stopped at any moment and started again.

| file             | holds                                                                               |
|------------------|-------------------------------------------------------------------------------------|
| `config.json`    | the study, all its settings and versions, and where and from which commit it began  |
| `samples.jsonl`  | one line per sample, on the disk before the next samples begin                      |
| `summary.json`   | what the samples say together; the same bytes however often the run was interrupted |
| `sessions.jsonl` | how long each process worked, and how fast                                          |

Several processes (torchrun, `accelerate launch`) share the folder: process r of w takes groups r, r + w, … of the
samples and writes `samples.r.jsonl`; process 0 joins the files. Nothing is sent between them, so a file system they
share is enough. The samples of a group are measured together or not at all, so that a number does not depend on where
a run was interrupted. What a study measures, and its report, belong to the studies.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tensorlens.errors import InputError, TensorLensError
from tensorlens.strict_json import from_json, to_json, write_text
from tensorlens.studies.origin import device_name, origin
from tensorlens.studies.processes import POLL_SECONDS, Processes
from tensorlens.studies.results import StudyResult
from tensorlens.studies.sample_lines import Appender, Record, as_line, read_record, whole_lines
from tensorlens.versions import package_versions

STALLED_AFTER_SECONDS = 3600.0
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO})
"""What a full, over-quota or broken disk answers."""


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
        self.settings = from_json(to_json(settings))
        self.processes = processes or Processes.from_environment()
        self._told: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            self._open_config()
        except OSError as error:
            raise InputError(f"Expected a folder for the run that can be written in; got {error}.") from error

    @property
    def config(self) -> dict[str, Any]:
        """What `config.json` holds."""
        advice = "If its samples are of the settings given now, delete config.json and start again; else choose "
        return _read_document(self.folder / "config.json", advice + "another folder.")

    @property
    def summary(self) -> dict[str, Any] | None:
        """What `summary.json` holds; None before the end."""
        path = self.folder / "summary.json"
        return _read_document(path, "Start the run again: it is written anew.") if path.is_file() else None

    def records(self, n_samples: int | None = None) -> list[Record]:
        """The samples finished so far, by any process, in the order of their index.

        A line that cannot be read, or whose index is none of `n_samples`, is reported once and left out; its sample is
        measured again.
        """
        found: dict[int, Record] = {}
        for path in self._sample_files():
            for number, line in whole_lines(path):
                try:
                    record = read_record(line, n_samples)
                except ValueError as error:
                    self._tell(f"{path}, line {number}: {error}. The line is left out, and the run goes on.")
                else:
                    found.setdefault(record["index"], record)
        return [found[index] for index in sorted(found)]

    def work(self, n_samples: int, measure: Callable[[int], Record], progress: bool | None = None) -> None:
        """Measure this process's share of the samples that are not on the disk yet.

        Args:
            n_samples: How many there are, over all processes.
            measure: From a sample's index to its record. What it raises ends the run, to be continued later.
            progress: Whether to show a bar; None shows it in a terminal.
        """
        groups = [[index] for index in range(n_samples)]
        self.work_in_groups(groups, lambda group: [measure(index) for index in group], progress)

    def work_in_groups(
        self,
        groups: Sequence[Sequence[int]],
        measure: Callable[[Sequence[int]], list[Record]],
        progress: bool | None = None,
    ) -> None:
        """Measure this process's share of groups of samples that belong together, such as those of one batch.

        A group of which a line is missing is measured as a whole, so that a sample always has the same company.

        Args:
            groups: The indices of all samples, over all processes. They must not depend on what is done already.
            measure: From the indices of a group to their records.
            progress: Whether to show a bar; None shows it in a terminal.
        """
        n_samples = sum(map(len, groups))
        done = {record["index"] for record in self.records(n_samples)}
        share = groups[self.processes.rank :: self.processes.count]
        pending = [group for group in share if not done.issuperset(group)]
        n_pending = sum(map(len, pending))
        started, n_done = time.perf_counter(), 0
        with self._writing(), Appender(self._own_file) as write, self._bar(n_samples, n_pending, progress) as bar:
            for group in pending:
                found = zip(group, measure(group), strict=True)
                write([{"index": index} | record for index, record in found if index not in done])
                n_done += len(group)
                bar.update(len(group) * self.processes.count)
            if n_done:
                self._note_session(n_done, time.perf_counter() - started)

    def complete(self, n_samples: int, summarise: Callable[[list[Record]], dict[str, Any]]) -> dict[str, Any]:
        """The summary of all samples: made by the first process when the last sample is in; the others wait for it."""
        if not self.processes.is_first:
            self._wait(lambda: self.summary is not None, "process 0 has not written the summary")
            return self.summary or {}
        self._wait(lambda: len(self.records(n_samples)) == n_samples, "other processes have samples outstanding")
        records = self.records(n_samples)
        with self._writing():
            self._join(records)
        self.write_text("summary.json", to_json(summarise(records), indent=1) + "\n")
        return self.summary or {}

    def finish(
        self,
        n_samples: int,
        summarise: Callable[[list[Record]], dict[str, Any]],
        write_report: Callable[[Run, dict[str, Any]], None],
    ) -> StudyResult:
        """What a study returns: the summary of all samples, with its report, which the first process writes."""
        summary = self.complete(n_samples, summarise)
        if self.processes.is_first:
            write_report(self, summary)
        return StudyResult(folder=self.folder, summary=summary)

    def write_text(self, name: str, text: str) -> Path:
        """Write a file into the folder, or into a folder in it, whole or not at all."""
        path = self.folder / name
        with self._writing():
            path.parent.mkdir(exist_ok=True)
            return write_text(path, text)

    # Settings -----------------------------------------------------------------------------------------------------

    def _remove_leftovers(self) -> None:
        """What a killed process had begun to write; of several processes one may be writing just now."""
        if self.processes.count == 1:
            for path in self.folder.glob(".*.tmp"):
                path.unlink(missing_ok=True)

    def _open_config(self) -> None:
        document = {"study": self.study, "settings": self.settings}
        document |= {"versions": package_versions(), "origin": origin()}
        temporary = self.folder / f".config.json.{os.getpid()}.tmp"
        try:
            temporary.write_text(to_json(document, indent=1) + "\n", "utf-8")
            # A link fails if the name is taken: of several processes that start at once exactly one writes it.
            os.link(temporary, self.folder / "config.json")
        except FileExistsError:
            self._compare(document)
        finally:
            temporary.unlink(missing_ok=True)

    def _compare(self, document: dict[str, Any]) -> None:
        there = self.config
        parts = ("study", "settings", "versions")
        said = [one for part in parts for one in differences(part, there.get(part), document[part])]
        if said:
            raise InputError(
                f"The run in {str(self.folder)!r} was started with other settings, and results must not mix: "
                f"{'; '.join(said)}. Choose another folder, or the settings of its config.json to go on with it."
            )

    # Samples ------------------------------------------------------------------------------------------------------

    @property
    def _own_file(self) -> Path:
        shard = f".{self.processes.rank}" if self.processes.count > 1 else ""
        return self.folder / f"samples{shard}.jsonl"

    def _sample_files(self) -> list[Path]:
        return sorted(self.folder.glob("samples*.jsonl"))

    def _join(self, records: Sequence[Record]) -> None:
        write_text(self.folder / "samples.jsonl", "".join(as_line(record) for record in records))
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
            "device": device_name(),
        }
        with (self.folder / "sessions.jsonl").open("a", encoding="utf-8") as file:
            file.write(as_line(note))

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

    # What is said -------------------------------------------------------------------------------------------------

    def _tell(self, message: str) -> None:
        """Once, by one process, above the bar."""
        if message not in self._told and self.processes.is_first:
            tqdm.write(f"tensorlens: {message}", file=sys.stderr)
        self._told.add(message)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that is full ends the run with one message; what is finished stays."""
        try:
            yield
        except OSError as error:
            if error.errno not in DISK_ERRORS:
                raise
            raise TensorLensError(
                f"The run in {str(self.folder)!r} stopped: {error.filename or 'a file of the run'}: {error.strerror}. "
                "What is finished is kept. Make room and start it again; it goes on where it stopped."
            ) from error


def _read_document(path: Path, advice: str) -> dict[str, Any]:
    """The object in a JSON file of the run.

    Raises:
        InputError: it cannot be read; says where, and what to do.
    """
    try:
        document = from_json(path.read_bytes())
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise InputError(f"Expected JSON in {str(path)!r}; at line {line}: {error}. {advice}") from error
    if not isinstance(document, dict):
        raise InputError(f"Expected an object in {str(path)!r}, line 1; got {type(document).__name__}. {advice}")
    return document


def differences(name: str, there: Any, here: Any) -> Iterator[str]:
    """Where two documents differ, a phrase for each place; the settings' own name is left out."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from differences(f"{name}.{key}", there.get(key), here.get(key))
    elif there != here:
        yield f"{name.removeprefix('settings.')} is {_short(there)} there and {_short(here)} here"


def _short(value: Any) -> str:
    text = to_json(value)
    return text if len(text) <= 80 else text[:77] + "…"
