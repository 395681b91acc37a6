"""Maps that fill row by row: rows that cost a backward pass each are computed some at a time, the last output first.

So there is something to see at once, and a place to stop.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from tensorlens.app.explorer.jobs import Job
from tensorlens.maps.defaults import has_one_row
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.recommendations import default_output
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


def compute_map(job: Job, T: AttentionTensor, method: str, out_token: int | None, target: Target | None) -> TokenMap:
    """The map, row by row if that takes long, with previews told on the way."""
    job.tell("progress", stage="Computing", done=None)
    at_a_time = ROWS_AT_A_TIME.get(method, T.shape[0])
    if has_one_row(T.operator.recording, method) or out_token is not None or T.shape[0] <= at_a_time:
        return T.map(method, out_token, target)
    first = default_output(T)
    sheet = _Sheet(T.map(method, first, target), T, first)
    sheet.report(job)
    for others in (range(first + 1, T.shape[0]), range(first)):
        for outputs in _groups(others, at_a_time):
            job.check()
            sheet.fill(outputs, T.map(method, outputs, target))
            sheet.report(job)
    return sheet.whole()


def _groups(outputs: range, least: int) -> Iterator[range]:
    """Ranges of outputs, the last ones first, each as long as takes about a moment to compute."""
    size, stop = least, outputs.stop
    while stop > outputs.start:
        group = range(max(outputs.start, stop - size), stop)
        start = time.monotonic()
        yield group
        seconds = time.monotonic() - start
        size = max(least, size // 2) if seconds > _SLOW else size * 2 if seconds < _QUICK else size
        stop = group.start


class _Sheet:
    """A map that fills row by row; rows not yet known are NaN.

    Args:
        row: The map of the first output alone.
        T: The tensor, which names the outputs.
        first: The output that `row` is about.
    """

    def __init__(self, row: TokenMap, T: AttentionTensor, first: int) -> None:
        n_out = T.shape[0]
        self._map = row
        self._tokens, self._n_known = T.out_tokens, 0
        self._scores = torch.full((n_out, row.shape[1]), torch.nan, dtype=row.scores.dtype)  # (out, in)
        self._bias = torch.full((n_out,), torch.nan, dtype=row.bias_share.dtype)  # (out,)
        # What a map says about each output; a target that is the same for all is said once, in `whole`.
        self._by_row: dict[str, list[Any]] = {"out_positions": list(range(n_out))}
        for name, value in row.meta.items():
            if name != "out_positions" and (is_by_output(name, value, 1) or name in ("target", "explains")):
                one = value[0] if isinstance(value, list) else value
                self._by_row[name] = [None if name == "logit" else one] * n_out
        self._shown = 0.0
        self.fill(range(first, first + 1), row)

    def fill(self, outputs: range, found: TokenMap) -> None:
        """Put the rows of some outputs in their places."""
        rows = slice(outputs.start, outputs.stop)
        self._scores[rows], self._bias[rows] = found.scores, found.bias_share
        for name, value in found.meta.items():
            if name in self._by_row and name != "out_positions":
                self._by_row[name][rows] = value if isinstance(value, list) else [value] * len(outputs)
        self._n_known += len(outputs)

    def report(self, job: Job) -> None:
        """Say how far it is; now and then, show it."""
        n_out, n_in = self._scores.shape
        job.tell("progress", stage="Computing", done=self._n_known, total=n_out)
        is_due = time.monotonic() - self._shown > _PREVIEW_SECONDS
        if is_due and self._n_known < n_out and n_out * n_in <= _PREVIEW_CELLS:
            self._shown = time.monotonic()
            job.tell("preview", map=payload(self.whole().view()))

    def whole(self) -> TokenMap:
        """The map as far as it is known."""
        meta = dict(self._map.meta)
        for name, values in self._by_row.items():
            is_one = name in ("target", "explains") and len(set(map(str, values))) == 1
            meta[name] = values[0] if is_one else values
        return TokenMap(
            scores=self._scores,
            out_tokens=tuple(self._tokens),
            in_tokens=self._map.in_tokens,
            method=self._map.method,
            bias_share=self._bias,
            meta=meta,
        )
