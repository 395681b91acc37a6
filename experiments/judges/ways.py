"""A search over the weights of the value, query and key ways of attention: other members of the family.

Every weighting gives an affine function with the right value at X, since its constant goes into B. The gate is halved
throughout. A point is chosen on the even items of every set and reported on the odd ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import tensorlens as tl
from tensorlens.batches import Batch
from tensorlens.recording.live import is_live, value_of
from tensorlens.recording.table import RULES
from tensorlens.strict_json import to_json, write_json
from tensorlens.studies.judge_study.evidence import evidence
from tensorlens.studies.judge_study.items import Item, groups_of
from tensorlens.studies.judge_study.measures import reciprocal_rank
from tensorlens.studies.judge_study.measuring import is_right
from tensorlens.studies.judge_study.scoring import last_logits, unit_sums

N_RESAMPLES = 2000


@contextmanager
def ways(weights: Sequence[float]) -> Iterator[None]:
    """Live attention whose value, query and key count by these weights, while it lasts.

    Each of them becomes w x + (1 - w) x⁰, which has the same value at X and the slope w.
    """
    of_value, of_query, of_key = weights
    name = "scaled_dot_product_attention"
    own = RULES[name]

    def weighted(function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        parts = zip(args[:3], (of_query, of_key, of_value), strict=True)
        mixed = [w * x + (1 - w) * value_of(x) if is_live(x) else x for x, w in parts]
        return own(function, name, (*mixed, *args[3:]), kwargs)

    RULES[name] = weighted
    try:
        yield
    finally:
        RULES[name] = own


def search(lens: tl.Lens, data: Path, out: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Measure every point on every item that the model gets right; write `rows.jsonl` and `summary.json`.

    A run that was stopped goes on behind its last row.
    """
    judge = evidence(lens, data / "evidence", limit=config["limit"])
    rules = replace(tl.Rules.attn_lrp(), attention="taylor")  # the weights take the place of its halves
    lens = tl.Lens(lens.model, lens.processor, rules=rules, name=lens.name)
    out.mkdir(parents=True, exist_ok=True)
    rows = read_rows(out / "rows.jsonl")
    known = {row["item"] for row in rows}
    with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
        for group in groups_of(judge.items, config["group_size"]):
            items = [judge.items[index] for index in group if judge.items[index].name not in known]
            found = measured(lens, items, config["points"]) if items else []
            file.writelines(to_json(one) + "\n" for one in found)
            file.flush()
            rows += found
    rows = [row for row in rows if row["scores"]]
    summary = summarise(rows, list(config["points"]))
    write_json(out / "summary.json", summary)
    return summary


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a run that was stopped has left, without the line that it was writing."""
    lines = path.read_text("utf-8").split("\n")[:-1] if path.is_file() else []
    if path.is_file():
        path.write_text("".join(line + "\n" for line in lines), "utf-8")
    return [json.loads(line) for line in lines]


def measured(lens: tl.Lens, items: Sequence[Item], points: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    """A row for each item, with scores by point where the model is right."""
    logits = last_logits(lens, [item.ids for item in items])
    found: list[dict[str, Any]] = [
        {"set": one.set, "item": one.name, "truth": one.truth, "scores": {}} for one in items
    ]
    right = [k for k, item in enumerate(items) if is_right(item, logits[k], item.target or 0)]
    prepared = [lens.prepare(list(items[k].ids)) for k in right]
    for name, weights in points.items() if right else ():
        with ways(weights):
            maps = Batch(lens.specimen, prepared).maps("tensor.in_class", targets=[items[k].target or 0 for k in right])
        for k, made in zip(right, maps, strict=True):
            found[k]["scores"][name] = unit_sums(items[k], made.scores[0].double().tolist())
    return found


def summarise(rows: list[dict[str, Any]], points: list[str]) -> dict[str, Any]:
    """Every point on the half that chooses and on the half that reports, and the chosen one less AttnLRP."""
    seen = [row["set"] for row in rows]
    sets = sorted({one for one in seen if seen.count(one) > 1})  # both halves have one
    tables = {
        one: np.array(
            [
                [reciprocal_rank(row["scores"][name], row["truth"]) for name in points]
                for row in rows
                if row["set"] == one
            ]
        )
        for one in sets
    }
    halves = {half: [tables[one][start::2] for one in sets] for half, start in (("chosen on", 0), ("reported on", 1))}
    means = {half: np.mean([part.mean(0) for part in parts], 0) for half, parts in halves.items()}
    best = int(np.argmax(means["chosen on"]))
    held = [part[:, best] - part[:, points.index("attn_lrp")] for part in halves["reported on"]]
    random = np.random.default_rng(0)
    drawn = np.mean(
        [(random.multinomial(len(one), np.full(len(one), 1 / len(one)), N_RESAMPLES) @ one) / len(one) for one in held],
        0,
    )
    low, high = np.quantile(drawn, (0.025, 0.975))
    return {
        "n": len(rows),
        "sets": {one: len(tables[one]) for one in sets},
        "points": {name: {half: round(float(means[half][k]), 4) for half in halves} for k, name in enumerate(points)},
        "best": points[best],
        "best less attn_lrp, reported on": {
            "mean": round(float(np.mean([one.mean() for one in held])), 4),
            "interval": [round(low, 4), round(high, 4)],
        },
    }


if __name__ == "__main__":
    raise SystemExit("Run judges.py, which calls this. " + json.dumps({"worker": "ways"}))
