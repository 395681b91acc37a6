"""Attribution patching by TransformerLens beside the Jacobian's member, on the pairs of a finished run of patching.

    PYTHONPATH=.venv/transformer-lens python experiments/judges/attribution_patching.py MODEL RUN --pairs DATA/pairs

MODEL is a folder that transformers loads, RUN the folder of the judge `patching` for it. TransformerLens reads whole
attentions and feed-forwards before the norm that some models have behind them; heads are the same places.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tensorlens as tl
from tensorlens.studies.judge_study.items import Item
from tensorlens.studies.judge_study.pairs import patching_pairs

PLACES = {"attn.hook_out": "attention", "mlp.hook_out": "feed-forward"}
HEADS = "attn.o.hook_in"
OURS = "patching@jacobian"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("run", type=Path)
    parser.add_argument("--pairs", type=Path, required=True)
    arguments = parser.parse_args()
    lens = tl.load(arguments.model, dtype="float32", attention="eager")
    records = {record["item"]: record for record in records_of(arguments.run)}
    items = [item for item in patching_pairs(lens, arguments.pairs).items if item.name in records]
    bridge = bridge_of(lens, arguments.model)
    rows = [compared(records[item.name], attributed(bridge, item)) for item in items]
    print(f"{len(rows)} pairs")
    for kind in ("attention head", *PLACES.values()):
        gaps = [row[kind] for row in rows]
        print(f"{kind}: differs by at most {max(gaps):.1e} of the largest effect, {np.median(gaps):.1e} in the median")
    for name in sorted({row["set"] for row in rows}):
        both = np.array([row["pearson"] for row in rows if row["set"] == name]).mean(0)
        print(f"{name}: correlation with the truth {both[0]:.3f}, of the Jacobian's member {both[1]:.3f}")


def records_of(run: Path) -> Iterator[dict[str, Any]]:
    """What the run measured, of pairs that the model gets right."""
    for path in sorted(run.glob("samples*.jsonl")):
        yield from (one for one in map(json.loads, path.read_text("utf-8").splitlines()) if "scores" in one)


def bridge_of(lens: tl.Lens, folder: str) -> Any:
    """The same model in TransformerLens."""
    from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]

    model = lens.model.eval().requires_grad_(True)
    return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=lens.processor, device="cpu")


def attributed(bridge: Any, item: Item) -> dict[str, float]:
    """(corrupted less clean) times the gradient in the clean run, by component, summed over all tokens."""
    clean, gradients = passed(bridge, item.ids, item.extra["weights"])
    corrupted, _ = passed(bridge, item.extra["corrupted"], item.extra["weights"])
    found: dict[str, float] = {}
    for n in range(bridge.cfg.n_layers):
        parts = {name: f"blocks.{n}.{name}" for name in (HEADS, *PLACES)}
        effects = {name: ((corrupted[at] - clean[at]) * gradients[at])[0] for name, at in parts.items()}
        by_head = effects[HEADS].reshape(len(item.ids), bridge.cfg.n_heads, -1).sum((0, 2))
        found |= {f"block {n}, attention head {h}": float(one) for h, one in enumerate(by_head)}
        found |= {f"block {n}, {label}": float(effects[name].sum()) for name, label in PLACES.items()}
    return found


def passed(bridge: Any, ids: Any, weights: dict[int, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the places of components hold in one run, and the gradient of the target there."""
    values: dict[str, Any] = {}
    gradients: dict[str, Any] = {}

    def is_wanted(name: str) -> bool:
        return name.endswith((f".{HEADS}", *(f".{place}" for place in PLACES)))

    def keep(value: Any, hook: Any) -> None:
        values[hook.name] = value.detach().clone()

    def keep_gradient(value: Any, hook: Any) -> None:
        gradients[hook.name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

    with torch.enable_grad(), bridge.hooks(fwd_hooks=[(is_wanted, keep)], bwd_hooks=[(is_wanted, keep_gradient)]):
        logits = bridge(torch.tensor([list(ids)]), return_type="logits", prepend_bos=False)[0, -1]
        torch.stack([weight * logits[token] for token, weight in weights.items()]).sum().backward()
    return values, gradients


def compared(record: dict[str, Any], theirs: dict[str, float]) -> dict[str, Any]:
    """Of one pair: how far the two are apart by kind of component, and how each correlates with the truth."""
    other = np.array([theirs[label] for label in record["labels"]])
    own, truth = (np.array(values) for values in (record["scores"][OURS], record["truth"]))
    row: dict[str, Any] = {"set": record["set"]}
    for kind in ("attention head", *PLACES.values()):
        some = [k for k, label in enumerate(record["labels"]) if label.rstrip("0123456789 ").endswith(kind)]
        row[kind] = float(np.abs(other[some] - own[some]).max() / np.abs(own[some]).max())
    return row | {"pearson": [np.corrcoef(one, truth)[0, 1] for one in (other, own)]}


if __name__ == "__main__":
    main()
