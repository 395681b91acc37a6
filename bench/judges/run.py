"""Judges as a run: items whose answer is known, every method and every peer on the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench.judges.measures  # noqa: F401  puts its measures into the library's table
from bench.judges import JUDGES
from bench.judges.compiled import compiled_programs
from bench.judges.needles import needles
from bench.judges.pairs import patching_pairs
from bench.judges.peers import PEERS, ask_peers
from bench.judges.single_tokens import single_tokens
from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.studies.judge_study import (
    SUFFIXES,
    WORD_OVERLAP,
    Judge,
    JudgeOptions,
    default_methods,
    evidence,
    run_judges,
)
from tensorlens.studies.options import checked_names, chosen_options
from tensorlens.studies.perturbation_study.run import perturbation
from tensorlens.studies.runs import Run, StudyResult

PERTURBATION = "perturbation"
TEXT = Path("wikitext-2") / "valid.txt"
WINDOW = 128
"""Tokens of a window that is perturbed, as in the paper."""


class BenchOptions(JudgeOptions, frozen=True, kw_only=True):
    """Everything a run of judges depends on besides model and data.

    Attributes:
        judges: Which of `JUDGES`.
        peers: Which of `PEERS` are judged beside our methods, each in a process of its own.
        lengths: Of needles: about how many tokens a prompt has.
        n_tokens: Of single tokens: length of a window.
        peer_python: Interpreter of the environment in which the peers are installed; this one's if None.
        peer_seconds: How long a peer may take for one item before it is given up.
        peer_total_seconds: How long a peer may take for all items; what it has answered by then counts.
        peer_limit: Items of each set that peers are asked about, at most; as many as `limit` if None.
        peer_workers: Peers that run at once. More than one makes their times say little.
    """

    judges: Sequence[str] = ("evidence",)
    peers: Sequence[str] = ()
    lengths: Sequence[int] = (512,)
    n_tokens: int = 32
    peer_python: str | None = None
    peer_seconds: float = 60.0
    peer_total_seconds: float | None = None
    peer_limit: int | None = None
    peer_workers: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("n_tokens", "peer_limit", "peer_workers")
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
        data: Folder with a folder for each judge: `evidence`, `tracr`, `needles`, `pairs`, `wikitext-2`. A folder that
            holds .csv or .jsonl files itself is one of evidence.
        out: The run's folder.
        options: Judges, methods, peers; see `BenchOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        tell: Is told what is being done.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.
    """
    chosen, folder = chosen_options(BenchOptions, options, changes), Path(data).expanduser()
    judges = [_judge(name, lens, folder, chosen) for name in chosen.judges if name != PERTURBATION]
    items = [item for one in judges for item in one.items]
    for one in judges:
        tell(f"{one.name}: {len(one.items)} items, {len(one.problems)} rows that cannot be used")

    def more(run: Run, records: list[dict[str, Any]]) -> dict[str, Any]:
        peers = ask_peers(lens, run, items, records, chosen, tell)  # puts their scores into the records
        areas = _areas(lens, folder, run, chosen, progress) if PERTURBATION in chosen.judges else {}
        return {"peers": peers} | areas

    settings = {"peers": chosen.peers, "peer_limit": chosen.peer_limit}
    return run_judges(lens, judges, out, chosen, progress, settings=settings, more=more, tell=tell)


def _judge(name: str, lens: Lens, folder: Path, options: BenchOptions) -> Judge:
    if not folder.is_dir():
        raise InputError(f"Expected a folder of judges; there is none at {str(folder)!r}.")
    limit = options.limit
    if name == "evidence":
        is_one = any(path.suffix in SUFFIXES for path in folder.iterdir())
        return evidence(lens, folder if is_one else _needed(name, folder / "evidence"), limit=limit)
    if name == "tracr":
        return compiled_programs(_needed(name, folder / "tracr"), limit=limit)
    if name == "patching":
        return patching_pairs(lens, _needed(name, folder / "pairs"), limit=limit)
    text = _needed(name, folder / TEXT)
    if name == "needles":
        return needles(lens, _needed(name, folder / "needles"), text, limit=limit, lengths=options.lengths)
    return single_tokens(lens, text, limit=limit, n_tokens=options.n_tokens, seed=options.seed)


def _needed(name: str, path: Path) -> Path:
    if not path.exists():
        raise InputError(f"The judge {name!r} needs {str(path)!r}, which is not there.")
    return path


def _areas(lens: Lens, folder: Path, run: Run, options: BenchOptions, progress: bool | None) -> dict[str, Any]:
    """Areas under the curve of HS-MSE by method, most relevant first: the perturbation study on windows of a text."""
    methods = [name for name in options.methods or default_methods() if name != WORD_OVERLAP]
    chosen = {"cut": "windows", "n_tokens": WINDOW, "limit": options.limit, "norm_probes": 16, "seed": options.seed}
    text = _needed(PERTURBATION, folder / TEXT)
    result = perturbation(lens, text, run.folder / PERTURBATION, methods=methods, progress=progress, **chosen)
    condition = next(iter(result.summary["conditions"].values()), {})
    found = condition.get("most", {}).get("hs_mse", {"methods": {}})["methods"]
    parts = {name: {part: found[name][part] for part in ("auc", "interval", "n")} for name in found}
    return {PERTURBATION: dict(sorted(parts.items(), key=lambda pair: -pair[1]["auc"]))}
