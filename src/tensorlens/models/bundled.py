"""Models with real weights that install by name from the package index: the table (`bundled.toml`), and a check.

The packages are read as data: none of them is imported, since their code needs runtimes this library does not use.
Conversion is in `conversions`.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from tensorlens.errors import LoadError, pip


class Recipe(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about a model that its files do not contain.

    Attributes:
        model: Class of transformers.
        config: The settings that differ from its defaults.
        names: Where a name in an ONNX file begins as the key does, it begins here as the value does; other names are
            not weights of the model.
        tokens: Special tokens by their role, for a package with a ``tokenizer.json``.
        settings: ``preprocessor_config.json`` of an image model.
        labels: The file of the package that lists the classes.
        token: Regular expression of one token, for a folder whose tokenizer is code.
    """

    model: str
    config: dict[str, Any] = {}
    names: dict[str, str] = {}
    tokens: dict[str, str] = {}
    settings: dict[str, Any] = {}
    labels: str = ""
    token: str = ""


class Bundled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row of the table: a short name, where its weights come from, and how they are stored.

    Attributes:
        name: The name that `load` accepts.
        distributions: ``name==version`` of each package; these are uploads by individuals, so a different version
            may have different, unseen content.
        files: `package/path` of each weight file or folder, in order.
        kind: How the files are stored. `torch folder` is a folder with a pickled state dict and a vocabulary,
            without a tokenizer transformers could read. Pieces of a `gguf` or a `zip` are its files in order.
        about: One line for people.
        licence: The terms of the weights according to the packages and the notes inside them.
        inside: For a zip archive, the model folder or `.gguf` file in it.
        in_demo: Whether `requirements-demo.txt` installs it.
        recipe: For `onnx` and `torch folder`, the facts that the files do not contain.
        parts: The first and the last number of its pieces, for texts with ``{i}``.
    """

    name: str
    distributions: tuple[str, ...]
    files: tuple[str, ...]
    kind: Literal["folder", "gguf", "onnx", "torch folder", "zip"]
    about: str
    licence: str
    inside: str = ""
    in_demo: bool = True
    recipe: Recipe = Recipe(model="")
    parts: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        numbers = range(self.parts[0], self.parts[1] + 1)
        for field in ("distributions", "files"):
            each = [[text.format(i=i) for i in numbers] if "{" in text else [text] for text in getattr(self, field)]
            msgspec.structs.force_setattr(self, field, tuple(text for texts in each for text in texts))

    @property
    def install_line(self) -> str:
        """The command that installs the weights, and nothing else."""
        return f"{pip()} install --no-deps " + " ".join(self.distributions)


class Installed(NamedTuple):
    """A bundled model found on disk."""

    bundled: Bundled
    paths: tuple[Path, ...]


_TABLE = Path(__file__).with_suffix(".toml").read_bytes()

BUNDLED: dict[str, Bundled] = {
    row.name: row for row in msgspec.toml.decode(_TABLE, type=dict[str, tuple[Bundled, ...]])["model"]
}
"""Every bundled model by its short name."""


def near_names(name: str) -> list[str]:
    """Bundled names similar to `name`, the most similar first."""
    return difflib.get_close_matches(name.lower(), list(BUNDLED), n=2, cutoff=0.65)


def is_installed(name: str) -> bool:
    """Whether the weights of the bundled model `name` are installed, in the version that was checked."""
    try:
        find_installed(name)
    except LoadError:
        return False
    return True


def find_installed(name: str) -> Installed:
    """Where the weights of the bundled model `name` are installed.

    Args:
        name: A key of `BUNDLED`.

    Raises:
        LoadError: A package is absent or has another version; the message holds the install line.
    """
    row = BUNDLED[name]
    for pinned in row.distributions:
        distribution, _, wanted = pinned.partition("==")
        try:
            installed = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            raise LoadError(
                f"The weights of {name!r} come with the package `{distribution}`, which is not installed. "
                f"Install them with: {row.install_line}"
            ) from None
        if installed != wanted:
            raise LoadError(
                f"The weights of {name!r} were checked in {pinned}, but version {installed} is "
                f"installed. Install the checked one with: {row.install_line}"
            )
    return Installed(row, tuple(_locate(row, file) for file in row.files))


def _locate(row: Bundled, file: str) -> Path:
    package, _, inner = file.partition("/")
    # `find_spec` of a top-level name reads the search path only; the package's own code does not run.
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / inner
        if path.exists():
            return path
    raise LoadError(
        f"The package of {row.name!r} is installed, but its file {file} is missing. "
        f"Install it again with: {row.install_line} --force-reinstall"
    )
