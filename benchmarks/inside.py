"""Components, pair maps and graphs against a map of the same target: `python -m benchmarks.inside`.

Random weights of SmolLM2's shape. Prints one table; a GPU is used if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf

import tensorlens as tl
from benchmarks.data_sets import SMOLLM2
from benchmarks.timing import Timing, timed

N_TOKENS, N_GRAPH_TOKENS = 128, 1000


def measured(device: str) -> Iterator[tuple[str, Timing]]:
    """Each question with its time."""
    torch.manual_seed(0)
    model = hf.LlamaForCausalLM._from_config(hf.LlamaConfig(**SMOLLM2), attn_implementation="sdpa").to(device).eval()
    lens, target = tl.Lens(model), 5
    ids, long = (torch.randint(0, 49152, (n,)).tolist() for n in (N_TOKENS, N_GRAPH_TOKENS))
    T = lens(ids)
    works: dict[str, Callable[[], Any]] = {
        f"map, {N_TOKENS} tokens, from ids": lambda: lens(ids).map("tensor.in_class", -1, target),
        f"components, {N_TOKENS} tokens, from ids": lambda: lens(ids).components(-1, target),
        f"map, {N_TOKENS} tokens, recorded": lambda: T.map("tensor.in_class", -1, target),
        f"components, {N_TOKENS} tokens, recorded": lambda: T.components(-1, target),
        f"direct effects, {N_TOKENS} tokens, recorded": lambda: T.components(-1, target, "direct"),
        f"pair map of block 20, {N_TOKENS} tokens, recorded": lambda: T.score(20, 1, -1, 3),
    }
    for name, work in works.items():
        yield name, timed(work, device, n=5, warm=1, most_seconds=20)
    if device == "cuda":
        whole = f"graph of 200 nodes, {N_GRAPH_TOKENS} tokens, from ids"
        yield whole, timed(lambda: lens(long).graph(-1, target, max_nodes=200), device, n=3, warm=1)


def main() -> None:
    """Measure and print."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{name}, torch {torch.__version__}")
    for what, one in measured(device):
        memory = "" if one.extra_bytes is None else f"  {one.extra_bytes / 2**30:6.2f} GiB"
        print(
            f"{what:48} {one.seconds:8.3f} s  ({one.fastest:.3f} to {one.slowest:.3f}, n={one.n}){memory}", flush=True
        )


if __name__ == "__main__":
    main()
