"""TensorLens: a Transformer, at a given input, as one exact linear operator.

>>> import tensorlens as tl
>>> lens = tl.load("minilm")
>>> T = lens("A cat sat on the mat.")
>>> bool(((T @ T.input + T.bias - T.output).norm() / T.output.norm()) < 1e-5)
True
"""

from tensorlens import studies
from tensorlens.__about__ import __version__
from tensorlens.errors import (
    AnatomyError,
    InputError,
    LoadError,
    MethodError,
    MissingExtraError,
    NotLinearError,
    SizeError,
    TensorLensError,
)
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.rules.activations import activate
from tensorlens.freezing.rules.modules import adapter
from tensorlens.freezing.rules.table import rules_for
from tensorlens.lens import Lens, load
from tensorlens.maps.methods import METHODS
from tensorlens.maps.token_map import TokenMap
from tensorlens.operators.certificate import Certificate
from tensorlens.operators.estimates import Estimate
from tensorlens.operators.mean import MeanTensor
from tensorlens.operators.norms import spectral_norm
from tensorlens.operators.spectrum import Spectrum, spectrum
from tensorlens.tensor import AttentionTensor, Prediction

__all__ = [
    # from a model to its operator
    "load",
    "Lens",
    "Rules",
    "AttentionTensor",
    "MeanTensor",
    # what to ask of it
    "METHODS",
    "TokenMap",
    "Prediction",
    "Certificate",
    "Estimate",
    "spectrum",
    "Spectrum",
    "spectral_norm",
    "studies",
    # teaching it a module or a torch function of your own
    "adapter",
    "activate",
    "rules_for",
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
