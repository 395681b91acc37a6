"""The maps of many samples by many methods: the one place where the study asks for maps."""

from __future__ import annotations

from collections.abc import Sequence

from tensorlens.batches import Asked, DatasetMaps
from tensorlens.errors import TensorLensError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import ModelInput
from tensorlens.studies.members import member_lens, split
from tensorlens.studies.perturbation_study.subjects import Sample

Missing = str
"""Why there is no map."""
Maps = dict[str, TokenMap | Missing]
"""The maps of one sample by method."""


class SampleMaps:
    """Gives the maps of groups of samples at one output token.

    Samples of a group share one recording for each member of the family of rules that is asked for.

    Args:
        lens: The model.
        methods: Names in `METHODS`, those of T perhaps with a member after an @.
        out_token: The output that is explained.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        seed: Random seed for the probes.
    """

    def __init__(
        self, lens: Lens, methods: Sequence[str], *, out_token: int, norm_probes: int | None = None, seed: int = 0
    ) -> None:
        self.lens, self.methods = lens, tuple(methods)
        by_member: dict[str | None, list[str]] = {}
        for name in methods:
            by_member.setdefault(split(name)[1] if "@" in name else None, []).append(name)
        self._works: list[tuple[list[str], DatasetMaps]] = []
        for member, names in by_member.items():
            bases = tuple(split(name)[0] for name in names)
            probes = norm_probes if "tensor.norm" in bases else None
            asked = Asked(methods=bases, out_token=out_token, probes=probes, seed=seed)
            of_member = member_lens(lens, member) if member else lens
            self._works.append((names, DatasetMaps(of_member.specimen, asked)))

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
        for names, work in self._works:
            work.batch_size = work.batch_size or len(samples)  # not what memory is free: a run must repeat itself
            for i, maps in self._maps(names, work, prepared):
                so_far = found[i]
                found[i] = so_far if isinstance(so_far, str) else maps if isinstance(maps, str) else so_far | maps
        return [maps if isinstance(maps, str) else {name: maps[name] for name in self.methods} for maps in found]

    def _maps(
        self, names: list[str], work: DatasetMaps, prepared: dict[int, ModelInput]
    ) -> list[tuple[int, Maps | Missing]]:
        try:
            window = dict(zip(prepared, work.window(list(prepared.values())), strict=True))
        except TensorLensError:  # of which sample?
            return [(i, self._alone(names, work, one)) for i, one in prepared.items()]
        return [(i, self._named(names, list(maps.values()))) for i, maps in window.items()]

    def _alone(self, names: list[str], work: DatasetMaps, prepared: ModelInput) -> Maps | Missing:
        try:
            return self._named(names, list(work.map_one(prepared).values()))
        except TensorLensError as error:
            return str(error)

    def _named(self, names: list[str], maps: list[TokenMap | TensorLensError]) -> Maps:
        """By the names that were asked for; an error as its first line."""
        return {
            name: found if isinstance(found, TokenMap) else f"{type(found).__name__}: {found}".splitlines()[0]
            for name, found in zip(names, maps, strict=True)
        }
