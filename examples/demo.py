"""The demo of `make demo`: a real sentence through real weights, the map, the certificate, and an HTML file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

import tensorlens as tl
from tensorlens.app.check_command import print_certificate

SENTENCE = "The Eiffel Tower is located in the city of"


def main() -> None:
    console = Console(highlight=False)
    console.print("Loading SmolLM2-135M (converted once, then cached) …", style="dim")
    T = tl.load("smollm2-135m")(SENTENCE)

    best = T.predictions(k=3)
    first, *others = (f"{found.name!r} ({found.probability:.0%})" for found in best)
    console.print(f"\n[bold]{SENTENCE}[/bold] … the model says [bold]{first}[/bold]")
    console.print(f"then {' and '.join(others)}\n")

    size = f"{T.n_tokens} tokens × {T.n_channels} channels, {T.n_blocks} blocks"
    print_certificate(T.certificate(), f"The operator T: {size}", console)
    console.print()

    found = T.map("tensor.in_class", out_token=-1, target=best[0].name)
    found.show(console)  # and what it sums to

    path = Path("demo.html")
    found.save(path)
    console.print(f"\nThe map is in {path.resolve()}: open it in a browser.", soft_wrap=True)
    command = Path(sys.executable).with_name("tensorlens")
    command = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    console.print("Next, a sentence of your own:")
    console.print(f'  {command} explain smollm2-135m "The capital of Italy is"', soft_wrap=True)  # to be copied


if __name__ == "__main__":
    main()
