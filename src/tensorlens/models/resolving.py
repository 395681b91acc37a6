"""From what a user calls a model to something `from_pretrained` can read.

A bundled short name, a `.gguf` file and a local folder become a folder; anything else is taken for a hub id.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path

from tensorlens.errors import LoadError
from tensorlens.models.bundled import BUNDLED, find
from tensorlens.models.gguf import convert_gguf
from tensorlens.models.onnx_dinov2 import convert_dinov2
from tensorlens.models.torch_folders import convert_torch_folder

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a checkpoint is: a folder that is there, or a hub id.

    Attributes:
        path: What `from_pretrained` takes.
        is_local: Whether `path` is a folder.
    """

    path: str
    is_local: bool


def resolve(name: str | Path) -> Location:
    """Find the checkpoint `name`: bundled name, `.gguf` file, folder or hub id, in this order.

    Raises:
        LoadError: It is none of them, or it is incomplete.
    """
    text = str(name)
    if text in BUNDLED:
        return Location(path=str(_bundled_folder(text)), is_local=True)
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadError(f"A .gguf file was expected at {text!r}, but there is none. Check the path.")
        return Location(path=str(convert_gguf(path.stem, [path])), is_local=True)
    if path.is_dir():
        _check_folder(path)
        return Location(path=str(path), is_local=True)
    if path.is_file():
        raise LoadError(f"A folder, a .gguf file or a name was expected, but {text!r} is another kind of file.")
    if isinstance(name, Path) or text.startswith((".", "/", "~", "\\")) or text.count("/") > 1:
        raise LoadError(f"A model folder was expected at {text!r}, but there is none. Check the path.")
    if "/" not in text and (near := near_names(text)):
        raise LoadError(
            f"{text!r} is no bundled model. Did you mean {' or '.join(map(repr, near))}? "
            "A model of the hub is named organisation/name, a model on disk by its folder."
        )
    return Location(path=text, is_local=False)


def near_names(name: str) -> list[str]:
    """Bundled names that look like `name`, the nearest first."""
    return difflib.get_close_matches(name.lower(), list(BUNDLED), n=2, cutoff=0.65)


def _bundled_folder(name: str) -> Path:
    source = find(name)
    match source.bundled.kind:
        case "folder":
            return source.paths[0]
        case "gguf" | "gguf parts":
            return convert_gguf(name, source.paths, pinned=True)
        case "onnx":
            return convert_dinov2(name, source.paths[0])
        case "torch folder":
            return convert_torch_folder(source)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"Name the file itself: {folder / files[0]}" if files else "Name the folder save_pretrained wrote."
        raise LoadError(f"A model folder holds a config.json, but {folder} does not. {hint}")
    if not any(next(folder.glob(pattern), None) for pattern in _WEIGHT_FILES):
        raise LoadError(
            f"A model folder holds weights (model.safetensors or pytorch_model.bin), but {folder} does not. "
            "Save the model again with save_pretrained, or copy the missing files."
        )
