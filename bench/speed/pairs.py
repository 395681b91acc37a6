"""What pair maps and answers to pictures cost, in forward-and-backward passes of the model itself.

Random weights of real shapes: an MPNet of base size (two texts of 128 tokens; one query against 100 passages), and
Qwen2.5-VL-7B with one picture of 1,036 pixels. A search has MiniLM's weights, and seconds of this process on one thread
of a CPU.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from inspect import signature
from statistics import median
from typing import Any

import torch
import transformers as hf

import tensorlens as tl
from bench.speed.models import device
from bench.speed.timing import timed
from tensorlens.batches import MOST_SAMPLES

IMAGE, VIDEO, START, END = 151655, 151656, 151652, 151653
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def pair_rows(tiny: bool = False) -> list[dict[str, str]]:
    """Pair maps, and an answer to a picture."""
    return [*encoder_rows(device(), tiny), *picture_rows(device(), tiny)]


def row(what: str, taken: Any, unit: float | None = None) -> dict[str, str]:
    """One line of the table: a time, in units of another, and memory."""
    share = "" if unit is None else f"{taken.seconds / unit:.2f}"
    return {"what": what, "time": str(taken), "in units": share, "GiB": taken.gib}


def search_rows(n: int = 100, n_whole: int = 32) -> list[dict[str, str]]:
    """A query of 14 tokens against passages of 128, in units of recording them; in turns, so that load is shared."""
    torch.set_num_threads(1)
    lens, draw = tl.load("minilm", device="cpu"), torch.Generator().manual_seed(0)
    texts = [[101, *torch.randint(2000, 28000, (126,), generator=draw).tolist(), 102] for _ in range(n)]
    query, most = [*texts[0][:13], 102], MOST_SAMPLES["cpu"]
    works: dict[str, Callable[[], Any]] = {
        f"{n} passages recorded one by one": lambda: [lens(text) for text in texts] and None,
        f"{n} passages recorded in batches": lambda: [lens.batch(texts[k : k + most]) for k in range(0, n, most)],
        **{f"the query, `top={k}`": lambda k=k: tl.similarities(lens, query, texts, top=k) for k in (1, 3)},
        f"the query, a map of each (from {n_whole})": lambda: tl.similarities(lens, query, texts[:n_whole]),
    }
    seconds: dict[str, list[float]] = {what: [] for what in works}
    for turn in range(6):  # the first warms up
        for what, work in works.items():
            start = time.process_time()
            work()
            scale = n / n_whole if "from" in what else 1.0
            seconds[what] += [scale * (time.process_time() - start)] if turn else []
    unit = median(next(iter(seconds.values())))
    return [
        {
            "what": what,
            "time": f"{median(s):.2f} s ({min(s):.2f} to {max(s):.2f})",
            "in units": f"{median(s) / unit:.2f}",
        }
        for what, s in seconds.items()
    ]


def encoder_rows(device: str, tiny: bool) -> list[dict[str, str]]:
    """Two texts, and one query against many passages."""
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    sizes: dict[str, Any] = small if tiny else {}
    model: Any = hf.MPNetModel(hf.MPNetConfig(**sizes), add_pooling_layer=False)
    model = model.to(device).eval()
    lens, many = tl.Lens(model), 8 if tiny else 100
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(5, 30000, (128,), generator=draw).tolist() for _ in range(many)]
    ids = torch.tensor([texts[0]], device=device)
    plain = timed(lambda: model(ids).last_hidden_state.mean().backward())
    pair = timed(lambda: tl.similarity(lens, texts[0], texts[1], pooling="mean"))
    recorded = timed(lambda: [lens(text) for text in texts] and None, n=2)
    most = MOST_SAMPLES[device]
    together = timed(lambda: [lens.batch(texts[k : k + most]) for k in range(0, many, most)] and None, n=2)
    search = timed(lambda: tl.similarities(lens, texts[0][:14], texts, pooling="mean") and None, n=2)
    return [
        row("MPNet, 128 tokens: forward and backward", plain),
        row("pair map of 128 × 128 tokens", pair, plain.seconds),
        row(f"{many} passages recorded one by one", recorded),
        row(f"{many} passages recorded in batches", together, recorded.seconds),
        row(f"one query of 14 tokens against {many} passages", search, recorded.seconds),
        row("the same, in units of the batches", search, together.seconds),
    ]


def vision_language(device: str, tiny: bool) -> Any:
    """The shape of Qwen2.5-VL-7B, or a tiny one of its kind, with random weights."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3] if tiny else [16, 24, 24]}
    sizes = (64, 128, 2, 4, 2) if tiny else (3584, 18944, 28, 28, 4)
    text = {"vocab_size": 152064, "rope_parameters": rope, **dict(zip(SIZES, sizes, strict=True))}
    vision: dict[str, Any] = {"out_hidden_size": sizes[0], "hidden_size": 1280, "intermediate_size": 3420}
    vision |= {"num_heads": 16, "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31]}
    if tiny:
        vision |= {"hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "depth": 2, "fullatt_block_indexes": [1]}
    places = dict(zip(("image", "video", "vision_start", "vision_end"), (IMAGE, VIDEO, START, END), strict=True))
    tokens: dict[str, Any] = {f"{name}_token_id": token for name, token in places.items()}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if device == "cpu" else torch.bfloat16)
    try:
        with torch.device(device):
            return hf.Qwen2_5_VLForConditionalGeneration(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(usual)


def picture_rows(device: str, tiny: bool) -> list[dict[str, str]]:
    """The answer to one picture, against one pass forwards and backwards of the same tokens."""
    gc.collect()
    model, side = vision_language(device, tiny), 8 if tiny else 74  # patches of 14 pixels, merged two by two
    ids = [*range(100, 110), START, *[IMAGE] * (side // 2) ** 2, END, *range(200, 216)]
    pixels = torch.randn(side * side, 1176, generator=torch.Generator().manual_seed(0)).to(model.dtype)
    kinds = {"mm_token_type_ids": torch.tensor([[int(token == IMAGE) for token in ids]])}
    prompt = {
        "input_ids": torch.tensor([ids]),
        **(kinds if "mm_token_type_ids" in signature(model.forward).parameters else {}),
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([[1, side, side]]),
    }
    lens, answer = tl.Lens(model), list(range(300, 312))

    def plain() -> None:
        seen = model.get_input_embeddings()(torch.tensor([[*ids, *answer]], device=device)).requires_grad_()
        model.model.visual(pixels.to(device), grid_thw=prompt["image_grid_thw"].to(device))
        states = model.model.language_model(inputs_embeds=seen).last_hidden_state
        model.lm_head(states[:, -13:-1]).float().sum().backward()

    once = timed(plain, n=3)
    asked = timed(lambda: lens.answer(prompt, answer).map() and None, n=3)
    made = lens.answer(prompt, answer).map(rows="tokens")
    values = torch.tensor(made.meta["logit"], dtype=torch.float64)
    left = made.scores.double().cpu().sum(1) + made.bias_share.double().cpu() * values - values
    gap = {"what": "columns; largest gap of a row's sum", "time": f"{made.shape[1]}; {float(left.abs().max()):.1e}"}
    return [
        row(f"Qwen2.5-VL-7B, {len(ids)} tokens: forward and backward", once),
        row("the answer and its map", asked, once.seconds),
        {**gap, "in units": "", "GiB": ""},
    ]
