"""Members of the family of rules on "which tokens to hide", relations and fidelity: tables of docs/members.md.

    python experiments/perturbation.py --data DATA --out RUNS --part members-smollm2-wikitext … [--seconds 80]
    python experiments/members.py areas RUNS --out AREAS
    python experiments/members.py page AREAS [--write]

The first makes the runs; a run that was stopped counts with the samples that it has. `areas` keeps of each one number a
sample, condition and method, which is all that `page` needs.

    python experiments/relations.py MODEL --by-member --rules half_gate --tf32 --out RUNS/relations-MODEL-half_gate …
    python experiments/members.py relations RUNS [--write]
    python experiments/fidelity.py MODEL --by-member --rules half_gate --out RUNS/fidelity-MODEL-half_gate …
    python experiments/members.py fidelity RUNS [--write]

Each member is compared with the paper's on the splits, or texts, that both have.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np

from tensorlens.strict_json import to_json

PAGE = Path(__file__).parents[1] / "docs" / "members.md"
METRICS = {"hs_mse": "HS-MSE", "abs_aopc": "abs-AOPC"}
MAPS = {"tensor.in_class": "In+Class", "tensor.in_out": "In+Out"}
MEMBERS = {"half_gate": "gate halved", "attn_lrp": "AttnLRP", "jacobian": "Jacobian"}
ALL = {"paper": "the paper's"} | MEMBERS
OTHERS = ("mean.attn", "control.recency", "control.random")
OPERATORS = {
    "tensor.full.beta1@0": "whole prompt",
    "tensor.subject.beta1@0": "subject's tokens, β = 1",
    "tensor.subject.tuned@0": "subject's tokens, β tuned",
}
"""Methods of the relation study that depend on the rules."""
N_RESAMPLES = 2000
MIN_RELATIONS = 10
"""A member with fewer says nothing yet."""


def areas(run: Path) -> dict[str, Any]:
    """The area under each curve of each sample, by condition, metric and method, most relevant first."""
    from tensorlens.studies.perturbation_study.measures import auc

    config = json.loads((run / "config.json").read_text("utf-8"))
    settings, found, n = config["settings"], {}, 0
    for path in sorted(run.glob("samples*.jsonl")):
        for line in path.read_text("utf-8").splitlines():
            record = json.loads(line)
            n += "skipped" not in record
            for condition, cells in record.get("conditions", {}).items():
                for method, cell in cells.items():
                    for metric, curve in cell.get("most", {}).items():
                        by_metric = found.setdefault(condition, {}).setdefault(metric, {})
                        by_metric.setdefault(method, {})[record["index"]] = float(f"{auc(curve, settings['grid']):.6g}")
    kept = ("model", "matmul_precision", "grid", "seed", "n_random", "data", "dtype")
    return {
        "n": n,
        "settings": {name: settings.get(name) for name in kept},
        "versions": config["versions"],
        "areas": found,
    }


def difference(part: dict[str, Any], conditions: list[str], metric: str, name: str, base: str) -> str:
    """How far one method's area is above another's, in per cent, averaged over conditions, with a 95 % interval.

    Paired: every resample draws whole samples, with all of their conditions.
    """
    areas = [
        (part["areas"][condition][metric][name], part["areas"][condition][metric][base]) for condition in conditions
    ]
    both = sorted(set.intersection(*(first.keys() & second.keys() for first, second in areas)))
    a, b = (np.array([[side[index] for index in both] for side in sides]) for sides in zip(*areas, strict=True))
    draws = np.random.default_rng(part["settings"]["seed"]).integers(0, len(both), (N_RESAMPLES, len(both)))
    found = [100 * ((a[:, chosen] - b[:, chosen]).mean(1) / b[:, chosen].mean(1)).mean() for chosen in draws]
    mean = 100 * ((a - b).mean(1) / b.mean(1)).mean()
    low, high = np.percentile(found, (2.5, 97.5))
    text = f"{mean:+.0f} [{low:+.0f}, {high:+.0f}]"
    return f"**{text}**" if low > 0 else f"*{text}*" if high < 0 else text


def table(part: dict[str, Any], base: str, metric: str) -> list[str]:
    """Conditions by members: how much more, or less, than under the paper's rules."""
    paper, areas = f"{base}@paper", part["areas"]
    names = {f"{base}@{member}": words for member, words in MEMBERS.items()} | {name: f"`{name}`" for name in OTHERS}
    conditions = [one for one, by_metric in areas.items() if paper in by_metric.get(metric, {})]
    if not conditions:
        return []
    rows = {one: [one] for one in conditions} | {"all of them": conditions}
    lines = [
        f"| {label} | {' | '.join(difference(part, some, metric, name, paper) for name in names)} |"
        for label, some in rows.items()
    ]
    return [f"| {MAPS[base]} | {' | '.join(names.values())} |", "| --- " * (len(names) + 1) + "|", *lines, ""]


def page(folder: Path, *, every: bool) -> str:
    """The tables of HS-MSE by In+Class, of In+Out where a model has no classes; or all of them."""
    lines = []
    for path in sorted(folder.glob("*.json.gz")):
        part = json.loads(gzip.decompress(path.read_bytes()))
        name = path.name.removeprefix("members-").removesuffix(".json.gz")
        for metric, words in METRICS.items():
            tables = [found for base in MAPS if (found := table(part, base, metric))]
            shown = tables if every else tables[:1] if metric == "hs_mse" else []
            if shown:
                lines += [f"**{name}**, {part['n']} samples, {words}", "", *(line for one in shown for line in one)]
    return "\n".join(lines).rstrip()


def splits(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The splits of a relation run that could be scored, by relation and number."""
    lines = [line for path in sorted(run.glob("samples*.jsonl")) for line in path.read_text("utf-8").splitlines()]
    return {(one["relation"], one["split"]): one for one in map(json.loads, lines) if "methods" in one}


def relation_tables(folder: Path) -> str:
    """Agreement of the mean operator with the model's answer by member, with the paired difference to the paper's."""
    parts = []
    for run in sorted(folder.glob("relations-*-paper"), key=_order):
        model = run.name.removeprefix("relations-").removesuffix("-paper")
        found = {name: splits(run.with_name(f"relations-{model}-{name}")) for name in ALL}
        head = " | ".join(f"{words} | less the paper's" for words in OPERATORS.values())
        lines = [f"| member | relations | splits | {head} |", "| --- " * (3 + 2 * len(OPERATORS)) + "|"]
        for name, one in found.items():
            shared = {key: record for key, record in one.items() if key in found["paper"]}
            base = {key: found["paper"][key] for key in shared}
            relations = sorted({relation for relation, _ in shared})
            if len(relations) < MIN_RELATIONS:
                continue
            cells = [agreement(shared, base, relations, method, is_base=name == "paper") for method in OPERATORS]
            counts = f"{len(relations)} | {len(shared)}"
            lines.append(f"| {ALL[name]} | {counts} | {' | '.join(cells)} |")
        parts.append("\n".join([f"**{model}**", "", *lines]))
    return "\n\n".join(parts)


def _order(run: Path) -> tuple[bool, str]:
    return ("gemma" in run.name, run.name)


def agreement(one: dict[Any, Any], paper: dict[Any, Any], relations: list[str], method: str, *, is_base: bool) -> str:
    """The mean over relations with its 95 % interval, and how far it is above the paper's on the same splits."""
    own, base = (
        np.array(
            [np.mean([_share(record, method) for key, record in side.items() if key[0] == name]) for name in relations]
        )
        for side in (one, paper)
    )
    draws = np.random.default_rng(0).integers(0, len(relations), (N_RESAMPLES, len(relations)))
    low, high = np.percentile(own[draws].mean(1), (2.5, 97.5))
    gap_low, gap_high = np.percentile((own - base)[draws].mean(1), (2.5, 97.5))
    less = "" if is_base else f"{(own - base).mean():+.3f} [{gap_low:+.3f}, {gap_high:+.3f}]"
    return f"{own.mean():.3f} [{low:.3f}, {high:.3f}] | {less}"


def _share(record: dict[str, Any], method: str) -> float:
    """Of the test facts of a split, those on which the operator says what the model says."""
    bits = record["methods"][method]["agreement"]
    return bits.count("1") / len(bits)


def fidelity_table(folder: Path) -> str:
    """How far each member is from the Jacobian, and its error around a text, as a part of the change itself."""
    head = (
        "model",
        "member",
        "texts",
        "‖T − J‖/‖J‖",
        "smallest random move",
        "smallest move of a token",
        "a token replaced",
        "the same by J",
    )
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    for base in sorted(folder.glob("fidelity-*-paper"), key=_order):
        model = base.name.removeprefix("fidelity-").removesuffix("-paper")
        for name in ALL:
            files = sorted(base.with_name(f"fidelity-{model}-{name}").glob("samples*.jsonl"))
            records = [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]
            if records:
                cells = " | ".join(f"{one:.2g}" if one < 0.1 else f"{one:.2f}" for one in nearness(records))
                lines.append(f"| {model} | {ALL[name]} | {len(records)} | {cells} |")
    return "\n".join(lines)


def nearness(records: list[dict[str, Any]]) -> list[float]:
    """Medians over texts and directions; an error is divided by the change that the model itself makes there."""
    along = {
        kind: [one for record in records for one in record["directions"] if one["kind"] == kind]
        for kind in ("random", "token")
    }
    replaced = [(one, one["sizes"].index(one["natural_size"])) for one in along["token"]]
    return [
        float(np.median([record["norms"]["frobenius"]["relative"] for record in records])),
        *(float(np.median([one["tensor"][0] / one["nothing"][0] for one in along[kind]])) for kind in along),
        *(float(np.median([one[who][k] / one["nothing"][k] for one, k in replaced])) for who in ("tensor", "jacobian")),
    ]


def put(kind: str, tables: str) -> None:
    """Tables into docs/members.md, between the marks of their kind."""
    before, rest = PAGE.read_text("utf-8").split(f"<!-- {kind}: members -->")
    after = rest.split(f"<!-- /{kind} -->")[1]
    PAGE.write_text(f"{before}<!-- {kind}: members -->\n\n{tables}\n\n<!-- /{kind} -->{after}", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("areas")
    making.add_argument("runs", type=Path)
    making.add_argument("--out", type=Path, required=True)
    writing = commands.add_parser("page")
    writing.add_argument("areas", type=Path)
    writing.add_argument("--every", action="store_true", help="both maps and both measures, not what the page shows")
    writing.add_argument("--write", action="store_true", help="into docs/members.md; printed if not given")
    for name in ("relations", "fidelity"):
        comparing = commands.add_parser(name)
        comparing.add_argument("runs", type=Path)
        comparing.add_argument("--write", action="store_true", help="into docs/members.md; printed if not given")
    chosen = parser.parse_args()
    if chosen.command == "areas":
        chosen.out.mkdir(parents=True, exist_ok=True)
        for run in sorted(path.parent for path in chosen.runs.glob("members-*/config.json")):
            data = to_json(areas(run)).encode()
            (chosen.out / f"{run.name}.json.gz").write_bytes(gzip.compress(data, mtime=0))
        return
    kind, tables = {
        "relations": lambda: ("relations", relation_tables(chosen.runs)),
        "fidelity": lambda: ("fidelity", fidelity_table(chosen.runs)),
        "page": lambda: ("perturbation", page(chosen.areas, every=chosen.every and not chosen.write)),
    }[chosen.command]()
    if chosen.write:
        put(kind, tables)
    else:
        print(tables)


if __name__ == "__main__":
    main()
