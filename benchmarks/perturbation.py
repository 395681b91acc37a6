"""Samples a second of the perturbation study with all methods: samples together beside one by one, in one run.

    PYTHONPATH=src python benchmarks/perturbation.py --out results.json [--model FOLDER --data FILE]

Random weights of SmolLM2's shape and random tokens, and besides a folder with real weights and a file with texts if
they are given. Needs a GPU for the numbers of docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import tensorlens as tl
from tensorlens.maps.methods import METHODS
from tensorlens.specimen import Specimen
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_study import changes
from tensorlens.studies.perturbation_study.measuring import Measurement
from tensorlens.studies.perturbation_study.options import PerturbationOptions
from tensorlens.studies.perturbation_study.subjects import Texts

SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
)


def finish() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def numbers_lens(device: str, dtype: torch.dtype = torch.float32, **smaller: int) -> tl.Lens:
    """Random weights of SmolLM2's shape, and a tokenizer whose words are numbers."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**(SMOLLM2 | smaller))
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").to(device, dtype).eval()
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(config.vocab_size)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="0", eos_token="1")
    return tl.Lens(model, tokenizer, name="smollm2, random weights")


def random_texts(n: int, n_tokens: int) -> list[str]:
    """As many texts of so many tokens, with some to spare."""
    ids = torch.randint(5, 40000, (n + 1, n_tokens), generator=torch.Generator().manual_seed(0))
    return [" ".join(map(str, row)) for row in ids.tolist()]


def rates(lens: tl.Lens, data: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """Samples a second of each way, the first group left out: it is checked, and kernels are chosen in it."""
    found: dict[str, Any] = {"samples": chosen.samples, "alone": chosen.alone, "group": chosen.group}
    dataset = read_dataset(data)
    options = PerturbationOptions(n_tokens=chosen.tokens, cut="windows", replacements=("token",))
    subject = Texts(lens, dataset, n_tokens=chosen.tokens, cut="windows", limit=chosen.samples + chosen.group)
    for way, n, size in (("together", chosen.samples, None), ("one by one", chosen.alone, 64)):
        if not n:
            continue
        with tempfile.TemporaryDirectory() as folder:
            measurement = Measurement(lens, subject, replaced(options, batch_size=size), Path(folder))
            if way == "one by one":
                for _, work in measurement.maps._works:
                    work.together = "one by one"
            every = range(chosen.group, chosen.group + n)
            groups = [every[at : at + chosen.group] for at in range(0, n, chosen.group)]
            measurement.measure(range(chosen.group if way == "together" else 2))
            finish()
            start = time.perf_counter()
            records = [record for group in groups for record in measurement.measure(group)]
            finish()
            found[f"{way}, samples a second"] = rate = n / (time.perf_counter() - start)
            found[f"{way}, said"] = [work.reason for _, work in measurement.maps._works if work.reason]
            found[f"{way}, records"] = [record["conditions"] for record in records]
            print(f"{lens.name}: {way} {rate:.3f} samples a second {found[f'{way}, said']}", flush=True)
            if way == "together" and chosen.parts:
                found["parts, seconds a sample"] = parts(measurement, groups[0])
    together, alone = found.pop("together, records", []), found.pop("one by one, records", [])
    found["mean of the curves"] = means(together)
    if alone:
        found["ratio"] = found["together, samples a second"] / found["one by one, samples a second"]
        found["largest difference of a curve, relative"] = difference(together[: len(alone)], alone[: len(together)])
        print(
            f"{lens.name}: x{found['ratio']:.1f}, curves differ by {found['largest difference of a curve, relative']}"
        )
    return found


def replaced(options: PerturbationOptions, **named: Any) -> PerturbationOptions:
    """The same options with some of them changed, and replacements settled as a run does."""
    return replace(options, **named)


def difference(one: Sequence[Any], other: Sequence[Any]) -> dict[str, float]:
    """By method, of curves of HS-MSE: how far they are apart over the size of the larger, median and largest."""
    errors: dict[str, list[float]] = defaultdict(list)
    for left, right in zip(one, other, strict=True):
        for condition, cells in left.items():
            for method, cell in cells.items():
                if "missing" in cell or "missing" in right[condition][method]:
                    continue
                a, b = (torch.tensor(side["most"]["hs_mse"]) for side in (cell, right[condition][method]))
                errors[method].append(float((a - b).abs().max() / b.abs().max()))
    return {name: float(f"{max(some):.2g}") for name, some in errors.items()}


def means(records: Sequence[Any]) -> dict[str, float]:
    """By method, the mean over samples and steps of HS-MSE: what two precisions can be compared by."""
    curves: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for cells in record.values():
            for method, cell in cells.items():
                if "missing" not in cell:
                    curves[method] += cell["most"]["hs_mse"]
    return {name: sum(values) / len(values) for name, values in curves.items()}


@contextmanager
def clocked(seconds: dict[str, float]) -> Iterator[None]:
    """What each method takes, and the copies: waits for the device after each, so that the sum is a little more."""

    def timed(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            finish()
            start = time.perf_counter()
            try:
                return work(*args, **named)
            finally:
                finish()
                seconds[name] += time.perf_counter() - start

        return run

    every = {name: replace(one, compute=timed(name, one.compute)) for name, one in METHODS.items()}
    run, record = changes.PlainModel.run, Specimen.record
    with (
        patch.dict(METHODS, every),
        patch.object(
            Specimen, "record", lambda self, *args, **named: timed("recordings", record)(self, *args, **named)
        ),
        patch.object(changes.PlainModel, "run", lambda self, *args: timed("plain model", run)(self, *args)),
    ):
        yield


def parts(measurement: Measurement, group: Sequence[int]) -> dict[str, float]:
    """Seconds a sample of each part of one group."""
    seconds: dict[str, float] = defaultdict(float)
    with clocked(seconds):
        finish()
        start = time.perf_counter()
        measurement.measure(group)
        finish()
        seconds["all"] = time.perf_counter() - start
    found = {name: round(value / len(group), 5) for name, value in sorted(seconds.items(), key=lambda pair: -pair[1])}
    print(json.dumps(found, indent=1), flush=True)
    return found


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", help="a folder with real weights, or a bundled name")
    parser.add_argument("--data", help="texts for it")
    parser.add_argument("--samples", type=int, default=96, help="of those that go together")
    parser.add_argument("--alone", type=int, default=8, help="of those that go one by one")
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=30, help="of the random weights; fewer to try it out")
    parser.add_argument("--float32", action="store_true", help="instead of tf32")
    parser.add_argument("--bfloat16", action="store_true", help="the model itself, instead of tf32")
    parser.add_argument("--parts", action="store_true", help="what each part takes")
    chosen = parser.parse_args()
    torch.backends.cuda.matmul.fp32_precision = "ieee" if chosen.float32 else "tf32"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = random_texts(chosen.samples + chosen.group, chosen.tokens)
    dtype = torch.bfloat16 if chosen.bfloat16 else torch.float32
    found = {"random weights": rates(numbers_lens(device, dtype, num_hidden_layers=chosen.layers), random, chosen)}
    if chosen.model is not None:
        found["real weights"] = rates(tl.load(chosen.model, device=device, dtype=dtype), chosen.data or random, chosen)
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
