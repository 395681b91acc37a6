"""`python -m bench.speed.sizes`: what `tensorlens size` predicts beside what the whole model takes, on a GPU.

Under two minutes: four shapes, random weights, bfloat16 but for BERT.
"""

from __future__ import annotations

import torch
import transformers as hf

from tensorlens.sizes import costs_of, size

SHAPES = {
    "BERT-base, 128 tokens, float32": (hf.BertConfig(architectures=["BertForMaskedLM"]), "float32", 128),
    "GPT-2, 512 tokens": (hf.GPT2Config(architectures=["GPT2LMHeadModel"]), "bfloat16", 512),
    "Llama-1B, 2,048 tokens": (
        hf.LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
        ),
        "bfloat16",
        2048,
    ),
    "Llama-8B, 1,024 tokens": (
        hf.LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
        ),
        "bfloat16",
        1024,
    ),
}  # fmt: skip


def main() -> None:
    device = torch.device("cuda")
    rows = []
    for name, (config, dtype, n_tokens) in SHAPES.items():
        predicted = size(config, n_tokens=n_tokens, device="cuda", dtype=dtype, slices=n_tokens < 1000)
        measured = costs_of(config, getattr(torch, dtype), device, n_tokens, slices=n_tokens < 1000)
        for guess, found in zip(predicted.costs, measured, strict=True):
            memory = guess.n_bytes / max(1, found.n_bytes) if guess.n_bytes and found.n_bytes else float("nan")
            rows.append((name, guess.work, guess.seconds, found.seconds, guess.seconds / found.seconds, memory))
        torch.cuda.empty_cache()
    print("| shape | work | predicted, s | measured, s | ratio of time | ratio of memory |\n|---|---|---|---|---|---|")
    for name, work, guess, found, ratio, memory in rows:
        print(f"| {name} | {work} | {guess:.4f} | {found:.4f} | {ratio:.2f} | {memory:.2f} |")
    near = [0.75 <= value <= 1.25 for row in rows for value in row[4:] if value == value]
    print(f"within 25 %: {sum(near)} of {len(near)}")


if __name__ == "__main__":
    main()
