"""Relation decoding on real weights, from `relations.json` (docs/results-relations.md).

    python experiments/relations.py NAME --model FOLDER --data FOLDER --out FOLDER

NAME is a key of "starts"; the model is that name unless --model gives its folder. Stopped, it goes on when started
again. Several processes share the work, also on one GPU: torchrun --nproc-per-node 8 experiments/relations.py …
"""

import argparse
import json
import time
from pathlib import Path

import torch

import tensorlens as tl
from tensorlens import studies
from tensorlens.studies.members import MEMBERS
from tensorlens.studies.processes import Processes
from tensorlens.studies.relation_study.report import category_table, difference_table, start_table, survival


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--model")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--config", default=Path(__file__).with_name("relations.json"), type=Path)
    parser.add_argument("--rules", default="paper", choices=list(MEMBERS))
    parser.add_argument("--by-member", action="store_true", help="the smaller run by which members are compared")
    parser.add_argument("--categories", nargs="*", help="only these")
    parser.add_argument("--limit", type=int, help="relations of each category, to try things")
    parser.add_argument("--override", default="{}", help='options as JSON, to try things: {"n_splits": 1}')
    parser.add_argument("--tf32", action="store_true", help="let matrix products run in TF32")
    arguments = parser.parse_args()
    if arguments.tf32:
        torch.set_float32_matmul_precision("high")

    config = json.loads(arguments.config.read_text())
    chosen = {"starts": config["starts"][arguments.name]} | config["options"]
    chosen |= (config["by_member"] if arguments.by_member else {}) | json.loads(arguments.override)
    options = studies.RelationOptions(**chosen | {"starts": tuple(chosen["starts"])})
    loaded = tl.load(arguments.model or arguments.name)
    lens = tl.Lens(loaded.model, loaded.processor, name=arguments.name, rules=MEMBERS[arguments.rules])
    began = time.time()
    result = studies.relations(
        lens, arguments.data, arguments.out, options=options, limit=arguments.limit, categories=arguments.categories
    )
    if Processes.from_environment().is_first:
        summary = result.summary
        print(f"{arguments.name}, {arguments.rules}: {time.time() - began:.0f} s. {survival(summary)}")
        for key, reason in summary["left_out"].items():
            print(f"  left out: {key}: {reason}")
        if summary["relations"]:
            print(f"\nAgreement\n{category_table(summary)}\n\n{difference_table(summary)}\n\n{start_table(summary)}")
            print(f"\nMatch\n{category_table(summary, 'match')}")


if __name__ == "__main__":
    main()
