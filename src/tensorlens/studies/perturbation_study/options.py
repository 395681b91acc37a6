"""What a perturbation run is asked to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorlens.errors import InputError, MethodError
from tensorlens.maps.methods import METHODS
from tensorlens.studies.members import check_member, split
from tensorlens.studies.options import check_positive, checked_names
from tensorlens.studies.perturbation_study.measures import GRID, check_grid
from tensorlens.studies.perturbation_study.samples import Cut

PRESETS = ("strict", "paper-like")
CUTS = ("each", "windows")


@dataclass(frozen=True, kw_only=True)
class PerturbationOptions:
    """Everything a perturbation run depends on besides model and data.

    Attributes:
        methods: Names in `METHODS`; all of them if None. Those of T may have a member of the family of rules behind an
            @: ``tensor.in_class@attn_lrp``. One that does not apply to the model is reported as missing.
        limit: How many samples at most.
        presets: For decoders, one or both of ``strict`` (the last token stays) and ``paper-like`` (it may go).
        replacements: What takes a token's place. Texts: ``token`` (mask, unknown, padding or end token), ``zero``,
            ``mean`` (embeddings), ``attention`` (masked out), ``delete``. Images: ``black``, ``mean``, ``blur``.
            The first of these if None.
        grid: Fractions of tokens replaced, from 0.
        n_tokens: Texts are cut to this many tokens.
        min_tokens: Shorter texts are left out.
        cut: ``each`` text is a sample, or all of them are joined and cut into ``windows``.
        column: Column or field with the text.
        split: For a data set by id: which part.
        absolute: Rank by magnitude; by signed score otherwise.
        seed: For the random control and the bootstrap.
        n_random: Random orders that the random control averages over.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        batch_size: Replaced copies run at a time; 256 on a GPU and 64 elsewhere if None. Numbers depend on it by
            rounding alone.
        group_size: Samples measured together, so that copies of several share a batch; an interruption loses at most
            as many. None: 16, or fewer where a run has few samples. Numbers depend on it by rounding alone.
    """

    methods: Sequence[str] | None = None
    limit: int | None = None
    presets: Sequence[str] = ("strict",)
    replacements: Sequence[str] | None = None
    grid: Sequence[float] = GRID
    n_tokens: int = 128
    min_tokens: int = 1
    cut: Cut = "each"
    column: str | None = None
    split: str = "test"
    absolute: bool = False
    seed: int = 0
    n_random: int = 5
    norm_probes: int | None = None
    batch_size: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        check_positive(self, "limit", "n_random", "norm_probes", "batch_size", "group_size")
        if self.cut not in CUTS:
            raise InputError(f"Expected `cut` among {', '.join(CUTS)}; got {self.cut!r}.")
        methods = METHODS if self.methods is None else self.methods
        object.__setattr__(self, "methods", _checked_methods(methods))
        object.__setattr__(self, "presets", checked_names(self.presets, PRESETS, "presets"))
        object.__setattr__(self, "grid", check_grid(self.grid))


def _checked_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Names of maps, each once, with the member after an @."""
    names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    checked_names([split(name)[0] if isinstance(name, str) else name for name in names], METHODS, "methods")
    for name in names:
        try:
            check_member(name)
        except MethodError as error:
            raise InputError(f"Expected `methods` that exist. {error}") from None
    return names
