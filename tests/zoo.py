"""One tiny random model for each family, with random biases and norm gains.

The default initialisation sets biases to zero and gains to one, which hides most errors; here both are drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import nn

N_TOKENS = 7
VOCABULARY = 60
TEXT = dict(
    hidden_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=24,
    vocab_size=VOCABULARY,
    max_position_embeddings=40,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = dict(num_key_value_heads=2)
VISION = dict(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=4, intermediate_size=24, image_size=8, patch_size=4
)


@dataclass(frozen=True)
class Family:
    """A model class with a tiny configuration.

    `casts` says that the model's own code computes parts in float32, whatever the type of its weights.
    """

    model: type
    config: Any
    casts: bool = False
    causal: bool = False
    vision: bool = False
    attentions: tuple[str, ...] = ("eager", "sdpa")
    has_biases: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


def _gpt2(**options: Any) -> Any:
    return hf.GPT2Config(
        n_embd=16, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=40, bos_token_id=1, eos_token_id=2, **options
    )


ZOO: dict[str, Family] = {
    "bert": Family(hf.BertModel, hf.BertConfig(**TEXT)),
    "bert-classifier": Family(hf.BertForSequenceClassification, hf.BertConfig(**TEXT, num_labels=3)),
    "bert-mlm": Family(hf.BertForMaskedLM, hf.BertConfig(**TEXT)),
    "roberta": Family(hf.RobertaForSequenceClassification, hf.RobertaConfig(**TEXT, num_labels=3)),
    "distilbert": Family(
        hf.DistilBertForSequenceClassification,
        hf.DistilBertConfig(
            dim=16,
            n_layers=3,
            n_heads=4,
            hidden_dim=24,
            vocab_size=VOCABULARY,
            max_position_embeddings=40,
            num_labels=3,
        ),
    ),
    "albert": Family(hf.AlbertModel, hf.AlbertConfig(**TEXT, embedding_size=8)),
    "modernbert": Family(
        hf.ModernBertForMaskedLM,
        hf.ModernBertConfig(**TEXT, cls_token_id=1, sep_token_id=2, local_attention=4, global_attn_every_n_layers=3),
        has_biases=False,
    ),
    "vit": Family(hf.ViTForImageClassification, hf.ViTConfig(**VISION, num_labels=3), vision=True),
    "deit": Family(hf.DeiTForImageClassification, hf.DeiTConfig(**VISION, num_labels=3), vision=True),
    "deit-distilled": Family(
        hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig(**VISION, num_labels=3), vision=True
    ),
    "dinov2": Family(
        hf.Dinov2Model,
        hf.Dinov2Config(**{k: v for k, v in VISION.items() if k != "intermediate_size"}, mlp_ratio=2),
        vision=True,
    ),
    "gpt2": Family(hf.GPT2LMHeadModel, _gpt2(), causal=True),
    "neox-parallel": Family(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**TEXT, use_parallel_residual=True), causal=True),
    "neox-serial": Family(hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**TEXT, use_parallel_residual=False), causal=True),
    "phi": Family(hf.PhiForCausalLM, hf.PhiConfig(**TEXT), causal=True),
    "llama": Family(hf.LlamaForCausalLM, hf.LlamaConfig(**TEXT, **GROUPED), casts=True, causal=True, has_biases=False),
    "qwen2": Family(hf.Qwen2ForCausalLM, hf.Qwen2Config(**TEXT, **GROUPED), casts=True, causal=True),
    "qwen3": Family(
        hf.Qwen3ForCausalLM, hf.Qwen3Config(**TEXT, **GROUPED, head_dim=4), casts=True, causal=True, has_biases=False
    ),
    "mistral": Family(
        hf.MistralForCausalLM,
        hf.MistralConfig(**TEXT, **GROUPED, sliding_window=3),
        casts=True,
        causal=True,
        has_biases=False,
    ),
    "gemma2": Family(
        hf.Gemma2ForCausalLM,
        hf.Gemma2Config(**TEXT, **GROUPED, head_dim=4, sliding_window=3, query_pre_attn_scalar=4),
        casts=True,
        causal=True,
        has_biases=False,
        attentions=("eager",),  # transformers refuses SDPA for its soft cap
    ),
    "gemma3": Family(
        hf.Gemma3ForCausalLM,
        hf.Gemma3TextConfig(
            **TEXT, **GROUPED, head_dim=4, sliding_window=3, query_pre_attn_scalar=4, sliding_window_pattern=2
        ),
        casts=True,
        causal=True,
        has_biases=False,
    ),
    "olmo2": Family(hf.Olmo2ForCausalLM, hf.Olmo2Config(**TEXT, **GROUPED), casts=True, causal=True, has_biases=False),
    "opt": Family(
        hf.OPTForCausalLM,
        hf.OPTConfig(
            hidden_size=16,
            num_hidden_layers=3,
            num_attention_heads=4,
            ffn_dim=24,
            vocab_size=VOCABULARY,
            max_position_embeddings=40,
            word_embed_proj_dim=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        ),
        causal=True,
    ),
}

CASES = [(name, attention) for name, family in ZOO.items() for attention in family.attentions]


def build(name: str, attention: str = "eager", dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """A tiny model with every parameter drawn at random."""
    family = ZOO[name]
    model = family.model._from_config(deepcopy(family.config), attn_implementation=attention)
    return randomise(model, seed).to(dtype).eval()


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter: matrices to keep the scale, gains around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(float(name.endswith("weight")) + 0.3 * noise)
    return model


def sample(name: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """An input that a lens on the model takes: token ids, or pixels."""
    generator = torch.Generator().manual_seed(seed)
    if ZOO[name].vision:
        size = VISION["image_size"]
        return torch.randn(3, size, size, generator=generator, dtype=dtype)
    return torch.randint(3, VOCABULARY, (N_TOKENS,), generator=generator).tolist()


def names(where: Callable[[Family], bool]) -> list[str]:
    """Families that satisfy a condition."""
    return [name for name, family in ZOO.items() if where(family)]
