"""Every study on a tiny model, small enough to be killed and started again by the hundred."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, lens_on, study

from tensorlens.studies import fidelity, relations


def run_perturbation(folder: Path) -> None:
    study(folder, group_size=2, methods=["tensor.in_out", "rollout.attn", "control.random"])


def run_relations(folder: Path) -> None:
    data = folder.parent / "data"
    if not data.exists():
        write_relation(data / "commonsense" / "fruit.json")
    sizes = {"n_splits": 3, "top_k": 300, "min_test": 2, "max_test": 2, "scales": (0.0, 1.0)}
    relations(tiny_lens("neox"), data, folder, progress=False, **sizes)


def run_fidelity(folder: Path) -> None:
    sizes = {"sizes": (0.1, 1.0), "n_random": 1, "n_token": 1, "n_probes": 2, "stride": 0}
    fidelity(lens_on(), [TEXTS[0], TEXTS[1], TEXTS[5]], folder, progress=False, **sizes)


STUDIES: dict[str, Callable[[Path], None]] = {
    "perturbation": run_perturbation,
    "relations": run_relations,
    "fidelity": run_fidelity,
}


def child(name: str, folder: Path, began: Connection) -> None:
    """Runs in a process of its own; says when it has begun."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began.send(True)
    STUDIES[name](folder)
