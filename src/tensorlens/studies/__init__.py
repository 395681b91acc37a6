"""Studies: questions asked of maps and operators over many samples, as runs that can be interrupted.

Each is called in one way, ``study(lens, data, out, **options)``, and returns a `StudyResult`.
"""

from tensorlens.studies.fidelity_study.properties import block_ranges as block_ranges
from tensorlens.studies.fidelity_study.properties import tensor_properties as tensor_properties
from tensorlens.studies.fidelity_study.run import FidelityOptions as FidelityOptions
from tensorlens.studies.fidelity_study.run import fidelity as fidelity
from tensorlens.studies.judge_study.options import JudgeOptions as JudgeOptions
from tensorlens.studies.judge_study.run import judge as judge
from tensorlens.studies.perturbation_study.options import PerturbationOptions as PerturbationOptions
from tensorlens.studies.perturbation_study.run import perturbation as perturbation
from tensorlens.studies.relation_study.run import RelationOptions as RelationOptions
from tensorlens.studies.relation_study.run import relations as relations
from tensorlens.studies.results import StudyResult as StudyResult
