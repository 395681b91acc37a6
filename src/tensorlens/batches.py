"""`Batch`: several inputs that share one recording. `InBatches`: many inputs, batch by batch, as for a data set.

The program of a batch is block-diagonal, F(X₁, …, X_b) = (T₁X₁ + B₁, …, T_bX_b + B_b), so one pull gives every sample's
own row. That samples do not mix is checked, not assumed: no fixed value may combine several of them, and no sample may
reach another. Shorter texts are padded at their end. In the first batch the shortest sample and another one are also
mapped alone; if they differ, only samples of equal length are batched, and if that does not help, each is mapped alone.
The `meta` of the results says so.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, count, islice, takewhile
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from msgspec.structs import replace
from torch import nn

from tensorlens.errors import InputError, MethodError, TensorLensError, check_choice, check_iterable, check_whole
from tensorlens.maps.methods import (
    METHODS,
    Question,
    begin_finishing,
    begin_predictions,
    check_question,
    joins_norms,
)
from tensorlens.maps.targets import METHOD, OUT_TOKEN, Context, Target, has_one_row
from tensorlens.maps.token_map import TokenMap
from tensorlens.memory import SHARE_OF_BATCH, clear_memory, free_bytes, is_out_of_memory
from tensorlens.models.inputs import ModelInput, vocabulary_size
from tensorlens.models.runner import own_modes, stepwise, tf32_allowed
from tensorlens.models.samples import Collated, has_sample_axis, length_of, row_error
from tensorlens.operators.operator import FrozenOperator, check_token
from tensorlens.progress import bar, check_cancelled
from tensorlens.recording.conventions import Rules
from tensorlens.recording.recording import Recording, Span
from tensorlens.specimen import Specimen
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64, relative, repeated
from tensorlens.views.printing import Printed

Together = Literal["padded", "by length", "one by one"]
"""Which samples share a recording."""

WINDOW = 8
"""Batches whose samples are sorted by length together."""

MOST_SAMPLES = {"cuda": 1024, "cpu": 16}
"""Samples per batch: enough to keep a GPU busier than Python, few for a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The question to every sample; see `Lens.maps`."""

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
            check_question(name)
            check_question(name, **self.options(name))
        taken = set().union(*map(self.options, self.methods))
        given = {"target": self.target, "probes": self.probes, "raw": self.raw or None}
        check_question(self.methods[0], **{k: v for k, v in given.items() if v is not None and k not in taken})

    def options(self, name: str) -> dict[str, Any]:
        """The arguments of `AttentionTensor.map` for one of the methods."""
        target = {"target": self.target} if METHODS[name].takes_target else {}
        raw = {"raw": True} if self.raw and joins_norms(name) else {}
        return target | raw | ({"probes": self.probes, "seed": self.seed} if METHODS[name].takes_probes else {})


# One batch ------------------------------------------------------------------------------------------------------------


class Batch(Sequence[AttentionTensor], Printed):
    """Several inputs whose maps share one recording. Made by `Lens.batch`.

    Args:
        specimen: The model.
        prepared: The inputs.
    """

    def __init__(self, specimen: Specimen, prepared: Sequence[ModelInput]) -> None:
        if not prepared:
            raise InputError("A batch needs at least one input; got none.")
        self.specimen, self.prepared = specimen, tuple(prepared)
        if len(prepared) == 1:
            self.recording = specimen.record(prepared[0].arguments)
            self.lengths: tuple[int, ...] = (self.recording.states[0].shape[1],)
        else:
            collated = Collated(prepared, specimen.model, specimen.pad_id)
            self.recording = specimen.record(collated.arguments, n_samples=len(prepared))
            self.lengths = tuple(length or self.recording.states[0].shape[1] for length in collated.lengths)
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

    def __reduce__(self) -> Any:
        """Pickle the model and the inputs, which are recorded again."""
        return Batch, (self.specimen, self.prepared)

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
        """The cause if samples mix; None if no fixed value combines several and nothing passes between them."""
        if len(self) == 1:
            return None
        return self.recording.mixes_samples or ("something carried" if carries_across(self.recording) else None)

    def check(self) -> None:
        """Refuse samples whose batched results differ from single ones, because they mix or react to padding."""
        if not self.is_separable():
            raise InputError(
                "This model mixes samples or reacts to padding: batched results differ from single ones. Use "
                "`lens.maps`, which groups samples safely."
            )

    def is_separable(self) -> bool:
        """Whether samples stay separate: the one with most padding gives the same result on its own.

        If the model decides over several samples at once, such as a router whose experts can be full, every sample
        is compared: a decision that changes none of them is harmless.
        """
        if len(self) > 1 and carries_across(self.recording):
            return False
        compared = range(len(self)) if self.recording.mixes_samples else self.shortest[-1:]
        return len(self) == 1 or all(map(self._is_as_alone, compared))

    def _is_as_alone(self, i: int) -> bool:
        alone = self.specimen.look(self.prepared[i]).output
        state = self.recording.states[-1][i, : len(alone)]
        return bool((state - alone).norm() <= _rounding(alone.dtype, alone.is_cuda) * alone.norm())

    @property
    def shortest(self) -> list[int]:
        """The samples with the fewest tokens."""
        least = min(self.lengths)
        return [i for i, length in enumerate(self.lengths) if length == least]

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
            probes: For `tensor.norm` and `tensor.contribution`.
            seed: Random seed for the probes.
        """
        if targets is not None:
            targets = check_iterable(targets, "targets", "a target for each sample")
            if target is not None:
                raise InputError("`target` is one for all samples, `targets` is one for each. Pass one of them.")
        named = next((each for each in targets or () if each is not None), target)
        check_question(method, named, probes=probes, seed=seed)
        if targets is not None and len(targets) != len(self):
            raise InputError(f"`targets` must be one for each of the {len(self)} samples; got {len(targets)}.")
        sketch = {"probes": probes and int(probes), "seed": int(seed)} if METHODS[method].takes_probes else {}
        begun = self.begin(method, out_token, target=target, targets=targets, **sketch)
        if begun is not None:
            return begun()
        each = zip(self.apart(), [target] * len(self) if targets is None else targets, strict=True)
        return [one.map_alone(method, out_token, target=its, **sketch) for one, its in each]

    def apart(self) -> Iterator[Batch]:
        """Each input as a batch of its own."""
        return (Batch(self.specimen, [one]) for one in self.prepared)

    def map_alone(self, method: str, out_token: int, **options: Any) -> TokenMap:
        """The map of the only input; see `begin`."""
        begun = self.begin(method, out_token, **options)
        assert begun is not None, "of one input"
        return begun()[0]

    def begin(self, method: str, out_token: int, **options: Any) -> Callable[[], list[TokenMap]] | None:
        """Start the maps of all samples on the device; calling the result waits for them. None if each must go alone.

        Args:
            method: A name in `METHODS`.
            out_token: The output to explain, counted from each sample's own end if negative.
            options: Those of `Question`.
        """
        recording, is_alone = self.recording, len(self) == 1
        # After an encoder, outputs are those of a second text.
        if not is_alone and (not METHODS[method].takes_samples or recording.n_encoder_blocks):
            return None
        n_out = recording.states[-1].shape[1]
        same = n_out == recording.states[0].shape[1]
        places = tuple(check_token(out_token, n if same else n_out) for n in self.lengths)
        pools = has_one_row(recording, method)
        key = (places, repr(options.get("target")), repr(options.get("targets")))
        question = Question(
            operator=FrozenOperator(recording),
            out_tokens=(0,) * len(self) if pools else places,
            samples=tuple(range(len(self))),
            lengths=self.lengths,
            classes=self.specimen.classes(recording),
            shared=self._shared.setdefault(key, {}),
            **options,
        )
        try:
            waiting = begin_finishing(METHODS[method].compute(question), question.classes)
        except MethodError:  # each sample on its own raises the reason, or works
            if is_alone:
                raise
            return None
        said = begin_predictions(question)

        def finish() -> list[TokenMap]:
            found, best = waiting(), said()
            maps = []
            for i, place in enumerate(question.out_tokens):
                context, meta = self.context(i), found.meta(i)
                label = meta["target"] if pools else (context.out_tokens or context.tokens)[place]
                meta = AttentionTensor(question.operator, context).meta() | {"out_positions": [place]} | meta
                maps.append(
                    TokenMap(
                        scores=found.scores[i : i + 1, : self.lengths[i]],
                        out_tokens=(label,),
                        in_tokens=context.tokens,
                        method=method,
                        bias_share=found.bias_share[i : i + 1],
                        meta=meta if best[i] is None else meta | {"prediction": best[i]},
                    )
                )
            return maps

        return finish

    def context(self, i: int) -> Context:
        """The context that maps of one sample record."""
        if i not in self._contexts:
            self._contexts[i] = self.specimen.context(self.prepared[i], self.recording, n_tokens=self.lengths[i])
        return self._contexts[i]


def carries_across(recording: Recording) -> bool:
    """Whether the values of one sample reach another: the program runs with NaN in half of the samples.

    The result is remembered for programs of the same model with the same steps.
    """
    known = _learned.setdefault(recording.from_model("A batch").model, _Learned()).separate
    steps = hash(tuple([(step.operation, step.module) for step in recording.program.steps]))
    if steps in known:
        return False
    x, span = recording.states[0], Span(0, recording.n_blocks)
    numbers = torch.arange(len(x), device=x.device)
    for bit in range((len(x) - 1).bit_length()):  # any two samples differ in some bit of their numbers
        for gone in (numbers >> bit & 1 == 1, numbers >> bit & 1 == 0):
            probe = torch.zeros_like(x)
            probe[gone] = torch.nan
            if bool(recording.push(probe, span, linear=True)[~gone].isnan().any()):
                return True
    known.add(steps)
    return False


@dataclass(frozen=True)
class _Learned:
    """Facts that batches have shown about a model: step lists that keep samples apart; bytes per token, by rules."""

    separate: set[int] = field(default_factory=set)
    held: dict[Rules, float] = field(default_factory=dict)


_learned: WeakKeyDictionary[nn.Module, _Learned] = WeakKeyDictionary()


def _rounding(dtype: torch.dtype, is_cuda: bool) -> float:
    """Accepted difference between a sample alone and in a batch; norms may be cast to float32 whatever the states."""
    return repeated(dtype, in_tf32=is_cuda and tf32_allowed())


# Many inputs ----------------------------------------------------------------------------------------------------------

Results = dict[str, Any]
"""The results for one sample by name: records with `scores` and `meta`, or the reason why there is none."""


class _Otherwise(Exception):
    """Samples cannot share recordings as planned; the remaining ones are planned again."""


class InBatches:
    """Processes many samples in batches, and learns on the way how many, and which, can share a recording.

    Abstract: a subclass starts the work on a batch (`begin_batch`) and does it for one sample (`make_alone`).

    Args:
        specimen: The model.
        names: Names of the results for every sample.
        batch_size: Samples per batch; as many as fit into free memory if None.
        seed: Random seed for the choice among the shortest samples.
    """

    def __init__(
        self, specimen: Specimen, names: Sequence[str], batch_size: int | None = None, *, seed: int = 0
    ) -> None:
        self.specimen, self.names, self.batch_size = specimen, tuple(names), batch_size
        self.together: Together = "padded"
        self.reason = ""
        self.go_alone: set[str] = set()
        """Names of results that differ between a batch and a single sample."""
        self._is_checked = False
        self._random = random.Random(seed)
        weight = next(specimen.model.parameters())
        self.device, self.dtype = weight.device, weight.dtype
        self._held = _learned.setdefault(specimen.model, _Learned()).held

    def begin_batch(self, batch: Batch) -> dict[str, Callable[[], list[Any]]]:
        """Start the work on a batch, by name."""
        raise NotImplementedError

    def make_alone(self, prepared: ModelInput) -> Results:
        """The same for one sample, by a recording of its own."""
        raise NotImplementedError

    @property
    def most(self) -> int:
        """Largest number of samples per batch."""
        return self.batch_size or MOST_SAMPLES.get(self.device.type, 16)

    def window(self, prepared: Sequence[ModelInput], done: Callable[[int], Any] = lambda n: None) -> list[Results]:
        """The results for some samples, in order; `done` is called with the number finished each time."""
        kinds = [(_kind(one), max(1, length_of(one))) for one in prepared]
        found: dict[int, Results] = {}
        begun: list[tuple[list[int], Callable[[], list[Results]]]] = []
        rest = sorted(range(len(prepared)), key=kinds.__getitem__)
        while rest or begun:
            check_cancelled()
            some: list[int] = []
            try:
                if rest:
                    some = self._take(rest, kinds)
                    begun.append((some, self._begin([prepared[i] for i in some])))
                # One batch is on the device while the results of the one before it are made.
                while len(begun) > bool(rest):
                    some, finish = begun[0]
                    found |= dict(zip(some, finish(), strict=True))
                    del begun[0]
                    done(len(some))
                continue
            except _Otherwise:
                self._is_checked = False
            except (torch.OutOfMemoryError, RuntimeError) as error:
                if not is_out_of_memory(error) or len(some) == 1:
                    raise
                self.batch_size = (len(some) + 1) // 2
            begun.clear()
            clear_memory()
            rest = sorted(set(range(len(prepared))) - found.keys(), key=kinds.__getitem__)
        return [found[i] for i in range(len(prepared))]

    def _take(self, rest: list[int], kinds: Sequence[tuple[Any, int]]) -> list[int]:
        """Take the next batch from the end, the longest samples first; one to be checked includes the shortest."""
        kind, longest = kinds[rest[-1]]
        fits = 1 if self.together == "one by one" else min(self.most, max(1, int(self._most_tokens / longest)))

        def belongs(i: int) -> bool:
            return kinds[i] == (kind, longest) if self.together == "by length" else kinds[i][0] == kind

        n = len(list(islice(takewhile(belongs, reversed(rest)), fits)))
        if n > 1 and not self._is_checked:
            shortest = rest.pop(next(place for place, i in enumerate(rest) if belongs(i)))
            rest.insert(len(rest) + 1 - n, shortest)
        some = rest[-n:]
        del rest[-n:]
        return some

    @property
    def _most_tokens(self) -> float:
        """Number of tokens per batch that fit into free memory."""
        if self.batch_size is not None:
            return sys.maxsize
        return SHARE_OF_BATCH * free_bytes(self.device) / (self._held.get(self.specimen.rules) or self._guessed_bytes)

    @cached_property
    def _guessed_bytes(self) -> int:
        """Approximate memory of a program per token: one number for each channel of a weight."""
        n_ids = vocabulary_size(self.specimen.model)  # embeddings are looked up, not kept
        weights = [p for p in self.specimen.model.parameters() if p.dim() == 2 and n_ids not in p.shape]
        return max(1, sum(max(4, p.dtype.itemsize) * max(p.shape) for p in weights))

    def _begin(self, prepared: list[ModelInput]) -> Callable[[], list[Results]]:
        """Start one batch; in the first one, the shortest sample and another one are also processed alone."""
        if len(prepared) == 1 or not all(map(has_sample_axis, prepared)):
            alone = [self._noted(self.make_alone(one)) for one in prepared]
            return lambda: alone
        try:
            batch = Batch(self.specimen, prepared)
        except (RuntimeError, TensorLensError) as error:
            if is_out_of_memory(error):
                raise
            raise self._otherwise("one by one", (str(error) or type(error).__name__).splitlines()[0]) from error
        if batch.recording.mixes_samples is not None or not self._is_checked and batch.mixing is not None:
            raise self._otherwise("one by one", f"{batch.mixing} combines several of them")
        if batch.recording.from_model("A batch").anatomy.leaves_blocks_out:
            raise self._otherwise("one by one", "the number of blocks that run depends on the input")
        n_tokens = len(prepared) * max(batch.lengths)
        self._held[self.specimen.rules] = max(1, batch.recording.program.held_bytes) / n_tokens
        begun = self.begin_batch(batch)
        checked = list[int]()
        if not self._is_checked:
            checked.append(self._random.choice(batch.shortest))
            checked.append(self._random.choice([i for i in range(len(batch)) if i not in checked]))
        alone = {i: self.make_alone(prepared[i]) for i in checked}
        self._is_checked = True

        def finish() -> list[Results]:
            every = {name: made() for name, made in begun.items()}
            found: list[Results] = [{name: made[i] for name, made in every.items()} for i in range(len(prepared))]
            pairs = [(name, found[i][name], one) for i, made in alone.items() for name, one in made.items()]
            wrong = {name for name, together, one in pairs if not self._agree(together, one)}
            if wrong and len(wrong) < len(self.names):
                self.go_alone |= wrong
                raise _Otherwise
            if wrong:
                after = "by length" if self.together == "padded" and len(batch.shortest) < len(batch) else "one by one"
                raise self._otherwise(after, "batched results differ from single ones")
            return [self._noted(one) for one in found]

        return finish

    def _otherwise(self, together: Together, reason: str) -> _Otherwise:
        """Use smaller batches from now on."""
        self.together, self.reason = together, f"samples go {together}: {reason}"
        return _Otherwise(self.reason)

    def _agree(self, one: Any, other: Any) -> bool:
        if isinstance(one, TensorLensError) or isinstance(other, TensorLensError):
            return str(one) == str(other)
        if one.scores.shape != other.scores.shape:
            return False
        error = relative(in_float64(one.scores) - in_float64(other.scores), other.scores)
        return error <= _rounding(self.dtype, self.device.type == "cuda")

    def _noted(self, found: Results) -> Results:
        """The same, with a note in `meta` if samples could not be batched freely."""
        alone = "samples go one by one: batched results of this method differ from single ones"
        said = {name: alone if name in self.go_alone else self.reason for name in found}
        return {
            name: replace(one, meta=one.meta | {"batches": said[name]})
            if said[name] and not isinstance(one, TensorLensError)
            else one
            for name, one in found.items()
        }


def _kind(prepared: ModelInput) -> tuple[str, ...]:
    """The properties that samples of one batch share: the names of arguments, and shapes that cannot be padded."""
    shapes = [
        f"{name}{tuple(value.shape[2:] if name in ('input_ids', 'inputs_embeds') else value.shape)}"
        for name, value in sorted(prepared.arguments.items())
        if isinstance(value, torch.Tensor)
    ]
    return tuple(shapes)


# The maps of a data set -----------------------------------------------------------------------------------------------


class DatasetMaps(InBatches):
    """Makes maps of many samples, in their order; options are those of `Lens.maps`."""

    def __init__(self, specimen: Specimen, asked: Asked, batch_size: int | None = None) -> None:
        asked.check()
        if batch_size is not None:
            check_whole(batch_size, "batch_size", 1)
        super().__init__(specimen, asked.methods, batch_size, seed=asked.seed)
        self.asked = asked

    def of(
        self,
        inputs: Iterable[Any],
        progress: bool | None,
        *,
        on_error: Literal["raise", "skip"],
        skipped: list[tuple[int, str]],
        truncate: bool,
        first: int,
    ) -> Iterator[Results]:
        """The maps of each input by method."""
        check_choice(on_error, "on_error", ("raise", "skip"))
        waiting, rows = iter(inputs), count(first)
        total = len(inputs) if isinstance(inputs, Sized) else None

        def windows() -> Iterator[list[Results]]:
            with bar(progress=progress, total=total, unit="map", delay=1, leave=False) as shown:
                while values := list(islice(waiting, WINDOW * self.most)):
                    good = []
                    for made, row in zip(self.specimen.prepare_all(values, truncate=truncate), rows, strict=False):
                        if isinstance(made, ModelInput):
                            good.append(made)
                        elif on_error == "raise":
                            raise row_error(row, made) from made
                        else:
                            skipped.append((row, str(made)))
                    yield self.window(good, done=shown.update)

        return chain.from_iterable(stepwise(windows()))

    def begin_batch(self, batch: Batch) -> dict[str, Callable[[], list[Any]]]:
        """Start the maps of a batch; those that differ in batches are computed one by one."""
        return {name: self._begin_method(batch, name) for name in self.names}

    def _begin_method(self, batch: Batch, name: str) -> Callable[[], list[Any]]:
        asked = self.asked
        if name not in self.go_alone:
            begun = batch.begin(name, asked.out_token, **asked.options(name))
            if begun is not None:
                return begun
        found = [self._map(one, name) for one in batch.apart()]
        return lambda: found

    def make_alone(self, prepared: ModelInput) -> Results:
        """The maps of one sample."""
        alone = Batch(self.specimen, [prepared])
        return {name: self._map(alone, name) for name in self.names}

    def _map(self, alone: Batch, name: str) -> TokenMap | TensorLensError:
        try:
            return alone.map_alone(name, self.asked.out_token, **self.asked.options(name))
        except TensorLensError as error:
            if len(self.names) == 1:
                raise
            return error
