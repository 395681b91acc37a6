"""From what a user calls a model to a folder that `from_pretrained` can read.

A bundled short name and a `.gguf` file are converted; any other name is taken for a hub id and downloaded. The hub is
first asked once, with a short timeout, and then for every file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tensorlens.errors import LoadError
from tensorlens.models.bundled import BUNDLED, Installed, find_installed, near_names
from tensorlens.models.conversions import (
    cache_key,
    check_magic,
    convert_gguf,
    convert_once,
    convert_onnx,
    convert_torch_folder,
    unpack_folder,
)
from tensorlens.models.foreign_files import foreign_reader

PATIENCE_SECONDS = 5.0
"""How long to wait for the hub to answer."""

_SAFE_WEIGHTS = "*model*.safetensors"
"""Files of weights by transformers' names; some repositories contain a consolidated copy as well."""
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")


def local_folder(name: str | Path, revision: str | None = None, *, weights: bool = True) -> Path:
    """The folder of the checkpoint `name`: a bundled name, `.gguf` file, folder or hub id, looked up in this order.

    A model of the hub is downloaded to the hub's own cache.

    Args:
        name: What the user calls it.
        revision: A branch, tag or commit of the hub; of a folder, the checkpoint folder inside it.
        weights: Whether the weights are needed, or only the files beside them.

    Raises:
        LoadError: It is not one of these, or it is incomplete.
    """
    check_model_name(name, revision)
    text = str(name)
    path = Path(text).expanduser()
    if text in BUNDLED:
        return bundled_folder(find_installed(text))
    if path.suffix == ".gguf":
        return convert_gguf(path.stem, [path])
    if path.is_dir():
        return path / (revision or "")
    there = ask_hub(text, revision)
    if isinstance(there, Path):
        return there
    from huggingface_hub import snapshot_download

    is_safe = any(file.endswith(".safetensors") and "/" not in file for file in there)
    wanted = ["*.json", "*.txt", "*.model", "*.py", "*.jinja"]
    wanted += [_SAFE_WEIGHTS if is_safe else "pytorch_model*.bin"] if weights else []
    try:
        folder = Path(snapshot_download(text, revision=revision, allow_patterns=wanted))
    except Exception as error:
        raise not_on_hub(text, error) from error
    if weights:
        _check_folder(folder)
    return folder


def is_hub_id(name: str) -> bool:
    """Whether a name that `check_model_name` accepts is neither bundled nor on disk."""
    path = Path(name).expanduser()
    return name not in BUNDLED and path.suffix != ".gguf" and not path.is_dir()


BARE_NAMES = frozenset(
    ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2", "bert-base-uncased", "bert-base-cased")
    + ("roberta-base", "distilbert-base-uncased", "t5-small")
)
"""Names without an organisation that the hub still knows from older tutorials."""


def check_model_name(name: str | Path, revision: str | None = None) -> None:
    """Refuse a name that cannot be a model, without reading, converting, importing or downloading anything.

    Args:
        name: What the user calls it.
        revision: As for `local_folder`.

    Raises:
        LoadError: It is neither a bundled model that is installed, a `.gguf` file, a folder of weights, nor of the form
            of a hub id; or it has no such revision.
    """
    if not isinstance(name, (str, Path)):
        raise LoadError(
            f"A model's name or path was expected; got {type(name).__name__}. A model that is already in memory "
            "goes into `tensorlens.Lens(model, tokenizer)`."
        )
    text = str(name)
    if revision is not None and not isinstance(revision, str):
        raise LoadError(f"`revision` is the name of a branch, tag, commit or checkpoint folder; got {revision!r:.60}.")
    if revision is not None and (text in BUNDLED or text.endswith(".gguf")):
        raise LoadError(
            f"`revision` is for models of the hub and folders of checkpoints; {text!r} has only one revision."
        )
    if text in BUNDLED:
        find_installed(text)
        return
    try:
        _check_path(text, revision, is_path=isinstance(name, Path))
    except (OSError, RuntimeError, ValueError) as error:  # too long, a foreign home folder, a null character
        raise LoadError(f"A model's name or path was expected, but {text[:80]!r} is not one ({error}).") from error


def _check_path(text: str, revision: str | None, *, is_path: bool) -> None:
    path = Path(text).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise LoadError(f"A .gguf file was expected at {text!r}, but there is none. Check the path.")
        check_magic(path.stem, path)
        return
    if path.is_dir() and text:
        if revision is not None and not (path / revision).is_dir():
            there = sorted(file.parent.name for file in path.glob("*/config.json"))
            raise LoadError(
                f"The checkpoint {revision!r} was expected as a folder in {text!r}, but there is none. "
                f"Its checkpoints: {', '.join(there) or 'none'}."
            )
        _check_folder(path / (revision or ""))
        return
    if path.is_file():
        raise LoadError(f"A folder, a .gguf file or a name was expected, but {text!r} is another kind of file.")
    if is_path or text.startswith((".", "/", "~", "\\")) or text.endswith("/") or text.count("/") > 1:
        raise LoadError(f"A model folder was expected at {text!r}, but there is none. Check the path.")
    if "/" not in text and text not in BARE_NAMES:  # a typo should not wait for the hub
        near = near_names(text)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else f"Bundled are {', '.join(BUNDLED)}."
        raise LoadError(
            f"{text!r} is neither a bundled model nor a folder here. {hint} "
            "A model of the hub is named organisation/name, such as openai-community/gpt2; one on disk by its folder."
        )


_CONVERTERS: dict[str, Callable[[Installed, Path], None]] = {
    "zip": unpack_folder,
    "onnx": convert_onnx,
    "torch folder": convert_torch_folder,
}
"""The function that writes a bundled model as a folder, by its kind."""


def bundled_folder(source: Installed) -> Path:
    """The folder of a bundled model, converted on first use where it has to be.

    Raises:
        LoadError: The installed files cannot be read.
    """
    row = source.bundled
    version = row.distributions[0].partition("==")[2]  # checked; it stands for the content of the files
    if row.kind == "folder":
        return source.paths[0]
    if row.kind == "gguf":
        return convert_gguf(row.name, source.paths, version=version, inside=row.inside)

    def make(target: Path) -> None:
        with foreign_reader(
            lambda said: (
                f"{row.name}: the installed weights could not be read ({said}). Install them again with: "
                f"{row.install_line} --force-reinstall"
            )
        ):
            _CONVERTERS[row.kind](source, target)

    return convert_once(cache_key(row.name, source.paths, version=version), make)


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a model folder, and their index files."""
    return sorted({file for pattern in _WEIGHT_FILES for file in folder.glob(pattern)})


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        files = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"Name the file itself: {folder / files[0]}" if files else "Name the folder save_pretrained wrote."
        raise LoadError(f"A model folder contains a config.json, but {folder} does not. {hint}")
    if not weight_files(folder):
        raise LoadError(
            f"A model folder contains weights (model.safetensors or pytorch_model.bin), but {folder} does not. "
            "Save the model again with save_pretrained, or copy the missing files."
        )


# The hub --------------------------------------------------------------------------------------------------------------


def ask_hub(name: str, revision: str | None = None) -> list[str] | Path:
    """The hub's files of the model `name`; if the hub does not answer, the folder of an earlier download.

    Raises:
        LoadError: It is not on the hub, or the hub does not answer and there is no copy here.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        found = HfApi().model_info(name, revision=revision, timeout=PATIENCE_SECONDS)
    except RevisionNotFoundError as error:
        raise LoadError(f"The hub has {name!r}, but not its revision {revision!r}. Check the branch or tag.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise not_on_hub(name, error) from error
    except Exception as error:  # the error for "no answer" depends on the HTTP library below
        copy = try_to_load_from_cache(name, "config.json", revision=revision)
        if not isinstance(copy, str):
            raise not_on_hub(name, error) from error
        return Path(copy).parent
    return [file.rfilename for file in found.siblings or ()]


def not_on_hub(name: str, error: BaseException) -> LoadError:
    """The error for a name that is not on the hub, or if the hub could not be asked."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    if any(isinstance(cause, GatedRepoError) for cause in causes):
        return LoadError(f"The hub has {name!r}, but behind an agreement. Accept it there, then run `hf auth login`.")
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        what = "the hub has no public model of this name"
    else:
        what = "the hub could not be reached or has no such model"
    near = near_names(name.split("/")[-1])
    hint = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    return LoadError(
        f"{name!r} is not a folder here, and {what}. {hint}Check the name (organisation/name) and the network, pass a "
        f"folder, or take a bundled model, which needs no network: {', '.join(BUNDLED)}."
    )
