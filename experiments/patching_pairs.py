"""Predicted effects of patching against true ones, on pairs of prompts: heads, feed-forwards and states of tokens.

    python experiments/patching_pairs.py --data DATA --out FILE.json [--limit 8] [--seconds 280] [--device cuda]
        [--batch 32] [--model smollm2-135m]

For each pair the truth comes from the model itself, by plain hooks on the modules of a Llama, many patches to a batch;
predictions come from recordings of both prompts by several members of the family: the change of a component times its
cotangent in the clean run, or times the mean of its cotangents in both runs ("both ends"). Plain attribution patching
is the Jacobian. Pairs of unequal length, and those on which the model is wrong, are left out and counted. The file is
written after each pair, the tasks in turn; a run that is started again goes on where it stopped.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import tensorlens as tl
from tensorlens.inside.edits import parts
from tensorlens.inside.patching import correlation, ranks
from tensorlens.inside.target import Pass
from tensorlens.strict_json import from_json, write_json

MEMBERS = {
    "paper": tl.Rules.paper(),
    "gate halved": tl.Rules(gate="half"),
    "attn_lrp": tl.Rules.attn_lrp(),
    "jacobian": tl.Rules.jacobian(),
}
PLAIN = "jacobian"  # attribution patching
BOTH = ", both ends"
METHODS = [*MEMBERS, *(name + BOTH for name in MEMBERS)]
KINDS = ("attention head", "feed-forward", "state of a token")
LATER = "feed-forward after block 0"
TASKS = ("ioi", "greater_than")
EVERY = 3  # of the blocks: states of single tokens are many


class Pair(NamedTuple):
    """One line of a file that is measured: two prompts of one length, and the weights on logits."""

    task: str
    line: int
    clean: list[int]
    corrupted: list[int]
    weights: dict[int, float]


def main() -> None:
    options = parsed()
    lens = tl.load(options.model, device=options.device)
    lenses = {name: tl.Lens(lens.model, lens.processor, rules=rules, name=lens.name) for name, rules in MEMBERS.items()}
    found = from_json(options.out.read_text("utf-8")) if options.out.exists() else {"model": options.model, "rows": []}
    known = {(row["task"], row["line"]) for row in found["rows"]}
    until, left_out = time.monotonic() + options.seconds, {task: {"length": 0, "wrong": 0} for task in TASKS}
    each = [pairs(lens, task, options.data, options.limit, left_out[task]) for task in TASKS]
    for pair in (pair for turn in zip_longest(*each) for pair in turn if pair is not None):
        if (pair.task, pair.line) in known:
            continue
        if time.monotonic() > until:
            break
        began = time.monotonic()
        effects = measured(lenses, pair, options.batch)
        found["rows"].append({"task": pair.task, "line": pair.line, "n_tokens": len(pair.clean), "effects": effects})
        found |= {"left_out": left_out, "summary": summary(found["rows"])}
        write_json(options.out, found)
        print(pair.task, pair.line, f"{time.monotonic() - began:.1f} s", flush=True)
    write_json(options.out, found | {"summary": summary(found["rows"])})
    print(table(summary(found["rows"])))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with pairs/ioi.csv and pairs/greater_than.csv")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--limit", type=int, default=8, help="pairs of each file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no pair after this time")
    parser.add_argument("--batch", type=int, default=32, help="patched runs at a time")
    return parser.parse_args()


def pairs(lens: tl.Lens, task: str, data: Path, limit: int, left_out: dict[str, int]) -> Iterator[Pair]:
    tokenizer: Any = lens.processor
    encode: Callable[[str], list[int]] = lambda text: tokenizer(text)["input_ids"]  # noqa: E731
    n_taken = 0
    with (data / "pairs" / f"{task}.csv").open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file)):
            clean, corrupted = encode(row["clean"]), encode(row["corrupted"])
            if len(clean) != len(corrupted):
                left_out["length"] += 1
                continue
            weights = object_weights(row, encode) if "corrupted_hard" in row else digit_weights(row["label"], encode)
            with torch.no_grad():
                logits = lens.model(torch.tensor([clean], device=next(lens.model.parameters()).device)).logits[0, -1]
            if sum(weight * float(logits[index]) for index, weight in weights.items()) <= 0:
                left_out["wrong"] += 1
                continue
            yield Pair(task, line, clean, corrupted, weights)
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


def measured(lenses: dict[str, tl.Lens], pair: Pair, batch: int) -> dict[str, dict[str, list[float]]]:
    """For each kind of component its true effects, and the predicted ones by method."""
    truth = Truth(next(iter(lenses.values())).model, pair, batch)
    found = {"attention head": truth.heads(), "feed-forward": truth.feed_forwards(), "state of a token": truth.states()}
    effects = {kind: {"true": values.tolist()} for kind, values in found.items()}
    for name, lens in lenses.items():
        for kind, ends in predictions(lens, pair).items():
            effects[kind] |= {name: ends[0].tolist(), name + BOTH: ends.mean(0).tolist()}
    return effects


def predictions(lens: tl.Lens, pair: Pair) -> dict[str, Tensor]:
    """For each kind of component (end, component): its change times its cotangent in the clean and the other run."""
    last = len(pair.clean) - 1
    clean, corrupted = (Pass(lens(ids).operator, pair.weights, last) for ids in (pair.clean, pair.corrupted))
    found: dict[str, list[list[Tensor]]] = {kind: [[], []] for kind in KINDS}
    for n in range(clean.stop):
        blocks = clean.block(n), corrupted.block(n)
        ours, theirs = (block.values for block in blocks)
        for pair_of_parts in zip(*map(parts, blocks), strict=True):
            one, other = pair_of_parts
            if one.component.kind in KINDS:
                change = other.of(theirs[other.slot]) - one.of(ours[one.slot])
                for end, run in enumerate((clean, corrupted)):
                    part = pair_of_parts[end]
                    effect = (part.of(run.cotangents(n)[part.slot]) * change).sum()[None]
                    found[one.component.kind][end].append(effect)
        if n % EVERY == 0:
            change = theirs[blocks[1].entry] - ours[blocks[0].entry]
            for end, run in enumerate((clean, corrupted)):
                found[KINDS[2]][end].append((run.waiting(n)[run.entry(n)] * change)[0].sum(-1))
    return {kind: torch.stack([torch.cat(one) for one in ends]).cpu() for kind, ends in found.items()}


# The truth -----------------------------------------------------------------------------------------------------------


class Truth:
    """The change of the target when one part of the clean run is taken from the corrupted one, by plain hooks."""

    def __init__(self, model: Any, pair: Pair, batch: int) -> None:
        self.model, self.clean, self.weights, self.batch = model, pair.clean, pair.weights, batch
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
        self._run([pair.corrupted])
        for handle in handles:
            handle.remove()
        self.value = float(self._run([pair.clean])[0])

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

        places = [(n, token) for n in range(0, len(self.layers), EVERY) for token in range(len(self.clean))]
        return self._patched(places, lambda n: self.layers[n], put, before=True)

    def _patched(self, places: list[tuple[int, int]], module: Any, put: Any, *, before: bool) -> Tensor:
        found = []
        for start in range(0, len(places), self.batch):
            some = places[start : start + self.batch]
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
            logits = self.model(torch.tensor(ids, device=self.model.device), use_cache=False, logits_to_keep=1).logits[
                :, -1
            ]
        return sum((weight * logits[:, index].cpu() for index, weight in self.weights.items()), torch.zeros(len(ids)))


# Summary -------------------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Correlations of predicted with true effects by task, kind, method: means over pairs with 95 % intervals."""
    found: dict[str, Any] = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        chosen = [row["effects"] | {LATER: later(row["effects"])} for row in rows if row["task"] == task]
        for kind in (*KINDS, LATER):
            plain = torch.tensor([correlation(*moved(of[kind], PLAIN)) for of in chosen])
            for method in METHODS:
                both = [moved(of[kind], method) for of in chosen]
                pearson = torch.tensor([correlation(*pair) for pair in both])
                found.setdefault(task, {}).setdefault(kind, {})[method] = {
                    "pearson": interval(pearson),
                    "less_plain": interval(pearson - plain),
                    "rank": interval(torch.tensor([correlation(*(ranks(one) for one in pair)) for pair in both])),
                }
    return found


def later(effects: dict[str, Any]) -> dict[str, list[float]]:
    """Feed-forwards but for that of block 0, on which all that follows builds: its patch is one of the whole input."""
    return {name: values[1:] for name, values in effects["feed-forward"].items()}


def moved(effects: dict[str, list[float]], method: str) -> tuple[Tensor, Tensor]:
    """Predicted and true effects of what differs between the prompts: a state before that is no patch at all."""
    known = {name: torch.tensor(values).double() for name, values in effects.items()}
    differs = torch.stack([values for name, values in known.items() if name != "true"]).any(0)
    return known[method][differs], known["true"][differs]


def interval(values: Tensor) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    draws = values[torch.randint(len(values), (2000, len(values)), generator=generator)].mean(1)
    low, high = draws.quantile(torch.tensor([0.025, 0.975])).tolist()
    return {"mean": float(values.mean()), "low": low, "high": high, "n": len(values)}


def table(found: dict[str, Any]) -> str:
    lines = ["| task | component | method | pairs | Pearson | rank |", "|---|---|---|---|---|---|"]
    for task, kinds in found.items():
        for kind, methods in kinds.items():
            for method, of in methods.items():
                shown = [
                    f"{of[name]['mean']:.2f} ({of[name]['low']:.2f} to {of[name]['high']:.2f})"
                    for name in ("pearson", "rank")
                ]
                lines.append(f"| {task} | {kind} | {method} | {of['pearson']['n']} | {' | '.join(shown)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
