"""What the program costs beside the model's own passes: `python -m benchmarks.program [MODEL …] [--tokens N]`.

Blocks of published widths with random weights, in bf16 on a GPU. All times of a row come from one run, and the table
gives their ratios: a map from ids over a forward and backward pass; recording, a push, a further output and a
certificate over a forward pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import tensorlens as tl
from benchmarks.models import default_type
from benchmarks.timing import Timing, median_seconds, timed

GEMMA3 = dict(hidden_size=3840, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15360, head_dim=256)
DEEPSEEK = dict(
    hidden_size=7168,
    num_attention_heads=32,
    num_key_value_heads=32,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    n_routed_experts=16,
    n_group=4,
    topk_group=2,
    first_k_dense_replace=3,
)
"""Half of its heads and a sixteenth of its experts, so that eight blocks fit one device."""

LLAMA = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
QWEN3 = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=12288, head_dim=128)
PHI = dict(hidden_size=2048, num_attention_heads=32, intermediate_size=8192, vocab_size=51200)
PYTHIA = dict(hidden_size=2048, num_attention_heads=8, intermediate_size=8192, vocab_size=50304, rotary_pct=0.25)

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama-8B": ("LlamaForCausalLM", "LlamaConfig", LLAMA | dict(vocab_size=128256, max_position_embeddings=131072)),
    "Qwen3-8B": ("Qwen3ForCausalLM", "Qwen3Config", QWEN3 | dict(vocab_size=151936, max_position_embeddings=40960)),
    "Gemma3-12B": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3 | dict(vocab_size=262208, sliding_window=1024)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK | dict(vocab_size=129280)),
    "Phi-1.5": ("PhiForCausalLM", "PhiConfig", PHI | dict(partial_rotary_factor=0.5, max_position_embeddings=8192)),
    "Pythia-1B": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PYTHIA | dict(max_position_embeddings=8192)),
}


def build(name: str, n_blocks: int, device: str, **small: Any) -> nn.Module:
    """Some blocks of a model, random and seeded."""
    cls, config, options = MODELS[name]
    made = getattr(hf, config)(**(options | dict(num_hidden_layers=n_blocks, use_cache=False) | small))
    torch.manual_seed(0)
    with default_type(torch.bfloat16 if device == "cuda" else torch.float32), torch.device(device):
        model = getattr(hf, cls)._from_config(made, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def forward_and_backward(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """The gradient of the largest logit at the last token, for the embeddings."""
    x = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
    logits = model(inputs_embeds=x, **options).logits[0, -1]
    return torch.autograd.grad(logits.max(), x)[0]


def ratios(model: nn.Module, n_tokens: int, device: str, *, certify: bool) -> dict[str, float]:
    """A row of the table."""
    ids = torch.randint(5, 900, (n_tokens,), generator=torch.Generator().manual_seed(1))
    lens, on_device = tl.Lens(model), ids.to(device)
    lrp = tl.Lens(model, rules=tl.Rules.attn_lrp())

    def seconds(work: Callable[[], Any]) -> float:
        return median_seconds(work, device, n=7, warm=2)

    with torch.no_grad():
        forward = seconds(lambda: model(on_device[None]))
    both = seconds(lambda: forward_and_backward(model, on_device))
    found = {
        "map": seconds(lambda: lens(ids).map("tensor.in_class", -1)) / both,
        "map, AttnLRP": seconds(lambda: lrp(ids).map("tensor.in_class", -1)) / both,
        "recording": seconds(lambda: lens(ids)) / forward,
    }
    T = lens(ids)
    T.map("tensor.in_class", -1)
    found["output"] = seconds(lambda: T.map("tensor.in_class", -2)) / forward
    found["push"] = seconds(lambda: T.apply(T.input)) / forward
    if certify:
        n_runs = 0

        def count(*_: Any) -> None:
            nonlocal n_runs
            n_runs += 1

        handle = model.register_forward_pre_hook(count)
        certificate = lens(ids).certificate()
        handle.remove()
        found["runs"] = n_runs
        found["laws"] = certificate.seconds["laws"] / forward
        found["laws, float32"] = certificate.seconds.get("float32", 0.0) / forward
        found["value"] = certificate.errors["value"]
        found["certified"] = float(certificate.passed)
    return found | {"forward ms": 1e3 * forward}


def long_row(model: nn.Module, n_tokens: int, device: str) -> dict[str, float]:
    """A long input through all blocks: a map, a push, components and a graph, over plain passes; memory in GiB."""
    ids = torch.randint(5, 900, (n_tokens,), generator=torch.Generator().manual_seed(1))
    lens, on_device = tl.Lens(model), ids.to(device)

    def measured(work: Callable[[], Any], n: int = 3) -> Timing:
        return timed(work, device, n=n, most_seconds=15)

    with torch.no_grad():
        forward = measured(lambda: model(on_device[None], logits_to_keep=1)).seconds
    both = measured(lambda: forward_and_backward(model, on_device, logits_to_keep=1)).seconds
    whole = measured(lambda: lens(ids).map("tensor.in_class", -1))
    T = lens(ids)
    T.map("tensor.in_class", -1)
    parts, flow = measured(lambda: lens(ids).components(-1, 7)), measured(lambda: T.components(-1, 7).flow())
    few, more = (measured(lambda n=n: T.graph(-1, 7, max_nodes=n, share=0.99), 2) for n in (10, 30))
    return {
        "map": whole.seconds / both,
        "map GiB": (whole.extra_bytes or 0) / 2**30,
        "output": measured(lambda: T.map("tensor.in_class", -2)).seconds / forward,
        "push": measured(lambda: T.apply(T.input)).seconds / forward,
        "components from ids": parts.seconds / both,
        "components GiB": (parts.extra_bytes or 0) / 2**30,
        "components, recorded": flow.seconds / both,
        "graph, forwards per node": (more.seconds - few.seconds) / 20 / forward,
        "forward ms": 1e3 * forward,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024])
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--no-certificate", action="store_true")
    parser.add_argument("--long", action="store_true", help="all 32 blocks of Llama-8B, one input of --tokens")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if options.long:
        model = build("Llama-8B", 32, device)
        for n_tokens in options.tokens:
            row = long_row(model, n_tokens, device)
            print(f"{n_tokens:6}  " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True)
        return
    found: list[float] = []
    for name in options.models:
        model = build(name, options.blocks, device)
        for n_tokens in options.tokens:
            row = ratios(model, n_tokens, device, certify=not options.no_certificate)
            found.append(row["map"])
            print(
                f"{name:12} {n_tokens:5}  " + "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True
            )
        del model
        torch.cuda.empty_cache()
    print(f"map, in the mean: {sum(found) / len(found):.2f}; in the middle: {median(found):.2f}")


if __name__ == "__main__":
    main()
