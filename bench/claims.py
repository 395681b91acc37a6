"""Which claims of the paper hold: one table from published records of runs, without a model.

python -m bench paper-reactions FILE.csv                data for rxnfp: reactions by the templates of the benchmark
python -m bench paper-records RUN --name mpnet-imdb     pack the samples of a run into bench/records/paper
python -m bench tables                                  the table from all that is there, with those of the benchmarks
"""

from __future__ import annotations

import csv
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.judges.reactions import reactions
from bench.tables import DOCS, fill, markdown, ranged
from tensorlens.errors import InputError
from tensorlens.files import to_json
from tensorlens.studies.perturbation_report import Comparing, curves_of, perturbation_summary
from tensorlens.studies.relation_report import relation_summary

FOLDER = Path(__file__).parent / "records" / "paper"
PAGE = DOCS / "results.md"
COMMANDS = {
    "imdb": "tensorlens paper bert",
    "sentiment": "tensorlens paper modernbert",
    "reactions": "tensorlens paper bert",
    "images": "tensorlens paper deit-base",
    "wikitext": "tensorlens paper pythia",
    "relations": "tensorlens paper relations",
}
"""The command that makes a run of each kind."""
STATES, TUNED = ("imdb",), ("sentiment", "reactions")
"""Runs on the states of encoders without a classifier, and of models that classify."""
IN_OUT, NORM = "tensor.in_out", "tensor.norm"
DATA = ("facts", "train")
"""Fields of a line that repeat the data: they stay out of published records."""
ENDING = ".jsonl.gz"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim that one run can test.

    Attributes:
        says: The claim.
        paper: The paper's number.
        kinds: How names of runs that test it end: model and data with a dash between them.
        method: The method of T that it is about.
        against: The method it is compared with; the best of the eight baselines if None.
        metric: What is measured.
        preset: The condition begins so, where a run has several.
    """

    says: str
    paper: str
    kinds: tuple[str, ...]
    method: str
    against: str | None = None
    metric: str = "hs_mse"
    preset: str = ""


def _decoder(preset: str, metric: str, paper: str) -> Claim:
    said = f"decoders, {preset}: Norm is at the top or second ({metric})"
    return Claim(says=said, paper=paper, kinds=("wikitext",), method="tensor.norm", metric=metric, preset=preset)


CLAIMS = (
    Claim(says="encoders: In+Out is ahead of every baseline", paper="> 0.158, < 0.09", kinds=STATES, method=IN_OUT),
    Claim(says="encoders: Norm is ahead of every baseline", paper="0.101, < 0.09", kinds=STATES, method=NORM),
    Claim(says="encoders: In+Out is ahead of Norm", paper="> 0.158, 0.101", kinds=STATES, method=IN_OUT, against=NORM),
    Claim(says="classifiers: In+Out is ahead of every baseline", paper="0.112, 0.077", kinds=TUNED, method=IN_OUT),
    Claim(says="classifiers: Norm is ahead of every baseline", paper="0.081, 0.077", kinds=TUNED, method=NORM),
    Claim(says="classifiers: In+Out is ahead of Norm", paper="0.112, 0.081", kinds=TUNED, method=IN_OUT, against=NORM),
    Claim(
        says="classifiers: masking by In+Out lowers accuracy most",
        paper="defined, not reported",
        kinds=("sentiment",),
        method=IN_OUT,
        metric="accuracy",
    ),
    Claim(says="pictures: In+Out is ahead of every baseline", paper="> 0.82, < 0.6", kinds=("images",), method=IN_OUT),
    Claim(says="pictures: Norm is ahead of every baseline", paper="0.66, < 0.6", kinds=("images",), method=NORM),
    _decoder("paper-like", "hs_mse", "3.708, 3.708"),
    _decoder("paper-like", "abs_aopc", "0.147, 0.148"),
    _decoder("strict", "hs_mse", "–"),
    Claim(
        says="decoders: means are far ahead of rollouts",
        paper="3.483, 0.306",
        kinds=("wikitext",),
        method="mean.attn",
        against="rollout.attn",
        preset="paper-like",
    ),
    Claim(
        says="relations: the mean operator agrees with the model on new subjects more often than LRE",
        paper="a figure",
        kinds=("relations",),
        method="tensor.full.beta1@0",
        against="lre.fixed@embedding",
        metric="agreement",
    ),
)


def write_reactions(path: Path) -> int:
    """Write different reactions, labelled with their template, and return their number."""
    rows = dict.fromkeys((one.text, one.template) for one in reactions(200))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    return len(rows)


def pack(run: Path, name: str, folder: Path = FOLDER, *, by_label: bool = False) -> Path:
    """Write the settings and samples of a finished run as one file.

    Args:
        run: Its folder.
        name: Model and data.
        folder: Where the file goes.
        by_label: Whether samples of one label are one unit: those made from one template are alike.
    """
    if not (run / "summary.json").is_file():
        raise InputError(f"Expected a finished run in {str(run)!r}; there is no summary. Run the command to its end.")
    config = json.loads((run / "config.json").read_text("utf-8"))
    samples = map(json.loads, (run / "samples.jsonl").read_text("utf-8").splitlines())
    kept = [{key: value for key, value in one.items() if key not in DATA} for one in samples]
    kept = [one | {"unit": one["label"]} if by_label else one for one in kept]
    lines = [to_json(one) for one in ({"settings": config["settings"]}, *kept)]
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
    summaries = {name: _summary(*run) for name, run in runs.items()}
    rows = []
    for claim in CLAIMS:
        row = _relations if "relations" in claim.kinds else _perturbation
        fitting = [name for name in runs if _kind(name) in claim.kinds]
        tested = [row(claim, name, summaries[name], *runs[name]) for name in fitting]
        first, *more = [one for one in tested if one is not None] or [_row(claim)]
        rows += [first, *(one | {"claim": "", "the paper": ""} for one in more)]
    return markdown(rows)


def _kind(name: str) -> str:
    return name.rsplit("-", 1)[1]


def _summary(lines: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    if "relations" in settings:
        return relation_summary(lines, [], settings["options"]["min_test"])
    return perturbation_summary(lines, settings)


def write() -> None:
    """Fill the table of docs/results.md."""
    print(f"{PAGE.name}: {fill(PAGE, 'records', lambda key: table() if key == 'claims' else None)} tables")


def _row(
    claim: Claim,
    *,
    name: str | None = None,
    ran: str = "",
    value: str = "–",
    other: str = "–",
    control: str = "–",
    difference: tuple[float, float, float] | None = None,
) -> dict[str, str]:
    low, high = difference[1:] if difference else (0.0, 0.0)
    verdict = "not tested" if difference is None else "holds" if low > 0 else "no" if high < 0 else "in part"
    return {
        "claim": claim.says,
        "the paper": claim.paper,
        "our model and data": name + ran if name else "–",
        "T": value,
        "compared with": other,
        "best control": control,
        "difference [95 %]": ranged(*difference, form="+.2g") if difference else "–",
        "holds": verdict,
        "command": f"`{COMMANDS[_kind(name) if name else claim.kinds[0]]}`",
    }


def _perturbation(
    claim: Claim, name: str, summary: dict[str, Any], lines: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, str] | None:
    """T's method against the best of the baselines, or the one that the claim names, on the same samples."""
    condition = next((one for one in summary["conditions"] if one.startswith(claim.preset)), None)
    result = None if condition is None else summary["conditions"][condition].get("most", {}).get(claim.metric)
    if condition is None or result is None or claim.method not in result["methods"]:
        return None
    other = claim.against or result["best"].get("baseline")
    if other is None:
        return None

    def said(method: str | None) -> str:
        return "–" if method is None else f"{method} {result['methods'][method]['auc']:.3g}"

    found = _compared(lines, condition, (claim.method, other), claim.metric, settings)
    return _row(
        claim,
        name=name,
        ran=f", {summary['n_measured']} samples, {settings.get('watched', 'logits')}",
        value=said(claim.method),
        other=said(other),
        control=said(result["best"].get("control")),
        difference=(found["advantage"], *found["interval"]),
    )


def _compared(
    lines: list[dict[str, Any]], condition: str, methods: tuple[str, str], metric: str, settings: dict[str, Any]
) -> dict[str, Any]:
    """The paired difference of two methods on the samples of a run; positive where the first is better."""
    measured = [one for one in lines if condition in one.get("conditions", {})]
    cells = [one["conditions"][condition] for one in measured]
    comparing = Comparing("most", metric, [one.get("unit") for one in measured], settings)
    return comparing.against(
        {name: comparing.areas(curves_of(cells, name, "most", metric)) for name in methods}, *methods
    )


def _relations(claim: Claim, name: str, summary: dict[str, Any], *_: Any) -> dict[str, str] | None:
    """T's mean operator against the named one; the control is the most common answer. Intervals draw relations."""
    found = summary["categories"].get("all")
    if found is None:
        return None
    metric, methods = claim.metric, found["methods"]
    less = found["differences"][f"{claim.method} - {claim.against}"][metric]
    return _row(
        claim,
        name=name,
        ran=f", {summary['n_survived']} relations",
        value=f"{claim.method} {methods[claim.method][metric]['mean']:.3g}",
        other=f"{claim.against} {methods[claim.against][metric]['mean']:.3g}",
        control=f"most common answer {found['majority'][metric]:.3g}",
        difference=(less["mean"], less["low"], less["high"]),
    )
