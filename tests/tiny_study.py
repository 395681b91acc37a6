"""A tiny model with a tokenizer, and the smallest study: for the tests, and for their processes that are killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from zoo import build

import tensorlens as tl
from tensorlens.studies import StudyResult, perturbation

WORDS = "the cat sat on a mat and saw red green birds fly over seven tall grey houses while it rained".split()  # noqa: SIM905
TEXTS = [
    "the cat sat on a mat and saw red birds",
    "seven tall grey houses",
    "the",
    "it rained while the cat sat on a mat and saw seven tall grey houses and birds fly over the green mat",
    "the cat sat on a mat and saw red birds",
    "red green red green red green",
]
METHODS = [
    "tensor.norm",
    "tensor.in_out",
    "tensor.in_class",
    "rollout.attn",
    "mean.w_attn_res_ln",
    "rollout.glob_enc",
    "control.random",
    "control.recency",
]


def tokenizer(wrapped: bool) -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[attr-defined]
    if wrapped:
        inner.post_processor = processors.TemplateProcessing(  # type: ignore[attr-defined]
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        unk_token="[UNK]",
    )


def lens_on(name: str = "bert") -> tl.Lens:
    model = build(name, dtype=torch.float32)
    return tl.Lens(model, tokenizer(wrapped=name.startswith("bert")), name=name)


def study(folder: Path | str, name: str = "bert", **options: Any) -> StudyResult:
    settings: dict[str, Any] = {"methods": METHODS, "grid": (0.0, 0.2, 0.4), "n_tokens": 16, "progress": False}
    return perturbation(lens_on(name), options.pop("data", TEXTS), folder, **(settings | options))


def vision_lens(name: str = "dinov2") -> tl.Lens:
    from transformers import ViTImageProcessor  # says on import that torchvision is absent

    processor = ViTImageProcessor(size={"height": 8, "width": 8}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.3, 0.4])
    return tl.Lens(build(name, dtype=torch.float32), processor, name=name)


def write_pictures(folder: Path) -> Path:
    """Three pictures, and a file that is none."""
    folder.mkdir()
    for number in range(3):
        pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    (folder / "broken.png").write_bytes(b"no picture")
    return folder


if __name__ == "__main__":
    torch.set_num_threads(1)
    study(sys.argv[1])
