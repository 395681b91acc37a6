"""Maps of a data set: inputs into batches, batches into maps, each proved to be what it is alone.

Samples of similar length go together, padded at their end where the model's padding is exactly silent. That is checked
and not believed: of the first batch and of every fiftieth one sample is mapped alone and compared. Where padding is
heard only samples of one length go together, and where a model mixes samples they go one by one; the maps say so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import Any, Literal

import torch
from tqdm import tqdm

from tensorlens import cancel
from tensorlens.batch import Batch, Source, has_sample_axis, length_of, map_of
from tensorlens.errors import InputError, TensorLensError
from tensorlens.maps.methods import check_question
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import clear_memory, free_bytes, is_out_of_memory
from tensorlens.models.inputs import ModelInput
from tensorlens.models.precision import in_float64, tf32, tf32_allowed
from tensorlens.models.rows import row_error

Together = Literal["padded", "by length", "one by one"]
"""Which samples share a recording."""

NEXT: dict[Together, Together] = {"padded": "by length", "by length": "one by one"}
WINDOW = 16
"""Batches whose samples are sorted by length together."""
CHECK_EVERY = 50
"""Batches between two samples that are mapped alone for comparison."""
MOST_SAMPLES = {"cuda": 256, "cpu": 16}
"""Samples at a time: more make a GPU no faster, and a CPU's cache holds few."""
MEMORY_SHARE = 0.3
"""Part of the free memory that a batch may take, by the estimate for its factors."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of every sample; see `Lens.maps`."""

    method: str
    out_token: int = -1
    target: Target | None = None
    probes: int | None = None
    seed: int = 0

    def check(self) -> None:
        """Refuse a question that no sample could answer, before any work."""
        check_question(self.method, self.target, probes=self.probes)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What becomes of inputs that the model cannot take; see `Lens.maps`."""

    on_error: Literal["raise", "skip"] = "raise"
    skipped: list[tuple[int, str]] = field(default_factory=list)
    truncate: bool = False
    first: int = 0

    def good(self, lens: Source, values: Sequence[Any], first: int) -> list[ModelInput]:
        """The inputs of those rows that can be mapped; the first of them is row `first`."""
        good = []
        for row, made in enumerate(lens.prepare_all(values, truncate=self.truncate), first):
            if isinstance(made, ModelInput):
                good.append(made)
            elif self.on_error == "raise":
                raise row_error(row, made) from made
            else:
                self.skipped.append((row, str(made)))
        return good


def maps(
    lens: Source, inputs: Iterable[Any], asked: Asked, rows: Rows, *, batch_size: int | None = None,
    progress: bool | None = None,
) -> Iterator[TokenMap]:  # fmt: skip
    """The maps of all inputs, in their order."""
    asked.check()
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise InputError(f"`batch_size` must be a whole number of at least 1; got {batch_size!r}.")
    if rows.on_error not in ("raise", "skip"):
        raise InputError(f"`on_error` must be 'raise' or 'skip'; got {rows.on_error!r}.")
    return _maps(lens, inputs, rows, _Work(lens, asked, batch_size), progress)


def _maps(lens: Source, inputs: Iterable[Any], rows: Rows, work: _Work, progress: bool | None) -> Iterator[TokenMap]:
    total = len(inputs) if isinstance(inputs, Sized) else None
    disable = None if progress is None else not progress
    waiting, first = iter(inputs), rows.first
    with tqdm(total=total, unit="map", delay=1, leave=False, disable=disable) as bar:
        while window := list(islice(waiting, WINDOW * work.most)):
            for found in work.window(rows.good(lens, window, first)):
                bar.update()
                yield found
            first += len(window)


class _Work:
    """How many samples go together, and which; learnt as it goes."""

    def __init__(self, lens: Source, asked: Asked, batch_size: int | None) -> None:
        self.lens, self.asked, self.batch_size = lens, asked, batch_size
        self.together: Together = "padded"
        self.n_batches = 0
        self.reason = ""
        self._random = random.Random(asked.seed)

    @property
    def most(self) -> int:
        """Samples at a time, at most."""
        device = next(self.lens.model.parameters()).device
        return self.batch_size or MOST_SAMPLES.get(device.type, 16)

    def window(self, prepared: Sequence[ModelInput]) -> Iterator[TokenMap]:
        """The maps of some samples, in their order."""
        found: dict[int, TokenMap] = {}
        order = sorted(range(len(prepared)), key=lambda i: (_kind(prepared[i]), length_of(prepared[i])))
        waiting = list(self._batches(prepared, order))
        while waiting:
            cancel.check()
            some = waiting.pop(0)
            try:
                made = self._maps([prepared[i] for i in some])
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(some) == 1:
                    raise
                made = None
            if made is None:  # out of memory: from now on half as many
                clear_memory()
                self.batch_size = half = (len(some) + 1) // 2
                waiting = [rest[i : i + half] for rest in (some, *waiting) for i in range(0, len(rest), half)]
                continue
            found |= dict(zip(some, made, strict=True))
        for i in range(len(prepared)):
            yield found[i]

    def _batches(self, prepared: Sequence[ModelInput], order: list[int]) -> Iterator[list[int]]:
        """Samples that go together: of one kind, and near in length."""
        for _, group in groupby(order, key=lambda i: _kind(prepared[i])):
            same = list(group)
            longest = max(length_of(prepared[i]) for i in same)
            most = 1 if self.together == "one by one" else self._fitting(longest)
            if self.together == "by length":
                for _, of_length in groupby(same, key=lambda i: length_of(prepared[i])):
                    yield from _chunks(list(of_length), most)
            else:
                yield from _chunks(same, most)

    def _fitting(self, n_tokens: int) -> int:
        if self.batch_size is not None or not n_tokens:
            return self.most
        device = next(self.lens.model.parameters()).device
        each = max(1, n_tokens * sum(max(p.shape) * 8 for p in self.lens.model.parameters() if p.dim() == 2))
        return max(1, min(self.most, int(MEMORY_SHARE * free_bytes(device) / each)))

    def _maps(self, prepared: list[ModelInput]) -> list[TokenMap]:
        if self.together == "one by one" or len(prepared) == 1 or not all(map(has_sample_axis, prepared)):
            return [self._noted(self._alone(one)) for one in prepared]
        try:
            made = self._batch_maps(prepared)
        except TensorLensError:
            raise
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            return self._apart(prepared, f"the model takes no batch of them ({str(error).splitlines()[0]})")
        check, self.n_batches = self.n_batches % CHECK_EVERY == 0, self.n_batches + 1
        if check:
            shorter = [i for i, one in enumerate(prepared) if length_of(one) < max(map(length_of, prepared))]
            i = self._random.choice(shorter or range(len(prepared)))
            if not agree(made[i], self._alone(prepared[i])) and not self._agree_strictly(prepared, i):
                return self._apart(prepared, "together they give other numbers than alone")
        return [self._noted(one) for one in made]

    def _agree_strictly(self, prepared: list[ModelInput], i: int) -> bool:
        """The comparison once more without tf32, whose rounding differs with the size of a batch."""
        if not tf32_allowed():
            return False
        with tf32(False):
            return agree(self._batch_maps(prepared)[i], self._alone(prepared[i]))

    def _batch_maps(self, prepared: list[ModelInput]) -> list[TokenMap]:
        asked = self.asked
        batch = Batch(self.lens, prepared, for_method=asked.method)
        return batch.maps(asked.method, asked.out_token, asked.target, probes=asked.probes, seed=asked.seed)

    def _apart(self, prepared: list[ModelInput], reason: str) -> list[TokenMap]:
        """The same samples with fewer of them together, from now on."""
        is_padded = len(set(map(length_of, prepared))) > 1
        self.together = NEXT[self.together] if self.together == "padded" and is_padded else "one by one"
        self.reason = f"samples go {self.together}: {reason}"
        order = sorted(range(len(prepared)), key=lambda i: length_of(prepared[i]))
        self.n_batches = 0  # the next batch is checked again
        found: dict[int, TokenMap] = {}
        for some in self._batches(prepared, order):
            found |= dict(zip(some, self._maps([prepared[i] for i in some]), strict=True))
        return [found[i] for i in range(len(prepared))]

    def _alone(self, prepared: ModelInput) -> TokenMap:
        asked, tensor = self.asked, self.lens(prepared)
        return map_of(tensor, asked.method, asked.out_token, asked.target, probes=asked.probes, seed=asked.seed)

    def _noted(self, found: TokenMap) -> TokenMap:
        return replace(found, meta=found.meta | {"batches": self.reason}) if self.reason else found


def _kind(prepared: ModelInput) -> tuple[str, ...]:
    """What samples of one batch have in common: the names of their arguments, and shapes that cannot be padded."""
    shapes = [
        f"{name}{tuple(value.shape[2:] if name in ('input_ids', 'inputs_embeds') else value.shape)}"
        for name, value in sorted(prepared.arguments.items())
        if isinstance(value, torch.Tensor)
    ]
    return tuple(shapes)


def _chunks(items: list[int], size: int) -> Iterator[list[int]]:
    return (items[i : i + size] for i in range(0, len(items), size))


def agree(one: TokenMap, other: TokenMap) -> bool:
    """Whether two maps of one sample are the same to rounding."""
    if one.scores.shape != other.scores.shape:
        return False
    tolerance = min(0.1, 100 * torch.finfo(one.scores.dtype).eps ** 0.75)
    scale = in_float64(other.scores).norm().clamp_min(torch.finfo(torch.float64).tiny)
    return bool((in_float64(one.scores) - in_float64(other.scores)).norm() <= tolerance * scale)
