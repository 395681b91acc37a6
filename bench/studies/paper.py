"""The paper's own tables, one command each: its models by their hub ids, its settings, its numbers beside ours.

    python -m bench.studies.paper TABLE --out FOLDER [--model FOLDER] [--data FOLDER] [--limit N]

TABLE is a key of `paper.json`: bert, roberta, modernbert, gemma3, pythia, pico, phi, deit-base, deit-small, relations.
Models and data are not bundled. Without a network, and with a file missing, the command says which one and stops. The
hub ids have not been looked up: one that is gone or was renamed shows as missing. What the paper leaves open, such as
the checkpoint trained for sentiment, is named in the table's note.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import tensorlens as tl
from bench.tables import markdown, ranged
from tensorlens import studies
from tensorlens.errors import LoadError, TensorLensError

CONFIG = Path(__file__).with_name("paper.json")
NEEDED = ("config.json",)
"""The file of a hub model that is asked for first; without it nothing else can be read."""


def main() -> None:
    """One table."""
    config = json.loads(CONFIG.read_text("utf-8"))
    tables = [*config["perturbation"], "relations"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="folder of the weights; the hub's if not given")
    parser.add_argument("--data", help="folder or file of the data; the hub's if not given")
    parser.add_argument("--limit", type=int, help="samples, to try things")
    parser.add_argument("--trust-remote-code", action="store_true")
    chosen = parser.parse_args()
    table = config["relations"] if chosen.table == "relations" else config["perturbation"][chosen.table]
    try:
        print(wants(table))
        lens = load(table, chosen.model, trust=chosen.trust_remote_code)
        print(run(table, lens, data_of(table, chosen.data), chosen.out, config["options"], limit=chosen.limit))
    except TensorLensError as error:
        sys.exit(f"paper.py: {error}")


def wants(table: dict[str, Any]) -> str:
    """What the command would fetch, and what is to be known of it."""
    return f"model {table['model']}, data {table['data']}" + (f" ({table['note']})" if "note" in table else "")


def load(table: dict[str, Any], folder: str | None, *, trust: bool = False) -> tl.Lens:
    """The model, from a folder or from the hub.

    Raises:
        LoadError: Neither is there; says which file is missing.
    """
    if folder is not None:
        return tl.load(folder, trust_remote_code=trust)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        return tl.load(table["model"], trust_remote_code=trust)
    except LoadError as error:
        missing = [name for name in NEEDED if not isinstance(try_to_load_from_cache(table["model"], name), str)]
        if not missing:
            raise
        place = Path(HF_HUB_CACHE) / f"models--{table['model'].replace('/', '--')}"
        raise LoadError(
            f"{missing[0]} of {table['model']} is neither on the hub, as far as it can be reached, nor in {place}. "
            f"Fetch the model there, or pass its folder with --model. ({error})"
        ) from error


def data_of(table: dict[str, Any], given: str | None) -> str:
    """The data set: what was given, or the hub's id.

    Raises:
        LoadError: It is one that has to be given.
    """
    if given is None and table["data"].startswith("a folder"):
        raise LoadError(f"The data are {table['data']}; pass it with --data.")
    return given or table["data"]


def run(
    table: dict[str, Any],
    lens: tl.Lens,
    data: Any,
    out: Path,
    options: dict[str, Any],
    *,
    limit: int | None = None,
    **changes: Any,
) -> str:
    """The study of a table to its end; the paper's numbers beside ours."""
    if "presets" not in table:
        result = studies.relations(lens, data, out, **(table["options"] | changes))
        rows = [
            {"number": name, "ours": value} for name, value in result.summary.items() if isinstance(value, (int, float))
        ]
        return markdown(rows)
    is_image = table["data"].startswith("a folder")
    chosen = {name: value for name, value in options.items() if not is_image or name == "norm_probes"}
    chosen |= {
        "presets": table["presets"],
        "limit": limit or table["n_samples"],
        "cut": table.get("cut", "each"),
        "split": table.get("split", "test"),
    } | changes
    result = studies.perturbation(lens, data, out, **chosen)
    return compared(result.summary, table["paper"])


def compared(summary: dict[str, Any], paper: dict[str, dict[str, float]]) -> str:
    """A table for each condition and metric: the paper's number and ours with its interval."""
    parts = []
    for condition, found in summary["conditions"].items():
        for metric, by_method in found.get("most", {}).items():
            said = paper.get(metric, {})
            rows = [
                {
                    "method": name,
                    "paper": said.get(name, "–"),
                    "ours": ranged(one["auc"], *one["interval"], ".4g"),
                }
                for name, one in by_method["methods"].items()
            ]
            other = [f"{name} {value}" for name, value in said.items() if name.startswith("every")]
            parts.append(
                f"{condition}, {metric}{' (paper: ' + ', '.join(other) + ')' if other else ''}\n{markdown(rows)}"
            )
    return "\n\n".join(parts) or "No sample could be measured."


if __name__ == "__main__":
    main()
