"""Studies: questions asked of maps and operators over many samples, as runs that can be interrupted."""

from tensorlens.studies.fidelity_run import FidelityOptions as FidelityOptions
from tensorlens.studies.fidelity_run import fidelity as fidelity
from tensorlens.studies.perturbation_run import PerturbationResult as PerturbationResult
from tensorlens.studies.perturbation_run import perturbation as perturbation
from tensorlens.studies.properties import block_ranges as block_ranges
from tensorlens.studies.properties import tensor_properties as tensor_properties
from tensorlens.studies.relations_run import RelationOptions as RelationOptions
from tensorlens.studies.relations_run import relations as relations
