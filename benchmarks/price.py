"""What trust costs: the same work with and without proofs, audits, fingerprints and checked samples, ratios of one run.

    PYTHONPATH=src python benchmarks/price.py --out benchmarks/results/price.json [--device cpu]

Both ways take turns, so that a noisy machine disturbs both. `first` forgets before each turn what was proved of the
model; without it the model is known, as in any second call.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf

import tensorlens as tl
from benchmarks.data_sets import SMOLLM2, times_of
from tensorlens import padded_lengths
from tensorlens.freezing import audit, proof
from tensorlens.freezing.interception import current_fingerprint
from tensorlens.freezing.proof import Proof

N_TURNS = 7
N_INPUTS = 200

once = cache(current_fingerprint)

MODELS: dict[str, Callable[[], Any]] = {
    "bert-base": lambda: hf.BertForMaskedLM(hf.BertConfig()),
    "minilm": lambda: hf.BertForMaskedLM(hf.BertConfig(hidden_size=384, num_hidden_layers=6, intermediate_size=1536)),
    "smollm2": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMOLLM2)),  # type: ignore[arg-type]
}


@contextmanager
def unchecked() -> Iterator[None]:
    """Everything believed: no engine proved, no pass audited, no state of a model compared, no sample mapped twice.

    A fingerprint is taken once for a model: without any, what is remembered of it would be found again every time.
    """
    with ExitStack() as stack:
        for name, value in {
            "operators.matrix_free.FrozenOperator._is_proved": lambda *_: True,
            "freezing.replay_of._prove": lambda *_: Proof(0.0, 1.0),
            "freezing.recorder.refuse_scripts": lambda *_: None,
            "freezing.recorder.current_fingerprint": once,
            "freezing.replay.check_unchanged": lambda *_: None,
            "freezing.replayed.check_unchanged": lambda *_: None,
            "folding.pull.check_unchanged": lambda *_: None,
            "dataset_maps.Work._checked": lambda *_: [],
        }.items():
            stack.enter_context(patch(f"tensorlens.{name}", value))
        yield


def forget() -> None:
    """Nothing was ever proved."""
    proof._proofs.clear()
    audit._audited.clear()
    audit._apart.clear()
    audit._left_traces.clear()
    padded_lengths._known.clear()


def works(lens: Any, vocabulary: int, n_tokens: int) -> dict[str, Callable[[], Any]]:
    """The works of the table, by name."""
    draw = random.Random(0)
    ids = [[draw.randrange(5, vocabulary) for _ in range(n_tokens)] for _ in range(N_INPUTS)]
    mixed = [one[: draw.randrange(16, n_tokens + 1)] for one in ids]
    return {
        "In+Out": lambda: lens(ids[0]).map("tensor.in_out", -1),
        "In+Class": lambda: lens(ids[0]).map("tensor.in_class", -1),
        "rows": lambda: lens(ids[0]).rows(n_tokens - 1),
        "norm": lambda: lens(ids[0]).map("tensor.norm", -1),
        "200 inputs of one length": lambda: list(lens.maps(ids, "tensor.in_class", out_token=-1, progress=False)),
        "200 inputs of many lengths": lambda: list(lens.maps(mixed, "tensor.in_class", out_token=-1, progress=False)),
    }


def measure(work: Callable[[], Any], *, first: bool, n_turns: int) -> dict[str, float]:
    """Median seconds with and without, in turns, and the median of their ratios."""
    with_it, without, ratios = [], [], []
    work()
    with unchecked():
        work()
    for _ in range(n_turns):
        if first:
            forget()
        with_it += times_of(work, 1)
        with unchecked():
            without += times_of(work, 1)
        ratios.append(with_it[-1] / without[-1])
    return {
        "seconds": median(with_it), "seconds_without": median(without), "ratio": median(ratios),
        "lowest": min(ratios), "highest": max(ratios),
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--only", help="works whose name holds this")
    parser.add_argument("--turns", type=int, default=N_TURNS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in options.models:
        torch.manual_seed(0)
        model = MODELS[name]().eval().to(options.device)
        lens = tl.Lens(model)
        for what, work in works(lens, model.config.vocab_size, options.tokens).items():
            for first in (False, True) if (options.only or "") in what else ():
                row = {"model": name, "device": options.device, "tokens": options.tokens, "work": what, "first": first}
                found.append(row | measure(work, first=first, n_turns=options.turns))
                one = found[-1]
                print(f"{name:10} {what:27} {'first' if first else 'again':6} {one['ratio']:.3f} "
                      f"({one['lowest']:.2f} to {one['highest']:.2f}), {one['seconds']:.3f} s", flush=True)  # fmt: skip
                if options.out:  # as it goes, so that what was reached is kept
                    options.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
