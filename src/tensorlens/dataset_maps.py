"""Maps of a data set: inputs into batches, batches into maps, each proved to be what it is alone.

Samples of similar length go together, padded at their end where the model's padding is exactly silent. That is checked
and not believed: of the first batch, of every fiftieth and of each that takes another way through the model one sample
is mapped alone and compared, and of all the shortest, padded to the longest. Where padding is heard only samples of one
length go together, and where a model mixes samples they go one by one; the maps say so.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, Generic, Literal, TypeVar

import torch
from tqdm import tqdm

from tensorlens import cancel
from tensorlens.batch import Batch, Source, difference, map_of
from tensorlens.device_work import aside, beside
from tensorlens.errors import InputError, NotLinearError, TensorLensError
from tensorlens.freezing.interception import left_alone
from tensorlens.maps.methods import check_question
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import clear_memory, free_bytes, is_out_of_memory
from tensorlens.models.collated import has_sample_axis, length_of
from tensorlens.models.forward_signature import vocabulary_size
from tensorlens.models.inputs import ModelInput
from tensorlens.models.module_tree import parameters
from tensorlens.models.plain_pass import stepwise
from tensorlens.models.precision import tf32, tf32_allowed
from tensorlens.models.rows import row_error
from tensorlens.padded_lengths import Lengths, forget, recall, remember, widened

Found = TypeVar("Found")
"""What is wanted of each sample: a map, or several."""

Pending = Callable[[], list[Found]]
"""What was found of some samples, with the work under way: a call waits for it."""

Together = Literal["padded", "by length", "one by one"]
"""Which samples share a recording."""

NEXT: dict[Together, Together] = {"padded": "by length", "by length": "one by one"}
WINDOW = 16
"""Batches whose samples are sorted by length together."""
CHECK_EVERY = 50
"""Batches between two samples that are mapped alone for comparison."""
FEW = 8
"""Samples that are enough to show that a model mixes them."""
MANY = 64
"""Samples of which one at random is hardly just the one that a model goes by for all."""
MOST_SAMPLES = {"cuda": 512, "cpu": 16}
"""Samples at a time: enough that a GPU has more to do than Python, and a CPU's cache holds few."""
MEMORY_SHARE = 0.5
"""Part of the free memory that a batch is planned to take, by the estimate for its graph: see `GRAPH_SHARE`."""


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
        check_question(self.method, self.target, probes=self.probes, seed=self.seed)


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
    return chain.from_iterable(stepwise(_windows(lens, inputs, rows, _Maps(lens, asked, batch_size), progress)))


def _windows(
    lens: Source, inputs: Iterable[Any], rows: Rows, work: _Maps, progress: bool | None
) -> Iterator[list[TokenMap]]:
    total = len(inputs) if isinstance(inputs, Sized) else None
    disable = None if progress is None else not progress
    waiting, first = iter(inputs), rows.first
    with tqdm(total=total, unit="map", delay=1, leave=False, disable=disable) as bar:
        while window := list(islice(waiting, WINDOW * work.most)):
            good = rows.good(lens, window, first)
            with left_alone(lens.model):
                found = work.window(good, done=bar.update)
            yield found
            first += len(window)


class Work(ABC, Generic[Found]):
    """How many samples go together, and which; learnt as it goes.

    Args:
        lens: The model.
        batch_size: Samples at a time; as many as go into free memory if None.
        asked: Names of the methods.
        seed: Of the choice of a sample that is compared with what it is alone.
    """

    def __init__(self, lens: Source, batch_size: int | None, asked: Sequence[str], seed: int = 0) -> None:
        self.lens, self.batch_size = lens, batch_size
        self._asked = lens.rules, *asked
        self.together: Together = "padded"
        self.n_batches = 0
        self._ways: set[int] = set()
        self._depths: set[int] = set()
        self._is_new_way = self._is_open = False
        self._cuts: Callable[[], bool] = lambda: False
        self.reason = ""
        self._free: int | None = None
        self._covered: Lengths = {}
        self._random = random.Random(seed)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.lens.model.parameters()).device

    @property
    def most(self) -> int:
        """Samples at a time, at most."""
        return self.batch_size or MOST_SAMPLES.get(self.device.type, 16)

    @abstractmethod
    def begin_batch(self, prepared: list[ModelInput]) -> Pending[Found]:
        """Begin the work on several samples together."""

    @abstractmethod
    def alone(self, prepared: ModelInput) -> Found:
        """What one sample is by itself."""

    @abstractmethod
    def agree(self, one: Found, other: Found) -> bool:
        """Whether two findings of one sample are the same to rounding."""

    @abstractmethod
    def noted(self, found: Found) -> Found:
        """The same, saying how samples went together if that is worth saying."""

    def window(self, prepared: Sequence[ModelInput], done: Callable[[int], Any] = lambda n: None) -> list[Found]:
        """What is found of some samples, in their order; `done` is told how many at a time."""
        found: dict[int, Found] = {}
        self._covered = recall(self.lens.model, self._asked)
        waiting = list(self._batches(prepared))
        begun: list[tuple[list[int], Pending[Found]]] = []
        while waiting:
            cancel.check()
            some = waiting.pop(0)
            try:
                pending = self._begin([prepared[i] for i in some])
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(some) == 1:
                    raise
                pending = None
            if pending is None:  # out of memory: from now on half as many
                clear_memory()
                self.batch_size = half = (len(some) + 1) // 2
                waiting = [rest[i : i + half] for rest in (some, *waiting) for i in range(0, len(rest), half)]
                continue
            begun.append((some, pending))
            # One batch is on the device while the maps of the one before it are made.
            while len(begun) > bool(waiting):
                rows, pending = begun.pop(0)
                found |= _finished(rows, pending)
                done(len(rows))
        return [found[i] for i in range(len(prepared))]

    def _batches(self, prepared: Sequence[ModelInput]) -> Iterator[list[int]]:
        """Samples of one kind and near in length; the longest first, then sizes that need no audit for that."""
        kinds = [(_kind(one), max(1, length_of(one))) for one in prepared]
        order = sorted(range(len(prepared)), key=kinds.__getitem__)
        for kind, group in groupby(order, key=lambda i: kinds[i][0]):
            made = list(self._of_one_kind(group, [length for _, length in kinds]))
            shortest, longest = kinds[made[0][0]][1], kinds[made[-1][-1]][1]
            if self.together == "padded" and self.most > 1 and not self._is_covered(kind, shortest, longest):
                made = widened(made)
            yield from (*made[-1:], *made[:-1])

    def _of_one_kind(self, group: Iterable[int], lengths: list[int]) -> Iterator[list[int]]:
        """Samples of one kind, which come sorted by length, in batches."""
        some: list[int] = []
        most, most_tokens = self.most, self._most_tokens
        for i in group:
            length = lengths[i]  # the longest so far, and so that of the batch when padded
            is_full = len(some) == most or (len(some) + 1) * length > most_tokens
            is_other = some and self.together == "by length" and length != lengths[some[0]]
            if some and (is_full or is_other or self.together == "one by one"):
                yield some
                some = []
            some.append(i)
        yield some

    def _is_covered(self, kind: tuple[str, ...], shortest: int, longest: int) -> bool:
        """Whether a sample as short was padded to such a length and compared with what it is alone."""
        first, last = self._covered.get(kind, (longest, longest))
        return first <= shortest and longest <= last

    @property
    def _most_tokens(self) -> float:
        """Tokens that go into a batch by the memory that is free."""
        if self.batch_size is not None:
            return math.inf
        if self._free is None:
            self._free = free_bytes(self.device)
        return MEMORY_SHARE * self._free / self._bytes_per_token

    @cached_property
    def _bytes_per_token(self) -> int:
        """About what the graph of a pass keeps for a token: two numbers for each channel that a weight gives."""
        n_ids = vocabulary_size(self.lens.model)  # of which a pass keeps nothing
        weights = [p for p in parameters(self.lens.model) if p.dim() == 2 and n_ids not in p.shape]
        return max(1, sum(2 * max(4, p.dtype.itemsize) * max(p.shape) for p in weights))

    def _begin(self, prepared: list[ModelInput]) -> Pending[Found]:
        """Begin the work on one batch; of one that is checked, a sample goes alone while the device works."""
        stream = aside(self.device)
        if self.together == "one by one" or len(prepared) == 1 or not all(map(has_sample_axis, prepared)):
            found = [self.noted(self.alone(one)) for one in prepared]
            return lambda: found
        if self.together == "by length" and len(set(map(length_of, prepared))) > 1:  # planned before that was known
            found = self._regrouped(prepared)
            return lambda: found
        try:
            pending = self.begin_batch(prepared)
        except (RuntimeError, TensorLensError) as error:
            is_own = isinstance(error, TensorLensError) and not isinstance(error, NotLinearError)
            if is_own or is_out_of_memory(error):
                raise
            found = self.apart(prepared, f"the model takes no batch of them ({str(error).splitlines()[0]})")
            return lambda: found
        if self._is_open:
            found = self.apart(prepared, "how many blocks run depends on the input")
            return lambda: found
        checked, together, covered = self._checked(prepared), self.together, dict(self._covered)

        def finish() -> list[Found]:
            if self.together != together:  # the batch before has shown meanwhile that these do not go together
                return self._regrouped(prepared)
            with beside(stream):
                alone = {i: self.alone(prepared[i]) for i in checked}
            made = pending()
            other = [i for i, one in alone.items() if not self.agree(made[i], one)]
            if not other or self._agree_strictly(prepared, other):
                if checked:
                    remember(self.lens.model, self._asked, covered)
                return [self.noted(one) for one in made]
            return self.apart(prepared, "together they give other numbers than alone")

        return finish

    def note_way(self, batch: Batch) -> None:
        """What a batch showed of the model: one sample may send all others its own way, such as past an early exit."""
        recording, self._cuts = batch.replay.recording, lambda: batch.was_cut
        self._is_new_way = recording.signature not in self._ways
        self._ways.add(recording.signature)
        self._depths.add(recording.n_blocks)
        self._is_open = len(self._depths) > 1 or recording.anatomy.leaves_blocks_out

    def _checked(self, prepared: list[ModelInput]) -> list[int]:
        """The samples to check this batch with; none for most batches.

        One that is padded if there is one, and the shortest where none as short was padded so far: code may branch by
        length, as rotary embeddings do that stretch. Where samples were cut out of the batch two more, since those that
        are padded are mapped alone in any case; and where it was one of few, since what a model takes from one sample
        for all is right for that one.
        """
        was_cut, self._cuts = self._cuts(), lambda: False
        self.n_batches += 1
        lengths, kind = [length_of(one) for one in prepared], _kind(prepared[0])
        shortest, longest = min(lengths), max(lengths)
        is_wide = not self._is_covered(kind, shortest, longest)
        if (self.n_batches - 1) % CHECK_EVERY and not self._is_new_way and not is_wide:
            return []
        widest = [lengths.index(shortest)] if is_wide else []
        self._covered[kind] = (shortest, longest) if is_wide else self._covered.get(kind, (longest, longest))
        padded = [i for i, length in enumerate(lengths) if length < longest]
        first = self._random.choice(padded or range(len(prepared)))
        if not was_cut and len(padded or prepared) >= MANY:
            return [*dict.fromkeys((*widest, first))]
        full = [i for i, length in enumerate(lengths) if length == longest]
        third = widest if widest and not was_cut else [*widest, full[0]]
        return [*dict.fromkeys((*third, first, full[-1]))]

    def _agree_strictly(self, prepared: list[ModelInput], checked: list[int]) -> bool:
        """Compare samples with a few others, without tf32, whose rounding differs with the size of a batch."""
        if not tf32_allowed():
            return False
        others = sorted((k for k in range(len(prepared)) if k not in checked), key=lambda k: -length_of(prepared[k]))
        with tf32(False):
            together = self.begin_batch([prepared[k] for k in (*checked, *others)[:FEW]])()
            return all(self.agree(made, self.alone(prepared[i])) for made, i in zip(together, checked, strict=False))

    def apart(self, prepared: list[ModelInput], reason: str) -> list[Found]:
        """The same samples with fewer of them together, from now on."""
        is_padded = len(set(map(length_of, prepared))) > 1
        self.together = NEXT[self.together] if self.together == "padded" and is_padded else "one by one"
        self.reason = f"samples go {self.together}: {reason}"
        self.n_batches = 0  # the next batch is checked again
        forget(self.lens.model)
        return self._regrouped(prepared)

    def _regrouped(self, prepared: list[ModelInput]) -> list[Found]:
        """What is found of samples that go together no longer."""
        found: dict[int, Found] = {}
        for some in self._batches(prepared):
            found |= _finished(some, self._begin([prepared[i] for i in some]))
        return [found[i] for i in range(len(prepared))]


class _Maps(Work[TokenMap]):
    """One map of each sample."""

    def __init__(self, lens: Source, asked: Asked, batch_size: int | None) -> None:
        super().__init__(lens, batch_size, [asked.method], asked.seed)
        self.asked = asked

    def begin_batch(self, prepared: list[ModelInput]) -> Pending[TokenMap]:
        """Proved by one sample of the first batch, and again every so often."""
        asked = self.asked
        batch = Batch(self.lens, prepared, methods=(asked.method,), probes=asked.probes)
        self.note_way(batch)
        pending = batch.begin(asked.method, asked.out_token, asked.target, probes=asked.probes, seed=asked.seed)
        batch.release()
        return pending

    def alone(self, prepared: ModelInput) -> TokenMap:
        """By a recording of its own."""
        asked, tensor = self.asked, self.lens(prepared)
        return map_of(tensor, asked.method, asked.out_token, asked.target, probes=asked.probes, seed=asked.seed)

    def agree(self, one: TokenMap, other: TokenMap) -> bool:
        """By their difference."""
        return agree(one, other, next(self.lens.model.parameters()).dtype)

    def noted(self, found: TokenMap) -> TokenMap:
        """In the map's `meta`."""
        return replace(found, meta=found.meta | {"batches": self.reason}) if self.reason else found


def _finished(rows: list[int], pending: Pending[Found]) -> dict[int, Found]:
    return dict(zip(rows, pending(), strict=True))


def _kind(prepared: ModelInput) -> tuple[str, ...]:
    """What samples of one batch have in common: the names of their arguments, and shapes that cannot be padded."""
    shapes = [
        f"{name}{tuple(value.shape[2:] if name in ('input_ids', 'inputs_embeds') else value.shape)}"
        for name, value in sorted(prepared.arguments.items())
        if isinstance(value, torch.Tensor)
    ]
    return tuple(shapes)


def agree(one: TokenMap, other: TokenMap, dtype: torch.dtype | None = None) -> bool:
    """Whether two maps of one sample are the same to the rounding of a model of that type."""
    error, tolerance = difference(one, other, dtype)
    return error <= tolerance
