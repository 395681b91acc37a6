"""Transformers compiled from programs (tracr), in torch: no norm, ReLU, attention to every token, positions added."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, width: int, inner: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value = (nn.Linear(width, inner) for _ in range(3))
        self.linear = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = (
            part(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        q, k, v = parts
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v
        return self.linear(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, n_heads: int, hidden: int) -> None:
        super().__init__()
        self.attn = Attention(width, inner, n_heads)
        self.linear_1, self.linear_2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.linear_2(torch.relu(self.linear_1(x)))


class Compiled(nn.Module):
    """A program; its logits are the channels of its residual stream."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.about: dict[str, Any] = json.loads(path.read_text("utf-8"))
        with np.load(path.with_suffix(".npz")) as file:
            weights = {name: torch.from_numpy(file[name]).double() for name in file.files}
        n_tokens, width = weights["token_embed/embeddings"].shape
        inner = weights["transformer/layer_0/attn/query/w"].shape[1]
        self.embed, self.positions = (
            nn.Embedding(n_tokens, width),
            nn.Embedding(len(weights["pos_embed/embeddings"]), width),
        )
        self.blocks = nn.ModuleList(
            Block(width, inner, self.about["heads"], weights[f"transformer/layer_{n}/mlp/linear_1/w"].shape[1])
            for n in range(self.about["layers"])
        )
        self.head = nn.Linear(width, width, bias=False)
        stored = {
            "embed.weight": weights["token_embed/embeddings"],
            "positions.weight": weights["pos_embed/embeddings"],
            "head.weight": torch.eye(width),
        }
        for name in self.state_dict():
            if name.startswith("blocks."):
                _, n, *module, kind = name.split(".")
                place = "/".join(module if module[0] == "attn" else ["mlp", *module])
                value = weights[f"transformer/layer_{n}/{place}/{'w' if kind == 'weight' else 'b'}"]
                stored[name] = value.T if kind == "weight" else value
        self.double().load_state_dict(stored)
        self.eval()

    def ids(self, tokens: list[Any]) -> list[int]:
        return [self.about["encoding"][str(token)] for token in tokens]

    def channel(self, name: str) -> int:
        return self.about["residual_labels"].index(name)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor) -> Any:
        x = self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))
