"""The models measured: real Hugging Face classes at their published configurations, random weights unless named."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

import tensorlens as tl

CONFIGS: dict[str, Callable[..., tuple[type, Any]]] = {
    "bert-base": lambda **o: (hf.BertModel, hf.BertConfig(**o)),
    "gpt2-small": lambda **o: (hf.GPT2Model, hf.GPT2Config(**o)),
    "pythia-1b": lambda **o: (
        hf.GPTNeoXModel,
        hf.GPTNeoXConfig(
            **(
                dict(
                    hidden_size=2048,
                    num_hidden_layers=16,
                    num_attention_heads=8,
                    intermediate_size=8192,
                    vocab_size=50304,
                    rotary_pct=0.25,
                    use_parallel_residual=True,
                )
                | o
            )
        ),
    ),
    "llama-8b": lambda **o: (
        hf.LlamaModel,
        hf.LlamaConfig(
            **(
                dict(
                    hidden_size=4096,
                    num_hidden_layers=32,
                    num_attention_heads=32,
                    num_key_value_heads=8,
                    intermediate_size=14336,
                    vocab_size=128256,
                    max_position_embeddings=131072,
                )
                | o
            )
        ),
    ),
    "tiny-bert": lambda **o: (
        hf.BertModel,
        hf.BertConfig(**(dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512) | o)),
    ),
    "tiny-gpt2": lambda **o: (hf.GPT2Model, hf.GPT2Config(**(dict(n_embd=128, n_layer=4, n_head=4) | o))),
    "tiny-neox": lambda **o: (
        hf.GPTNeoXModel,
        hf.GPTNeoXConfig(
            **(
                dict(
                    hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=1000
                )
                | o
            )
        ),
    ),
    "tiny-llama": lambda **o: (
        hf.LlamaModel,
        hf.LlamaConfig(
            **(
                dict(
                    hidden_size=128,
                    num_hidden_layers=4,
                    num_attention_heads=4,
                    num_key_value_heads=2,
                    intermediate_size=384,
                    vocab_size=1000,
                )
                | o
            )
        ),
    ),
}


def build(name: str, device: str, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A model with random weights, seeded; `minilm` has its real ones."""
    if name == "minilm":
        return tl.load("minilm", device=device, dtype=dtype).model
    torch.manual_seed(0)
    cls, config = CONFIGS[name](**options)
    config._attn_implementation = "sdpa"
    with default_type(dtype), torch.device(device):
        model = cls(config)
    return model.to(device).eval().requires_grad_(False)


@contextmanager
def default_type(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def token_ids(n_tokens: int, vocabulary: int = 900) -> list[int]:
    """Random ids, seeded."""
    return torch.randint(5, vocabulary, (n_tokens,), generator=torch.Generator().manual_seed(1)).tolist()


def body_function(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """The model from X⁰ (1, token, channel) to X^N, by its own code."""
    if hasattr(model, "encoder") and hasattr(model, "embeddings"):
        return lambda x: model.encoder(x).last_hidden_state  # type: ignore[operator,union-attr]
    if hasattr(model, "wpe"):  # its own code adds the positions, which X⁰ has already
        return lambda x: model(inputs_embeds=x - model.wpe.weight[: x.shape[1]], use_cache=False).last_hidden_state  # type: ignore[union-attr,index]
    return lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state
