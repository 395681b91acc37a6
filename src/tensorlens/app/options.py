"""Options that several commands share, and how they are read."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from tensorlens.errors import InputError
from tensorlens.freezing.conventions import Rules
from tensorlens.lens import Lens, load

Model = Annotated[str, typer.Argument(help="Bundled short name, folder, .gguf file or hub id.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda:0; the GPU if there is one.")]
Dtype = Annotated[str | None, typer.Option(help="float32 (default), float64, bfloat16, float16 or auto.")]
AttentionBackend = Annotated[
    str | None, typer.Option("--attention", help="eager or sdpa; transformers' choice if not given.")
]
Gate = Annotated[str, typer.Option(help="Gated feed-forwards: freeze_gate, freeze_up or half.")]
FinalNorm = Annotated[bool, typer.Option(help="Whether the output is taken after the final norm.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the model.")]


def load_lens(
    model: str, *, device: str | None, dtype: str | None, attention: str | None, gate: str, final_norm: bool,
    trust_remote_code: bool,
) -> Lens:  # fmt: skip
    """The lens that the options describe."""
    rules = Rules(gate=gate, include_final_norm=final_norm)  # type: ignore[arg-type]  # checked by Rules itself
    return load(
        model, device=device, dtype=dtype, attention=attention, rules=rules, trust_remote_code=trust_remote_code
    )


def read_input(value: str) -> str:
    """The text itself, or standard input for ``-``."""
    return sys.stdin.read().rstrip("\n") if value == "-" else value


def block_range(text: str | None, n_blocks: int) -> tuple[int, int] | None:
    """``3:9`` as a pair; either end may be left out."""
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    try:
        first = int(start) if start else 0
        return first, (int(stop) if stop else n_blocks) if colon else first + 1
    except ValueError:
        raise InputError(f"`--blocks` must be a range such as 3:9, or one block such as 4; got {text!r}.") from None


def head_choice(choices: list[str]) -> dict[int, list[int]]:
    """``3:0,2`` as {3: [0, 2]}, for each time the option is given."""
    chosen: dict[int, list[int]] = {}
    for text in choices:
        block, _, heads = text.partition(":")
        try:
            chosen[int(block)] = [int(head) for head in heads.split(",") if head]
        except ValueError:
            raise InputError(f"Heads must be given as BLOCK:HEAD,HEAD such as 3:0,2; got {text!r}.") from None
    return chosen


def target_of(target: str | None, against: str | None) -> Any:
    """A target, or a pair for a contrast. A number is an id or class index."""
    if against is not None and target is None:
        raise InputError("`--against` names the other target of a contrast; give the first with `--target`.")
    values = [int(value) if value is not None and value.lstrip("-").isdigit() else value for value in (target, against)]
    return values[0] if against is None else (values[0], values[1])
