"""Why taking the last tokens first does so well on decoders: what each token does when it alone is replaced.

    python -m bench.studies.single_tokens --data DATA --out FILE.json [--model NAME] [--weights PATH] [--limit 12]

For windows of WikiText as in `smollm2-wikitext` and `gemma3-wikitext`: HS-MSE at the last token when one token is
replaced, by how far it is from the end, for each replacement; and what part of the sum the nearest 30 % hold.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.strict_json import write_json
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_study.measures import hidden_state_mse
from tensorlens.studies.perturbation_study.plain_model import PlainModel
from tensorlens.studies.perturbation_study.samples import Texts

REPLACEMENTS = ("token", "mean", "attention")
BINS = {"the last": (0, 1), "2 to 7": (1, 7), "8 to 38": (7, 38), "39 and more": (38, 10**6)}
"""Places from the end: 6 tokens are 5 % of a window, 38 are 30 %."""


def main() -> None:
    """Measure, and write after each window."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext-2/")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", help="folder or file, where the name is not bundled")
    parser.add_argument("--limit", type=int, default=12)
    options = parser.parse_args()
    lens = tl.load(options.weights or options.model)
    texts = Texts(lens, read_dataset(options.data / "wikitext-2" / "valid.txt"), cut="windows", limit=options.limit)
    plain = PlainModel(lens, batch_size=32)
    changes = {replacement: [] for replacement in REPLACEMENTS}
    for index in range(len(texts)):
        for replacement in REPLACEMENTS:
            changes[replacement].append(single(texts, plain, index, replacement))
        write_json(options.out, summary(options.model, changes))
        print(f"{index + 1} of {len(texts)}", flush=True)
    print(options.out.read_text())


def single(texts: Texts, plain: PlainModel, index: int, replacement: str) -> Tensor:
    """HS-MSE when each token alone is replaced, the last token first; without the special ones at the start."""
    sample = texts.load(index)
    chosen = [token for token in reversed(range(sample.n_tokens)) if token not in sample.fixed]
    masks = torch.zeros(len(chosen), sample.n_tokens, dtype=torch.bool)
    masks[torch.arange(len(chosen)), chosen] = True
    clean = plain.run(sample.inputs).states[0]
    return hidden_state_mse(clean, plain.run(texts.copies(sample, masks, replacement)).states).cpu()


def summary(model: str, changes: dict[str, list[Tensor]]) -> dict:
    """Mean HS-MSE of a token by its place; of the sum over all but the last, the part of places 2 to 38."""
    result = {}
    for replacement, found in changes.items():
        means = torch.stack(found).mean(0)
        result[replacement] = {
            "by_place": {name: float(means[low:high].mean()) for name, (low, high) in BINS.items()},
            "share_of_2_to_38": float(means[1:38].sum() / means[1:].sum()),
        }
    return {"model": model, "n_windows": len(next(iter(changes.values()))), "replacements": result}


if __name__ == "__main__":
    main()
