"""Predicted effects of patching against true ones, on pairs of prompts: heads, feed-forwards and states of tokens.

    python experiments/patching_pairs.py --data DATA --out FILE.json [--limit 8] [--model smollm2-135m]

For each pair the truth comes from the model itself, by plain hooks on the modules of a Llama, many patches to a batch;
predictions come from `tl.patching` by several members of the family. Plain attribution patching is the Jacobian.
Pairs of unequal length, and those on which the model is wrong, are left out and counted.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.inside.components import Cotangents
from tensorlens.inside.patching import correlation, ranks
from tensorlens.inside.target import pass_to
from tensorlens.strict_json import write_json

MEMBERS = {
    "paper": tl.Rules.paper(),
    "gate halved": tl.Rules(gate="half"),
    "attn_lrp": tl.Rules.attn_lrp(),
    "jacobian (attribution patching)": tl.Rules.jacobian(),
}
KINDS = ("attention head", "feed-forward", "state of a token")
DEPTHS = range(0, 30, 3)
AT_A_TIME = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with pairs/ioi.csv and pairs/greater_than.csv")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--limit", type=int, default=8, help="pairs of each file")
    options = parser.parse_args()
    lens = tl.load(options.model, device="cpu")
    lenses = {name: tl.Lens(lens.model, lens.processor, rules=rules, name=lens.name) for name, rules in MEMBERS.items()}
    rows: list[dict[str, Any]] = []
    for task in ("ioi", "greater_than"):
        left_out = {"length": 0, "wrong": 0}
        for pair in pairs(lens, options.data / "pairs" / f"{task}.csv", options.limit, left_out):
            rows.append({"task": task} | measured(lenses, *pair))
            write_json(options.out, {"model": options.model, "rows": rows, "summary": summary(rows)})
            print(
                task,
                {f"{k} {m}": round(v, 2) for k, of in rows[-1]["pearson"].items() for m, v in of.items()},
                flush=True,
            )
        rows[-1]["left_out"] = left_out
    write_json(options.out, {"model": options.model, "rows": rows, "summary": summary(rows)})


def pairs(
    lens: tl.Lens, path: Path, limit: int, left_out: dict[str, int]
) -> Iterator[tuple[list[int], list[int], dict[int, float]]]:
    tokenizer: Any = lens.processor
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    n_taken = 0
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            clean, corrupted = encode(row["clean"]), encode(row["corrupted"])
            if len(clean) != len(corrupted):
                left_out["length"] += 1
                continue
            weights = object_weights(row, encode) if "corrupted_hard" in row else digit_weights(row["label"], encode)
            with torch.no_grad():
                logits = lens.model(torch.tensor([clean])).logits[0, -1]
            if sum(weight * float(logits[index]) for index, weight in weights.items()) <= 0:
                left_out["wrong"] += 1
                continue
            yield clean, corrupted, weights
            n_taken += 1
            if n_taken == limit:
                return


def object_weights(row: dict[str, str], encode: Callable[[str], list[int]]) -> dict[int, float]:
    """The indirect object less the subject: the words in which the clean and the hard prompt differ."""
    both = zip(row["clean"].split(), row["corrupted_hard"].split(), strict=True)
    subject, object_ = next((ours, theirs) for ours, theirs in both if ours != theirs)
    return {encode(f" {object_}")[0]: 1.0, encode(f" {subject}")[0]: -1.0}


def digit_weights(label: str, encode: Callable[[str], list[int]]) -> dict[int, float]:
    """The mean logit of the larger first digits less that of the others."""
    digits, first = [encode(str(digit))[0] for digit in range(10)], int(label[0])
    larger, others = digits[first + 1 :] or digits[first:], digits[:first] or digits[: first + 1]
    return {token: 1 / len(larger) for token in larger} | {token: -1 / len(others) for token in others}


# Predictions ---------------------------------------------------------------------------------------------------------


def measured(
    lenses: dict[str, tl.Lens], clean: list[int], corrupted: list[int], weights: dict[int, float]
) -> dict[str, Any]:
    true = Truth(next(iter(lenses.values())).model, clean, corrupted, weights)
    truth = {"attention head": true.heads(), "feed-forward": true.feed_forwards(), "state of a token": true.states()}
    found: dict[str, Any] = {"n_tokens": len(clean), "pearson": {}, "rank": {}}
    for name, lens in lenses.items():
        predicted = predictions(lens, clean, corrupted, weights)
        for kind in KINDS:
            pair = predicted[kind].double(), truth[kind].double()
            found["pearson"].setdefault(kind, {})[name] = correlation(*pair)
            found["rank"].setdefault(kind, {})[name] = correlation(*(ranks(one) for one in pair))
    return found


def predictions(lens: tl.Lens, clean: list[int], corrupted: list[int], weights: dict[int, float]) -> dict[str, Tensor]:
    T, other = lens(clean), lens(corrupted)
    found = tl.patching(lens, clean, corrupted, weights)
    kinds = {
        kind: torch.stack(
            [effect for label, effect in zip(found.labels, found.predicted, strict=True) if label.kind == kind]
        )
        for kind in KINDS[:2]
    }
    with pass_to(T.operator, weights, len(clean) - 1) as run:
        at = Cotangents(run, [run.entry(n)[0] for n in DEPTHS])
        changes = [other.operator.recording.states[n] - T.operator.recording.states[n] for n in DEPTHS]
        states = [at.times(run.entry(n)[0], change)[0].sum(-1) for n, change in zip(DEPTHS, changes, strict=True)]
    return kinds | {"state of a token": torch.cat(states)}


# The truth -----------------------------------------------------------------------------------------------------------


class Truth:
    """The change of the target when one part of the clean run is taken from the corrupted one, by plain hooks."""

    def __init__(self, model: Any, clean: list[int], corrupted: list[int], weights: dict[int, float]) -> None:
        self.model, self.clean, self.weights = model, clean, weights
        self.layers, self.n_heads = model.model.layers, model.config.num_attention_heads
        self.kept: dict[tuple[str, int], Tensor] = {}
        handles = []
        for n, layer in enumerate(self.layers):
            keep = lambda m, a, n=n: self.kept.__setitem__(("heads", n), a[0])  # noqa: E731
            handles.append(layer.self_attn.o_proj.register_forward_pre_hook(keep))
            keep = lambda m, a, y, n=n: self.kept.__setitem__(("feed-forward", n), y)  # noqa: E731
            handles.append(layer.mlp.register_forward_hook(keep))
            keep = lambda m, a, n=n: self.kept.__setitem__(("state", n), a[0])  # noqa: E731
            handles.append(layer.register_forward_pre_hook(keep))
        self._run([corrupted])
        for handle in handles:
            handle.remove()
        self.value = float(self._run([clean])[0])

    def heads(self) -> Tensor:
        places = [(n, h) for n in range(len(self.layers)) for h in range(self.n_heads)]

        def put(x: Tensor, row: int, n: int, h: int) -> None:
            width = x.shape[-1] // self.n_heads
            channels = slice(h * width, (h + 1) * width)
            x[row, :, channels] = self.kept["heads", n][0, :, channels]

        return self._patched(places, lambda n: self.layers[n].self_attn.o_proj, put, before=True)

    def feed_forwards(self) -> Tensor:
        def put(x: Tensor, row: int, n: int, _: int) -> None:
            x[row] = self.kept["feed-forward", n][0]

        return self._patched([(n, 0) for n in range(len(self.layers))], lambda n: self.layers[n].mlp, put, before=False)

    def states(self) -> Tensor:
        def put(x: Tensor, row: int, n: int, token: int) -> None:
            x[row, token] = self.kept["state", n][0, token]

        places = [(n, token) for n in DEPTHS for token in range(len(self.clean))]
        return self._patched(places, lambda n: self.layers[n], put, before=True)

    def _patched(self, places: list[tuple[int, int]], module: Any, put: Any, *, before: bool) -> Tensor:
        found = []
        for start in range(0, len(places), AT_A_TIME):
            some = places[start : start + AT_A_TIME]
            handles = []
            for n in {n for n, _ in some}:
                rows = [(row, part) for row, (block, part) in enumerate(some) if block == n]

                def change(x: Tensor, n: int = n, rows: Any = rows) -> Tensor:
                    x = x.clone()
                    for row, part in rows:
                        put(x, row, n, part)
                    return x

                if before:
                    hook = lambda m, a, change=change: (change(a[0]), *a[1:])  # noqa: E731
                    handles.append(module(n).register_forward_pre_hook(hook))
                else:
                    handles.append(module(n).register_forward_hook(lambda m, a, y, change=change: change(y)))
            found.append(self._run([self.clean] * len(some)) - self.value)
            for handle in handles:
                handle.remove()
        return torch.cat(found)

    def _run(self, ids: list[list[int]]) -> Tensor:
        with torch.no_grad():
            logits = self.model(torch.tensor(ids), use_cache=False, logits_to_keep=1).logits[:, -1]
        return sum((weight * logits[:, index] for index, weight in self.weights.items()), torch.zeros(len(ids)))


# Summary -------------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over pairs with 95 % intervals by bootstrap."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        for kind in KINDS:
            for member in MEMBERS:
                for measure in ("pearson", "rank"):
                    values = torch.tensor([row[measure][kind][member] for row in rows if row["task"] == task])
                    found.setdefault(task, {}).setdefault(kind, {}).setdefault(member, {})[measure] = interval(values)
    return found


def interval(values: Tensor) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    draws = values[torch.randint(len(values), (2000, len(values)), generator=generator)].mean(1)
    low, high = draws.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high, "n": len(values)}


if __name__ == "__main__":
    main()
