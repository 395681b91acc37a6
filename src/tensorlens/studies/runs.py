"""A run: a study in a folder, which can be interrupted at any moment and resumed.

| file            | holds                                                                               |
|-----------------|-------------------------------------------------------------------------------------|
| `config.json`   | the study, all its settings and versions, and where it began                        |
| `samples.jsonl` | one line per sample, on the disk before the next samples begin                      |
| `summary.json`  | the pooled results; the same bytes however often the run was interrupted |
| `report.html`   | the same for people                                                                 |

Several processes (torchrun, `accelerate launch`) share the folder: process r of w takes groups r, r + w, … of the
samples and writes `samples.r.jsonl`; process 0 joins the files. Nothing is sent between them, so a shared file system
is enough. The samples of a group are measured together or not at all, so that a number does not depend on where
a run was interrupted. What a study measures, and its report, belong to the studies.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import torch
from torch import Tensor, nn
from tqdm import tqdm

from tensorlens.__about__ import package_versions
from tensorlens.errors import InputError, TensorLensError
from tensorlens.files import from_json, to_json, write_whole
from tensorlens.lens import Lens
from tensorlens.models.runner import matmul_precision
from tensorlens.studies.processes import Processes

Record = dict[str, Any]
"""The measurements of one sample, with its `index`."""

POLL_SECONDS = 0.2
STALLED_AFTER_SECONDS = 3600.0
LINE_SECONDS = 30.0
"""How often a run without a terminal says how far it is."""
LINE = "{desc}: {n_fmt} of {total_fmt} samples after {elapsed}, about {remaining} left\n"


@dataclass(frozen=True, kw_only=True)
class StudyResult:
    """A finished run.

    ``result["n_samples"]`` is short for ``result.summary["n_samples"]``.

    Attributes:
        folder: Its folder.
        summary: The content of `summary.json`.
    """

    folder: Path
    summary: dict[str, Any]

    @property
    def report(self) -> Path:
        """The page with figures and tables."""
        return self.folder / "report.html"

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def areas(self, condition: str | None = None, metric: str = "hs_mse", order: str = "most") -> dict[str, float]:
        """The area under the curve of each method of a perturbation study, best first.

        Args:
            condition: Preset and replacement, as the summary calls them; the first if None.
            metric: ``hs_mse``, ``abs_aopc``, ``aopc`` or ``accuracy``.
            order: ``most`` relevant first, or ``least``.

        Raises:
            InputError: no sample could be measured, or the study is another.
        """
        conditions = self.summary.get("conditions")
        if conditions is None:
            raise InputError("`areas` is only available for perturbation studies. Read `summary` instead.")
        if not conditions:
            raise InputError(f"No sample could be measured; the first: {self.summary['skipped'][0]['reason']}")
        chosen = conditions[next(iter(conditions)) if condition is None else condition]
        methods = chosen.get(order, {}).get(metric, {"methods": {}})["methods"]  # none where every method has a gap
        largest = (order == "most") == (metric != "accuracy")  # which falls as more is lost
        return {name: methods[name]["auc"] for name in best_first(methods, largest=largest)}


def best_first(methods: Mapping[str, Any], *, largest: bool) -> list[str]:
    """The methods of a perturbation study by their area."""
    return sorted(methods, key=lambda name: methods[name]["auc"], reverse=largest)


def check_run_folder(folder: str | Path, study: str) -> None:
    """Refuse a folder that cannot hold a run of this study; commands ask before they load a model."""
    folder, config = Path(folder), Path(folder) / "config.json"
    taken = next((one for one in (folder, *folder.parents) if one.exists() and not one.is_dir()), None)
    if taken is not None:
        raise InputError(f"Expected a folder for the run; {str(taken)!r} is a file.")
    found = read_run_file(config, "Choose another folder.", _ConfigFile)["study"] if config.exists() else study
    if found != study:
        raise InputError(f"Expected a folder of a {study} run, or a new one; {str(folder)!r} holds a run of {found}.")


class RunFolder:
    """A folder whose work can be interrupted: opened again with the same settings, it is continued; others are refused.

    Attributes:
        folder: Where it is; made if it is not there.
        study: What is done in it.
        settings: Everything that its results depend on besides versions, as plain data.
        config_name: The file with these.
    """

    config_name = "config.json"

    def __init__(self, folder: Path, study: str, settings: dict[str, Any], *, is_shared: bool = False) -> None:
        self.folder, self.study, self.settings = folder, study, from_json(to_json(settings))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not is_shared:  # of several processes one may be writing just now
                for left in folder.glob(".*.tmp"):  # what a killed process had begun to write
                    left.unlink(missing_ok=True)
            self._open_config()
        except OSError as error:
            raise InputError(f"Expected a folder for the run that can be written in; got {error}.") from error

    @property
    def config(self) -> dict[str, Any]:
        """The content of its config: study, settings, versions, and where it began."""
        name = self.config_name
        advice = f"If its files were made with the current settings, delete {name} and start again; else choose "
        return read_run_file(self.folder / name, advice + "another folder.", _ConfigFile)

    def _open_config(self) -> None:
        """Write the config, or refuse to continue with other settings, another study or other versions."""
        config = self.folder / self.config_name
        here = {"study": self.study, "settings": self.settings, "versions": dict(package_versions())}
        origin = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        temporary = self.folder / f".{config.name}.{os.getpid()}.tmp"
        try:
            temporary.write_text(to_json(here | {"origin": origin}, indent=1) + "\n", "utf-8")
            # A link fails if the name is taken: of several processes that start at once exactly one writes it.
            os.link(temporary, config)
        except FileExistsError:
            there = self.config
            said = [one for part in here for one in setting_differences(part, there[part], here[part])]
            if said:
                raise InputError(
                    f"The run in {str(self.folder)!r} was started with different settings, and results must not mix: "
                    f"{'; '.join(said)}. Choose another folder, or the settings of its {config.name} to continue it."
                ) from None
        finally:
            temporary.unlink(missing_ok=True)


class Run(RunFolder):
    """A study's folder, opened for this process."""

    def __init__(
        self, folder: str | Path, study: str, settings: dict[str, Any], processes: Processes | None = None
    ) -> None:
        self.processes = processes or Processes.from_environment()
        super().__init__(Path(folder), study, settings, is_shared=self.processes.count > 1)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The content of `summary.json`; None before the end."""
        path = self.folder / "summary.json"
        return read_run_file(path, "Remove it and start the run again.") if path.exists() else None

    def records(self, n_samples: int | None = None) -> list[Record]:
        """The samples finished so far, by any process, in the order of their index.

        Raises:
            InputError: a line cannot be read, or its index is none of `n_samples`.
        """
        found: dict[int, Record] = {}
        for path in self._sample_files():
            for number, line in whole_lines(path):
                try:
                    record = read_record(line, n_samples)
                except ValueError as error:
                    raise InputError(
                        f"Expected a sample of this run in {str(path)!r}, line {number}: {error}. Remove the line and "
                        "start the run again; its sample is then measured again."
                    ) from error
                found.setdefault(record["index"], record)
        return [found[index] for index in sorted(found)]

    def work(
        self,
        groups: Sequence[Sequence[int]],
        measure: Callable[[Sequence[int]], list[Record]],
        progress: bool | None = None,
    ) -> None:
        """Measure this process's share of the samples that are not on the disk yet.

        A group with a missing line is measured as a whole, so a sample is always measured with the same others.

        Args:
            groups: The indices of all samples, over all processes, those that are measured together in one group. They
                must not depend on what is done already.
            measure: From the indices of a group to their records. An exception ends the run; it can be resumed later.
            progress: Whether to show a bar; None shows it in a terminal, and lines elsewhere.
        """
        n_samples = sum(map(len, groups))
        done = {record["index"] for record in self.records(n_samples)}
        share = groups[self.processes.rank :: self.processes.count]
        pending = [group for group in share if not done.issuperset(group)]
        n_pending = sum(map(len, pending))
        with self._writing(), _appending(self._own_file) as write, self._bar(n_samples, n_pending, progress) as bar:
            for group in pending:
                found = zip(group, measure(group), strict=True)
                write([{"index": index} | record for index, record in found if index not in done])
                bar.update(len(group) * self.processes.count)

    def finish(
        self,
        n_samples: int,
        summarise: Callable[[list[Record]], dict[str, Any]],
        write_report: Callable[[Run, dict[str, Any]], None] | None = None,
    ) -> StudyResult:
        """The summary of all samples, and its report: made by the first process; the others wait for the summary."""
        if not self.processes.is_first:
            self._wait(lambda: self.summary is not None, "process 0 has not written the summary")
            return StudyResult(folder=self.folder, summary=self.summary or {})
        self._wait(lambda: len(self.records(n_samples)) == n_samples, "other processes have samples outstanding")
        records = self.records(n_samples)
        with self._writing():
            write_whole(self.folder / "samples.jsonl", "".join(map(as_line, records)))
            for path in self._sample_files()[1:]:  # `samples.jsonl` is the first by name
                path.unlink()
        self.write_text("summary.json", to_json(self._summarised(records, summarise), indent=1) + "\n")
        if write_report is not None:
            write_report(self, self.summary or {})
        return StudyResult(folder=self.folder, summary=self.summary or {})

    def _summarised(self, records: list[Record], summarise: Callable[[list[Record]], dict[str, Any]]) -> dict[str, Any]:
        try:
            return summarise(records)
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
            raise InputError(
                f"Expected the samples of a {self.study} study in {str(self.folder / 'samples.jsonl')!r}; its lines "
                f"have other fields ({type(error).__name__}: {error}). Delete it and start again."
            ) from error

    def write_text(self, name: str, text: str) -> Path:
        """Write a file into the folder, whole or not at all."""
        with self._writing():
            return write_whole(self.folder / name, text)

    # Samples ------------------------------------------------------------------------------------------------------

    @property
    def _own_file(self) -> Path:
        shard = f".{self.processes.rank}" if self.processes.count > 1 else ""
        return self.folder / f"samples{shard}.jsonl"

    def _sample_files(self) -> list[Path]:
        return sorted(self.folder.glob("samples*.jsonl"), key=lambda path: (len(path.name), path.name))

    def _bar(self, n_samples: int, n_pending: int, progress: bool | None) -> tqdm:
        """A bar in a terminal; a line now and then elsewhere."""
        in_lines = progress is None and not sys.stderr.isatty()
        return tqdm(
            total=n_samples,
            initial=max(0, n_samples - n_pending * self.processes.count),
            disable=not self.processes.is_first or progress is False,
            unit="sample",
            desc=self.study,
            smoothing=0.05,
            mininterval=LINE_SECONDS if in_lines else 0.1,
            bar_format=LINE if in_lines else None,
        )

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
                    f"{STALLED_AFTER_SECONDS / 60:.0f} minutes. Start it again; it continues where it stopped."
                )
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A full disk ends the run with one message; finished samples are kept."""
        try:
            yield
        except OSError as error:
            raise TensorLensError(
                f"The run in {str(self.folder)!r} stopped: {error.filename or 'a file of the run'}: {error.strerror}. "
                "What is finished is kept. Make room and start it again; it continues where it stopped."
            ) from error


def reason_of(error: BaseException) -> str:
    """An error in one line, as records and summaries hold it."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


# Files ----------------------------------------------------------------------------------------------------------------


@contextmanager
def _appending(path: Path) -> Iterator[Callable[[Sequence[Record]], None]]:
    """A function that appends lines and waits until they are on the disk: a kill loses at most the last line."""
    if path.is_file():
        text = path.read_bytes()
        os.truncate(path, text.rfind(b"\n") + 1)  # a line that was cut short
    with path.open("ab", buffering=0) as file:  # what a full disk refused would be tried once more on closing

        def write(records: Sequence[Record]) -> None:
            left = "".join(map(as_line, records)).encode()
            try:
                while left:  # without a buffer a write may take a part only
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError as error:
                error.filename = error.filename or str(path)
                raise

        yield write


def as_line(record: Record) -> str:
    """A record as it stands in the file."""
    return to_json(record, ascii_only=True) + "\n"


def whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers; one without its end was cut short and never counted."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:  # another process has joined it into samples.jsonl meanwhile
        return
    except OSError as error:
        raise InputError(f"Expected a file of samples at {str(path)!r}; got {error.strerror}. Remove it.") from error
    yield from enumerate(text.split(b"\n")[:-1], 1)


def read_record(line: bytes, n_samples: int | None = None) -> Record:
    """The record of a line; a ValueError says why it is none."""
    try:
        record = from_json(line)
        index = msgspec.convert(record, _Indexed).index
    except RecursionError as error:
        raise ValueError(str(error)) from error
    if n_samples is not None and index >= n_samples:
        raise ValueError(f"the index {index} is not one of the run's {n_samples} samples")
    return record


class _Indexed(msgspec.Struct):
    index: Annotated[int, msgspec.Meta(ge=0)]


class _ConfigFile(TypedDict):
    study: str
    settings: dict[str, Any]
    versions: dict[str, Any]
    origin: dict[str, Any]


def read_run_file(path: Path, advice: str, kind: Any = dict[str, Any]) -> dict[str, Any]:
    """The object in a JSON file of a run."""
    try:
        return msgspec.convert(from_json(path.read_bytes()), kind)
    except OSError as error:
        raise InputError(f"Expected a file at {str(path)!r}; got {error.strerror}. {advice}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"Expected JSON of a run in {str(path)!r}; got: {error}. {advice}") from error


def setting_differences(name: str, there: Any, here: Any) -> Iterator[str]:
    """Where two documents differ, a phrase for each place; the settings' own name is left out."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in sorted({*there, *here}):
            yield from setting_differences(f"{name}.{key}", there.get(key), here.get(key))
    elif there != here:
        before, now = (text if len(text) <= 80 else text[:77] + "…" for text in map(to_json, (there, here)))
        yield f"{name.removeprefix('settings.')} is {before} there and {now} here"


# What a run was made with: a name may later refer to different ones ----------------------------------------------


N_VALUES = 1024
"""Values of each weight that enter the digest, evenly spread: training changes all of them, a copy none."""


def digest_of(parts: Iterable[str | bytes]) -> str:
    """Digest of a sequence; ``["ab"]`` and ``["a", "b"]`` differ."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]


def tensor_digest(value: Tensor) -> str:
    """Digest of shape, type and all values; the same on every device."""
    return digest_of([f"{tuple(value.shape)} {value.dtype}", _bytes(value.detach().reshape(-1))])


def model_settings(lens: Lens) -> dict[str, Any]:
    """The properties of the model that a run's numbers depend on: a different model in the same folder is refused."""
    return {
        "model": lens.name,
        "model_class": type(lens.model).__name__,
        "dtype": str(next(lens.model.parameters()).dtype).removeprefix("torch."),
        "weights": _weights_digest(lens.model),
        "rules": lens.rules.as_dict(),
        "matmul_precision": matmul_precision(),
    }


def _weights_digest(model: nn.Module) -> str:
    """Digest of names, shapes and some values of all weights; the same on every device."""
    return digest_of(
        f"{name} {tuple(value.shape)} {value.dtype}\0".encode() + _some_bytes(value)
        for name, value in sorted(model.state_dict().items())
        if isinstance(value, Tensor)
    )


def _some_bytes(value: Tensor) -> bytes:
    if value.is_meta or not value.numel():
        return b""
    try:
        flat = value.detach().reshape(-1)
        return _bytes(flat[:: -(-len(flat) // N_VALUES)])
    except (RuntimeError, NotImplementedError, TypeError):  # a packed type that cannot be sliced: by name and shape
        return b""


def _bytes(flat: Tensor) -> bytes:
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
