"""All public names. `tensorlens` imports this file when one of them is first used.

It is a file of its own so that `tensorlens --help` does not wait for torch.
"""

from tensorlens import studies as studies
from tensorlens.answers.answer import Answer as Answer
from tensorlens.batches import Batch as Batch
from tensorlens.comparison import Comparison as Comparison
from tensorlens.comparison import compare as compare
from tensorlens.corpus_tensor import CorpusReading as CorpusReading
from tensorlens.corpus_tensor import CorpusTensor as CorpusTensor
from tensorlens.errors import AnatomyError as AnatomyError
from tensorlens.errors import InputError as InputError
from tensorlens.errors import LoadError as LoadError
from tensorlens.errors import MethodError as MethodError
from tensorlens.errors import MissingExtraError as MissingExtraError
from tensorlens.errors import NotLinearError as NotLinearError
from tensorlens.errors import SizeError as SizeError
from tensorlens.errors import TensorLensError as TensorLensError
from tensorlens.explanation import Explanation as Explanation
from tensorlens.inside.circuit import Circuit as Circuit
from tensorlens.inside.circuit import Faithfulness as Faithfulness
from tensorlens.inside.circuit import circuit as circuit
from tensorlens.inside.components import ComponentMap as ComponentMap
from tensorlens.inside.dictionary import Dictionary as Dictionary
from tensorlens.inside.graph import ComponentGraph as ComponentGraph
from tensorlens.inside.inside_record import Inside as Inside
from tensorlens.inside.patching import Ablation as Ablation
from tensorlens.inside.patching import Patching as Patching
from tensorlens.inside.patching import patching as patching
from tensorlens.lens import Lens as Lens
from tensorlens.lens import load as load
from tensorlens.mapper import Mapper as Mapper
from tensorlens.maps.methods import METHODS as METHODS
from tensorlens.maps.methods import Question as Question
from tensorlens.maps.methods import Scored as Scored
from tensorlens.maps.methods import method as method
from tensorlens.maps.token_map import TokenMap as TokenMap
from tensorlens.operators.certificate import Certificate as Certificate
from tensorlens.operators.operator import MeanTensor as MeanTensor
from tensorlens.operators.spectrum import Spectrum as Spectrum
from tensorlens.operators.spectrum import spectral_norm as spectral_norm
from tensorlens.operators.spectrum import spectrum as spectrum
from tensorlens.pairs.pair_map import PairMap as PairMap
from tensorlens.pairs.similarity import similarities as similarities
from tensorlens.pairs.similarity import similarity as similarity
from tensorlens.recommendations import Recommendation as Recommendation
from tensorlens.recommendations import recommended as recommended
from tensorlens.recording.conventions import Rules as Rules
from tensorlens.recording.live import value_of as value_of
from tensorlens.recording.rules.modules import adapter as adapter
from tensorlens.recording.rules.modules import kernel as kernel
from tensorlens.recording.rules.nonlinear import activate as activate
from tensorlens.recording.rules.nonlinear import quotient as quotient
from tensorlens.recording.tape import rules_for as rules_for
from tensorlens.tensor import AttentionTensor as AttentionTensor
from tensorlens.tensor import Prediction as Prediction
