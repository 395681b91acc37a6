"""Output of commands: strict JSON for scripts, tables for people, and stages while a model works."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from msgspec.structs import replace
from rich.console import Console
from rich.measure import Measurement

from tensorlens.files import to_json
from tensorlens.views.captions import badge
from tensorlens.views.printing import table
from tensorlens.views.terminal import show_body

if TYPE_CHECKING:
    from tensorlens.maps.token_map import TokenMap
    from tensorlens.tensor import AttentionTensor

Say = Callable[[str], None]


def stage(name: str) -> None:
    """Print on standard error what is being done now; of several processes, only the first one does."""
    if os.environ.get("RANK", "0") == "0":
        typer.secho(f"{name} …", err=True, dim=True)


PATIENCE_SECONDS = 1.0


@contextmanager
def while_waiting(name: str) -> Iterator[None]:
    """Print on standard error what is being done, if it takes longer than a second."""
    timer = threading.Timer(PATIENCE_SECONDS, stage, (name,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def teller(*, as_json: bool) -> Say:
    """Prints text for people, or nothing if the command prints JSON. Lines are flushed, also into a pipe."""
    return (lambda text: None) if as_json else typer.echo


def certified(T: AttentionTensor, found: TokenMap, say: Say) -> TokenMap:
    """The map with its certificate, which is also printed in one line."""
    with while_waiting("Measuring the certificate; --no-certify skips it"):
        certificate = T.certificate()
    say(f"C{badge(certificate.passed, certificate.errors)[1:]}")
    return replace(found, meta=found.meta | {"certificate": certificate.verdict})


def show_map(found: TokenMap, say: Say, *, is_saved: bool) -> None:
    """Print a map before its certificate; of one that goes into a file, only the sums of its rows.

    Where the map of an answer comes from is in its file and its JSON.
    """
    view = found.view()
    several = found.shape[0] > 1 and view.answer is not None
    if view.answer is not None and not is_saved:
        say(view.title)
        show_body(view)
    elif not is_saved:
        replace(found, meta={key: value for key, value in found.meta.items() if key != "certificate"}).show()
    for label, line in zip(found.out_tokens, view.sums if is_saved or several else (), strict=False):
        say(f"{label.strip()}: {line}." if several else f"{line[:1].upper()}{line[1:]}.")


def map_content(found: TokenMap) -> dict[str, Any]:
    """A map as plain values, without its picture."""
    return {
        "method": found.method,
        "out_tokens": found.out_tokens,
        "in_tokens": found.in_tokens,
        "scores": found.scores.tolist(),
        "bias_share": found.bias_share.tolist(),
        "meta": {name: value for name, value in found.meta.items() if name != "image"},
    }


def save(found: Any, out: Path | None, say: Say) -> None:
    """Write a record to the path of `--out`."""
    if out is not None:
        say(f"Wrote {found.save(out)}")


def print_json(content: Any) -> None:
    """Print JSON that every reader takes: NaN and infinity become null."""
    typer.echo(to_json(content))


def print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows with the same keys as a table; outside a terminal it is as wide as its cells need."""
    shown = table(list(rows[0]), [[str(cell) for cell in row.values()] for row in rows])
    shown.columns[0].no_wrap = True
    console = Console(highlight=False)
    if not console.is_terminal:
        widest = Measurement.get(console, console.options.update(width=10_000), shown).maximum
        console.width = max(console.width, widest)
    console.print(shown)
