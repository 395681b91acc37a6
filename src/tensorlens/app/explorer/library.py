"""`Library`: the models, saved maps and reports named at start. Paths come from the command line only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.inputs import forward_parameters, tokenizer_of

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
        opened: Lenses of the models loaded so far.
    """

    names: tuple[str, ...]
    load: Callable[[str], Lens]
    maps: tuple[tuple[str, TokenMap], ...] = ()
    reports: tuple[Report, ...] = ()
    opened: dict[str, Lens] = field(default_factory=dict)

    def lens(self, name: str) -> Lens:
        """The lens of a model named at start.

        Raises:
            InputError: no such model was named.
        """
        if name not in self.names:
            known = ", ".join(self.names) or "none"
            raise InputError(
                f"Expected a model that the explorer was started with ({known}), got {name[:80]!r}. "
                "Start the explorer again with that model's name."
            )
        if name not in self.opened:
            self.opened[name] = self.load(name)
        return self.opened[name]


def open_library(arguments: Sequence[str], load: Callable[[str], Lens]) -> Library:
    """Tell models, saved maps and report folders of the command line apart, and read the maps.

    Raises:
        InputError: a map cannot be read.
    """
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
    return Library(names=tuple(dict.fromkeys(names)), load=load, maps=tuple(maps), reports=tuple(reports))


def can_answer(lens: Lens) -> bool:
    """Whether a model can say something after a text."""
    can_generate = getattr(lens.model, "can_generate", None)
    return tokenizer_of(lens.processor) is not None and callable(can_generate) and bool(can_generate())


def input_kind(lens: Lens) -> str:
    """What a model takes: ``text`` or ``image``."""
    if tokenizer_of(lens.processor) is None and "pixel_values" in forward_parameters(lens.model):
        return "image"
    return "text"
