"""Maps that fill row by row: rows that cost a backward pass each are computed some at a time, the last output first.

So there is something to see at once, and a place to stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from tensorlens.app.explorer.jobs import Job
from tensorlens.maps.defaults import has_one_row
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.tensor import AttentionTensor
from tensorlens.views.captions import is_by_output
from tensorlens.views.page import payload

ROWS_AT_A_TIME = {
    "tensor.norm": 1,
    "tensor.in_out": 16,
    "tensor.in_class": 16,
    "gradient.times_input": 1,
    "gradient.integrated": 1,
}
"""Methods whose cost grows with the outputs asked for, and how many outputs cost little more than one.

The others take as long for one row as for all."""

_QUICK, _SLOW = 0.25, 1.0
_PREVIEW_CELLS = 400 * 400
_PREVIEW_SECONDS = 0.7
_SAID_ONCE = ("target", "explains")
"""Keys of `meta` that are one text where all outputs have the same, and a list otherwise."""


def compute_map(job: Job, T: AttentionTensor, method: str, out_token: int | None, target: Target | None) -> TokenMap:
    """The map, row by row if that takes long, with previews told on the way."""
    job.tell("progress", stage="Computing", done=None)
    n_out, at_a_time = T.shape[0], ROWS_AT_A_TIME.get(method, T.shape[0])
    if has_one_row(T.operator.recording, method) or out_token is not None or n_out <= at_a_time:
        return T.map(method, out_token, target)
    parts: list[TokenMap] = []
    shown = 0.0
    for outputs in _groups(n_out, at_a_time):
        job.check()
        parts.append(T.map(method, outputs, target))
        job.tell("progress", stage="Computing", done=n_out - outputs.start, total=n_out)
        is_due = time.monotonic() - shown > _PREVIEW_SECONDS and outputs.start
        if is_due and n_out * len(parts[0].in_tokens) <= _PREVIEW_CELLS:
            shown = time.monotonic()
            job.tell("preview", map=payload(_joined(parts, T.out_tokens).view()))
    return _joined(parts, T.out_tokens)


def _groups(n_out: int, least: int) -> Iterator[range]:
    """Ranges of outputs, the last ones first, each as long as takes about a moment to compute."""
    size, stop = least, n_out
    while stop:
        group = range(max(0, stop - size), stop)
        start = time.monotonic()
        yield group
        seconds = time.monotonic() - start
        size = max(least, size // 2) if seconds > _SLOW else size * 2 if seconds < _QUICK else size
        stop = group.start


def _joined(parts: Sequence[TokenMap], out_tokens: Sequence[str]) -> TokenMap:
    """One map from maps of some outputs each; rows not yet known are NaN."""
    first, n_out = parts[0], len(out_tokens)
    scores = torch.full((n_out, first.shape[1]), torch.nan, dtype=first.scores.dtype)  # (out, in)
    bias = torch.full((n_out,), torch.nan, dtype=first.bias_share.dtype)  # (out,)
    by_row: dict[str, list[Any]] = {}
    for part in parts:
        places = part.meta["out_positions"]
        scores[places], bias[places] = part.scores, part.bias_share
        for name, value in part.meta.items():
            if name in _SAID_ONCE or is_by_output(name, value, len(places)):
                column = by_row.setdefault(name, [None] * n_out)
                for k, place in enumerate(places):
                    column[place] = value[k] if isinstance(value, list) else value
    known = {place for part in parts for place in part.meta["out_positions"]}
    for name in {*_SAID_ONCE} & by_row.keys():
        texts = {by_row[name][place] for place in known}
        by_row[name] = texts.pop() if len(texts) == 1 else by_row[name]
    by_row["out_positions"] = list(range(n_out))
    return replace(first, scores=scores, out_tokens=tuple(out_tokens), bias_share=bias, meta=first.meta | by_row)
