"""Transformers as other people write them, small, with random weights, biases and gains.

None is written for the package: names, argument orders, outputs and habits are those of public code. The pieces at the
top are put together in other ways by `oddities.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from strangers.frozen import held
from torch import Tensor, nn
from torch.nn import functional as F

D, H, HIDDEN, WORDS, LENGTH, DEPTH = 16, 4, 24, 29, 6, 3
IDS = (5, 9, 23, 12, 7, 17)


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every weight, bias and gain random, in float64, for evaluation."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.dim() > 1:
                n_in = parameter[0].numel() if parameter.dim() == 4 else parameter.shape[-1]  # 4: of a convolution
                parameter.copy_(noise / math.sqrt(n_in) if "embed" not in name else noise)
            else:
                parameter.copy_((0.0 if name.endswith("bias") else 1.0) + noise / 3)
    return model


class Attention(nn.Module):
    """Causal or not, with the matrix written out."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.qkv, self.proj, self.is_causal = nn.Linear(D, 3 * D), nn.Linear(D, D), is_causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(D // H)
        if self.is_causal:
            later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -torch.inf)
        return self.proj((scores.softmax(-1) @ v).transpose(-3, -2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(
        self, activation: Callable[[Tensor], Tensor] = F.gelu, hidden: int = HIDDEN, width: int | None = None
    ) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(D, hidden), nn.Linear(width or hidden, D), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """Pre-LN."""

    def __init__(self, attention: nn.Module | None = None, mlp: nn.Module | None = None) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(D), attention or Attention()
        self.ln_2, self.mlp = nn.LayerNorm(D), mlp or FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Plain(nn.Module):
    """Embedding, blocks and norm; the base of many."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = DEPTH) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, D), nn.Embedding(LENGTH, D)
        self.blocks = nn.ModuleList([block() for _ in range(depth)])
        self.norm = nn.LayerNorm(D)

    def embedded(self, input_ids: Tensor) -> Tensor:
        return self.embed(input_ids) + self.positions(torch.arange(input_ids.shape[-1]))

    def body(self, input_ids: Tensor) -> Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, input_ids: Tensor) -> Any:
        return self.body(input_ids)


class WithHead(Plain):
    """The same with an unembedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, WORDS)

    def forward(self, input_ids: Tensor) -> Any:
        return self.head(self.body(input_ids))


class NanoGPT(nn.Module):
    """A dict of parts, ids called `idx`, logits and loss returned, the last position alone at inference."""

    def __init__(self, last_only: bool = False) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(WORDS, D),
                "wpe": nn.Embedding(LENGTH, D),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList([Block() for _ in range(DEPTH)]),
                "ln_f": nn.LayerNorm(D),
            }
        )
        self.lm_head, self.last_only = nn.Linear(D, WORDS, bias=False), last_only

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        parts: Any = self.transformer
        x = parts.drop(parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1])))
        for block in parts.h:
            x = block(x)
        x = parts.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return self.lm_head(x[:, [-1]] if self.last_only else x), None


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions as multiplication of complex numbers."""
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3)


class CachedAttention(nn.Module):
    """Keys and values are written into plain tensors that stay with the module."""

    def __init__(self, has_cache: bool = True) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(D, n, bias=False) for n in (D, D // 2, D // 2, D))
        self.has_cache = has_cache
        self.cache_k, self.cache_v = (torch.zeros(1, 2 * LENGTH, H // 2, D // H, dtype=torch.float64) for _ in "kv")

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        n = x.shape[1]
        q, k, v = (w(x).unflatten(-1, (-1, D // H)) for w in (self.wq, self.wk, self.wv))
        q, k = rotated(q, freqs_cis), rotated(k, freqs_cis)
        if self.has_cache:
            self.cache_k[:1, start_pos : start_pos + n] = k
            self.cache_v[:1, start_pos : start_pos + n] = v
            k, v = self.cache_k[:1, : start_pos + n], self.cache_v[:1, : start_pos + n]
        q, k, v = (
            q.transpose(1, 2),
            k.repeat_interleave(2, 2).transpose(1, 2),
            v.repeat_interleave(2, 2).transpose(1, 2),
        )
        scores = q @ k.transpose(2, 3) / math.sqrt(D // H)
        scores = F.softmax(scores if mask is None else scores + mask, -1)
        return self.wo((scores @ v).transpose(1, 2).flatten(2))


class GatedFeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*shape, bias=False) for shape in ((D, HIDDEN), (HIDDEN, D), (D, HIDDEN)))

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(held(F.silu(self.w1(x))) * self.w3(x))


class LlamaBlock(nn.Module):
    def __init__(self, has_cache: bool = True) -> None:
        super().__init__()
        self.attention, self.feed_forward = CachedAttention(has_cache), GatedFeedForward()
        self.attention_norm, self.ffn_norm = RMSNorm(), RMSNorm()

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor, mask: Tensor | None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), start_pos, freqs_cis, mask)
        return h + self.feed_forward(self.ffn_norm(h))


class MetaLlama(nn.Module):
    """`forward(tokens, start_pos)`, with a cache written in place and rotary positions by complex numbers."""

    def __init__(self, has_cache: bool = True) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, D)
        self.layers = nn.ModuleList([LlamaBlock(has_cache) for _ in range(DEPTH)])
        self.norm, self.output = RMSNorm(), nn.Linear(D, WORDS, bias=False)
        angles = torch.outer(torch.arange(2.0 * LENGTH), 10.0 ** -torch.arange(0, 1, 2 / (D // H)))
        self.freqs_cis = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

    @torch.inference_mode()
    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        return self.run(tokens, start_pos)

    def run(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        n = tokens.shape[1]
        h = self.tok_embeddings(tokens)
        mask = torch.full((n, n), -torch.inf, dtype=h.dtype).triu(1) if n > 1 else None
        for layer in self.layers:
            h = layer(h, start_pos, self.freqs_cis[start_pos : start_pos + n], mask)
        return self.output(self.norm(h)).double()


class PlainLlama(MetaLlama):
    """Without the cache and without inference mode: the twin."""

    def __init__(self) -> None:
        super().__init__(has_cache=False)

    def forward(self, tokens: Tensor, start_pos: int = 0) -> Tensor:
        return self.run(tokens, start_pos)


def torch_encoder(
    *, batch_first: bool = True, norm_first: bool = True, activation: Any = "gelu", norm: bool = True
) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        D, H, HIDDEN, activation=activation, batch_first=batch_first, norm_first=norm_first, dtype=torch.float64
    )
    return nn.TransformerEncoder(layer, DEPTH, norm=nn.LayerNorm(D) if norm else None, enable_nested_tensor=False)


def torch_decoder() -> nn.Module:
    layer = nn.TransformerDecoderLayer(D, H, HIDDEN, activation="gelu", batch_first=True, norm_first=True)
    return nn.TransformerDecoder(layer, DEPTH, norm=nn.LayerNorm(D))


def torch_transformer() -> nn.Module:
    return nn.Transformer(D, H, 2, 2, HIDDEN, activation="gelu", batch_first=True, norm_first=True)


class TorchClassifier(nn.Module):
    """An embedding, torch's own encoder, a mean over tokens and a head, as in many tutorials."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encoder, self.classifier = nn.Embedding(WORDS, D), torch_encoder(), nn.Linear(D, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.classifier(self.encoder(self.embed(tokens)).mean(1))


class SequentialWithHeads(nn.Module):
    """Blocks in a Sequential, and a list of many wide heads that is no list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = (
            nn.Embedding(WORDS, D),
            nn.Sequential(*[Block(Attention(False)) for _ in range(DEPTH)]),
        )
        self.norm, self.heads = nn.LayerNorm(D), nn.ModuleList([nn.Linear(D, 200) for _ in range(4)])

    def forward(self, x: Tensor) -> list[Tensor]:
        pooled = self.norm(self.blocks(self.embed(x)))[:, 0]
        return [head(pooled) for head in self.heads]


class SentenceModel(nn.Module):
    """A dict goes in and the same dict comes out with more in it, as in sentence-transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(WORDS, D), nn.ModuleList([Block(Attention(False)) for _ in range(DEPTH)])
        self.norm = nn.LayerNorm(D)

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        x = self.embed(features["input_ids"])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        features["token_embeddings"] = x
        features["sentence_embedding"] = F.normalize(x.mean(1), dim=-1)
        return features
