"""The header of a `.gguf` file, read once and fast.

transformers reads it anew for the configuration, the tokenizer and the weights, each time element by element through
`numpy.memmap`, whose every slice runs Python code: with a vocabulary of 150,000 tokens that is most of a conversion.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATCHING = threading.RLock()
"""Two conversions at once would each put back what the other has put there."""


@contextlib.contextmanager
def read_once(file: Path) -> Iterator[None]:
    """Whoever asks for a `gguf.GGUFReader` of `file` gets the same one, for as long as it takes."""
    import gguf

    with _PATCHING:
        usual, kept = gguf.GGUFReader, _plain_reader(gguf.GGUFReader, file)

        def reader(path: str | os.PathLike[str], *rest: Any, **options: Any) -> Any:
            is_kept = not rest and not options and Path(path).resolve() == file.resolve()
            return kept if is_kept else usual(path, *rest, **options)

        gguf.GGUFReader = reader  # type: ignore[assignment,misc]
        try:
            yield
        finally:
            gguf.GGUFReader = usual


def _plain_reader(usual: Any, file: Path) -> Any:
    """A reader that slices a plain array over the mapped file."""

    class PlainReader(usual):
        def __setattr__(self, name: str, value: Any) -> None:
            import numpy as np

            super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)

    return PlainReader(file)
