"""The paper's tables, and its protocol as a record and a file, with our choice where the paper leaves something open.

A file (.json or .toml) can replace any part of `Protocol`; the rest keeps the values given here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tensorlens.errors import InputError
from tensorlens.studies.options import (
    Chosen,
    Count,
    Options,
    PerturbationOptions,
    RelationOptions,
    Whole,
    checked_names,
)

MEASURES = ("attn", "w_attn", "w_attn_res_ln", "glob_enc")
TENSOR = ("tensor.norm", "tensor.in_out", "tensor.in_class")
BASELINES = tuple(f"{join}.{measure}" for join in ("rollout", "mean") for measure in MEASURES)
CONTROLS = ("control.random", "control.recency", "control.position", "control.embedding_norm")


class TableSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the paper's tables or figures.

    Attributes:
        title: Model and data.
        model: Its hub id.
        kind: Its data.
        options: Single options of the protocol that are this table's own.
        paper: By metric the paper's numbers, in the order of its columns.
        notes: Notes for the reader.
        trains: Whether the model is fine-tuned first.
    """

    title: str
    model: str
    kind: Literal["imagenet", "imdb", "wikitext", "relations"]
    options: dict[str, Any] = {}
    paper: dict[str, str] = {}
    notes: list[str] = []
    trains: bool = False

    def numbers(self, metric: str) -> dict[str, str]:
        """The paper's numbers by method; empty if it has none."""
        row = self.paper.get(metric)
        return {} if row is None else dict(zip((*TENSOR, *BASELINES), row.split(", "), strict=True))


TABLES: dict[str, TableSettings] = msgspec.toml.decode(
    Path(__file__).with_name("tables.toml").read_bytes(), type=dict[str, TableSettings]
)


class Training(Options, frozen=True, kw_only=True):
    """How a model is fine-tuned for sentiment before it is measured; the paper gives no details.

    Attributes:
        epochs: Passes over the reviews; 0 does not train, and then the model must have been trained before.
        learning_rate: The peak learning rate, reached after a tenth of the steps.
        batch_size: Reviews per batch.
        n_tokens: Longer reviews are cut.
        limit: Largest number of reviews.
        held_out: Share of the data for measuring instead of training, if the data have no parts.
    """

    epochs: Whole = 2
    learning_rate: Annotated[float, msgspec.Meta(ge=0)] = 5e-5
    batch_size: Count = 32
    n_tokens: Count = 128
    limit: Count | None = None
    held_out: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise InputError(f"Expected `held_out` between 0 and 1; got {self.held_out}.")


class Protocol(Options, frozen=True, kw_only=True):
    """Everything that the paper's tables depend on besides models and data.

    Attributes:
        n_samples: Samples of a perturbation table; the paper does not say how many.
        stratify: Draw in turn from each label or class; data without labels are refused. Otherwise at random.
        perturbation: Grid, replacement, replaceable tokens, watched output, norms.
        relations: Splits, prompts, filters, starting layers.
        training: Fine-tuning of ModernBERT and Gemma3.
        tables: Options of `perturbation` that differ in single tables, by table.
    """

    n_samples: Count = 1000
    stratify: bool = True
    perturbation: PerturbationOptions = PerturbationOptions(
        methods=(*TENSOR, *BASELINES, *CONTROLS),
        draw="random",
        presets=("paper-like", "strict"),
        n_tokens=128,
        min_tokens=128,
    )
    relations: RelationOptions = RelationOptions(n_train=3, n_splits=6, top_k=20, starts=(0, 4, 8, 12))
    training: Training = Training()
    tables: dict[str, dict[str, Any]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, changes in self.tables.items():
            checked_names(name, [one for one in TABLES if one != "relations"], "tables")
            with_changes(self.perturbation, changes)


def read_protocol(path: str | Path | None) -> Protocol:
    """The protocol, with the values of a file instead of the paper's."""
    if path is None:
        return Protocol()
    file = Path(path).expanduser()
    readers = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}
    if file.suffix.lower() not in readers:
        raise InputError(f"`--protocol` must be a .json or .toml file; got {str(path)!r}.")
    try:
        document = readers[file.suffix.lower()](file.read_bytes())
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise InputError(f"The protocol {str(path)!r} could not be read: {error}") from error
    if not isinstance(document, dict):
        raise InputError(f"The protocol {str(path)!r} must be an object of settings; got {type(document).__name__}.")
    try:
        return _changed(Protocol(), document)
    except (msgspec.ValidationError, InputError) as error:
        raise InputError(f"The protocol {str(path)!r} must have the fields of `Protocol`; got: {error}") from error


def with_changes(options: PerturbationOptions, *changes: Mapping[str, Any]) -> PerturbationOptions:
    """The same with single options changed, checked as those of a file."""
    try:
        return _changed(options, {name: one for change in changes for name, one in change.items()})
    except msgspec.ValidationError as error:
        raise InputError(f"{error}") from error


def _changed(record: Chosen, changes: Mapping[str, Any]) -> Chosen:
    plain = msgspec.to_builtins(record)
    for name, value in changes.items():
        inner = plain.get(name)
        plain[name] = inner | value if isinstance(inner, dict) and isinstance(value, dict) else value
    return msgspec.convert(plain, type(record))


def differences(options: Options, usual: Options) -> list[str]:
    """The differences of two records, one line per option."""
    return [
        f"{name} = {getattr(options, name)!r} instead of {getattr(usual, name)!r}"
        for name in options.__struct_fields__
        if getattr(options, name) != getattr(usual, name)
    ]
