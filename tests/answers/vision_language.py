"""Tiny vision–language models of each type, with processors that make their image tokens as the real ones do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers as hf
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.smolvlm import processing_smolvlm

import tensorlens as tl

MARKS = """
<pad> <s> </s> <unk> <image> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <start_of_image>
<end_of_image> <image_soft_token> <fake_token_around_image> <global-img> <end_of_utterance>
"""
SPECIAL = [*MARKS.split(), "\n\n", "\n", *(f"<row_{r}_col_{c}>" for r in range(1, 4) for c in range(1, 4))]
CROPS = "Here is the original image and here are some crops to help you see better"
WORDS = [*dict.fromkeys(f"what is on the table ? a red cup user assistant : look here {CROPS}".split())]
TEXT = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": None,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
TALL = PICTURE.rotate(90, expand=True)


def tokenizer(**named: str) -> Any:
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named |= {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
    }
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokens,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=named,
    )
    made.add_tokens(SPECIAL[4:], special_tokens=True)
    return made


def ids(*words: str) -> list[int]:
    return [(SPECIAL + WORDS).index(word) for word in words]


def template(image: str) -> str:
    return (
        "{% for m in messages %}{{ m['role'] + ' : ' }}{% for p in m['content'] %}{% if p['type'] == 'image' %}{{ '"
        + image
        + " ' }}{% else %}{{ p['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant :' }}{% endif %}"
    )


def _llava() -> tuple[Any, Any]:
    processor = hf.LlavaProcessor(
        image_processor=hf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer=tokenizer(image_token="<image>"),
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template("<image>"),
    )
    config = hf.LlavaConfig(
        vision_config=hf.CLIPVisionConfig(**VISION),
        text_config=hf.LlamaConfig(**TEXT),
        image_token_id=ids("<image>")[0],
        image_seq_length=16,
        vision_feature_layer=-1,
    )
    return hf.LlavaForConditionalGeneration(config), processor


class _Unchecked:
    """Video processors need torchvision."""

    def check_argument_for_proper_class(self, *_: Any) -> None:
        return None


class _QwenWithoutVideo(_Unchecked, hf.Qwen2_5_VLProcessor): ...


class _SmolVLMWithoutVideo(_Unchecked, hf.SmolVLMProcessor): ...


def _qwen() -> tuple[Any, Any]:
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 64, "max_pixels": 1024}
    processor = _QwenWithoutVideo(
        image_processor=hf.Qwen2VLImageProcessorPil(**sizes),
        tokenizer=tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>"),
        video_processor=None,
        chat_template=template("<|vision_start|> <|image_pad|> <|vision_end|>"),
    )
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16}
    vision |= {"patch_size": 4, "spatial_merge_size": 2, "window_size": 16, "fullatt_block_indexes": [1]}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    places = ids("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    config = hf.Qwen2_5_VLConfig(
        vision_config=vision, text_config=TEXT | {"rope_parameters": rope}, **dict(zip(names, places, strict=True))
    )
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor


def _gemma3() -> tuple[Any, Any]:
    processor = hf.Gemma3Processor(
        image_processor=hf.Gemma3ImageProcessorPil(size={"height": 16, "width": 16}),
        tokenizer=tokenizer(image_token="<image_soft_token>"),
        image_seq_length=4,
        chat_template=template("<start_of_image>"),
    )
    config = hf.Gemma3Config(
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False),
        text_config=hf.Gemma3TextConfig(**TEXT),
        mm_tokens_per_image=4,
        image_token_id=ids("<image_soft_token>")[0],
        boi_token_index=ids("<start_of_image>")[0],
        eoi_token_index=ids("<end_of_image>")[0],
    )
    return hf.Gemma3ForConditionalGeneration(config), processor


def _idefics3() -> tuple[Any, Any]:
    processor = hf.Idefics3Processor(
        image_processor=hf.Idefics3ImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer=tokenizer(image_token="<image>"),
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    config = hf.Idefics3Config(
        vision_config=VISION, text_config=hf.LlamaConfig(**TEXT), image_token_id=ids("<image>")[0], scale_factor=2
    )
    return hf.Idefics3ForConditionalGeneration(config), processor


def _smolvlm() -> tuple[Any, Any]:
    processing_smolvlm.num2words = str  # only videos need the package
    processor = _SmolVLMWithoutVideo(
        image_processor=hf.SmolVLMImageProcessorPil(size={"longest_edge": 32}, max_image_size={"longest_edge": 16}),
        tokenizer=tokenizer(image_token="<image>"),
        video_processor=SimpleNamespace(num_frames=1, fps=1),
        image_seq_len=4,
        chat_template=template("<image>"),
    )
    config = hf.SmolVLMConfig(
        vision_config=VISION, text_config=hf.LlamaConfig(**TEXT), image_token_id=ids("<image>")[0], scale_factor=2
    )
    return hf.SmolVLMForConditionalGeneration(config), processor


def _paligemma() -> tuple[Any, Any]:
    image_processor = hf.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    image_processor.image_seq_length = 16
    processor = hf.PaliGemmaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer(image_token="<image>"),
        chat_template=template("<image>"),
    )
    config = hf.PaliGemmaConfig(
        vision_config=hf.SiglipVisionConfig(**VISION, vision_use_head=False, num_image_tokens=16),
        text_config=hf.GemmaConfig(**TEXT),
        image_token_index=ids("<image>")[0],
        projection_dim=16,
    )
    return hf.PaliGemmaForConditionalGeneration(config), processor


TYPES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "llava": _llava,
    "qwen2.5-vl": _qwen,
    "gemma3": _gemma3,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "paligemma": _paligemma,
}


def lens_of(name: str, seed: int = 0) -> tl.Lens:
    """A lens on a tiny random model with its processor."""
    torch.manual_seed(seed)
    model, processor = TYPES[name]()
    for weight in model.parameters():
        weight.data.normal_(std=0.3)
    model.generation_config.eos_token_id = None
    return tl.Lens(model.double().eval(), processor)


def ask(*pictures: Any, text: str = "what is on the table ?") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
