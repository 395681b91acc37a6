"""Strangers whose difficulty is how they are put together and called: the torch.nn Transformers, nanoGPT, Llama."""

from __future__ import annotations

from typing import Any

import torch
from strangers.cases import Stranger, ids, plainly
from strangers.models import (
    DEPTH,
    LENGTH,
    D,
    MetaLlama,
    NanoGPT,
    PlainLlama,
    SentenceModel,
    SequentialWithHeads,
    TorchClassifier,
    torch_decoder,
    torch_encoder,
    torch_transformer,
)
from strangers.oracle import Places, randn
from torch import Tensor, nn

TORCH = Places(blocks="layers", end="norm")
CAUSAL = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)


def src(*shape: int) -> Tensor:
    return randn(*(shape or (1, LENGTH, D)), seed=11)


def encoder(name: str, build: Any, given: dict[str, Any], places: Places = TORCH, **more: Any) -> Stranger:
    return Stranger(name=name, build=build, given=lambda: dict(given), call=lambda m: m(**given), places=places, **more)


PADDED = torch.tensor([[False] * (LENGTH - 2) + [True] * 2])
GPT = Places(blocks="transformer.h", end="transformer.ln_f", head="lm_head")
LLAMA = Places(blocks="layers", end="norm", head="output")
MEMORY = {"tgt": src(), "memory": randn(1, 4, D, seed=12)}


class Joined(nn.Module):
    """Both states of an encoder and decoder as one, so that it can be differentiated by."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.joined = model, nn.Identity()

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        both = self.joined(torch.cat([src, tgt], 1))
        return self.model(both[:, : src.shape[1]], both[:, src.shape[1] :])


STRANGERS = [
    Stranger(name="nanoGPT, a list of ids", build=NanoGPT, places=GPT),
    Stranger(name="nanoGPT, named idx", build=NanoGPT, given=lambda: {"idx": ids()}, places=GPT),
    Stranger(
        name="nanoGPT, ids and targets",
        build=NanoGPT,
        given=lambda: {"idx": ids(), "targets": ids()},
        call=lambda m: m(ids(), ids()),
        places=GPT,
    ),
    Stranger(name="nanoGPT, logits of the last alone", build=lambda: NanoGPT(last_only=True), places=GPT),
    Stranger(name="Meta's Llama with its cache", build=MetaLlama, twin=plainly(PlainLlama), places=LLAMA),
    Stranger(
        name="Meta's Llama, start_pos given",
        build=MetaLlama,
        twin=plainly(PlainLlama),
        given=lambda: {"tokens": ids(), "start_pos": 0},
        places=LLAMA,
    ),
    encoder("TransformerEncoder", torch_encoder, {"src": src()}),
    encoder("TransformerEncoder, batch second", lambda: torch_encoder(batch_first=False), {"src": src(LENGTH, 1, D)}),
    encoder("TransformerEncoder, unbatched", torch_encoder, {"src": src(LENGTH, D)}),
    encoder("TransformerEncoder, -inf causal mask", torch_encoder, {"src": src(), "mask": CAUSAL}),
    encoder(
        "TransformerEncoder, causal mask and is_causal",
        torch_encoder,
        {"src": src(), "mask": CAUSAL, "is_causal": True},
    ),
    encoder("TransformerEncoder, src_key_padding_mask", torch_encoder, {"src": src(), "src_key_padding_mask": PADDED}),
    encoder(
        "TransformerEncoder, post-norm, relu, no final norm",
        lambda: torch_encoder(norm_first=False, norm=False, activation="relu"),
        {"src": src()},
        Places(blocks="layers", end=f"layers.{DEPTH - 1}"),
    ),
    encoder(
        "TransformerEncoder, softplus",
        lambda: torch_encoder(activation=nn.functional.softplus),
        {"src": src()},
    ),
    Stranger(
        name="TransformerEncoder, a plain tensor",
        build=torch_encoder,
        given=src,
        call=lambda m: m(src()),
        places=TORCH,
    ),
    encoder("TransformerDecoder with memory", torch_decoder, MEMORY),
    encoder("TransformerDecoder, causal", torch_decoder, MEMORY | {"tgt_mask": CAUSAL}),
    encoder(
        "nn.Transformer",
        torch_transformer,
        {"src": src(), "tgt": randn(1, 4, D, seed=13)},
        Places(blocks=(), start="joined", end="model.decoder.norm"),
        twin=Joined,
        has_ranges=False,
    ),
    Stranger(
        name="TransformerEncoder in a classifier",
        build=TorchClassifier,
        given=lambda: {"tokens": ids()},
        places=Places(blocks="encoder.layers", end="encoder.norm"),
    ),
    Stranger(
        name="TransformerEncoder in a classifier, a list of ids",
        build=TorchClassifier,
        places=Places(blocks="encoder.layers", end="encoder.norm"),
    ),
    Stranger(
        name="Sequential blocks and a list of heads",
        build=SequentialWithHeads,
        given=lambda: {"x": ids()},
        places=Places(),
    ),
    Stranger(
        name="a dict in, a dict out",
        build=SentenceModel,
        given=lambda: {"input_ids": ids()},
        call=lambda m: m({"input_ids": ids()}),
        places=Places(),
    ),
]
