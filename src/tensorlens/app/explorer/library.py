"""`Library`: the models, saved maps and reports named at start. Paths come from the command line only."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.bundled import BUNDLED
from tensorlens.models.forward_signature import forward_parameters
from tensorlens.models.resolving import check_model_name
from tensorlens.models.texts import tokenizer_of

_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_MAPS = (".json", ".safetensors")
REPORT = "report.html"
"""The page that every study leaves in its folder."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The page of a study's folder."""

    title: str
    path: Path


@dataclass(kw_only=True)
class Library:
    """The models, maps and reports that may be asked for, by name or number.

    Models are loaded when first asked for, in the worker's thread, and stay.

    Attributes:
        names: Names of the models.
        load: Makes a lens from a name.
        maps: Saved maps with their titles.
        reports: Pages of studies.
        is_recommended: Whether each question takes the rules recommended for it, and not those of the lens.
        opened: Lenses of the models loaded so far.
    """

    names: tuple[str, ...]
    load: Callable[[str], Lens]
    maps: tuple[tuple[str, TokenMap], ...] = ()
    reports: tuple[Report, ...] = ()
    is_recommended: bool = False
    opened: dict[str, Lens] = field(default_factory=dict)

    def add(self, name: str) -> None:
        """Load a model that was not named at start: a bundled one or one of the hub, never a path."""
        if name not in BUNDLED and (_NAME.fullmatch(name) is None or Path(name).exists()):
            raise InputError(f"Only bundled models and those of the hub can be added here; got {name[:80]!r}.")
        check_model_name(name)
        self.opened[name] = self.load(name)
        self.names = (*self.names, name)

    def lens(self, name: str) -> Lens:
        """The lens of a model named at start."""
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise InputError(
                f"Expected a model that the explorer was started with ({known}), got {name[:80]!r}. "
                "Start the explorer again with that model's name."
            )
        if name not in self.opened:
            self.opened[name] = self.load(name)
        return self.opened[name]


def open_library(arguments: Sequence[str], load: Callable[[str], Lens], **more: Any) -> Library:
    """Tell models, saved maps and reports of the command line apart, and read the maps; `more` is for `Library`."""
    maps, reports, names = [], [], []
    for argument in arguments:
        path = Path(argument)
        if path.suffix.lower() in _MAPS and path.is_file():
            maps.append((path.name, TokenMap.load(path)))
        elif (path / REPORT).is_file():
            reports.append(Report(title=path.resolve().name, path=path / REPORT))
        elif path.name == REPORT and path.is_file():
            reports.append(Report(title=path.resolve().parent.name, path=path))
        else:
            names.append(argument)
    named = tuple(dict.fromkeys(names))
    return Library(names=named, load=load, maps=tuple(maps), reports=tuple(reports), **more)


def can_answer(lens: Lens) -> bool:
    """Whether a model can say something after a text."""
    can_generate = getattr(lens.model, "can_generate", None)
    return tokenizer_of(lens.processor) is not None and callable(can_generate) and bool(can_generate())


def input_kind(lens: Lens) -> str:
    """What a model takes: ``text`` or ``image``."""
    if tokenizer_of(lens.processor) is None and "pixel_values" in forward_parameters(lens.model):
        return "image"
    return "text"
