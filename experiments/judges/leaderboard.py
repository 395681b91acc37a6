"""Fill the tables of docs/leaderboard.md and docs/members.md from the folders of finished runs.

    python experiments/judges/leaderboard.py RUNS [--page docs/leaderboard.md] [--keep]

RUNS holds MODEL/RUN/summary.json as `judges.py` writes them. A page has blocks ``<!-- judges: KEY -->`` …
``<!-- /judges -->``; what is between is replaced, the rest is written by hand. KEY is a question (word, passage,
component, removal), or one of: sets MODEL, counts, ways, tracr, peers, members, differences, perturbation. The runs
`peers` and `peer_…` are shown by themselves, since they have other items. A run that was stopped is shown as far as it
came. With --keep, what RUNS does not hold stays as it was printed.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from keeping import kept

from tensorlens.studies.judge_study.measuring import WRONG
from tensorlens.studies.judge_study.report import area_table, counts_line, judge_table
from tensorlens.studies.judge_study.summary import summarise
from tensorlens.studies.pages import as_markdown
from tensorlens.studies.sample_lines import whole_lines

PAGES = (Path("docs/leaderboard.md"), Path("docs/members.md"))
MODELS = ("smollm2-135m", "gemma3-270m", "qwen2.5-coder-1.5b")
BLOCK = re.compile(r"(<!-- judges: (.*?) -->\n)(.*?)(<!-- /judges -->)", re.DOTALL)
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

Runs = dict[str, dict[str, Any]]
"""By model and judge, what the run's summary says."""


class Found(NamedTuple):
    """What the folders hold, by model."""

    judges: Runs
    ways: dict[str, Any]
    peers: dict[str, Any]
    areas: dict[str, Any]


def read(folder: Path) -> Found:
    """Judges, the searches over ways, the runs with peers and the areas of perturbation."""
    found = Found({}, {}, {}, {})
    for path in sorted((one for one in folder.glob("*/*") if one.is_dir()), key=_order):
        model, summary = path.parts[-2], summary_of(path)
        if summary is None:
            continue
        if "judges" not in summary:
            found.ways[model] = summary
            continue
        if summary.get("peers"):
            found.peers.setdefault(model, {})[path.name] = summary
        if not path.name.startswith("peer"):
            found.judges.setdefault(model, {}).update(summary["judges"])
        if summary.get("perturbation"):
            found.areas[model] = summary["perturbation"]
    return found


def _order(path: Path) -> tuple[int, str]:
    """Known models first, from small to large."""
    model = path.parts[-2]
    return (MODELS.index(model) if model in MODELS else len(MODELS), str(path))


def summary_of(folder: Path) -> dict[str, Any] | None:
    """The summary of a run; of one that was stopped what its rows say so far, with how many are missing."""
    if (folder / "summary.json").is_file():
        return json.loads((folder / "summary.json").read_text("utf-8"))
    if not (folder / "config.json").is_file():
        return None
    settings = json.loads((folder / "config.json").read_text("utf-8"))["settings"]
    if settings["peers"]:  # started again, it asks on
        return None
    lines = [line for file in sorted(folder.glob("samples*.jsonl")) for _, line in whole_lines(file)]
    records = {record["index"]: record for record in map(json.loads, lines)}
    if not records:
        return None
    found = summarise([records[index] for index in sorted(records)], settings)
    for name, one in found["judges"].items():
        one["n_not_run"] = settings["judges"][name]["n"] - one["n_items"]
    return found


def question_table(runs: Runs, question: str, *, only: dict[str, str] | None = None) -> str:
    """Methods by model for every judge of a question: value with interval, and cost."""
    parts = []
    names = list(
        dict.fromkeys(
            name
            for one in runs.values()
            for name, found in one.items()
            if found["question"] == question and found["measures"] and name != "tracr"
        )
    )
    for name in names:
        models = [model for model in runs if runs[model].get(name, {}).get("measures")]
        measure = next(iter(runs[models[0]][name]["measures"]))
        values = {model: runs[model][name]["measures"][measure]["methods"] for model in models}
        known = {method for some in values.values() for method in some if only is None or method in only}
        methods = sorted(known, key=lambda m: -sum(some.get(m, {}).get("mean") or 0.0 for some in values.values()))
        rows, cost_of = [], f"ms an item, {models[0]}"
        for method in methods:
            cells = {model: value(values[model].get(method)) for model in models}
            cost = runs[models[0]][name]["seconds"].get(method)
            label = f"`{method}`" if only is None else f"{only[method]}"
            rows.append({"method": label} | cells | {cost_of: "–" if cost is None else f"{1000 * cost:.0f}"})
        chance = {model: f"{runs[model][name]['measures'][measure]['random']:.3f}" for model in models}
        rows.append({"method": "chance"} | chance | {cost_of: ""})
        sets = _sets([runs[model][name] for model in models])
        parts.append(
            f"**{name}**, {measure.replace('_', ' ')}, mean over {sets}, 95 % intervals\n\n{as_markdown(rows)}"
        )
    return "\n\n".join(parts) or "No run yet."


def _sets(found: list[dict[str, Any]]) -> str:
    counts = [sum(one["n_measured"] > 0 for one in each["sets"].values()) for each in found]
    if len(set(counts)) > 1:
        return f"sets ({', '.join(map(str, counts))} of them)"
    return "one set" if counts[0] == 1 else f"{counts[0]} sets"


def value(one: dict[str, Any] | None) -> str:
    """A mean with its interval."""
    if one is None or one["mean"] is None:
        return "–"
    return f"{one['mean']:.3f} [{one['interval'][0]:.3f}, {one['interval'][1]:.3f}]"


def set_table(runs: Runs, model: str, name: str = "evidence") -> str:
    """Methods by set, of one model."""
    found = runs.get(model, {}).get(name)
    if found is None or not found["measures"]:
        return "No run yet."
    compared = next(iter(found["measures"].values()))
    sets = list(compared["random_by_set"])
    cells = {method: one.get("sets", {}) for method, one in compared["methods"].items()}
    cells["chance"] = compared["random_by_set"]
    return as_markdown(
        [
            {"method": f"`{method}`" if method != "chance" else method}
            | {one: "–" if values.get(one) is None else f"{values[one]:.3f}" for one in sets}
            for method, values in cells.items()
        ]
    )


def counts(runs: Runs) -> str:
    """How many items each number stands on."""
    rows = [
        {
            "model": model,
            "judge": name,
            "items": found["n_items"],
            "measured": found["n_measured"],
            "not reached": found.get("n_not_run", 0),
            "left out, the model is wrong": sum(one["left_out"].get(WRONG, 0) for one in found["sets"].values()),
            "rows that could not be used": found["n_problems"],
        }
        for model, some in runs.items()
        for name, found in some.items()
    ]
    return as_markdown(rows) if rows else "No run yet."


def way_table(ways: dict[str, Any]) -> str:
    """The search over the weights of the value, query and key ways."""
    parts = []
    for model, found in ways.items():
        rows = [
            {"weights (value, query, key)": name} | {half: f"{one[half]:.3f}" for half in one}
            for name, one in sorted(found["points"].items(), key=lambda pair: -pair[1]["chosen on"])
        ]
        less = found["best less attn_lrp, reported on"]
        sets = ", ".join(f"{one} {n}" for one, n in found["sets"].items())
        parts.append(
            f"**{model}**, {found['n']} items ({sets}): best on the half that chooses is *{found['best']}*; "
            f"on the other half it is {less['mean']:+.3f} [{less['interval'][0]:+.3f}, "
            f"{less['interval'][1]:+.3f}] from AttnLRP.\n\n{as_markdown(rows)}"
        )
    return "\n\n".join(parts) or "No run yet."


def peer_list(peers: dict[str, Any]) -> str:
    """What the peers get, and version, own example and error of each."""
    parts = []
    for model, runs in peers.items():
        for summary in runs.values():
            ((name, found),) = summary["judges"].items()
            parts.append(f"*{model}, {name}*: {counts_line(found)}.\n\n{judge_table(found)}")
        rows = [
            {
                "peer": f"`{name}`",
                "version": about.get("version", "–"),
                "judge": judge,
                "answers": about["n"],
                "its own example": about.get("check", "–"),
                "said": about.get("error", ""),
            }
            for summary in runs.values()
            for judge in summary["judges"]
            for name, about in summary["peers"].items()
        ]
        parts.append(as_markdown(rows))
    return "\n\n".join(parts) or "No run yet."


def member_tables(runs: Runs) -> str:
    """The members alone, for every question."""
    parts = [question_table(runs, question, only=MEMBERS) for question in ("word", "passage", "component", "removal")]
    return "\n\n".join(part for part in parts if part != "No run yet.") or "No run yet."


def differences(runs: Runs) -> str:
    """What the paper's choice loses: paired differences of the members to it."""
    rows = []
    for model, some in runs.items():
        for name, found in some.items():
            for measure, compared in list(found["measures"].items())[:1]:
                for method, one in compared["methods"].items():
                    less = next((found for key, found in one.items() if key.startswith("less ")), None)
                    if method in MEMBERS and less and less["mean"] and name != "tracr":
                        rows.append(
                            {
                                "model": model,
                                "judge": name,
                                "measure": measure.replace("_", " "),
                                "member": MEMBERS[method],
                                "less the paper's": f"{less['mean']:+.3f} [{less['interval'][0]:+.3f}, "
                                f"{less['interval'][1]:+.3f}]",
                            }
                        )
    return as_markdown(rows) if rows else "No run yet."


def block(key: str, found: Found) -> str:
    """What belongs between the marks of a key."""
    runs = found.judges
    if key.startswith("sets "):
        return set_table(runs, key.removeprefix("sets "))
    if key == "tracr":
        model = next((model for model in runs if "tracr" in runs[model]), "")
        return set_table(runs, model, "tracr")
    simple = {
        "counts": lambda: counts(runs),
        "ways": lambda: way_table(found.ways),
        "peers": lambda: peer_list(found.peers),
        "members": lambda: member_tables(runs),
        "differences": lambda: differences(runs),
        "perturbation": lambda: area_tables(found.areas),
    }
    return simple[key]() if key in simple else question_table(runs, key)


def area_tables(areas: dict[str, Any]) -> str:
    """Areas under the curve of HS-MSE, most relevant tokens first."""
    return "\n\n".join(f"**{model}**\n\n{area_table(one)}" for model, one in areas.items()) or "No run yet."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--page", type=Path, action="append")
    parser.add_argument("--keep", action="store_true", help="leave what these runs do not hold as it is")
    arguments = parser.parse_args()
    found = read(arguments.runs)
    for page in arguments.page or PAGES:
        text = page.read_text("utf-8")

        def filled(match: re.Match[str], keep: bool = arguments.keep) -> str:
            new = block(match[2], found)
            return f"{match[1]}\n{kept(match[2], match[3], new, MODELS) if keep else new}\n\n{match[4]}"

        page.write_text(BLOCK.sub(filled, text), "utf-8")
        print(f"{page}: {len(BLOCK.findall(text))} tables")


if __name__ == "__main__":
    main()
