"""In+Out of inputs of many thousand tokens, against a plain forward and backward pass."""

from __future__ import annotations

from typing import Any

import torch

import tensorlens as tl
from benchmarks.models import build, token_ids
from benchmarks.parts import Rows, clear
from benchmarks.timing import timed


def long_model(name: str, device: str) -> Any:
    """The model, in the type such models are used in."""
    return build(name, device, torch.bfloat16 if device == "cuda" else torch.float32)


def long_inputs(
    model: Any,
    device: str,
    lengths: tuple[int, ...] = (8192, 65536, 131072),
    compare_up_to: int = 8192,
    repeats: int = 5,
    name: str = "llama-8b",
) -> Rows:
    """In+Out of one output from token ids, against a plain forward and backward pass."""
    rows = []
    lens = tl.Lens(model)
    vocabulary = model.config.vocab_size
    for n in lengths:
        ids = token_ids(n, vocabulary)
        work = lambda ids=ids: lens(ids).map("tensor.in_out", out_token=-1)  # noqa: E731
        few = n > compare_up_to
        try:
            ours = timed(work, device, n=1 if few else repeats, warm=0 if few else 1, most_seconds=60)
        except torch.OutOfMemoryError as error:
            rows.append({"work": "in_out", "model": name, "L": n, "failed": str(error)[:300]})
            print(rows[-1], flush=True)
            clear(device)
            continue
        row: dict[str, Any] = {"work": "in_out", "model": name, "L": n, "ours": ours.as_dict()}
        row["precision"] = str(model.dtype)
        if not few:
            row |= _plain(model, ids, device, repeats)
            row["ratio_time"] = ours.seconds / row["forward_backward"]["seconds"]
            row["ratio_memory"] = (ours.extra_bytes or 0) / max(1, row["forward_backward"]["extra_bytes"] or 1)
            row["parts"] = _parts(lens, ids, device)
        rows.append(row)
        print({k: v for k, v in row.items() if k not in ("precision",)}, flush=True)
        clear(device)
    return rows


def _plain(model: Any, ids: list[int], device: str, n: int) -> dict[str, Any]:
    """A forward pass, and a forward and backward pass to the input, of the model left to itself."""
    x = model.get_input_embeddings()(torch.tensor([ids], device=device)).detach()

    def forward() -> Any:
        with torch.no_grad():
            return model(inputs_embeds=x, use_cache=False).last_hidden_state

    def both() -> Any:
        leaf = x.clone().requires_grad_()
        y = model(inputs_embeds=leaf, use_cache=False).last_hidden_state[0, -1]
        return torch.autograd.grad(y, leaf, y.detach())[0]

    return {
        "forward": timed(forward, device, n=n, warm=1).as_dict(),
        "forward_backward": timed(both, device, n=n, warm=1).as_dict(),
    }


def _parts(lens: Any, ids: list[int], device: str) -> dict[str, float]:
    """Seconds of the recording and of the map alone."""
    recording = timed(lambda: lens(ids), device, n=2, warm=0)
    T = lens(ids)
    pulling = timed(lambda: T.map("tensor.in_out", out_token=-1), device, n=2, warm=0)
    return {
        "recording": recording.seconds,
        "map": pulling.seconds,
        "is_streamed": float(T.operator.recording.is_streamed),
    }
