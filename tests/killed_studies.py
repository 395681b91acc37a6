"""Every study and `tensorlens maps` on a tiny model, small enough to be killed and started again by the hundred."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, lens_on, study

from tensorlens.app.maps_command import MapsChoices, maps
from tensorlens.app.options import ModelOptions
from tensorlens.studies import fidelity, judge, relations


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


def run_judges(folder: Path) -> None:
    data = folder.parent / "sets" / "animals.csv"
    if not data.exists():
        data.parent.mkdir(parents=True)
        rows = (
            "the cat sat on a,mat,birds,cat\nseven tall grey,houses,fly,seven\nred green birds fly,over,while,birds\n"
        )
        data.write_text("prefix,good,bad,evidence\n" + 4 * rows)
    methods = ("tensor.in_class", "tensor.in_class@attn_lrp", "mean.attn", "control.recency")
    judge(lens_on("llama"), data.parent, folder, progress=False, methods=methods, group_size=2)


def run_maps(folder: Path) -> None:
    data, model = folder.parent / "texts.txt", folder.parent / "model"
    if not data.exists():
        lens = tiny_lens()
        lens.model.float().save_pretrained(model)
        lens.processor.save_pretrained(model)
        data.write_text("\n".join([*TEXTS, *reversed(TEXTS)]))
    asked = MapsChoices(part_rows=3, batch_size=2)
    maps(str(model), data=str(data), out=folder, asked=asked, reading=ModelOptions(device="cpu"))


STUDIES: dict[str, Callable[[Path], None]] = {
    "perturbation": run_perturbation,
    "relations": run_relations,
    "fidelity": run_fidelity,
    "judges": run_judges,
    "maps": run_maps,
}


def child(name: str, folder: Path, began: Connection) -> None:
    """Runs in a process of its own; says when it has begun."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    began.send(True)
    STUDIES[name](folder)
