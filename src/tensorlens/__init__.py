"""TensorLens: a Transformer, at a given input, as one exact linear operator.

>>> import tensorlens as tl
>>> lens = tl.load("minilm")
>>> T = lens("A cat sat on the mat.")
>>> bool(((T @ T.input + T.bias - T.output).norm() / T.output.norm()) < 1e-5)
True
"""

# ruff: noqa: F405  -- the names of the star below

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tensorlens.__about__ import __version__

if TYPE_CHECKING:
    from tensorlens.surface import *  # noqa: F403

__all__ = [
    # from a model to its operator
    "load",
    "Lens",
    "Rules",
    "AttentionTensor",
    "Batch",
    "MeanTensor",
    "CorpusTensor",
    "CorpusReading",
    # questions to it
    "Explanation",
    "recommended",
    "Recommendation",
    "METHODS",
    "TokenMap",
    "Answer",
    "similarity",
    "similarities",
    "PairMap",
    "ComponentGraph",
    "Inside",
    "Ablation",
    "ComponentMap",
    "patching",
    "Patching",
    "circuit",
    "Circuit",
    "Faithfulness",
    "Dictionary",
    "Prediction",
    "Mapper",
    "Certificate",
    "compare",
    "Comparison",
    "spectrum",
    "Spectrum",
    "spectral_norm",
    "studies",
    # teaching it a module, a torch function or a map of your own
    "adapter",
    "activate",
    "quotient",
    "value_of",
    "kernel",
    "rules_for",
    "method",
    "Question",
    "Scored",
    # what can go wrong
    "TensorLensError",
    "AnatomyError",
    "InputError",
    "LoadError",
    "MethodError",
    "MissingExtraError",
    "NotLinearError",
    "SizeError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, because importing torch takes seconds."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    surface = importlib.import_module("tensorlens.surface")
    globals().update({public: getattr(surface, public) for public in __all__ if hasattr(surface, public)})
    return getattr(surface, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
