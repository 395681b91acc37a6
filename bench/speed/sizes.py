"""What `tensorlens size` predicts beside what the whole model takes, on a GPU.

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


def size_rows() -> list[dict[str, str]]:
    """For each shape and task, seconds predicted and measured, and the ratios of time and of memory."""
    rows = []
    for name, (config, dtype, n_tokens) in SHAPES.items():
        predicted = size(config, n_tokens=n_tokens, device="cuda", dtype=dtype, slices=n_tokens < 1000)
        measured = costs_of(config, getattr(torch, dtype), torch.device("cuda"), n_tokens, slices=n_tokens < 1000)
        for guess, found in zip(predicted.costs, measured, strict=True):
            seconds = {"predicted, s": f"{guess.seconds:.4f}", "measured, s": f"{found.seconds:.4f}"}
            ratios = {"ratio of time": f"{guess.seconds / found.seconds:.2f}"}
            both = guess.n_bytes and found.n_bytes and guess.n_bytes / found.n_bytes
            ratios["ratio of memory"] = f"{both:.2f}" if both else ""
            rows.append({"shape": name, "work": guess.work} | seconds | ratios)
        torch.cuda.empty_cache()
    return rows
