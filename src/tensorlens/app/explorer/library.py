"""`Library`: the models, saved maps and reports named at start; `Recent` and `Parts`: memory between questions.

Paths come from the command line only.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tensorlens.app.explorer.questions import Ask
from tensorlens.errors import InputError
from tensorlens.lens import Lens
from tensorlens.maps.targets import has_predictions
from tensorlens.maps.token_map import TokenMap
from tensorlens.models.bundled import BUNDLED
from tensorlens.models.inputs import forward_parameters
from tensorlens.models.resolving import check_model_name
from tensorlens.models.texts import tokenizer_of
from tensorlens.tensor import AttentionTensor

_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*", re.ASCII)
_MAPS = (".json", ".safetensors")
REPORT = "report.html"
"""The page that every study writes into its folder."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The page of a study's folder."""

    title: str
    path: Path


@dataclass(kw_only=True)
class Library:
    """The models, maps and reports that may be asked for, by name or number.

    Models are loaded on first use, in the worker's thread, and stay loaded.

    Attributes:
        names: Names of the models.
        load: Makes a lens from a name.
        maps: Saved maps with their titles.
        reports: Pages of studies.
        is_recommended: Whether each question uses the rules recommended for it instead of those of the lens.
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
    """Whether a model can continue a text."""
    can_generate = getattr(lens.model, "can_generate", None)
    return tokenizer_of(lens.processor) is not None and callable(can_generate) and bool(can_generate())


def input_kind(lens: Lens) -> str:
    """The kind of a model's input: ``text`` or ``image``."""
    if tokenizer_of(lens.processor) is None and "pixel_values" in forward_parameters(lens.model):
        return "image"
    return "text"


# Between questions ----------------------------------------------------------------------------------------------------

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")

N_PREDICTIONS = 8
_MOST_PARTS = 3


class Recent(Generic[Key, Value]):
    """Keeps what was used last. The newest is kept even if it alone is too large. Safe to use from any thread."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[Key, tuple[Value, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def n_bytes(self) -> int:
        """Bytes of all kept values."""
        return sum(n_bytes for _, n_bytes in self._kept.values())

    def get(self, key: Key) -> Value | None:
        """The value for `key`, now the most recent, or None."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: Key, value: Value, n_bytes: int) -> None:
        """Keep `value`, and drop the values that were not used for longest."""
        with self._lock:
            self._kept[key] = (value, n_bytes)
            self._kept.move_to_end(key)
            while len(self._kept) > self._most or len(self._kept) > 1 and self.n_bytes > self._most_bytes:
                self._kept.popitem(last=False)


class Parts:
    """The attention tensor of one input with its latest parts, whose bias and certificate are computed only once."""

    def __init__(self, whole: AttentionTensor) -> None:
        self.whole = whole
        self._kept: Recent[Any, AttentionTensor] = Recent(_MOST_PARTS, 2**62)

    @property
    def n_bytes(self) -> int:
        """Memory of the hidden states and of the constants that are not the model's own."""
        recording = self.whole.operator.recording
        return sum(state.nbytes for state in recording.states) + recording.program.held_bytes

    def predictions(self, out_token: int) -> list[dict[str, Any]]:
        """Names, numbers and probabilities of the top predictions at one output; none for a model without a head."""
        if not has_predictions(self.whole):
            return []
        out_token = 0 if self.whole.operator.recording.pools else out_token
        return [one._asdict() for one in self.whole.predictions(N_PREDICTIONS, out_token)]

    def part(self, ask: Ask) -> AttentionTensor:
        """The tensor of the blocks and heads that a question is about."""
        key = str((ask.blocks, ask.heads, ask.keeps_heads))
        kept = self._kept.get(key)
        if kept is None:
            kept = _part(self.whole, ask)
            self._kept.put(key, kept, 1)
        return kept


def _part(T: AttentionTensor, ask: Ask) -> AttentionTensor:
    """Convert heads: the page counts blocks from the model's first, a tensor from the first of its range."""
    start, stop = ask.blocks or (0, T.n_blocks)
    outside = [block for block in ask.heads or {} if not start <= block < stop]
    if outside:
        raise InputError(
            f"Expected heads of blocks {start} to {stop - 1}, got block {outside[0]}. "
            "Widen the range of blocks, or choose other heads."
        )
    T = T if ask.blocks is None else T.blocks(start, stop)
    chosen = {block - start: heads for block, heads in (ask.heads or {}).items()}
    return T if not chosen else T.heads(chosen) if ask.keeps_heads else T.without_heads(chosen)
