"""Judges as a run: items whose answer is known, every method and every peer on the same ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.judges import JUDGES
from bench.judges.compiled import compiled_programs
from bench.judges.engine import BenchItem, Judge, run_judges
from bench.judges.pairs import patching_pairs
from bench.judges.peers import PEERS, ask_peers
from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.studies.judge_study import SUFFIXES, evidence
from tensorlens.studies.options import Count, JudgeOptions, Names, checked_names, chosen_options
from tensorlens.studies.runs import Run, StudyResult


class BenchOptions(JudgeOptions, frozen=True, kw_only=True):
    """Everything a run of judges depends on besides model and data.

    Attributes:
        judges: Which of `JUDGES`.
        peers: Which of `PEERS` are judged beside our methods, each in a process of its own.
        peer_python: Interpreter of the environment in which the peers are installed; this one's if None.
        peer_limit: Items of each set that peers are asked about, at most; as many as `limit` if None.
    """

    judges: Names = ("evidence",)
    peers: Names = ()
    peer_python: str | None = None
    peer_limit: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settle(judges=checked_names(self.judges, JUDGES, "judges"))
        if self.peers:
            self.settle(peers=checked_names(self.peers, PEERS, "peers"))


def judge(
    lens: Lens,
    data: str | Path,
    out: str | Path,
    *,
    options: BenchOptions | None = None,
    progress: bool | None = None,
    tell: Callable[[str], None] = lambda said: None,
    **changes: Any,
) -> StudyResult:
    """Let judges that know the answer compare maps, members of the family of rules, controls and peers.

    Args:
        lens: A language model with its tokenizer; compiled programs bring their own models.
        data: Folder with a folder for each judge: `evidence`, `tracr`, `pairs`. A folder that holds
            .csv or .jsonl files itself is one of evidence.
        out: The run's folder.
        options: Judges, methods, peers; see `BenchOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        tell: Is told what is being done.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.
    """
    chosen, folder = chosen_options(BenchOptions, options, changes), Path(data).expanduser()
    judges = [_judge(name, lens, folder, chosen) for name in chosen.judges]
    items = [item for one in judges for item in one.items]
    for one in judges:
        tell(f"{one.name}: {len(one.items)} items, {len(one.problems)} rows that cannot be used")

    def more(run: Run, records: list[dict[str, Any]]) -> dict[str, Any]:
        return {"peers": ask_peers(lens, run, items, records, chosen, tell)}  # puts their scores into the records

    settings = {"peers": chosen.peers, "peer_limit": chosen.peer_limit}
    return run_judges(lens, judges, out, chosen, progress, settings=settings, more=more, tell=tell)


def _judge(name: str, lens: Lens, folder: Path, options: BenchOptions) -> Judge:
    if not folder.is_dir():
        raise InputError(f"Expected a folder of judges; there is none at {str(folder)!r}.")
    limit = options.limit
    if name == "evidence":
        is_one = any(path.suffix in SUFFIXES for path in folder.iterdir())
        found, problems = evidence(lens, folder if is_one else _needed(name, folder / "evidence"), limit)
        items = tuple(BenchItem(**vars(item)) for item in found)
        return Judge(name=name, measures=("reciprocal_rank", "top_1"), items=items, problems=problems)
    if name == "tracr":
        return compiled_programs(_needed(name, folder / "tracr"), limit=limit)
    return patching_pairs(lens, _needed(name, folder / "pairs"), limit=limit)


def _needed(name: str, path: Path) -> Path:
    if not path.exists():
        raise InputError(f"The judge {name!r} needs {str(path)!r}, which is not there.")
    return path
