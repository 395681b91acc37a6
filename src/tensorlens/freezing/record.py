"""`record`: run a model once and keep what holds it still."""

from __future__ import annotations

import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensorlens.errors import NotLinearError, TensorLensError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.factors import KeptFactors, NoFactors
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.recorder import Recorder
from tensorlens.freezing.recording import OtherParts, Recording, RecordOptions, StartAtEmbedding, Unaudited
from tensorlens.memory import is_out_of_memory
from tensorlens.models.anatomy import Anatomy, find_anatomy
from tensorlens.models.evidence import watch
from tensorlens.models.module_tree import parameters
from tensorlens.models.not_found import never_ran
from tensorlens.models.own_errors import own_errors
from tensorlens.models.plain_pass import evaluating


def record(
    anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None, options: RecordOptions | None = None
) -> Recording:
    """Run the model once on `inputs` and hold every factor.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward.
        rules: The conventions; the defaults of `Rules` if None.
        options: How to record; one sample, all factors kept, if None.
    """
    with own_precision():
        inputs = {name: value.clone() if _is_inference(value) else value for name, value in inputs.items()}
    for candidate in (anatomy, *anatomy.alternatives()):
        try:
            recording = _record(candidate, inputs, rules or Rules(), options or RecordOptions())
        except OtherParts:
            found = find_anatomy(anatomy.model, watch(anatomy.model, inputs), blocks=anatomy.asked)
            return record(replace(found, n_alike=None), inputs, rules, options)
        except (TensorLensError, MemoryError):
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _run_plainly(anatomy.model, inputs)  # an input that the model itself cannot take
            if isinstance(error, (TypeError, RuntimeError, AttributeError)):  # as torch raises them
                raise NotLinearError(_why_it_stopped(anatomy.model, error)) from error
            raise
        if recording is not None:
            return recording
    raise never_ran(anatomy.model, anatomy.stack)


def _run_plainly(model: nn.Module, inputs: dict[str, Any]) -> None:
    with own_errors(model, inputs), own_precision(), torch.no_grad(), evaluating(model):
        model(**inputs)


def _why_it_stopped(model: nn.Module, error: Exception) -> str:
    """Of an error that comes up under the rules alone, such as torch's of a live number where it takes plain ones."""
    ours = Path(__file__).parents[1]
    frames = [one for one in traceback.extract_tb(error.__traceback__) if not Path(one.filename).is_relative_to(ours)]
    own = [one for one in frames if not Path(one.filename).is_relative_to(Path(torch.__file__).parent)]
    place = f" in line {own[-1].lineno} of {Path(own[-1].filename).name}, `{own[-1].line}`" if own else ""
    return (
        f"Under the rules `{type(model).__name__}` stopped{place}, though by itself it runs: {type(error).__name__}: "
        f"{error}. Expected code that takes a subclass of tensors like tensors; write that step in plain torch "
        "functions, or register an adapter for its module's class with `tensorlens.adapter`."
    )


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _record(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules, options: RecordOptions) -> Recording | None:
    """One anatomy tried: with gradients if they pass, from the embeddings if need be; None if no block ran."""
    grad, at_embedding, audits = gradients_pass(anatomy.model), False, False
    while True:
        factors = KeptFactors() if options.keeps_factors else NoFactors()
        recorder = Recorder(
            anatomy, inputs, rules, options, grad=grad, at_embedding=at_embedding, factors=factors, audits=audits
        )
        try:
            return recorder.go()
        except StartAtEmbedding:
            at_embedding = True
        except Unaudited:
            audits = True
        except Exception:
            # Code may fail for its gradients alone: a write in place. Without them it is held.
            if not grad or recorder.has_leak or recorder.is_refused:
                raise
            grad = False
        del recorder  # and the graph it began


def gradients_pass(model: nn.Module) -> bool:
    """Whether a graph can keep the weights: off-loaded ones come and go, and inference tensors are kept by none."""
    return not any(parameter.is_meta or parameter.is_inference() for parameter in parameters(model))
