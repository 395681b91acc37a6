"""What a perturbation run is asked to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from tensorlens.errors import InputError, MethodError
from tensorlens.maps.methods import METHODS
from tensorlens.studies.options import Options, check_member, checked_names, split
from tensorlens.studies.perturbation_study.measures import GRID, check_grid

PRESETS = ("strict", "paper-like")
CUTS = ("each", "windows")
DRAWS = ("file", "random")
WATCHES = ("auto", "first", "last", "mean")


class PerturbationOptions(Options, frozen=True, kw_only=True):
    """Everything a perturbation run depends on besides model and data.

    Attributes:
        methods: Names in `METHODS`; all of them if None. Those of T may have a rule set
            after an @: ``tensor.in_class@attn_lrp``. One that does not apply to the model is reported as missing.
        limit: How many samples at most.
        draw: Samples in the order of the ``file``, or drawn at ``random``: in turn from each label, class or article.
        watch: The output whose state is watched and explained: ``first``, ``last``, the ``mean`` of all, or by
            ``auto`` the last of a decoder and the first of another model.
        presets: For decoders, one or both of ``strict`` (the last token stays) and ``paper-like`` (it may go).
        keep_first: So many tokens at the beginning are never replaced, besides special ones.
        replacements: What takes a token's place. Texts: ``token`` (mask, unknown, padding or end token), ``zero``,
            ``mean`` (embeddings), ``attention`` (masked out), ``delete``. Images: ``black``, ``mean``, ``blur``.
            The first of these if None.
        grid: Fractions of tokens replaced, from 0.
        n_tokens: Texts are cut to this many tokens.
        min_tokens: Shorter texts are left out.
        cut: ``each`` text is a sample, or all of them are joined and cut into ``windows``. Windows that are drawn lie
            within one article.
        column: Column or field with the text.
        label: Column or field with the label.
        split: For data with several parts: which one.
        absolute: Rank by magnitude; by signed score otherwise.
        raw_norms: Join matrices of norms over blocks as they are; otherwise rows are divided by their sums first.
        seed: For the draw, the random control and the bootstrap.
        n_random: Random orders that the random control averages over.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact if None.
        batch_size: Replaced copies run at a time; 256 on a GPU and 64 elsewhere if None. Numbers depend on it by
            rounding alone.
        group_size: Samples measured together, so that copies of several share a batch; an interruption loses at most
            as many. None: 16, or fewer where a run has few samples. Numbers depend on it by rounding alone.
    """

    methods: tuple[str, ...] | None = None
    limit: int | None = None
    draw: Literal["file", "random"] = "file"
    watch: Literal["auto", "first", "last", "mean"] = "auto"
    presets: tuple[str, ...] = ("strict",)
    keep_first: int = 0
    replacements: tuple[str, ...] | None = None
    grid: tuple[float, ...] = GRID
    n_tokens: int = 128
    min_tokens: int = 1
    cut: Literal["each", "windows"] = "each"
    column: str | None = None
    label: str | None = None
    split: str = "test"
    absolute: bool = False
    raw_norms: bool = False
    seed: int = 0
    n_random: int = 5
    norm_probes: int | None = None
    batch_size: int | None = None
    group_size: int | None = None

    def __post_init__(self) -> None:
        self.check_positive("limit", "n_random", "norm_probes", "batch_size", "group_size")
        for name, known in (("cut", CUTS), ("draw", DRAWS), ("watch", WATCHES)):
            if getattr(self, name) not in known:
                raise InputError(f"Expected `{name}` among {', '.join(known)}; got {getattr(self, name)!r}.")
        methods = METHODS if self.methods is None else self.methods
        presets = checked_names(self.presets, PRESETS, "presets")
        self.settle(methods=_checked_methods(methods), presets=presets, grid=check_grid(self.grid))


def _checked_methods(names: Iterable[str]) -> tuple[str, ...]:
    """Names of maps, each once, with the rule set after an @."""
    names = (names,) if isinstance(names, str) else tuple(dict.fromkeys(names))
    checked_names([split(name)[0] if isinstance(name, str) else name for name in names], METHODS, "methods")
    for name in names:
        try:
            check_member(name)
        except MethodError as error:
            raise InputError(f"Expected `methods` that exist. {error}") from None
    return names
