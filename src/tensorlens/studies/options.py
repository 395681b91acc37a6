"""The options of a study: a record, single keywords, a record with some of them changed, or the command line's.

Each study has one record, which checks itself by the types of its fields when it is made and can be read from a file.
The command line has an option for each field, with the field's words as its help. Nothing here imports torch.
Methods may name a rule set after an @: ``tensor.in_class@attn_lrp``.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

import msgspec

from tensorlens.errors import InputError
from tensorlens.recording.conventions import RULE_SETS, Rules

if TYPE_CHECKING:
    from tensorlens.lens import Lens

Count = Annotated[int, msgspec.Meta(ge=1)]
"""A number of things, at least one."""
Whole = Annotated[int, msgspec.Meta(ge=0)]
"""A whole number, not negative."""
Names = tuple[str, ...]
"""Names, or a single one."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that the numbers of a study depend on besides model and data."""

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            value = (value,) if isinstance(value, str) and field.type in (Names, Names | None) else value
            self.settle(**{field.name: _converted(field, value)})

    def settle(self, **values: Any) -> None:
        """Replace given values with checked ones; for `__post_init__` alone."""
        for name, value in values.items():
            msgspec.structs.force_setattr(self, name, value)

    @classmethod
    def from_texts(cls, **given: Any) -> Self:
        """The record of a command line: numbers as text, lists as texts with commas; None or empty if not given."""
        made = {}
        for field in msgspec.structs.fields(cls):
            if (value := given.get(field.name)) not in (None, []):
                value = [one.strip() for text in value for one in text.split(",")] if isinstance(value, list) else value
                made[field.name] = _converted(field, value, strict=False)
        return cls(**made)

    @classmethod
    def words(cls) -> dict[str, str]:
        """By field, the words of the docstring."""
        text = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
        found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text, re.MULTILINE)
        return {name: " ".join(words.replace("``", "").split()) for name, words in found}


def _converted(field: msgspec.structs.FieldInfo, value: Any, *, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, field.type, strict=strict)
    except msgspec.ValidationError as error:
        known = [one for one in get_args(field.type) if isinstance(one, str)]
        least, usual = str(error).partition(" >= ")[2], field.default
        wanted = f"among {', '.join(known)}" if known else f"of at least {least}" if least else f"({error})"
        wanted = f"such as {','.join(map(str, usual))}" if isinstance(usual, tuple) else wanted
        raise InputError(f"Expected `{field.name}` {wanted}; got {value!r}.") from error


Chosen = TypeVar("Chosen", bound=Options)


def chosen_options(kind: type[Chosen], options: Chosen | None, changes: Mapping[str, Any]) -> Chosen:
    """The record of a study's options.

    Args:
        kind: The study's record.
        options: A record, or None for the defaults.
        changes: Options that the caller named instead of it, or beside it.

    Raises:
        InputError: there is no such option, or `options` is another study's.
    """
    if options is not None and not isinstance(options, kind):
        raise InputError(f"Expected `options` of type {kind.__name__}; got {type(options).__name__}.")
    known = kind.__struct_fields__
    unknown = next((name for name in changes if name not in known), None)
    if unknown is not None:
        raise InputError(f"Expected options among {', '.join(known)}; got {unknown!r}.{_hint(unknown, known)}")
    return kind(**changes) if options is None else msgspec.structs.replace(options, **changes)


def checked_names(chosen: Iterable[Any], known: Iterable[str], name: str) -> tuple[Any, ...]:
    """The names chosen for the option `name`, each once; a single name is accepted."""
    known = tuple(known)
    chosen = (chosen,) if isinstance(chosen, str) else tuple(dict.fromkeys(chosen))
    wrong = next((one for one in chosen if one not in known), None)
    if wrong is not None or not chosen:
        got = repr(wrong) if chosen else "none"
        raise InputError(f"Expected `{name}` among {', '.join(known)}; got {got}.{_hint(str(wrong), known)}")
    return chosen


def _hint(wrong: str, known: Iterable[str]) -> str:
    near = get_close_matches(wrong, list(known), n=1)
    return f" Did you mean {near[0]!r}?" if near else ""


# Names of methods -----------------------------------------------------------------------------------------------------


METHOD_NAMES = (
    "tensor.in_out",
    "tensor.in_class",
    "tensor.contribution",
    "tensor.norm",
    "rollout.attn",
    "mean.attn",
    "rollout.w_attn",
    "mean.w_attn",
    "rollout.w_attn_res_ln",
    "mean.w_attn_res_ln",
    "rollout.glob_enc",
    "mean.glob_enc",
    "alti",
    "rollout.attn_without_sink",
    "control.random",
    "control.recency",
    "control.position",
    "control.embedding_norm",
    "gradient.times_input",
    "gradient.integrated",
)
"""The keys of `METHODS`; a test compares the two."""


def checked_methods(names: Iterable[str] | None, also: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Names of maps, each once, perhaps with a rule set after an @; None for all.

    Args:
        names: As the user gave them.
        also: Further names that a study knows.
    """
    if names is None:
        return None
    names = tuple(dict.fromkeys(names))
    loaded = sys.modules.get("tensorlens.maps.methods")  # before it is imported, nobody can have added a method
    known = METHOD_NAMES if loaded is None else tuple(loaded.METHODS)
    checked_names([one if one in also else split(one)[0] for one in names], (*known, *also), "methods")
    for name in names:
        base, member = split(name)
        if member not in MEMBERS or "@" in name and not base.startswith("tensor."):
            raise InputError(
                f"Expected one of {', '.join(MEMBERS)} after the @ of a map of T in `methods`; got {name!r}."
            )
    return names


# Rule sets ------------------------------------------------------------------------------------------------------------


MEMBERS: dict[str, Rules] = {name: getattr(Rules, name)() for name in RULE_SETS if name != "cp_lrp"}
"""The rule sets that are compared."""


def split(name: str) -> tuple[str, str]:
    """The map and the rule set of a name."""
    base, _, member = name.partition("@")
    return base, member or "paper"


def member_lens(lens: Lens, member: str) -> Lens:
    """The same model under a rule set, with the user's choice of the output."""
    return lens.with_rules(replace(MEMBERS[member], include_final_norm=lens.rules.include_final_norm))


# The studies ----------------------------------------------------------------------------------------------------------


GRID = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Convention: the paper says 0 to 30 %, but not in how many steps."""


class PerturbationOptions(Options, frozen=True, kw_only=True):
    """Everything a perturbation run depends on besides model and data.

    Attributes:
        methods: Names in `METHODS`; all by default. Those of T may have a rule set after an @:
            ``tensor.in_class@attn_lrp``. A method that does not apply to the model is reported as missing.
        limit: Largest number of samples.
        draw: Samples in the order of the ``file``, or drawn at ``random``: in turn from each label, class or article.
        watch: The output whose state is watched and explained: ``first``, ``last``, the ``mean`` of all, or with
            ``auto`` the last of a decoder and the first of any other model.
        presets: For decoders, ``strict`` (the last token is never replaced), ``paper-like`` (it may be), or both.
        keep_first: Number of tokens at the beginning that are never replaced, besides special ones.
        replacements: How a token is replaced. Texts: ``token`` (mask, unknown, padding or end token), ``zero``,
            ``mean`` (embeddings), ``attention`` (masked out), ``delete``. Images: ``black``, ``mean``, ``blur``.
            By default the first of these.
        grid: Fractions of tokens replaced, from 0.
        n_tokens: Texts are cut to this many tokens.
        min_tokens: Shorter texts are left out.
        cut: With ``each``, every text is a sample; with ``windows``, all texts are joined and cut into windows. Windows
            that are drawn lie within one article.
        column: Column or field with the text.
        label: Column or field with the label.
        split: For data with several parts, the part to use.
        absolute: Rank by magnitude; by signed score otherwise.
        raw_norms: Multiply a rollout's matrices of norms as they are; otherwise rows are divided by their sums first.
        seed: Random seed for the draw, the random control and the bootstrap.
        n_random: Random orders that the random control averages over.
        norm_probes: Estimate `tensor.norm` by this many random probes; exact by default.
        batch_size: Perturbed copies per batch; by default 256 on a GPU and 64 elsewhere. Numbers depend on it only by
            rounding.
        group_size: Samples measured together, so that copies of several share a batch; an interruption loses at most
            as many. By default 16, or fewer if a run has few samples. Numbers depend on it only by rounding.
    """

    methods: Names | None = None
    limit: Count | None = None
    draw: Literal["file", "random"] = "file"
    watch: Literal["auto", "first", "last", "mean"] = "auto"
    presets: Names = ("strict",)
    keep_first: Whole = 0
    replacements: Names | None = None
    grid: tuple[float, ...] = GRID
    n_tokens: Count = 128
    min_tokens: Count = 1
    cut: Literal["each", "windows"] = "each"
    column: str | None = None
    label: str | None = None
    split: str = "test"
    absolute: bool = False
    raw_norms: bool = False
    seed: Whole = 0
    n_random: Count = 5
    norm_probes: Count | None = None
    batch_size: Count | None = None
    group_size: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        presets = checked_names(self.presets, ("strict", "paper-like"), "presets")
        self.settle(methods=checked_methods(self.methods), presets=presets, grid=check_grid(self.grid))


def check_grid(grid: Sequence[float]) -> tuple[float, ...]:
    """The grid as floats: from 0 upwards, to at most 1."""
    values = tuple(map(float, grid))
    rises = all(a < b for a, b in zip(values, values[1:], strict=False))
    if len(values) < 2 or values[0] != 0 or not rises or values[-1] > 1:
        raise InputError(f"Expected a grid of rising fractions from 0 to at most 1; got {list(grid)}.")
    return values


SCALES = tuple(i / 4 for i in range(21))
"""LRE's grid: 21 points on [0, 5]."""


class RelationOptions(Options, frozen=True, kw_only=True):
    """Everything a relation run depends on besides model and data.

    Attributes:
        n_train: m, the number of examples in the mean; the prompt of each example contains the other m - 1.
        n_splits: Splits into training and test, each with a seed of its own.
        seed: Seed of the first split.
        top_k: Test facts are kept if the object's first token is among the model's `top_k` likeliest.
        min_test: A split with fewer test facts is not scored; at least half of the splits must be scored.
        max_test: Largest number of test facts per split, drawn at random.
        test_examples: Examples in a test prompt: ``m-1``, as in training, or all ``m``. A mean needs prompts of one
            length, so with ``m`` training prompts contain all m too, including their own fact.
        starts: Blocks to start from; 0 is the whole model.
        scales: The values that β is tuned over.
        with_lre: Also run LRE, whose Jacobians cost as much as slices of T.
        limit: Largest number of relations per category; all by default.
        categories: Only these categories; all by default.
    """

    n_train: Count = 3
    n_splits: Count = 6
    seed: Whole = 0
    top_k: Count = 20
    min_test: Count = 3
    max_test: Count = 100
    test_examples: Literal["m-1", "m"] = "m-1"
    starts: tuple[int, ...] = (0,)
    scales: tuple[float, ...] = SCALES
    with_lre: bool = True
    limit: Count | None = None
    categories: Names | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.starts or min(self.starts) < 0:
            raise InputError(f"`starts` must name at least one block to start from, such as (0,); got {self.starts}.")
        if not self.scales:
            raise InputError("The grid of scales is empty; expected at least one number, such as 1.0.")


SIZES = tuple(float(f"{10 ** (k / 4):.6g}") for k in range(-12, 3))
"""Lengths of a move relative to the input's, from 0.001 to about 3."""


class FidelityOptions(Options, frozen=True, kw_only=True):
    """Everything a fidelity run depends on besides model and inputs.

    Attributes:
        sizes: Lengths of ε relative to X.
        n_random: Random directions per input.
        n_token: Directions towards another token per input, if the input has tokens; as many as random ones by
            default.
        n_probes: Probes for the distance to the Jacobian.
        seed: Random seed for directions and probes.
        stride: Measure properties at every n-th block; 0 leaves them out.
        out_token: The output whose slice is measured; by default the last of a language model and the first of any
            other.
    """

    sizes: tuple[float, ...] = SIZES
    n_random: Whole = 4
    n_token: Whole | None = None
    n_probes: Count = 16
    seed: Whole = 0
    stride: Whole = 1
    out_token: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.sizes or min(self.sizes) <= 0:
            raise InputError(f"`sizes` must be positive numbers, at least one; got {self.sizes}.")
        self.settle(n_token=self.n_random if self.n_token is None else self.n_token)
        if not self.n_random and not self.n_token:
            raise InputError("Expected at least one direction; got `n_random` = `n_token` = 0.")


WORD_OVERLAP = "control.word_overlap"


class JudgeOptions(Options, frozen=True, kw_only=True):
    """Everything a benchmark run depends on besides model and data.

    Attributes:
        methods: Names of maps, with the rule set after an @ (``tensor.in_class@attn_lrp``); all by default.
        limit: Largest number of items per set.
        seed: Random seed for the bootstrap.
        group_size: Items that share a recording. Numbers depend on it only by rounding.
    """

    methods: Names | None = None
    limit: Count | None = None
    seed: int = 0
    group_size: Count = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.settle(methods=checked_methods(self.methods, also=(WORD_OVERLAP,)))
