"""Models of other packages, as their own documentation builds them, made small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from strangers import torchvision_stub
from strangers.by_value import judge_by_value
from strangers.cases import Verdict, ids
from strangers.models import LENGTH, WORDS, D, H, randomised
from strangers.oracle import randn
from torch import nn

PICTURE = randn(1, 3, 32, 32, seed=3)


@dataclass(frozen=True, kw_only=True)
class Foreigner:
    """A model of a package: `build` makes it, `inputs` are its keyword arguments."""

    package: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def judge_foreigner(one: Foreigner) -> Verdict:
    torchvision_stub.install()
    inputs = one.inputs()
    return judge_by_value(randomised(one.build()), lambda model: model(**inputs), dict(inputs))


def x_transformer(kind: str, *, depth: int = 2, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import x_transformers

        layers = getattr(x_transformers, kind)(dim=D, depth=depth, heads=2, attn_dim_head=8, **options)
        return x_transformers.TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers)

    return build


def vit_pytorch(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import importlib

        kind = getattr(importlib.import_module(f"vit_pytorch.{module}"), name)
        common = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": D, "depth": 2, "heads": 2, "mlp_dim": 24}
        return kind(**(common | options))

    return build


def clip_picture() -> nn.Module:
    from open_clip.transformer import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, width=32, layers=2, heads=4, mlp_ratio=2.0, output_dim=D, output_tokens=False
    )


def clip_text() -> nn.Module:
    from open_clip.transformer import TextTransformer

    return TextTransformer(context_length=LENGTH, vocab_size=WORDS, width=D, heads=2, layers=2, output_dim=D)


def esm2() -> nn.Module:
    from esm.data import Alphabet
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=D, attention_heads=H, alphabet=Alphabet.from_architecture("ESM-1b"))


def sentence_transformer() -> nn.Module:
    import transformers as hf
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules.transformer import Transformer
    from sentence_transformers.sentence_transformer.modules.pooling import Pooling
    from strangers.habits import bert

    with TemporaryDirectory() as folder:
        bert().save_pretrained(folder)  # type: ignore[operator]
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{n}" for n in range(WORDS - 5))]
        (Path(folder) / "vocab.txt").write_text("\n".join(words))
        hf.BertTokenizer(str(Path(folder) / "vocab.txt")).save_pretrained(folder)
        transformer = Transformer(folder)
    return SentenceTransformer(modules=[transformer, Pooling(D)])


def diffusion(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, name)(**options)

    return build


def latents(channels: int = 4) -> dict[str, Any]:
    return {"hidden_states": randn(1, channels, 12, 12, seed=4), "timestep": torch.tensor([3])}


DIT = {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 12}

FOREIGNERS = (
    [
        Foreigner(package="x_transformers", name=f"x-transformers {name}", build=build, inputs=lambda: {"x": ids()})
        for name, build in {
            "decoder": x_transformer("Decoder"),
            "encoder": x_transformer("Encoder"),
            "decoder, rotary, RMSNorm, SwiGLU": x_transformer(
                "Decoder", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True
            ),
            "decoder, soft-clamped scores": x_transformer("Decoder", attn_softclamp_logits=True),
            "decoder, ALiBi, one set of keys": x_transformer("Decoder", alibi_pos_bias=True, attn_one_kv_head=True),
            "encoder, gated residual": x_transformer("Encoder", gate_residual=True),
            "encoder, post-norm, squared ReLU": x_transformer("Encoder", pre_norm=False, ff_relu_squared=True),
            "decoder, sandwich norm, qk-norm": x_transformer("Decoder", sandwich_norm=True, attn_qk_norm=True),
            "decoder, macaron": x_transformer("Decoder", macaron=True),
            "encoder, talking heads": x_transformer(
                "Encoder", attn_pre_talking_heads=True, attn_post_talking_heads=True
            ),
        }.items()
    ]
    + [
        Foreigner(package="vit_pytorch", name=f"vit-pytorch {name}", build=build, inputs=lambda: {"img": PICTURE})
        for name, build in {
            "ViT": vit_pytorch("vit", "ViT"),
            "SimpleViT": vit_pytorch("simple_vit", "SimpleViT"),
            "DeepViT": vit_pytorch("deepvit", "DeepViT"),
            "CaiT": vit_pytorch("cait", "CaiT", cls_depth=2),
            "ViT for small data": vit_pytorch("vit_for_small_dataset", "ViT"),
            "parallel ViT": vit_pytorch("parallel_vit", "ViT"),
            "ViT with registers": vit_pytorch("simple_vit_with_register_tokens", "SimpleViT"),
        }.items()
    ]
    + [
        Foreigner(package="open_clip", name="open_clip vision", build=clip_picture, inputs=lambda: {"x": PICTURE}),
        Foreigner(package="open_clip", name="open_clip text", build=clip_text, inputs=lambda: {"text": ids()}),
        Foreigner(package="esm", name="fair-esm ESM-2", build=esm2, inputs=lambda: {"tokens": ids()}),
        Foreigner(
            package="sentence_transformers",
            name="sentence-transformers BERT and pooling",
            build=sentence_transformer,
            inputs=lambda: {"input": {"input_ids": ids(), "attention_mask": torch.ones_like(ids())}},
        ),
        Foreigner(
            package="diffusers",
            name="diffusers DiT",
            build=diffusion("DiTTransformer2DModel", **DIT, patch_size=2, out_channels=8, num_embeds_ada_norm=1000),
            inputs=lambda: latents() | {"class_labels": torch.tensor([1])},
        ),
        Foreigner(
            package="diffusers",
            name="diffusers PixArt",
            build=diffusion(
                "PixArtTransformer2DModel",
                **DIT,
                patch_size=2,
                out_channels=8,
                cross_attention_dim=16,
                caption_channels=20,
                norm_type="ada_norm_single",
            ),
            inputs=lambda: (
                latents()
                | {
                    "encoder_hidden_states": randn(1, 5, 20, seed=6),
                    "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
                }
            ),
        ),
        Foreigner(
            package="diffusers",
            name="diffusers Transformer2D",
            build=diffusion("Transformer2DModel", **DIT, norm_num_groups=2, cross_attention_dim=20),
            inputs=lambda: {
                "hidden_states": randn(1, 4, 12, 12, seed=4),
                "encoder_hidden_states": randn(1, 5, 20, seed=6),
            },
        ),
        Foreigner(
            package="diffusers",
            name="diffusers SD3",
            build=diffusion(
                "SD3Transformer2DModel",
                **DIT,
                patch_size=2,
                out_channels=4,
                joint_attention_dim=20,
                caption_projection_dim=16,
                pooled_projection_dim=10,
                pos_embed_max_size=8,
            ),
            inputs=lambda: (
                latents()
                | {
                    "encoder_hidden_states": randn(1, 5, 20, seed=6),
                    "pooled_projections": randn(1, 10, seed=7),
                }
            ),
        ),
    ]
)
