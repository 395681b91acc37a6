"""The table of strangers: `python -m strangers.show [part of a name]`, from the folder of tests."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator

import torch
from strangers.cases import Stranger, judge


def every_stranger() -> Iterator[Stranger]:
    from strangers import known_layouts, odd_operations, odd_structures

    for module in (known_layouts, odd_structures, odd_operations):
        yield from module.STRANGERS


def main(wanted: str = "") -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for stranger in every_stranger():
        if wanted in stranger.name:
            start = time.perf_counter()
            verdict = judge(stranger)
            print(
                f"| {stranger.name} | {stranger.expect} | {verdict} | {time.perf_counter() - start:.1f} s", flush=True
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
