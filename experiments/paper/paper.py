"""The paper's own tables, one command each: its models by their hub ids, its settings, its numbers beside ours.

    python experiments/paper/paper.py TABLE --out FOLDER [--model FOLDER] [--data FOLDER] [--limit N]
    python experiments/paper/paper.py TABLE --estimate      how long it would take on this machine

TABLE is a key of `paper.json`: bert, roberta, modernbert, gemma3, pythia, pico, phi, deit-base, deit-small, relations.
Models and data are not bundled. Without a network, and with a file missing, the command says which one and stops. The
hub ids have not been looked up: one that is gone or was renamed shows as missing. What the paper leaves open, such as
the checkpoint trained for sentiment, is named in the table's note.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import tensorlens as tl
from tensorlens import studies
from tensorlens.errors import LoadError, TensorLensError
from tensorlens.studies.pages import as_markdown

CONFIG = Path(__file__).with_name("paper.json")
NEEDED = ("config.json",)
"""The file of a hub model that is asked for first; without it nothing else can be read."""


def main() -> None:
    config = json.loads(CONFIG.read_text("utf-8"))
    tables = [*config["perturbation"], "relations"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="folder of the weights; the hub's if not given")
    parser.add_argument("--data", help="folder or file of the data; the hub's if not given")
    parser.add_argument("--limit", type=int, help="samples, to try things")
    parser.add_argument("--estimate", action="store_true")
    parser.add_argument("--trust-remote-code", action="store_true")
    chosen = parser.parse_args()
    table = config["relations"] if chosen.table == "relations" else config["perturbation"][chosen.table]
    try:
        if chosen.estimate:
            print(estimate(table, config["options"]))
            return
        if chosen.out is None:
            parser.error("--out is needed")
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
        return as_markdown(rows)
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
                    "ours": f"{one['auc']:.4g} [{one['interval'][0]:.4g}, {one['interval'][1]:.4g}]",
                }
                for name, one in by_method["methods"].items()
            ]
            other = [f"{name} {value}" for name, value in said.items() if name.startswith("every")]
            parts.append(
                f"{condition}, {metric}{' (paper: ' + ', '.join(other) + ')' if other else ''}\n{as_markdown(rows)}"
            )
    return "\n\n".join(parts) or "No sample could be measured."


def estimate(table: dict[str, Any], options: dict[str, Any], n_samples: int = 4) -> str:
    """Time of a run of this shape with random weights on this machine, for all samples of the table."""
    import torch
    import transformers

    if "shape" not in table:
        return "An estimate needs a shape; take that of pythia: one relation costs about as much as one sample."
    name, config, sizes = table["shape"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes)).to(device).eval()
    lens = tl.Lens(model, name=name)
    size = getattr(model.config, "image_size", None)
    n_tokens = options["n_tokens"]
    vocabulary = getattr(model.config, "vocab_size", 1000)
    inputs = [
        torch.randn(3, size, size) if size else torch.randint(5, vocabulary - 1, (n_tokens,)).tolist()
        for _ in range(n_samples)
    ]
    lens(inputs[0]).map("tensor.in_out", out_token=-1)
    began = time.perf_counter()
    for one in inputs:
        tensor = lens(one)
        for method in tl.METHODS:
            try:
                tensor.map(method, out_token=-1, **({"probes": 16} if method == "tensor.norm" else {}))
            except TensorLensError:
                continue
    each = (time.perf_counter() - began) / n_samples
    hours = each * table["n_samples"] / 3600
    n_all = table["n_samples"]
    return f"{name} of this shape on {device}: {each:.2f} s of maps a sample, {hours:.2f} h for {n_all} samples"


if __name__ == "__main__":
    main()
