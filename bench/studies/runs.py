"""The perturbation, relation and fidelity runs of docs/results.md, as `runs.json` describes them.

    python -m bench.studies.runs perturbation minilm-imdb dinov2-photographs --data DATA --out RUNS
    python -m bench.studies.runs relations smollm2-135m --data DATA/relations --out RUNS [--member half_gate] [--tf32]
    python -m bench.studies.runs fidelity minilm --out RUNS [--member half_gate]

DATA holds imdb/reviews.csv, wikitext-2/ and images/. Weights go by their bundled names; others are given as folders or
files with --weights NAME=PATH. A run that was stopped continues when the same command is given again, and several
processes share it: torchrun --nproc-per-node 8 -m bench.studies.runs … With --member the run is the smaller one by
which the members of the family of rules are compared, and its folder is named after the member.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

import tensorlens as tl
from bench.tables import markdown
from tensorlens import studies
from tensorlens.studies.fidelity_study.report import error_table, norm_table
from tensorlens.studies.members import MEMBERS
from tensorlens.studies.processes import Processes
from tensorlens.studies.relation_study.report import category_table, difference_table, survival
from tensorlens.studies.runs import StudyResult

CONFIG = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
MEASURES = ("attn", "w_attn", "w_attn_res_ln", "glob_enc")
OTHERS = ("mean.attn", "control.recency", "control.random")
METHODS = {
    "one_pass": [
        "tensor.in_out",
        "tensor.in_class",
        "gradient.times_input",
        "alti",
        "rollout.attn_without_sink",
        "control.random",
        "control.recency",
        "control.position",
        "control.embedding_norm",
        *(f"{join}.{measure}" for join in ("rollout", "mean") for measure in MEASURES),
    ],
    "tensor": [*(name for name in tl.METHODS if name.startswith("tensor.")), "control.random"],
    "signed": ["tensor.in_out", "mean.attn"],
    "recency": ["mean.attn", "control.recency", "control.random"],
    "members": [*(f"{name}@{one}" for name in ("tensor.in_class", "tensor.in_out") for one in MEMBERS), *OTHERS],
    "members_without_head": [*(f"tensor.in_out@{one}" for one in MEMBERS), *OTHERS],
}


def main() -> None:
    """Run what was named, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=CONFIG)
    parser.add_argument("names", nargs="+", help="runs of the config; of relations and fidelity the models")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--weights", action="append", default=[], metavar="NAME=PATH", help="where weights are")
    parser.add_argument("--limit", type=int, help="samples, relations or texts, to try things")
    parser.add_argument("--member", choices=list(MEMBERS), help="of relations and fidelity")
    parser.add_argument("--device", help="such as cpu; the GPU if there is one")
    parser.add_argument("--tf32", action="store_true", help="let matrix products run in TF32")
    chosen = parser.parse_args()
    if chosen.tf32:
        torch.set_float32_matmul_precision("high")
    for name in chosen.names:
        began = time.perf_counter()
        result = {"perturbation": perturbed, "relations": related, "fidelity": near}[chosen.study](name, chosen)
        if Processes.from_environment().is_first:
            print(f"== {name}: {time.perf_counter() - began:.0f} s\n{told(result)}", flush=True)


def lens_of(name: str, chosen: argparse.Namespace, rules: tl.Rules, dtype: str | None = None) -> tl.Lens:
    """The model, by its name and not by its path, which differs from machine to machine."""
    path = dict(pair.split("=", 1) for pair in chosen.weights).get(name, name)
    loaded = tl.load(path, device=chosen.device or Processes.device(), dtype=dtype)
    return tl.Lens(loaded.model, loaded.processor, rules=rules, name=name)


def perturbed(name: str, chosen: argparse.Namespace) -> StudyResult:
    """One run of perturbation; data that begin with `@model/` lie with the weights."""
    config: dict[str, Any] = dict(CONFIG["perturbation"][name])
    model, data, methods = config.pop("model"), config.pop("data"), config.pop("methods", None)
    lens = lens_of(model, chosen, tl.Rules(gate=config.pop("gate", "freeze_gate")))
    weights = Path(dict(pair.split("=", 1) for pair in chosen.weights).get(model, model))
    source = weights / data.removeprefix("@model/") if data.startswith("@model/") else chosen.data / data
    config |= {"methods": METHODS[methods] if methods else None, "limit": chosen.limit or config["limit"]}
    return studies.perturbation(lens, source, chosen.out / name, progress=True, **config)


def related(name: str, chosen: argparse.Namespace) -> StudyResult:
    """Relation decoding of one model."""
    config = CONFIG["relations"]
    options = {"starts": config["starts"][name]} | config["options"] | (config["by_member"] if chosen.member else {})
    options |= {"starts": tuple(options["starts"]), "limit": chosen.limit}
    lens = lens_of(name, chosen, MEMBERS[chosen.member or "paper"])
    return studies.relations(lens, chosen.data, _folder("relations", name, chosen), progress=True, **options)


def near(name: str, chosen: argparse.Namespace) -> StudyResult:
    """Fidelity, bounds and properties of one model."""
    config = CONFIG["fidelity"]
    options = {"stride": config["stride"][name]} | config["options"] | (config["by_member"] if chosen.member else {})
    lens = lens_of(name, chosen, MEMBERS[chosen.member or "paper"], config["dtype"])
    texts = config["texts"][: chosen.limit]
    return studies.fidelity(lens, texts, _folder("fidelity", name, chosen), progress=True, **options)


def _folder(study: str, name: str, chosen: argparse.Namespace) -> Path:
    return chosen.out / f"{study}-{name}{f'-{chosen.member}' if chosen.member else ''}"


def told(result: StudyResult) -> str:
    """The first table of a study."""
    summary = result.summary
    if "conditions" in summary:
        areas = "\n".join(f"{name:28} {area:.5g}" for name, area in result.areas().items())
        return f"{summary['n_measured']} samples, {summary['n_skipped']} skipped\n{areas}"
    if "relations" in summary:
        tables = [category_table(summary), difference_table(summary)] if summary["relations"] else []
        return "\n\n".join([survival(summary), *map(markdown, tables)])
    return f"{markdown(norm_table(summary))}\n\n{markdown(error_table(summary))}"


if __name__ == "__main__":
    main()
