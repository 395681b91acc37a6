"""The maps of many samples by many methods: the one place where the study asks for maps.

Samples of a group share one recording for each member of the family of rules that is asked for, and every method goes
for all of them at once where it can. That they are what they are alone is checked as for any data set; see
`tensorlens.dataset_maps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tensorlens.batch import Batch
from tensorlens.dataset_maps import Pending, Work, agree
from tensorlens.errors import TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput
from tensorlens.studies.members import member_lens, split
from tensorlens.studies.perturbation_study.subjects import Sample
from tensorlens.tensor import AttentionTensor

Missing = str
"""Why there is no map."""
Maps = dict[str, TokenMap | Missing]
"""The maps of one sample by method."""


class SampleMaps:
    """Gives the maps of groups of samples at one output token.

    Args:
        lens: The model.
        methods: Names in `METHODS`, those of T perhaps with a member after an @.
        out_token: The output that is explained.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        seed: For the probes.
    """

    def __init__(
        self, lens: Lens, methods: Sequence[str], *, out_token: int, norm_probes: int | None = None, seed: int = 0
    ) -> None:
        self.lens, self.methods = lens, tuple(methods)
        asked: dict[str | None, list[str]] = {}
        for name in methods:
            asked.setdefault(split(name)[1] if "@" in name else None, []).append(name)
        self.works = [
            _Together(member_lens(lens, member) if member else lens, names, out_token, norm_probes, seed)
            for member, names in asked.items()
        ]

    def of(self, samples: Sequence[Sample]) -> list[Maps | Missing]:
        """In the order of the samples, maps by method.

        A method that fails on a sample has the reason in its place, and so has a sample that cannot be recorded.
        """
        found: list[Maps | Missing] = [{} for _ in samples]
        prepared: dict[int, ModelInput] = {}
        for i, sample in enumerate(samples):
            try:
                prepared[i] = self.lens.prepare(sample.value)
            except TensorLensError as error:
                found[i] = str(error)
        for work in self.works:
            work.batch_size = work.batch_size or len(samples)  # not what memory is free: a run must repeat itself
            for i, maps in zip(prepared, work.window(list(prepared.values())), strict=True):
                found[i] = _joined(found[i], maps)
        return [maps if isinstance(maps, str) else {name: maps[name] for name in self.methods} for maps in found]


def _joined(one: Maps | Missing, other: Maps | Missing) -> Maps | Missing:
    return one if isinstance(one, str) else other if isinstance(other, str) else one | other


class _Together(Work[Maps | Missing]):
    """Maps of each sample under one member of the family, from one recording of several samples."""

    lens: Lens

    def __init__(self, lens: Lens, names: Sequence[str], out_token: int, norm_probes: int | None, seed: int) -> None:
        super().__init__(lens, None, names, seed)
        self.out_token, self.norm_probes = out_token, norm_probes
        self.singly: set[str] = set()
        self.disagreed: set[str] = set()
        sketch = {} if norm_probes is None else {"probes": norm_probes, "seed": seed}
        self.options: dict[str, dict[str, Any]] = {
            name: sketch if split(name)[0] == "tensor.norm" else {} for name in names
        }

    def begin_batch(self, prepared: list[ModelInput]) -> Pending[Maps | Missing]:
        """One recording for all methods."""
        methods = {split(name)[0] for name in self.options}
        try:
            batch = Batch(self.lens, prepared, methods, self.norm_probes)
            self.note_way(batch)
        except TensorLensError:  # of which sample?
            found = [self.alone(one) for one in prepared]
            return lambda: found
        tensors = [self.lens(one) for one in prepared] if self.singly else batch
        pending = {name: self._begin_map(batch, tensors, name) for name in self.options}
        batch.release()

        def finish() -> list[Maps | Missing]:
            every = {name: maps() for name, maps in pending.items()}
            return [{name: maps[i] for name, maps in every.items()} for i in range(len(prepared))]

        return finish

    def _begin_map(
        self, batch: Batch, tensors: Iterable[AttentionTensor], name: str
    ) -> Callable[[], Sequence[TokenMap | Missing]]:
        pending = None
        if name not in self.singly:
            with suppress(TensorLensError):  # each sample says why
                pending = batch.begin_together(split(name)[0], self.out_token, **self.options[name])
        if pending is not None:
            return pending
        found = [self._map(tensor, name) for tensor in tensors]
        return lambda: found

    def apart(self, prepared: list[ModelInput], reason: str) -> list[Maps | Missing]:
        """Where some methods agree and others do not, these alone go one sample after the other."""
        if self.disagreed and len(self.singly | self.disagreed) < len(self.options):
            self.singly |= self.disagreed
            self.n_batches = 0  # the next batch, which is this one once more, is checked again
            return self._begin(prepared)()
        return super().apart(prepared, reason)

    def alone(self, prepared: ModelInput) -> Maps | Missing:
        """One recording for all methods of the sample."""
        try:
            tensor = self.lens(prepared)
        except TensorLensError as error:
            return str(error)
        return {name: self._map(tensor, name) for name in self.options}

    def _map(self, tensor: AttentionTensor, name: str) -> TokenMap | Missing:
        method = split(name)[0]
        pooled = method == "tensor.in_class" and tensor.operator.recording.pools
        try:
            return tensor.map(method, out_token=None if pooled else self.out_token, **self.options[name])
        except (TensorLensError, torch.OutOfMemoryError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]

    def agree(self, one: Maps | Missing, other: Maps | Missing) -> bool:
        """Map by map; where one says why there is none, so must the other."""
        self.disagreed = set()
        if isinstance(one, str) or isinstance(other, str):
            return one == other
        self.disagreed = {name for name in self.options if not self._same(one[name], other[name])}
        return not self.disagreed

    def _same(self, one: TokenMap | Missing, other: TokenMap | Missing) -> bool:
        if isinstance(one, str) or isinstance(other, str):
            return one == other
        return agree(one, other, next(self.lens.model.parameters()).dtype)

    def noted(self, found: Maps | Missing) -> Maps | Missing:
        """In each map's `meta`."""
        if isinstance(found, str) or not (self.reason or self.singly):
            return found
        singly = "samples go one by one: together this method gives other numbers than alone"
        said = {name: singly if name in self.singly else self.reason for name in found}
        return {
            name: one
            if isinstance(one, str) or not said[name]
            else replace(one, meta=one.meta | {"batches": said[name]})
            for name, one in found.items()
        }
