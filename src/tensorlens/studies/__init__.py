"""Studies: questions about maps and operators over many samples, as runs that can be resumed.

Each is called in one way, ``study(lens, data, out, **options)``, and returns a `StudyResult`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorlens.studies.fidelity_study import fidelity as fidelity
    from tensorlens.studies.judge_study import judge as judge
    from tensorlens.studies.options import FidelityOptions as FidelityOptions
    from tensorlens.studies.options import JudgeOptions as JudgeOptions
    from tensorlens.studies.options import PerturbationOptions as PerturbationOptions
    from tensorlens.studies.options import RelationOptions as RelationOptions
    from tensorlens.studies.perturbation_study import perturbation as perturbation
    from tensorlens.studies.properties import block_ranges as block_ranges
    from tensorlens.studies.properties import tensor_properties as tensor_properties
    from tensorlens.studies.properties import word_pairs as word_pairs
    from tensorlens.studies.relation_study import relations as relations
    from tensorlens.studies.runs import StudyResult as StudyResult

_WHERE = {
    "block_ranges": "properties",
    "tensor_properties": "properties",
    "FidelityOptions": "options",
    "fidelity": "fidelity_study",
    "JudgeOptions": "options",
    "judge": "judge_study",
    "PerturbationOptions": "options",
    "perturbation": "perturbation_study",
    "RelationOptions": "options",
    "relations": "relation_study",
    "StudyResult": "runs",
    "word_pairs": "properties",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: a process that only starts others needs no torch."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE]
