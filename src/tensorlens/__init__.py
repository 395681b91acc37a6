"""TensorLens: a Transformer, at a given input, as one exact linear operator.

>>> import tensorlens as tl
>>> lens = tl.load("smollm2-135m")                       # doctest: +SKIP
>>> T = lens("The Eiffel Tower is in the city of")       # doctest: +SKIP
>>> T.map("tensor.in_class", out_token=-1).show()        # doctest: +SKIP
"""

from tensorlens.errors import (
    AnatomyError as AnatomyError,
)
from tensorlens.errors import (
    InputError as InputError,
)
from tensorlens.errors import (
    LoadError as LoadError,
)
from tensorlens.errors import (
    MethodError as MethodError,
)
from tensorlens.errors import (
    MissingExtraError as MissingExtraError,
)
from tensorlens.errors import (
    NotLinearError as NotLinearError,
)
from tensorlens.errors import (
    SizeError as SizeError,
)
from tensorlens.errors import (
    TensorLensError as TensorLensError,
)
from tensorlens.freezing.adapters import adapter as adapter
from tensorlens.freezing.functions import rules_for as rules_for
from tensorlens.freezing.nonlinear import activate as activate
from tensorlens.freezing.rules import Rules as Rules
from tensorlens.lens import Lens as Lens
from tensorlens.lens import load as load
from tensorlens.maps.methods import METHODS as METHODS
from tensorlens.maps.token_map import TokenMap as TokenMap
from tensorlens.operators.certificate import Certificate as Certificate
from tensorlens.operators.mean import MeanTensor as MeanTensor
from tensorlens.tensor import AttentionTensor as AttentionTensor
from tensorlens.tensor import Prediction as Prediction
