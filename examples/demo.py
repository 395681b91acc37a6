"""The demo of `make demo`: a real sentence through real weights, the map, the certificate, and an HTML file."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

import tensorlens as tl
from tensorlens.app.inspect_commands import print_certificate

SENTENCE = "The Eiffel Tower is located in the city of"


def main() -> None:
    console = Console(highlight=False)
    console.print("Loading SmolLM2-135M (converted once, then cached) …", style="dim")
    e = tl.load("smollm2-135m").explain(SENTENCE)
    e.show(console)

    path = Path("demo.html")
    e.map.save(path)
    console.print(f"The map is in {path.resolve()}: open it in a browser.\n", soft_wrap=True)

    console.print("Is it right? The certificate …", style="dim")
    T = e.tensor
    size = f"{T.n_tokens} tokens × {T.n_channels} channels, {T.n_blocks} blocks"
    print_certificate(e.certificate(), f"The operator T: {size}")

    command = Path(sys.executable).with_name("tensorlens")
    command = command.relative_to(Path.cwd()) if command.is_relative_to(Path.cwd()) else command
    console.print("\nNext, a sentence of your own:")
    console.print(f'  {command} explain smollm2-135m "The capital of Italy is"', soft_wrap=True)  # to be copied


if __name__ == "__main__":
    main()
