"""`Batch`: several inputs that share one recording; and the maps of a data set, made in batches.

The program of a batch is block-diagonal, F(X₁, …, X_b) = (T₁X₁ + B₁, …, T_bX_b + B_b), so one pull gives every sample's
own row. That samples do not mix is checked, not assumed: no fixed value may combine several of them, and no sample may
reach another. Shorter texts are padded at their end. In the first batch the shortest sample and one at random are also
mapped alone; if padding changes them, only samples of equal length are batched, and if that does not help, each is
mapped alone. The maps' `meta` says so.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from msgspec.structs import replace
from tqdm import tqdm

from tensorlens import cancel
from tensorlens.errors import InputError, MethodError, TensorLensError, check_iterable
from tensorlens.maps.defaults import METHOD, OUT_TOKEN, has_one_row, one_output, own_prediction
from tensorlens.maps.methods import (
    METHODS,
    Question,
    Scored,
    begin_finishing,
    begin_predictions,
    check_question,
    joins_norms,
)
from tensorlens.maps.targets import Target
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import SHARE_OF_BATCH, clear_memory, free_bytes, is_out_of_memory
from tensorlens.models.forward_signature import vocabulary_size
from tensorlens.models.inputs import ModelInput
from tensorlens.models.modes import own_modes, stepwise
from tensorlens.models.precision import in_float64, tf32_allowed
from tensorlens.models.samples import Collated, has_sample_axis, length_of, row_error
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.recording.recording import Recording, Span
from tensorlens.specimen import Specimen
from tensorlens.tensor import AttentionTensor, Context
from tensorlens.tolerances import repeated
from tensorlens.views.printing import Printed

Together = Literal["padded", "by length", "one by one"]
"""Which samples share a recording."""

NEXT: dict[Together, Together] = {"padded": "by length", "by length": "one by one"}

WINDOW = 16
"""Batches whose samples are sorted by length together."""

MOST_SAMPLES = {"cuda": 512, "cpu": 16}
"""Samples per batch: enough to keep a GPU busier than Python, few for a CPU's cache."""

MIXED = "samples go one by one: {} combines several of them"
DIFFERENT = "samples go {}: batched results differ from single ones"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is asked of every sample; see `Lens.maps`."""

    methods: tuple[str, ...]
    out_token: int = OUT_TOKEN
    target: Target | None = None
    probes: int | None = None
    seed: int = 0
    raw: bool = False

    def check(self) -> None:
        """Refuse a question that no sample could answer, before any work."""
        if not self.methods:
            raise InputError("Expected at least one method; got none.")
        for name in self.methods:
            check_question(name, self.target if METHODS.get(name) and METHODS[name].takes_target else None)
        if self.target is not None and not any(METHODS[name].takes_target for name in self.methods):
            check_question(self.methods[0], self.target)
        if "tensor.norm" in self.methods or self.probes is not None:
            check_question("tensor.norm", probes=self.probes, seed=self.seed)
        if self.probes is not None and "tensor.norm" not in self.methods:
            check_question(self.methods[0], probes=self.probes)
        if self.raw and not any(map(joins_norms, self.methods)):
            check_question(self.methods[0], raw=True)

    def options(self, name: str) -> dict[str, Any]:
        """What `AttentionTensor.map` takes for one of the methods."""
        target = {"target": self.target} if METHODS[name].takes_target else {}
        raw = {"raw": True} if self.raw and joins_norms(name) else {}
        return target | raw | ({"probes": self.probes, "seed": self.seed} if name == "tensor.norm" else {})


@dataclass(frozen=True, kw_only=True)
class Rows:
    """What to do with inputs that the model cannot take; see `Lens.maps`."""

    on_error: Literal["raise", "skip"] = "raise"
    skipped: list[tuple[int, str]] = field(default_factory=list)
    truncate: bool = False
    first: int = 0

    def good(self, specimen: Specimen, values: Sequence[Any], first: int) -> list[ModelInput]:
        """The inputs of those rows that can be mapped; the first of them is row `first`."""
        good = []
        for row, made in enumerate(specimen.prepare_all(values, truncate=self.truncate), first):
            if isinstance(made, ModelInput):
                good.append(made)
            elif self.on_error == "raise":
                raise row_error(row, made) from made
            else:
                self.skipped.append((row, str(made)))
        return good


# One batch ------------------------------------------------------------------------------------------------------------


class Batch(Sequence[AttentionTensor], Printed):
    """Several inputs whose maps share one recording; and the attention tensor of each. Made by `Lens.batch`.

    Args:
        specimen: The model.
        prepared: The inputs.
    """

    def __init__(self, specimen: Specimen, prepared: Sequence[ModelInput]) -> None:
        if not prepared:
            raise InputError("A batch needs at least one input; got none.")
        self.specimen, self.prepared = specimen, tuple(prepared)
        collated = Collated(prepared, specimen.model, specimen.pad_id)
        self.is_padded = collated.is_padded
        self.recording = specimen.record(collated.arguments, n_samples=len(prepared))
        n_tokens = self.recording.states[0].shape[1]
        self.lengths = tuple(length or n_tokens for length in collated.lengths)
        self._shared: dict[Any, dict[Any, Any]] = {}
        self._contexts: dict[int, Context] = {}
        self._tensors: WeakValueDictionary[int, AttentionTensor] = WeakValueDictionary()

    def __repr__(self) -> str:
        """One line: how many inputs, and how long they are."""
        ends = dict.fromkeys([min(self.lengths), max(self.lengths)])
        return f"Batch({len(self)} inputs of {' to '.join(map(str, ends))} tokens)"

    def __len__(self) -> int:
        return len(self.prepared)

    def __iter__(self) -> Iterator[AttentionTensor]:
        return (self[i] for i in range(len(self)))

    @own_modes
    def __getitem__(self, i: Any) -> Any:
        """The attention tensor of one sample, from its own recording, independent of the others."""
        if isinstance(i, slice):
            return [self[one] for one in range(*i.indices(len(self)))]
        i = check_token(i, len(self), "sample")
        found = self._tensors.get(i)
        if found is None:
            found = self._tensors[i] = self.specimen.look(self.prepared[i])
        return found

    @cached_property
    def mixing(self) -> str | None:
        """What mixes samples, or None if no fixed value combines several and nothing passes between them."""
        if len(self) == 1:
            return None
        return self.recording.mixes_samples or ("something carried" if carries_across(self.recording) else None)

    def check(self) -> None:
        """Refuse samples whose batched results differ from single ones.

        Raises:
            InputError: the model mixes samples, or padding changes results.
        """
        if self.is_separable():
            return
        raise InputError(
            "This model mixes samples or reacts to padding: batched results differ from single ones. Use `lens.maps`, "
            "which groups samples safely."
        )

    def is_separable(self) -> bool:
        """Whether samples stay separate, and two of them give the same results as alone."""
        return len(self) == 1 or self.mixing is None and all(map(self._is_as_alone, {self._shortest, 0}))

    @property
    def _shortest(self) -> int:
        return min(range(len(self)), key=lambda i: (self.lengths[i], -i))  # the last of them

    def _is_as_alone(self, i: int) -> bool:
        alone = self.specimen.look(self.prepared[i]).output
        state = self.recording.states[-1][i, : len(alone)]
        return bool((state - alone).norm() <= _rounding(alone.dtype, alone.is_cuda) * alone.norm())

    @own_modes
    def maps(
        self,
        method: str = METHOD,
        out_token: int = OUT_TOKEN,
        target: Target | None = None,
        *,
        targets: Sequence[Target] | None = None,
        probes: int | None = None,
        seed: int = 0,
    ) -> list[TokenMap]:
        """A map of one output of each sample; see `AttentionTensor.map`.

        Args:
            method: A name in `METHODS`.
            out_token: The output to explain; negative ones count from each sample's own end.
            target: For `tensor.in_class`.
            targets: The same, one per sample, instead of one for all.
            probes: For `tensor.norm`.
            seed: Random seed for the probes.
        """
        check_question(method, target, probes=probes, seed=seed)
        targets = None if targets is None else check_iterable(targets, "targets", "a target for each sample")
        if targets is not None and len(targets) != len(self):
            raise InputError(f"`targets` must be one for each of the {len(self)} samples; got {len(targets)}.")
        begun = self.begin(method, out_token, target, targets=targets, probes=probes and int(probes), seed=int(seed))
        if begun is not None:
            return begun()
        each = zip(self, [target] * len(self) if targets is None else targets, strict=True)
        sketch = {"probes": probes, "seed": seed} if method == "tensor.norm" else {}
        return [map_alone(one, method, out_token, {"target": its, **sketch}) for one, its in each]

    def begin(
        self,
        method: str,
        out_token: int,
        target: Target | None = None,
        *,
        targets: Sequence[Target] | None = None,
        probes: int | None = None,
        seed: int = 0,
        raw: bool = False,
        asked: Collection[str] = (),
    ) -> Callable[[], list[TokenMap]] | None:
        """Start the maps of all samples on the device; the result waits for them. None if each goes alone."""
        recording = self.recording
        if not METHODS[method].takes_samples or recording.n_encoder_blocks:  # whose outputs are those of a second text
            return None
        n_out = recording.states[-1].shape[1]
        same = n_out == recording.states[0].shape[1]
        places = tuple(check_token(out_token, n if same else n_out) for n in self.lengths)
        key = (places, repr(target), repr(targets))
        question = Question(
            operator=FrozenOperator(recording),
            out_tokens=(0,) * len(self) if has_one_row(recording, method) else places,
            samples=tuple(range(len(self))),
            lengths=self.lengths,
            target=target,
            targets=targets,
            probes=probes,
            seed=seed,
            raw=raw,
            classes=self.specimen.classes(recording),
            asked=frozenset(asked),
            shared=self._shared.setdefault(key, {}),
        )
        try:
            waiting = begin_finishing(METHODS[method].compute(question), question.classes)
        except MethodError:  # each sample alone says why, or has another way
            return None
        said = begin_predictions(question)

        def finish() -> list[TokenMap]:
            found, best = waiting(), said()
            return [self._map(i, method, places[i], found, best[i]) for i in range(len(self))]

        return finish

    def _map(self, i: int, method: str, place: int, found: Scored, best: str | None) -> TokenMap:
        context = self._context(i)
        labels = context.out_tokens or context.tokens
        pools = has_one_row(self.recording, method)
        meta = found.meta(i)
        return TokenMap(
            scores=found.scores[i : i + 1, : self.lengths[i]],
            out_tokens=(meta["target"],) if pools else (labels[place],),
            in_tokens=context.tokens,
            method=method,
            bias_share=found.bias_share[i : i + 1],
            meta=context.meta
            | {
                "out_positions": [0 if pools else place],
                "blocks": [0, self.recording.n_blocks],
                "heads": None,
                "rules": self.recording.rules.as_dict(),
                "certificate": None,
            }
            | meta
            | ({} if best is None else {"prediction": best}),
        )

    def _context(self, i: int) -> Context:
        if i not in self._contexts:
            self._contexts[i] = self.specimen.context(self.prepared[i], self.recording, n_tokens=self.lengths[i])
        return self._contexts[i]


def carries_across(recording: Recording) -> bool:
    """Whether one sample reaches another: the program is run with NaN in all other samples."""
    x, span = recording.states[0], Span(0, recording.n_blocks)
    for first in (0, 1):
        probe = torch.zeros_like(x)
        probe[first::2] = torch.nan
        found = recording.push(probe, span, linear=True)
        if bool(found[1 - first :: 2].isnan().any()):
            return True
    return False


def _rounding(dtype: torch.dtype, is_cuda: bool) -> float:
    """Accepted difference between a sample alone and in a batch; norms may be cast to float32 whatever the states."""
    return repeated(dtype, in_tf32=is_cuda and tf32_allowed())


def map_alone(tensor: AttentionTensor, method: str, out_token: int, options: dict[str, Any]) -> TokenMap:
    """The map of one sample alone, in the form of data set maps, with the model's prediction."""
    recording, classes = tensor.operator.recording, tensor.context.classes
    pools = has_one_row(recording, method)
    found = tensor.map(method, None if pools else out_token, **options)
    if recording.readout is None or classes is None:
        return found
    logits = recording.logits(recording.readout, one_output(recording, out_token))
    best = int(own_prediction(logits[tensor.operator.sample]))
    return replace(found, meta=found.meta | {"prediction": classes.name(best)})


# A data set -----------------------------------------------------------------------------------------------------------

Maps = dict[str, TokenMap | TensorLensError]
"""The maps of one sample by method, or the reason there are none."""


def dataset_maps(
    specimen: Specimen,
    inputs: Iterable[Any],
    asked: Asked,
    rows: Rows,
    *,
    batch_size: int | None = None,
    progress: bool | None = None,
) -> Iterator[Maps]:
    """The maps of all inputs, in their order."""
    asked.check()
    if batch_size is not None and (type(batch_size) is not int or batch_size < 1):
        raise InputError(f"`batch_size` must be a whole number of at least 1; got {batch_size!r}.")
    if rows.on_error not in ("raise", "skip"):
        raise InputError(f"`on_error` must be 'raise' or 'skip'; got {rows.on_error!r}.")
    work = DatasetMaps(specimen, asked, batch_size)
    return chain.from_iterable(stepwise(_windows(work, inputs, rows, progress)))


def _windows(work: DatasetMaps, inputs: Iterable[Any], rows: Rows, progress: bool | None) -> Iterator[list[Maps]]:
    total = len(inputs) if isinstance(inputs, Sized) else None
    disable = None if progress is None else not progress
    waiting, first = iter(inputs), rows.first
    with tqdm(total=total, unit="map", delay=1, leave=False, disable=disable) as bar:
        while window := list(islice(waiting, WINDOW * work.most)):
            yield work.window(rows.good(work.specimen, window, first), done=bar.update)
            first += len(window)


class DatasetMaps:
    """Makes maps of samples in batches; learns on the way how many, and which, can be batched.

    Args:
        specimen: The model.
        asked: What is asked of every sample.
        batch_size: Samples per batch; as many as fit into free memory if None.
    """

    def __init__(self, specimen: Specimen, asked: Asked, batch_size: int | None = None) -> None:
        self.specimen, self.asked, self.batch_size = specimen, asked, batch_size
        self.together: Together = "padded"
        self.reason = ""
        self._is_checked = False
        self._alone: set[str] = set()
        """Methods whose batched maps differ from single ones."""
        self._random = random.Random(asked.seed)
        self._held: float | None = None

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.specimen.model.parameters()).device

    @property
    def most(self) -> int:
        """Largest number of samples per batch."""
        return self.batch_size or MOST_SAMPLES.get(self.device.type, 16)

    def window(self, prepared: Sequence[ModelInput], done: Callable[[int], Any] = lambda n: None) -> list[Maps]:
        """The maps of some samples, in order; `done` is called with the number finished each time."""
        found: dict[int, Maps] = {}
        waiting = list(self._batches(prepared, range(len(prepared))))
        is_guessed = self._held is None and self.batch_size is None
        begun: list[tuple[list[int], Callable[[], list[Maps]]]] = []
        while waiting or begun:
            cancel.check()
            if waiting:
                some = waiting.pop(0)
                try:
                    begun.append((some, self._begin([prepared[i] for i in some])))
                except (torch.OutOfMemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error) or len(some) == 1:
                        raise
                    waiting = self._halved([some, *waiting])
                    continue
                if is_guessed and self._held is not None:  # the first batch has shown how much a token takes
                    waiting, is_guessed = list(self._batches(prepared, list(chain.from_iterable(waiting)))), False
            # One batch is on the device while the maps of the one before it are made.
            while len(begun) > bool(waiting):
                rows, finish = begun.pop(0)
                found |= dict(zip(rows, finish(), strict=True))
                done(len(rows))
        return [found[i] for i in range(len(prepared))]

    def _halved(self, waiting: list[list[int]]) -> list[list[int]]:
        """Halve the batch size after memory ran out."""
        clear_memory()
        self.batch_size = half = (len(waiting[0]) + 1) // 2
        return [rest[i : i + half] for rest in waiting for i in range(0, len(rest), half)]

    def _batches(self, prepared: Sequence[ModelInput], rows: Sequence[int]) -> Iterator[list[int]]:
        """Samples of one kind and similar length; the first batch has the shortest and the longest, to compare them."""
        kinds = {i: (_kind(prepared[i]), max(1, length_of(prepared[i]))) for i in rows}
        order = sorted(rows, key=kinds.__getitem__)
        for _, group in groupby(order, key=lambda i: kinds[i][0]):
            made = list(self._of_one_kind(group, {i: length for i, (_, length) in kinds.items()}))
            if not self._is_checked and len(made) > 1 and self.together == "padded":
                made[-1][0], made[0][0] = made[0][0], made[-1][0]
            yield from (*made[-1:], *made[:-1])

    def _of_one_kind(self, group: Iterable[int], lengths: dict[int, int]) -> Iterator[list[int]]:
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

    @property
    def _most_tokens(self) -> float:
        """Number of tokens per batch that fit into free memory."""
        if self.batch_size is not None:
            return math.inf
        return SHARE_OF_BATCH * free_bytes(self.device) / (self._held or self._guessed_bytes)

    @cached_property
    def _guessed_bytes(self) -> int:
        """Approximate memory of a program per token: two numbers for each output channel of a weight."""
        n_ids = vocabulary_size(self.specimen.model)  # embeddings are looked up, not kept
        weights = [p for p in self.specimen.model.parameters() if p.dim() == 2 and n_ids not in p.shape]
        return max(1, sum(2 * max(4, p.dtype.itemsize) * max(p.shape) for p in weights))

    def _begin(self, prepared: list[ModelInput]) -> Callable[[], list[Maps]]:
        """Start one batch; in the first one, two samples are also mapped alone."""
        if self.together == "one by one" or len(prepared) == 1 or not all(map(has_sample_axis, prepared)):
            found = [self._noted(self.map_one(one)) for one in prepared]
            return lambda: found
        if self.together == "by length" and len(set(map(length_of, prepared))) > 1:  # planned before that was known
            return self._regrouped(prepared)
        try:
            batch = Batch(self.specimen, prepared)
        except (RuntimeError, TensorLensError) as error:
            if is_out_of_memory(error):
                raise
            return self._apart(prepared, f"samples go one by one: {str(error).splitlines()[0]}", "one by one")
        if batch.recording.mixes_samples is not None or not self._is_checked and batch.mixing is not None:
            return self._apart(prepared, MIXED.format(batch.mixing), "one by one")
        if batch.recording.from_model("A batch").anatomy.leaves_blocks_out:
            return self._apart(
                prepared, "samples go one by one: the number of blocks that run depends on the input", "one by one"
            )
        self._held = batch.recording.program.held_bytes / max(1, len(prepared) * max(batch.lengths))
        begun = {name: self._begin_method(batch, name) for name in self.asked.methods}
        checked = [] if self._is_checked else self._to_check(batch)
        self._is_checked, begun_as = True, (self.together, frozenset(self._alone))

        def finish() -> list[Maps]:
            if begun_as != (self.together, self._alone):  # a batch before this one was found to differ since
                return self._begin(prepared)()
            every = {name: maps() for name, maps in begun.items()}
            found: list[Maps] = [{name: maps[i] for name, maps in every.items()} for i in range(len(prepared))]
            wrong = self._wrong(prepared, found, checked)
            if wrong and len(wrong) < len(self.asked.methods):
                self._alone |= wrong  # these alone go one sample after the other
                self._is_checked = False
                return self._begin(prepared)()
            if wrong:
                after = NEXT[self.together] if len(set(batch.lengths)) > 1 else "one by one"
                return self._apart(prepared, DIFFERENT.format(after), after)()
            return [self._noted(maps) for maps in found]

        return finish

    def _begin_method(self, batch: Batch, name: str) -> Callable[[], list[Any]]:
        asked = self.asked
        if name not in self._alone:
            begun = batch.begin(name, asked.out_token, **asked.options(name), asked=asked.methods)
            if begun is not None:
                return begun
        found = [self._map(tensor, name) for tensor in batch]
        return lambda: found

    def _to_check(self, batch: Batch) -> list[int]:
        """The shortest sample, and one at random."""
        return sorted({batch._shortest, self._random.randrange(len(batch))})

    def _wrong(self, prepared: list[ModelInput], found: list[Maps], checked: list[int]) -> set[str]:
        """The methods whose batched results differ from single ones for some samples."""
        wrong: set[str] = set()
        for i in checked:
            alone = self.map_one(prepared[i])
            wrong |= {name for name, one in found[i].items() if not self._agree(one, alone[name])}
        return wrong

    def _agree(self, one: TokenMap | TensorLensError, other: TokenMap | TensorLensError) -> bool:
        if isinstance(one, TensorLensError) or isinstance(other, TensorLensError):
            return str(one) == str(other)
        if one.scores.shape != other.scores.shape:
            return False
        dtype = next(self.specimen.model.parameters()).dtype
        accepted = _rounding(dtype, self.device.type == "cuda")
        scale = in_float64(other.scores).norm().clamp_min(torch.finfo(torch.float64).tiny)
        return float((in_float64(one.scores) - in_float64(other.scores)).norm() / scale) <= accepted

    def _apart(self, prepared: list[ModelInput], reason: str, together: Together) -> Callable[[], list[Maps]]:
        """Use smaller batches from now on, and start these samples again."""
        self.together, self.reason = together, reason
        self._is_checked = False
        return self._regrouped(prepared)

    def _regrouped(self, prepared: list[ModelInput]) -> Callable[[], list[Maps]]:
        found = self.window(prepared)
        return lambda: found

    def map_one(self, prepared: ModelInput) -> Maps:
        """The maps of one sample, by a recording of its own."""
        tensor = self.specimen.look(prepared)
        return {name: self._map(tensor, name) for name in self.asked.methods}

    def _map(self, tensor: AttentionTensor, name: str) -> TokenMap | TensorLensError:
        try:
            return map_alone(tensor, name, self.asked.out_token, self.asked.options(name))
        except TensorLensError as error:
            if len(self.asked.methods) == 1:
                raise
            return error

    def _noted(self, found: Maps) -> Maps:
        """The same maps, with a note in `meta` if samples could not be batched freely."""
        if not (self.reason or self._alone):
            return found
        alone = "samples go one by one: batched results of this method differ from single ones"
        said = {name: alone if name in self._alone else self.reason for name in found}
        return {
            name: replace(one, meta=one.meta | {"batches": said[name]})
            if said[name] and isinstance(one, TokenMap)
            else one
            for name, one in found.items()
        }


def _kind(prepared: ModelInput) -> tuple[str, ...]:
    """What samples of one batch have in common: the names of their arguments, and shapes that cannot be padded."""
    shapes = [
        f"{name}{tuple(value.shape[2:] if name in ('input_ids', 'inputs_embeds') else value.shape)}"
        for name, value in sorted(prepared.arguments.items())
        if isinstance(value, torch.Tensor)
    ]
    return tuple(shapes)
