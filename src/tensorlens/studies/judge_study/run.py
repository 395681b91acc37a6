"""Judges as a run: items whose answer is known, every method and every peer on the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.models.precision import matmul_precision
from tensorlens.studies.identity import model_settings
from tensorlens.studies.judge_study.compiled import compiled_programs
from tensorlens.studies.judge_study.evidence import SUFFIXES, evidence
from tensorlens.studies.judge_study.items import Judge, groups_of
from tensorlens.studies.judge_study.measuring import Measurement
from tensorlens.studies.judge_study.needles import needles
from tensorlens.studies.judge_study.options import JudgeOptions
from tensorlens.studies.judge_study.pairs import patching_pairs
from tensorlens.studies.judge_study.peer_answers import ask_peers
from tensorlens.studies.judge_study.perturbed import perturbed
from tensorlens.studies.judge_study.report import write_report
from tensorlens.studies.judge_study.single_tokens import single_tokens
from tensorlens.studies.judge_study.summary import summarise
from tensorlens.studies.options import chosen_options
from tensorlens.studies.results import StudyResult
from tensorlens.studies.runs import Run

PERTURBATION = "perturbation"
TEXT = Path("wikitext-2") / "valid.txt"
REFERENCES = {"patching": "patching@paper"}
"""What differences are taken to, where it is not In+Class by the paper's rules."""


def judge(
    lens: Lens,
    data: str | Path,
    out: str | Path,
    *,
    options: JudgeOptions | None = None,
    progress: bool | None = None,
    **changes: Any,
) -> StudyResult:
    """Let judges that know the answer compare maps, members of the family of rules, controls and peers.

    Args:
        lens: A language model with its tokenizer; compiled programs bring their own models.
        data: Folder with a folder for each judge: `evidence`, `tracr`, `needles`, `pairs`, `wikitext-2`. A folder that
            holds .csv or .jsonl files itself is one of evidence.
        out: The run's folder.
        options: Judges, methods, peers; see `JudgeOptions`.
        progress: Whether to show a bar; None shows it in a terminal.
        **changes: Single options by name, such as ``limit=50``, instead of a record or over it.

    Returns:
        The summary and where everything is. Started again with the same settings, a run goes on where it stopped.
    """
    chosen = chosen_options(JudgeOptions, options, changes)
    folder = Path(data).expanduser()
    judges = [_judge(name, lens, folder, chosen) for name in chosen.judges if name != PERTURBATION]
    items = [item for one in judges for item in one.items]
    if not items and judges:
        problems = [line for one in judges for line in one.problems]
        raise InputError(f"No row could be used; the first: {problems[0] if problems else 'there are no rows'}")
    run = Run(out, "judge", _settings(lens, judges, chosen))
    measurement = Measurement(lens, judges, items, chosen)
    run.work_in_groups(groups_of(items, chosen.group_size), measurement.measure, progress)
    areas: dict[str, Any] = {}

    def with_peers(records: list[dict[str, Any]]) -> dict[str, Any]:
        peers = ask_peers(lens, run, items, records, chosen)  # puts their scores into the records
        return summarise(records, run.settings) | {"peers": peers} | areas

    if PERTURBATION in chosen.judges:
        areas[PERTURBATION] = perturbed(lens, _needed(PERTURBATION, folder / TEXT), run.folder, chosen, progress)
    return run.finish(len(items), with_peers, write_report)


def _judge(name: str, lens: Lens, folder: Path, options: JudgeOptions) -> Judge:
    if not folder.is_dir():
        raise InputError(f"Expected a folder of judges; there is none at {str(folder)!r}.")
    limit = options.limit
    if name == "evidence":
        return evidence(lens, _evidence_folder(folder), limit=limit)
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


def _evidence_folder(folder: Path) -> Path:
    is_one = any(path.suffix in SUFFIXES for path in folder.iterdir())
    return folder if is_one or not (folder / "evidence").is_dir() else folder / "evidence"


def _settings(lens: Lens, judges: Sequence[Judge], options: JudgeOptions) -> dict[str, Any]:
    return model_settings(lens) | {
        "matmul_precision": matmul_precision(),
        "methods": options.methods,
        "peers": options.peers,
        "peer_limit": options.peer_limit,
        "seed": options.seed,
        "limit": options.limit,
        "judges": {
            one.name: {
                "question": one.question,
                "measures": one.measures,
                "n": len(one.items),
                "items": one.digest(),
                "problems": list(one.problems),
            }
            | ({"reference": REFERENCES[one.name]} if one.name in REFERENCES else {})
            for one in judges
        },
    }
