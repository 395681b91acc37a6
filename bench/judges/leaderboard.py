"""The judges on real weights, from `judges.json`, and the tables of docs/leaderboard.md and docs/members.md.

    python -m bench.judges.leaderboard run --data DATA --out RUNS --model smollm2-135m --model gemma3-270m=PATH
    python -m bench.judges.leaderboard page RUNS

DATA holds evidence/, needles/, pairs/, tracr/ and wikitext-2/. PATH is a folder or a file; without it the name is
loaded. A run's options hold for every model, but for what stands under `of` and the model's name. Runs that were
stopped continue when the same command is given again, and several processes share them (torchrun). A page has blocks
``<!-- judges: KEY -->``: KEY is a question (word, passage, component, removal), or one of: sets MODEL, counts, tracr,
peers, members, differences, perturbation. The runs `peers` and `peer_…` are shown by themselves, since they have other
items.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.tables import DOCS, fill, markdown, ranged
from tensorlens.studies.judge_study import QUESTIONS, WRONG, counts_line, judge_table
from tensorlens.studies.judge_study import set_table as sets_of

PAGES = (DOCS / "leaderboard.md", DOCS / "members.md")
NOTHING = "No run yet."
MEMBERS = {
    "tensor.in_class": "the paper's (= CP-LRP)",
    "tensor.in_class@half_gate": "gate halved",
    "tensor.in_class@attn_lrp": "gate and attention halved (= AttnLRP)",
    "tensor.in_class@jacobian": "Jacobian",
    "patching@paper": "the paper's (= CP-LRP)",
    "patching@half_gate": "gate halved",
    "patching@attn_lrp": "gate and attention halved (= AttnLRP)",
    "patching@jacobian": "Jacobian (attribution patching)",
}

Summaries = dict[str, dict[str, Any]]
"""By model and run, what `summary.json` says."""


# Runs -----------------------------------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> None:
    """Every run of every model, one after the other."""
    import tensorlens as tl
    from bench.judges.run import judge

    config = json.loads((Path(__file__).with_name("judges.json")).read_text("utf-8"))
    for number, given in enumerate(arguments.model):
        model, _, path = given.partition("=")
        loaded = tl.load(path or model, dtype=config["dtype"], attention=config["attention"])
        lens = tl.Lens(loaded.model, loaded.processor, name=model)
        for name, about in config["runs"].items():
            once = about.get("once", False)  # the programs bring their own models
            if name in (arguments.only or [name]) and not (once and number):
                options = about["options"] | about.get("of", {}).get(model, {}) | {"peer_python": arguments.peer_python}
                out = arguments.out / ("compiled" if once else model) / name
                print(f"{model}, {name}: into {out}", flush=True)
                judge(lens, arguments.data, out, progress=True, **options)


# Tables ---------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Summaries:
    """What the folders of finished runs hold, models from small to large as they come."""
    found: Summaries = {}
    for path in sorted(folder.glob("*/*/summary.json")):
        found.setdefault(path.parts[-3], {})[path.parts[-2]] = json.loads(path.read_text("utf-8"))
    return found


def judges_of(summaries: Summaries) -> dict[str, dict[str, Any]]:
    """By model and judge, what the runs without peers say."""
    return {
        model: {
            name: one
            for run, found in runs.items()
            if not run.startswith("peer")
            for name, one in found["judges"].items()
        }
        for model, runs in summaries.items()
    }


def question_table(summaries: Summaries, question: str, *, only: dict[str, str] | None = None) -> str:
    """Methods by model for every judge of a question: value with interval, and cost."""
    runs, parts = judges_of(summaries), []
    asked = {
        name for of in runs.values() for name, one in of.items() if one["question"] == question and one["measures"]
    }
    for name in sorted(asked - {"tracr"}):
        found = {model: of[name] for model, of in runs.items() if of.get(name, {}).get("measures")}
        measure = next(iter(next(iter(found.values()))["measures"]))
        values = {model: one["measures"][measure]["methods"] for model, one in found.items()}
        known = {method for some in values.values() for method in some if only is None or method in only}
        first = next(iter(found))
        rows = []
        for method in sorted(known, key=lambda m: -sum(some.get(m, {}).get("mean") or 0.0 for some in values.values())):
            cost = found[first]["seconds"].get(method)
            label = f"`{method}`" if only is None else only[method]
            cells = {model: value(some.get(method)) for model, some in values.items()}
            rows.append({"method": label} | cells | {f"ms per item, {first}": ranged(cost and 1000 * cost, form=".0f")})
        chance = {model: f"{one['measures'][measure]['random']:.3f}" for model, one in found.items()}
        rows.append({"method": "chance"} | chance | {f"ms per item, {first}": ""})
        sets = {sum(one["n_measured"] > 0 for one in each["sets"].values()) for each in found.values()}
        head = f"**{name}**, {measure.replace('_', ' ')}, mean over {' or '.join(map(str, sorted(sets)))} sets"
        parts.append(f"{head}, 95 % intervals\n\n{markdown(rows)}")
    return "\n\n".join(parts) or NOTHING


def value(one: dict[str, Any] | None) -> str:
    """A mean with its interval."""
    return "–" if one is None or one["mean"] is None else ranged(one["mean"], *one["interval"])


def set_table(summaries: Summaries, model: str, name: str = "evidence") -> str:
    """Methods by set, of one model."""
    found = judges_of(summaries).get(model, {}).get(name)
    return markdown(sets_of(found)) if found is not None and found["measures"] else NOTHING


def counts(summaries: Summaries) -> str:
    """How many items each number stands on."""
    rows = [
        {
            "model": model,
            "judge": name,
            "items": found["n_items"],
            "measured": found["n_measured"],
            "left out, the model is wrong": sum(one["left_out"].get(WRONG, 0) for one in found["sets"].values()),
            "rows that could not be used": found["n_problems"],
        }
        for model, some in judges_of(summaries).items()
        for name, found in some.items()
    ]
    return markdown(rows) or NOTHING


def peer_list(summaries: Summaries) -> str:
    """What the peers get, and version, own example and error of each."""
    parts = []
    for model, runs in summaries.items():
        asked = {run: found for run, found in runs.items() if found.get("peers")}
        for summary in asked.values():
            for name, found in summary["judges"].items():
                parts.append(f"*{model}, {name}*: {counts_line(found)}.\n\n{markdown(judge_table(found))}")
        rows = [
            {
                "peer": f"`{name}`",
                "version": about.get("version", "–"),
                "judge": ", ".join(summary["judges"]),
                "answers": about["n"],
                "its own example": about.get("check", "–"),
                "said": about.get("error", ""),
            }
            for summary in asked.values()
            for name, about in summary["peers"].items()
        ]
        parts += [markdown(rows)] if rows else []
    return "\n\n".join(parts) or NOTHING


def member_tables(summaries: Summaries) -> str:
    """The members alone, for every question."""
    parts = [question_table(summaries, question, only=MEMBERS) for question in QUESTIONS]
    return "\n\n".join(part for part in parts if part != NOTHING) or NOTHING


def differences(summaries: Summaries) -> str:
    """What the paper's choice loses: paired differences of the members to it."""
    rows = [
        {
            "model": model,
            "judge": name,
            "measure": measure.replace("_", " "),
            "member": MEMBERS[method],
            "less the paper's": ranged(less["mean"], *less["interval"], "+.3f"),
        }
        for model, some in judges_of(summaries).items()
        for name, found in some.items()
        for measure, compared in list(found["measures"].items())[:1]
        for method, one in compared["methods"].items()
        for less in [next((found for key, found in one.items() if key.startswith("less ")), None)]
        if method in MEMBERS and less and less["mean"] and name != "tracr"
    ]
    return markdown(rows) or NOTHING


def area_table(areas: dict[str, Any]) -> list[dict[str, Any]]:
    """The areas of a perturbation study."""
    return [
        {"method": name, "HS-MSE": ranged(one["auc"], *one["interval"], ".4g"), "windows": one["n"]}
        for name, one in areas.items()
    ]


def block(key: str, summaries: Summaries) -> str | None:
    """What belongs between the marks of a key."""
    if key.startswith("sets "):
        return set_table(summaries, key.removeprefix("sets "))
    if key in QUESTIONS:
        return question_table(summaries, key)
    areas = {
        model: run["perturbation"]
        for model, runs in summaries.items()
        for run in runs.values()
        if "perturbation" in run
    }
    drawn = "\n\n".join(f"**{model}**\n\n{markdown(area_table(one))}" for model, one in areas.items())
    simple = {
        "tracr": lambda: set_table(summaries, "compiled", "tracr"),
        "counts": lambda: counts(summaries),
        "peers": lambda: peer_list(summaries),
        "members": lambda: member_tables(summaries),
        "differences": lambda: differences(summaries),
        "perturbation": lambda: drawn or NOTHING,
    }
    return simple[key]() if key in simple else None


def main() -> None:
    """Run the judges, or fill the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--data", type=Path, required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--model", action="append", required=True, help="NAME or NAME=PATH; repeatable")
    running.add_argument("--only", action="append", help="a run of the config; repeatable")
    running.add_argument("--peer-python", help="interpreter of the peers' environment, for the runs of peers")
    pages = commands.add_parser("page")
    pages.add_argument("runs", type=Path)
    pages.add_argument("--page", type=Path, action="append")
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments)
        return
    summaries = read(arguments.runs)
    for page in arguments.page or PAGES:
        print(f"{page}: {fill(page, 'judges', lambda key: block(key, summaries))} tables")


if __name__ == "__main__":
    main()
