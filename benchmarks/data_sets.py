"""Maps of a data set beside plain input times gradient in batches, long inputs beside plain passes: ratios of one run.

    PYTHONPATH=src python benchmarks/data_sets.py --out results.json [--only batches long peers]

Random weights in the real classes of transformers. Needs a GPU for the numbers of docs/performance.md. `peers` sets
lxt and captum beside the library, each in a process of `--peer-python`; one that cannot run is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import tensorlens as tl

SMOLLM2 = dict(
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    vocab_size=49152,
    max_position_embeddings=8192,
)
LLAMA_8B = dict(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=128256,
    max_position_embeddings=8192,
)


def finish() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(work: Callable[[], Any], n: int = 3) -> float:
    """Median seconds."""
    return statistics.median(times_of(work, n))


def times_of(work: Callable[[], Any], n: int = 3) -> list[float]:
    """Seconds of each time."""
    found = []
    for _ in range(n):
        finish()
        start = time.perf_counter()
        work()
        finish()
        found.append(time.perf_counter() - start)
    return found


def plain_maps(model: Any, ids: list[list[int]], batch_size: int) -> None:
    """Input times gradient of the predicted logit, in batches of samples sorted by length, padded at the end."""
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    embed = model.get_input_embeddings()
    device = embed.weight.device
    for at in range(0, len(order), batch_size):
        some = [ids[i] for i in order[at : at + batch_size]]
        longest = max(map(len, some))
        tokens = torch.tensor([one + [0] * (longest - len(one)) for one in some], device=device)
        mask = torch.tensor([[1] * len(one) + [0] * (longest - len(one)) for one in some], device=device)
        last = torch.tensor([len(one) - 1 for one in some], device=device)
        x = embed(tokens).detach().requires_grad_()
        logits = model(inputs_embeds=x, attention_mask=mask, **extra(model)).logits
        rows = logits if logits.dim() == 2 else logits[torch.arange(len(some), device=device), last]
        gradient = torch.autograd.grad(rows.max(-1).values.sum(), x)[0]
        (gradient * x).sum(-1).tolist()


def extra(model: Any) -> dict[str, Any]:
    """No cache, where there could be one."""
    return {"use_cache": False} if hasattr(model, "generate") else {}


def batches(device: str) -> dict[str, Any]:
    """Samples a second of the library, with the batch size that it chooses, over those of the yardstick at its best."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    found: dict[str, Any] = {}
    models = {
        "smollm2": hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**SMOLLM2), attn_implementation="sdpa"),
        "bert-base": hf.BertForSequenceClassification._from_config(hf.BertConfig(), attn_implementation="sdpa"),
    }
    n = 2048 if device == "cuda" else 16
    for name, model in models.items():
        model = model.to(device).eval().requires_grad_(False)
        generator = torch.Generator().manual_seed(0)

        def draw(length: int, generator: torch.Generator = generator) -> list[int]:
            return torch.randint(5, 30000, (length,), generator=generator).tolist()

        equal = [draw(128) for _ in range(n)]
        mixed = [draw(int(torch.randint(16, 257, (1,), generator=generator))) for _ in range(n)]
        found |= _compare(f"{name}, 128 tokens", model, equal, EVERY if name == "smollm2" else EVERY[:2])
        found |= _compare(f"{name}, 16 to 256 tokens", model, mixed, EVERY[:1])
        del model
        if device == "cuda":
            torch.cuda.empty_cache()
    return found


EVERY = (
    ("in_class", "tensor.in_class", {}, 1.0),
    ("in_out", "tensor.in_out", {}, 1.0),
    ("sketch, 16 probes", "tensor.norm", {"probes": 16}, 0.25),
    ("contribution", "tensor.contribution", {}, 0.125),
)
"""What is measured, and on which part of the samples."""


def _compare(label: str, model: Any, ids: list[list[int]], works: tuple[Any, ...]) -> dict[str, Any]:
    sizes = (128, 256) if next(model.parameters()).is_cuda else (8, 16)
    for size in sizes:
        plain_maps(model, ids[:size], size)
    rates = {size: len(ids) / timed(lambda s=size: plain_maps(model, ids, s), 2) for size in sizes}
    plain, lens, found = max(rates.values()), tl.Lens(model), {}
    for key, method, options, part in works:
        some = ids[: int(part * len(ids))]
        list(lens.maps(some[: max(sizes)], method, progress=False, **options))
        times = times_of(lambda s=some, m=method, o=options: list(lens.maps(s, m, progress=False, **o)))
        ours = sorted(len(some) / seconds for seconds in times)
        found[f"{label}, {key}"] = {
            "ratio": ours[1] / plain,
            "samples a second": ours,
            "input x gradient, samples a second by batch size": rates,
        }
        print(f"{label:28} {key:18} plain {plain:6.0f}/s ours {ours[1]:6.0f}/s x{ours[1] / plain:.3f}", flush=True)
    return found


def long(device: str, n_tokens: int = 8192) -> dict[str, float]:
    """Llama-8B's shape at 8,192 tokens in bfloat16, over plain passes."""
    config = hf.LlamaConfig(**(LLAMA_8B if device == "cuda" else SMOLLM2 | {"num_hidden_layers": 2}))
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = hf.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
        torch.set_default_dtype(torch.float32)
    ids = torch.randint(
        5, 40000, (n_tokens if device == "cuda" else 64,), generator=torch.Generator().manual_seed(0)
    ).tolist()
    tokens = torch.tensor([ids], device=device)

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False, logits_to_keep=1)

    def both() -> None:
        x = model.get_input_embeddings()(tokens).detach().requires_grad_()
        model(inputs_embeds=x, use_cache=False, logits_to_keep=1).logits[0, -1].max().backward()

    found: dict[str, float] = {}
    forward(), both()
    plain, plain_both = timed(forward), timed(both)
    print(f"plain forward {plain:.3f} s, forward and backward {plain_both:.3f} s")
    for name, rules in (("paper", tl.Rules.paper()), ("attn_lrp", tl.Rules.attn_lrp())):
        lens = tl.Lens(model, rules=rules)
        lens(ids).map("tensor.in_class", out_token=-1)
        one = timed(lambda lens=lens: lens(ids).map("tensor.in_class", out_token=-1))
        found[f"in_class from ids, {name}, over forward and backward"] = one / plain_both
        print(f"{name:9} In+Class from ids {one:.3f} s  x{one / plain_both:.3f}")
        if name == "paper":
            T = lens(ids)
            T.map("tensor.in_class", out_token=-1)
            further = timed(lambda T=T: T.map("tensor.in_class", out_token=-2))
            found["a further output, seconds"] = further
            first_push = timed(lambda T=T: T @ T.input, 1)
            push = timed(lambda T=T: T @ T.input, 3)
            found["first push over forward"] = first_push / plain
            found["push over forward"] = push / plain
            print(f"further output {further:.3f} s, push x{push / plain:.2f}, the first x{first_push / plain:.2f}")
            del T
        if device == "cuda":
            print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
            torch.cuda.reset_peak_memory_stats()
    return found


PEERS = (
    "input x gradient",
    "lxt.attn_lrp",
    "lxt.cp_lrp",
    "captum.input_x_gradient",
    "captum.integrated_gradients",
)
"""What `data_set_peers.py` can run."""
OURS = (
    ("tensor.in_class", tl.Rules.paper()),
    ("tensor.in_class", tl.Rules.attn_lrp()),
    ("gradient.times_input", tl.Rules.paper()),
    ("gradient.integrated", tl.Rules.paper()),
)
"""What the library has of the same kind."""


def peers(device: str, python: str) -> dict[str, Any]:
    """Samples a second of SmolLM2's shape, the same number of samples for each."""
    n, n_tokens, size = (1024, 128, 128) if device == "cuda" else (16, 64, 8)
    found: dict[str, Any] = {"samples": n, "tokens": n_tokens}
    script = Path(__file__).with_name("data_set_peers.py")
    for name in PEERS:
        numbers = ["--samples", str(n), "--tokens", str(n_tokens), "--batch-size", str(size)]
        done = subprocess.run([python, str(script), name, *numbers], capture_output=True, text=True, check=False)
        last = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        found[name] = json.loads(last[0]) if done.returncode == 0 else {"reason": last[0]}
        print(f"{name:32} {found[name]}", flush=True)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**SMOLLM2), attn_implementation="sdpa")
    model = model.to(device).eval().requires_grad_(False)
    ids = torch.randint(5, 30000, (n, n_tokens), generator=torch.Generator().manual_seed(0)).tolist()
    for method, rules in OURS:
        lens = tl.Lens(model, rules=rules)
        list(lens.maps(ids[:size], method, progress=False))
        seconds = timed(lambda lens=lens, method=method: list(lens.maps(ids, method, progress=False)), 1)
        found[f"ours, {method}, {rules.name}"] = {"samples a second": n / seconds}
        print(f"ours, {method}, {rules.name}: {n / seconds:.1f}/s", flush=True)
    return found


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", nargs="*", default=["batches", "long"])
    parser.add_argument("--peer-python", default=sys.executable, help="interpreter with lxt and captum")
    chosen = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found: dict[str, Any] = {}
    every = {"batches": batches, "long": long, "peers": partial(peers, python=chosen.peer_python)}
    for part, work in every.items():
        if part in chosen.only:
            try:
                found[part] = work(device)
            except Exception as error:  # noqa: BLE001  the other part is worth its numbers
                import traceback

                traceback.print_exc()
                found[part] = str(error)
    print(json.dumps(found, indent=1))
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
