"""Which claims of the paper hold: one table from published records of perturbation runs, without a model.

python -m bench paper-records RUN --name mpnet-imdb     pack the samples of a run into bench/records/paper
python -m bench paper-table                             the table from all that is there
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.tables import markdown, ranged
from tensorlens.errors import InputError
from tensorlens.strict_json import to_json
from tensorlens.studies.perturbation_study.summary import compare_two, perturbation_summary

FOLDER = Path(__file__).parent / "records" / "paper"
ENDING = ".jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that one run can test.

    Attributes:
        says: The claim.
        paper: The paper's number.
        kind: How names of runs that test it end: model and data with a dash between them.
        method: The method of T that it is about.
        against: The method it is compared with; the best of the eight baselines if None.
        metric: What is measured.
        preset: The condition begins so, where a run has several.
    """

    says: str
    paper: str
    kind: str
    method: str
    against: str | None = None
    metric: str = "hs_mse"
    preset: str = ""


def _decoder(preset: str, metric: str, paper: str) -> Claim:
    said = f"decoders, {preset}: Norm is at the top or second ({metric})"
    return Claim(says=said, paper=paper, kind="wikitext", method="tensor.norm", metric=metric, preset=preset)


CLAIMS = (
    Claim(
        says="encoders: In+Out is ahead of every baseline", paper="> 0.158, < 0.09", kind="imdb", method="tensor.in_out"
    ),
    Claim(says="encoders: Norm is ahead of every baseline", paper="0.101, < 0.09", kind="imdb", method="tensor.norm"),
    Claim(
        says="encoders: In+Out is ahead of Norm",
        paper="> 0.158, 0.101",
        kind="imdb",
        method="tensor.in_out",
        against="tensor.norm",
    ),
    Claim(
        says="fine-tuned: In+Out is ahead of every baseline",
        paper="0.112, 0.077",
        kind="sentiment",
        method="tensor.in_out",
    ),
    Claim(
        says="fine-tuned: Norm is ahead of every baseline", paper="0.081, 0.077", kind="sentiment", method="tensor.norm"
    ),
    Claim(
        says="pictures: In+Out is ahead of every baseline", paper="> 0.82, < 0.6", kind="images", method="tensor.in_out"
    ),
    Claim(says="pictures: Norm is ahead of every baseline", paper="0.66, < 0.6", kind="images", method="tensor.norm"),
    _decoder("paper-like", "hs_mse", "3.708, 3.708"),
    _decoder("paper-like", "abs_aopc", "0.147, 0.148"),
    _decoder("strict", "hs_mse", "–"),
    Claim(
        says="decoders: means are far ahead of rollouts",
        paper="3.483, 0.306",
        kind="wikitext",
        method="mean.attn",
        against="rollout.attn",
        preset="paper-like",
    ),
    Claim(
        says="encoders: masking by In+Out lowers accuracy most",
        paper="the text's definition",
        kind="imdb",
        method="tensor.in_out",
        metric="accuracy",
    ),
)


def pack(run: Path, name: str, folder: Path = FOLDER) -> Path:
    """Write the settings and samples of a finished run as one file."""
    if not (run / "summary.json").is_file():
        raise InputError(f"Expected a finished run in {str(run)!r}; there is no summary. Run the command to its end.")
    config = json.loads((run / "config.json").read_text("utf-8"))
    lines = [to_json({"settings": config["settings"]}), *(run / "samples.jsonl").read_text("utf-8").splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}{ENDING}"
    target.write_bytes(gzip.compress("\n".join(lines).encode(), mtime=0))
    return target


def published(folder: Path = FOLDER) -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Samples and settings of each run that is published."""
    found = {}
    for path in sorted(folder.glob(f"*{ENDING}")):
        head, *lines = (json.loads(line) for line in gzip.decompress(path.read_bytes()).decode().splitlines())
        found[path.name.removesuffix(ENDING)] = lines, head["settings"]
    return found


def table(folder: Path = FOLDER) -> str:
    """One row for each claim and run; a claim that no run tests has a row that says so."""
    runs = published(folder)
    made = {name: perturbation_summary(*one) for name, one in runs.items()}
    rows = []
    for claim in CLAIMS:
        fitting = [name for name in runs if name.endswith(f"-{claim.kind}")]
        tested = [_row(claim, name, made[name], *runs[name]) for name in fitting]
        rows += [row for row in tested if row is not None] or [_untested(claim)]
    return markdown(rows)


def _untested(claim: Claim) -> dict[str, str]:
    blank = dict.fromkeys(("our model and data", "T", "best baseline", "best control", "difference [95 %]"), "–")
    return {"claim": claim.says, "the paper": claim.paper} | blank | {"holds": "not tested"}


def _row(
    claim: Claim, name: str, summary: dict[str, Any], lines: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, str] | None:
    condition = next((one for one in summary["conditions"] if one.startswith(claim.preset)), None)
    result = None if condition is None else summary["conditions"][condition].get("most", {}).get(claim.metric)
    if condition is None or result is None or claim.method not in result["methods"]:
        return None
    best = result["best"]
    other = claim.against or best.get("baseline")
    if other is None:
        return None
    against = compare_two(lines, condition, (claim.method, other), "most", claim.metric, settings)
    low, high = against["interval"]
    return {
        "claim": claim.says,
        "the paper": claim.paper,
        "our model and data": f"{name}, {summary['n_measured']} samples",
        "T": f"{claim.method} {result['methods'][claim.method]['auc']:.4g}",
        "best baseline": f"{other} {result['methods'][other]['auc']:.4g}",
        "best control": f"{best['control']} {result['methods'][best['control']]['auc']:.4g}"
        if "control" in best
        else "–",
        "difference [95 %]": ranged(against["advantage"], low, high, "+.3g"),
        "holds": "holds" if low > 0 else "no" if high < 0 else "in part",
    }
