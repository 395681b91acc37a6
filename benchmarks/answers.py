"""Whole answers of long prompts, in passes of the model left to itself.

    PYTHONPATH=src:. python benchmarks/answers.py --out answers.json

Random weights of a published shape. Passages × sentences of the answer are pulls; all tokens of the answer × passages
are pushes. Each is timed from the token ids to the map, its recording included.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import tensorlens as tl
from benchmarks.models import default_type, token_ids
from benchmarks.timing import Timing, timed

SIZES: dict[str, dict[str, int]] = {
    "llama-8b": dict(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=131072,
    ),
    "tiny": dict(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=160,
        vocab_size=500,
        max_position_embeddings=8192,
    ),
}
BARS = {"passages × answer sentences": 6.0, "answer tokens × 20 passages": 30.0}


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="llama-8b")
    parser.add_argument("--prompt", type=int, default=6000)
    parser.add_argument("--answer", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with default_type(torch.bfloat16 if device == "cuda" else torch.float32), torch.device(device):
        torch.manual_seed(0)
        config = hf.LlamaConfig(**SIZES[arguments.size])
        config._attn_implementation = "sdpa"
        model = hf.LlamaForCausalLM(config).eval().requires_grad_(False)
    found = measured(tl.Lens(model), arguments.prompt, arguments.answer, device, arguments.repeats)
    arguments.out.write_text(json.dumps(found, indent=1))
    print(table(found))


def measured(lens: tl.Lens, n_prompt: int, n_answer: int, device: str, repeats: int) -> dict[str, Any]:
    """Seconds of plain passes and of both questions."""
    ids = token_ids(n_prompt + n_answer, lens.model.config.vocab_size)  # type: ignore[union-attr]
    prompt, answer = ids[:n_prompt], ids[n_prompt:]
    size = -(-n_prompt // 20)
    passages = [(f"passage {k}", size * k, min(n_prompt, size * (k + 1))) for k in range(20)]
    plain = _plain(lens.model, ids, n_answer, device, repeats)

    def sentences() -> Any:
        made = lens.answer(prompt, answer)
        bounds = [made.offsets[k : k + 20] for k in range(0, n_answer, 20)]
        rows = [(f"sentence {k}", some[0][0], some[-1][1]) for k, some in enumerate(bounds)]  # type: ignore[index]
        return made.map(passages, rows)

    def tokens() -> Any:
        return lens.answer(prompt, answer).map(passages, "tokens")

    per = {
        "passages × answer sentences": plain["forward and backward"],
        "answer tokens × 20 passages": plain["forward"],
    }
    works: dict[str, Callable[[], Any]] = dict(zip(per, (sentences, tokens), strict=True))
    recorded = timed(lambda: lens.answer(prompt, answer), device, n=repeats)
    rows = {}
    for name, work in works.items():
        made = work()  # warms up, and proves what is proved once for a model
        took = timed(work, device, n=repeats, warm=0, most_seconds=60)
        rows[name] = took.as_dict() | {
            "passes": took.seconds / per[name].seconds,
            "bar": BARS[name],
            "engine": made.meta["engine"],
            "error": _error(made),
            "shape": list(made.shape),
        }
        print(name, rows[name], flush=True)
    T = lens.answer(prompt, answer).tensor
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "dtype": str(T.dtype),
        "prompt": n_prompt,
        "answer": n_answer,
        "streamed": T.operator.is_streamed,
        "plain": {name: one.as_dict() for name, one in plain.items()},
        "recording": recorded.as_dict(),
        "rows": rows,
    }


def _plain(model: Any, ids: list[int], n_answer: int, device: str, repeats: int) -> dict[str, Timing]:
    x = model.get_input_embeddings()(torch.tensor([ids], device=device)).detach()

    def forward() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=x, use_cache=False, logits_to_keep=n_answer + 1).logits

    def both() -> Any:
        leaf = x.clone().requires_grad_()
        logits = model(inputs_embeds=leaf, use_cache=False, logits_to_keep=n_answer + 1).logits[0, :-1]
        return torch.autograd.grad(logits.amax(-1).sum(), leaf)[0]

    return {
        name: timed(work, device, n=2 * repeats)
        for name, work in (("forward", forward), ("forward and backward", both))
    }


def _error(made: Any) -> float:
    """How far rows and bias are from the targets, of the largest target."""
    values = torch.tensor(made.meta["logit"]).double()
    sums = made.scores.double().sum(1) + made.bias_share.double() * values
    return float((sums - values).abs().max() / values.abs().max())


def table(found: dict[str, Any]) -> str:
    """What was measured, in Markdown."""
    plain, recorded = found["plain"], found["recording"]
    lines = [
        f"{found['device']}, {found['dtype']}, prompt {found['prompt']}, answer {found['answer']}; forward "
        f"{plain['forward']['seconds']:.3f} s, forward and backward {plain['forward and backward']['seconds']:.3f} s, "
        f"recording {recorded['seconds']:.3f} s, streamed: {found['streamed']}",
        "",
        "| question | engine | seconds | passes | bar | extra memory, GiB | error of sums |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in found["rows"].items():
        memory = "–" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**30:.1f}"
        cells = [
            name,
            row["engine"],
            f"{row['seconds']:.2f}",
            f"{row['passes']:.1f}",
            f"{row['bar']:.0f}",
            memory,
            f"{row['error']:.1e}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
