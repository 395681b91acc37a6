"""Options shared by several commands: how a model is loaded, and how values are parsed.

Nothing here imports torch before a command runs, so help and usage errors appear at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from msgspec import structs

from tensorlens.app.printing import stage
from tensorlens.errors import InputError, MethodError, check_choice
from tensorlens.recording.conventions import RULE_SETS, Rules
from tensorlens.studies.options import METHOD_NAMES, Options

if TYPE_CHECKING:
    from tensorlens.lens import Lens


SUFFIXES = (".html", ".png", ".svg", ".pdf", ".json", ".csv", ".safetensors")
"""Suffixes of files for maps."""
DTYPES = ("float32", "float64", "bfloat16", "float16", "auto")

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="A bundled name (see `tensorlens models`), a folder, a .gguf file or a hub id."
    ),
]
Input = Annotated[str, typer.Argument(metavar="INPUT", help="A text, the path of an image, or - for standard input.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
FinalNorm = Annotated[bool, typer.Option(help="Take the output after the final norm.")]
Certify = Annotated[bool, typer.Option(help="Measure the certificate and print it beside the map.")]
TargetName = Annotated[
    str | None,
    typer.Option(help="The token or class to explain, or its id as #7042 (default: the model's top prediction)."),
]
OtherTarget = Annotated[str | None, typer.Option(help="Contrast target: explain --target minus this.")]
MapFile = Annotated[Path | None, typer.Option(help=f"File to write, by suffix: {' '.join(SUFFIXES)}.")]
PageFile = Annotated[Path | None, typer.Option(help="File to write: .html (a page) or .json.")]
LeftOut = Annotated[
    list[str] | None, typer.Option(metavar="BLOCK:HEAD,…", help="Leave these heads out, such as 3:0,2. Repeatable.")
]
RunFolder = Annotated[Path, typer.Option(help="Output folder. An existing run in it is resumed.")]
NumberOfProcesses = Annotated[int, typer.Option(help="Number of worker processes on this machine.", min=1)]


def _option(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False, rich_help_panel="Model")


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Options for loading a model; a command takes them as one parameter, see `with_records`.

    Attributes:
        device: The device; the accelerator that torch finds, or the CPU, if None.
        dtype: Type of the weights; float32 if None.
        attention: Backend of attention; transformers' choice if None.
        trust_remote_code: Whether code that comes with the model may run.
        revision: The version of the model; the current one if None.
    """

    device: Annotated[str | None, _option("cpu, cuda:0, mps, … (default: the accelerator if there is one).")] = None
    dtype: Annotated[str | None, _option("float32 (default), float64, bfloat16, float16, auto.")] = None
    attention: Annotated[str | None, _option("eager or sdpa (default: transformers' choice).", "--attention")] = None
    trust_remote_code: Annotated[bool, _option("Run code that comes with the model.", "--trust-remote-code")] = False
    revision: Annotated[str | None, _option("Branch, tag or commit on the hub, or a checkpoint in the folder.")] = None

    def check(self, model: str) -> None:
        """Refuse an unknown model or type before torch is imported or a file is read."""
        from tensorlens.models.resolving import check_model_name, is_hub_id

        if self.dtype is not None:
            check_choice(self.dtype, "--dtype", DTYPES)
        check_model_name(model, self.revision)
        if is_hub_id(model):
            from tensorlens.models.resolving import ask_hub

            ask_hub(model, self.revision)

    def lens(self, model: str, *, final_norm: bool = True, device: str | None = None) -> Lens:
        """Load `model`; `device` is the default if no device was chosen."""
        self.check(model)
        stage(f"Loading {model}")
        from tensorlens.lens import load

        return load(model, **self.loading(final_norm=final_norm, device=device))

    def loading(self, *, final_norm: bool = True, device: str | None = None) -> dict[str, Any]:
        """The arguments of `load` besides the name."""
        return {
            "device": self.device or device,
            "dtype": self.dtype,
            "attention": self.attention,
            "rules": Rules.of(getattr(self, "rules", None), include_final_norm=final_norm),
            "trust_remote_code": self.trust_remote_code,
            "revision": self.revision,
        }


@dataclass(frozen=True, kw_only=True)
class ModelOptions(LoadOptions):
    """Options for loading a model, and its rules.

    Attributes:
        rules: A name in `RULE_SETS`, or pairs, as `Rules.of` takes them; None for the default of the command.
    """

    rules: Annotated[
        str | None,
        _option(
            f"Rule set, which decides what is kept fixed: {', '.join(RULE_SETS)}; or pairs such as gate=half (default: "
            "paper; answer, circuit and explore use the recommended set)."
        ),
    ] = None

    def check(self, model: str) -> None:
        """Refuse an unknown rule set too."""
        Rules.of(self.rules)
        super().check(model)


def with_records(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each field of its records as an option of its own, so that typer sees plain parameters.

    A record is a parameter whose type is a dataclass, or the `Options` of a study, perhaps annotated with a mapping
    from fields to the names of their options. Its fields replace it in the signature, and are put together again when
    the command is called.
    """
    plain, records = [], {}
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        kind, (flags, *_) = parameter.annotation, (*getattr(parameter.annotation, "__metadata__", ()), {})
        study = getattr(kind, "__origin__", kind)
        if isinstance(study, type) and issubclass(study, Options):
            given, make = _study_options(study, flags), study.from_texts
        elif is_dataclass(kind):
            hints = get_type_hints(kind, include_extras=True)
            given, make = {one.name: (hints[one.name], one.default) for one in fields(kind)}, kind
        else:
            plain.append(parameter)
            continue
        records[parameter.name] = make, tuple(given)
        plain += [parameter.replace(name=name, annotation=of, default=value) for name, (of, value) in given.items()]

    @wraps(command)
    def called(*given: Any, **values: Any) -> None:
        for name, (make, names) in records.items():
            values[name] = make(**{one: values.pop(one) for one in names if one in values})
        command(*given, **values)

    called.__signature__ = inspect.Signature(plain)  # type: ignore[attr-defined]
    called.__annotations__ = {one.name: one.annotation for one in plain}
    return called


def _study_options(kind: type[Options], flags: dict[str, str]) -> dict[str, tuple[Any, None]]:
    """By field, an option as typer takes it: texts, which the record itself reads; None if not given."""
    words, made = kind.words(), {}
    for field in structs.fields(kind):
        types = [getattr(one, "__origin__", one) for one in (field.type, *get_args(field.type))]
        choices, default = [one for one in types if isinstance(one, str)], field.default
        as_read: Any = list[str] if tuple in types else bool if bool in types else str
        shape = "A,B,…" if tuple in types else "|".join(choices) or ("INTEGER" if int in types else "TEXT")
        option = typer.Option(
            flags.get(field.name, "--" + field.name.replace("_", "-")),
            help=words[field.name],
            metavar=None if bool in types else shape,
            show_default=",".join(map(str, default)) if isinstance(default, tuple) else str(default or "") or False,
        )
        made[field.name] = Annotated[as_read | None, option], None
    return made


def read_input(value: str, *, images: bool = True) -> str:
    """Return the text, or standard input for ``-``; refuse unreadable input before a model is loaded.

    Args:
        value: The argument as written.
        images: Whether a text that ends like a picture's file name is a path.
    """
    from tensorlens.models.texts import check_unicode, names_image

    text = sys.stdin.read().rstrip("\n") if value == "-" else value
    if not text.strip():
        where = "standard input was empty" if value == "-" else "it is empty"
        raise InputError(f"Expected a text{' or the path of an image' if images else ''}, but {where}.")
    check_unicode(text)
    if images and value != "-" and names_image(text) and not Path(text).is_file():
        raise InputError(
            f"Found no image at {text!r}. Check the path; to pass it as a text, pipe it in and use - in its place."
        )
    if value != "-" and text.endswith((".txt", ".md")) and Path(text).is_file():
        raise InputError(
            f"{text!r} is a file, and its name would be read as the text. Use - and pipe it in: - < {text}"
        )
    return text


def listed(text: str | None) -> list[str]:
    """Names separated by commas."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def check_data(path: str | Path, *, suffixes: tuple[str, ...] = ()) -> None:
    """Refuse data that do not exist, before a model is loaded.

    Args:
        path: The value of `--data`.
        suffixes: Suffixes of files; any other name may be the id of a data set. Without any, a folder is expected.
    """
    place = Path(path).expanduser()
    if not suffixes and not place.is_dir():
        raise InputError(f"`--data` must be a folder; there is none at {str(path)!r}.")
    if place.suffix.lower() in suffixes and not place.is_file():
        raise InputError(f"`--data` must be a file that exists, a folder or a data set's id; got {str(path)!r}.")


def block_range(text: str | None) -> tuple[int, int | None] | None:
    """``3:9`` as a pair; either end may be left out and is then None."""
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    try:
        first = int(start) if start or not colon else 0
        last = (int(stop) if stop else None) if colon else first + 1
    except ValueError:
        first, last = -1, None
    if first < 0 or (last is not None and last <= first):
        raise InputError(f"`--blocks` must be a range such as 3:9, or one block such as 4; got {text!r}.")
    return first, last


def head_choice(choices: list[str] | None) -> dict[int, list[int]]:
    """``3:0,2`` as {3: [0, 2]}, for each time the option is given."""
    chosen: dict[int, list[int]] = {}
    for text in choices or []:
        block, _, heads = text.partition(":")
        try:
            numbers = [int(head) for head in heads.split(",") if head]
            if min(int(block), *numbers, 0) < 0:
                raise ValueError
            chosen[int(block)] = numbers
        except ValueError:
            raise InputError(f"Heads must be given as BLOCK:HEAD,HEAD such as 3:0,2; got {text!r}.") from None
    return chosen


def two_targets(target: str | None, against: str | None) -> tuple[str | int | None, str | int | None]:
    """The target and the contrast target."""
    if against is not None and target is None:
        raise InputError("`--against` is the contrast target; pass the target itself with `--target`.")
    if against is not None and target == against:
        raise InputError(f"The two targets of a contrast must differ; both are {target!r}.")
    return number(target), number(against)


def target_of(target: str | None, against: str | None) -> Any:
    """A target, or a pair for a contrast."""
    first, second = two_targets(target, against)
    return first if second is None else (first, second)


def number(target: str | None) -> str | int | None:
    """A target as it was written; #7042 is an id, since 7042 may be a text."""
    return int(target[1:]) if target is not None and target[:1] == "#" and target[1:].isdecimal() else target


def check_file(path: Path | None, suffixes: Sequence[str] = SUFFIXES) -> None:
    """Refuse a file that could not be written."""
    if path is None:
        return
    if path.suffix.lower() not in suffixes:
        raise InputError(f"`--out` must end in one of {' '.join(suffixes)}; got {str(path)!r}.")
    if not path.parent.is_dir():
        raise InputError(f"`--out` must be in a folder that exists; {str(path.parent)!r} does not.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InputError(f"`--out` must be a file that can be written; {str(path)!r} cannot. Choose another folder.")


# Names of methods -----------------------------------------------------------------------------------------------------


def check_method_name(name: str) -> None:
    """Refuse a name that no method has."""
    if name not in METHOD_NAMES:
        near = get_close_matches(name, METHOD_NAMES, n=3, cutoff=0.4)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise MethodError(
            f"TensorLens has no method {name!r}.{hint} `tensorlens methods` lists all {len(METHOD_NAMES)}."
        )
