"""The models measured: real classes of transformers at published widths, with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import tensorlens as tl

LLAMA = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=14336)
QWEN3 = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, intermediate_size=12288, head_dim=128)
GEMMA3 = dict(hidden_size=3840, num_attention_heads=16, num_key_value_heads=8, intermediate_size=15360, head_dim=256)
SMOLLM2 = dict(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, intermediate_size=1536)
PHI = dict(hidden_size=2048, num_attention_heads=32, intermediate_size=8192, vocab_size=51200)
PYTHIA = dict(hidden_size=2048, num_attention_heads=8, intermediate_size=8192, vocab_size=50304, rotary_pct=0.25)
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
QWEN3_MOE = dict(hidden_size=2048, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
GPT_OSS = dict(num_local_experts=128, num_experts_per_tok=4)
TINY = dict(hidden_size=64, num_attention_heads=4, intermediate_size=128, vocab_size=1000)

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama-8B": ("LlamaForCausalLM", "LlamaConfig", LLAMA | dict(vocab_size=128256, max_position_embeddings=131072)),
    "Qwen3-8B": ("Qwen3ForCausalLM", "Qwen3Config", QWEN3 | dict(vocab_size=151936, max_position_embeddings=40960)),
    "Gemma3-12B": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA3 | dict(vocab_size=262208, sliding_window=1024)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", DEEPSEEK | dict(vocab_size=129280)),
    "Phi-1.5": ("PhiForCausalLM", "PhiConfig", PHI | dict(partial_rotary_factor=0.5, max_position_embeddings=8192)),
    "Pythia-1B": ("GPTNeoXForCausalLM", "GPTNeoXConfig", PYTHIA | dict(max_position_embeddings=8192)),
    "Qwen3-30B-A3B": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", QWEN3_MOE | dict(vocab_size=151936)),
    "GPT-OSS-120B": ("GptOssForCausalLM", "GptOssConfig", GPT_OSS | dict(vocab_size=201088)),
    "SmolLM2": ("LlamaForCausalLM", "LlamaConfig", SMOLLM2 | dict(vocab_size=49152, num_hidden_layers=30)),
    "tiny": ("LlamaForCausalLM", "LlamaConfig", TINY | dict(num_key_value_heads=2, num_hidden_layers=3)),
    "tiny-experts": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        TINY | dict(num_key_value_heads=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16),
    ),
    "bert-base": ("BertModel", "BertConfig", {}),
    "gpt2-small": ("GPT2Model", "GPT2Config", {}),
    "tiny-bert": ("BertModel", "BertConfig", TINY | dict(num_hidden_layers=3)),
}


def build(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model with random weights, seeded, on the GPU if there is one; `options` change its configuration."""
    cls, config, own = MODELS[name]
    before, attention = torch.get_default_dtype(), "eager" if name.startswith("GPT-OSS") else "sdpa"
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device()):
            model = getattr(hf, cls)._from_config(getattr(hf, config)(**(own | options)), attn_implementation=attention)
    finally:
        torch.set_default_dtype(before)
    return model.to(device()).eval().requires_grad_(False)


def lens_of_numbers(name: str) -> tl.Lens:
    """A lens on such a model whose words are numbers, each its own id."""
    model = build(name)
    inner = Tokenizer(models.WordLevel({str(i): i for i in range(model.config.vocab_size)}, unk_token="0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    return tl.Lens(model, hf.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="0", eos_token="1"), name=name)


def device() -> str:
    """Where everything runs."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def half() -> torch.dtype:
    """The type in which large models are used, where there is a GPU."""
    return torch.bfloat16 if device() == "cuda" else torch.float32


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
