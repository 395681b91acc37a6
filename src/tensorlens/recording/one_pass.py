"""`record`: run a model once and keep the program it leaves behind."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import NotLinearError, TensorLensError
from tensorlens.memory import is_out_of_memory
from tensorlens.models.anatomy import Anatomy, never_ran, observe
from tensorlens.models.runner import own_errors, running
from tensorlens.recording import rules as _rules  # noqa: F401  (fills the table)
from tensorlens.recording.conventions import Rules
from tensorlens.recording.module_paths import ModulePlaces
from tensorlens.recording.recorder import OtherParts, Recorder, StartEarly
from tensorlens.recording.recording import Recording
from tensorlens.recording.tape import Tape


def record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None, *, n_samples: int = 1) -> Recording:
    """Run the model once on `inputs`.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward.
        rules: The conventions; the defaults of `Rules` if None.
        n_samples: How many samples the inputs hold.
    """
    inputs = {name: value.clone() if _is_inference(value) else value for name, value in inputs.items()}
    try:
        found = _recorded(anatomy, inputs, rules or Rules(), n_samples)
    except OtherParts:
        other, _ = observe(anatomy.model, inputs, blocks=anatomy.asked)
        found = record(replace(other, n_alike=None), inputs, rules, n_samples=n_samples)
        origin = found.from_model("A recording")
        # The next input may take a different path again.
        return replace(found, origin=origin._replace(anatomy=replace(origin.anatomy, n_alike=other.n_alike)))
    except (TensorLensError, MemoryError):
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        with own_errors(anatomy.model, inputs), running(anatomy.model):
            anatomy.model(**inputs)  # raises if the model itself cannot take the input
        if isinstance(error, (TypeError, RuntimeError, AttributeError)):  # as torch raises them
            raise NotLinearError(_why_it_stopped(anatomy.model, error)) from error
        raise
    if found is None:
        raise never_ran(anatomy.model, anatomy.stack)
    return found


def _recorded(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, n_samples: int) -> Recording | None:
    """One anatomy tried; None if no block ran."""
    places, copies = ModulePlaces(anatomy.model), False
    while True:
        run = Tape(rules, weights=places.weights.values(), n_samples=n_samples, copies=copies)
        recorder = Recorder(anatomy, inputs, run, places)
        try:
            found = recorder.go()
        except StartEarly:
            anatomy = replace(anatomy, starts_early=True)
            continue
        if not copies and run.changed_constants():
            copies = True  # the model has overwritten a constant: record once more, with copies
            continue
        return found


def _why_it_stopped(model: nn.Module, error: Exception) -> str:
    """The message for an error that occurs only while recording, such as torch's about a tensor subclass."""
    ours = Path(__file__).parents[1]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not Path(one.filename).is_relative_to(ours)]
    own = [one for one in frames if not Path(one.filename).is_relative_to(Path(torch.__file__).parent)]
    place = f" in line {own[-1].lineno} of {Path(own[-1].filename).name}, `{own[-1].line}`" if own else ""
    return (
        f"Under the rules `{type(model).__name__}` stopped{place}, although it runs on its own: "
        f"{type(error).__name__}: "
        f"{error}. Expected code that accepts tensor subclasses; write that step in plain torch "
        "functions, or register an adapter for its module's class with `tensorlens.adapter`."
    )


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()
