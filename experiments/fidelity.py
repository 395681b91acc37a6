"""Fidelity, bounds and tensor properties on real weights, from `fidelity.json` (docs/results-fidelity.md).

    python experiments/fidelity.py NAME --model FOLDER --out FOLDER

NAME is a key of "stride"; the model is that name unless --model gives its folder. Stopped, it goes on when started
again. Several processes share the texts, also on one GPU: torchrun --nproc-per-node 6 experiments/fidelity.py …
"""

import argparse
import json
import time
from pathlib import Path

import tensorlens as tl
from tensorlens import studies
from tensorlens.studies.fidelity_study.report import error_table, norm_table, property_table
from tensorlens.studies.members import MEMBERS
from tensorlens.studies.processes import Processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--model")
    parser.add_argument("--out", required=True)
    parser.add_argument("--config", default=Path(__file__).with_name("fidelity.json"), type=Path)
    parser.add_argument("--rules", default="paper", choices=list(MEMBERS))
    parser.add_argument("--by-member", action="store_true", help="the smaller run by which members are compared")
    parser.add_argument("--limit", type=int, help="texts, to try things")
    parser.add_argument("--override", default="{}", help='options as JSON, to try things: {"stride": 0}')
    arguments = parser.parse_args()

    config = json.loads(arguments.config.read_text())
    chosen = {"stride": config["stride"][arguments.name]} | config["options"]
    chosen |= (config["by_member"] if arguments.by_member else {}) | json.loads(arguments.override)
    loaded = tl.load(arguments.model or arguments.name, dtype=config["dtype"])
    lens = tl.Lens(loaded.model, loaded.processor, name=arguments.name, rules=MEMBERS[arguments.rules])
    began = time.time()
    texts = config["texts"][: arguments.limit]
    result = studies.fidelity(lens, texts, arguments.out, **chosen)
    if Processes.from_environment().is_first:
        summary = result.summary
        norms = summary["norms"]
        print(f"{arguments.name}, {arguments.rules}: {time.time() - began:.0f} s, {len(texts)} texts")
        print(f"every error below every right-hand side: {summary['holds']}")
        print(f"‖T − J‖/‖J‖ = {norms['relative_distance_to_jacobian']:.3f}, stable rank {norms['stable_rank']:.2f}")
        for kind, found in summary["kinds"].items():
            print(f"{kind}: error / change at the smallest move {found['relative_at_smallest']}, at {found['natural']}")
        print(f"\n{norm_table(summary)}\n\n{error_table(summary)}\n\n{property_table(summary)}")


if __name__ == "__main__":
    main()
