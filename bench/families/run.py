"""The compatibility table: a certificate for every model type that transformers can build.

Each type is built tiny and random, recorded and certified in a process of its own, with a time limit, so that a crash
of one is one line in the table.
"""

from __future__ import annotations

import multiprocessing
import re
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from bench.families.tiny_models import TASKS, TinyModel, build, model_types
from tensorlens.errors import LoadError, TensorLensError
from tensorlens.lens import Lens
from tensorlens.program.program import Constants
from tensorlens.tensor import AttentionTensor

ATTENTIONS = ("eager", "sdpa")


class Case(NamedTuple):
    """One line of the table, before it is known."""

    task: str
    model_type: str
    attention: str


@dataclass(frozen=True, kw_only=True)
class FamilyRecord:
    """One line of the compatibility table.

    Attributes:
        task: ``causal``, ``masked``, ``seq2seq``, ``vision`` or ``audio``.
        model_type: As in transformers.
        attention: ``eager`` or ``sdpa``.
        status: ``certified``, ``refused`` or ``not_built``.
        reason: Why it is not certified.
        errors: The errors of the certificate, by law.
        tolerance: What was accepted.
        conventions: Products whose roles are a choice, with the modules where they carry gradient.
        rules: The rules and adapters that fired, with the number of modules of each.
        bias_share: ‖B‖ against ‖F(X)‖.
        unexplained: The part of B that no additive parameter of the model accounts for, against ‖F(X)‖.
        blocks: Path of the blocks.
        shape: Sizes of T.
        seconds: How long it took.
    """

    task: str
    model_type: str
    attention: str
    status: str
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    tolerance: float | None = None
    conventions: dict[str, list[str]] = field(default_factory=dict)
    rules: dict[str, int] = field(default_factory=dict)
    bias_share: float | None = None
    unexplained: float | None = None
    blocks: str = ""
    shape: tuple[int, ...] = ()
    seconds: float = 0.0


def cases(
    tasks: Iterable[str] = tuple(TASKS), only: Iterable[str] = (), attentions: Iterable[str] = ATTENTIONS
) -> list[Case]:
    """Every line of the table, or those of the model types in `only`."""
    chosen = set(only)
    return [
        Case(task, model_type, attention)
        for task in tasks
        for model_type in model_types(task)
        if not chosen or model_type in chosen
        for attention in attentions
    ]


# One case ------------------------------------------------------------------------------------------------------------


def examine(case: Case) -> FamilyRecord:
    """Build a tiny model, certify its operator, and check that it is left as it was."""
    started = time.monotonic()
    try:
        tiny = build(*case)
    except LoadError as error:
        found: dict[str, Any] = {"status": "not_built", "reason": str(error)}
    else:
        found = _certified(tiny)
    return FamilyRecord(**case._asdict(), **found, seconds=round(time.monotonic() - started, 1))


def _certified(tiny: TinyModel) -> dict[str, Any]:
    try:
        before = fingerprint(tiny)
    except Exception as error:  # noqa: BLE001  the model's own code
        return {"status": "not_built", "reason": f"does not run: {_told(error)}"}
    try:
        lens = Lens(tiny.model)
        tensor = lens(tiny.arguments)
        certificate = tensor.certificate()
    except TensorLensError as error:
        return {"status": "refused", "reason": _told(error)}
    found = {
        "errors": certificate.errors,
        "tolerance": certificate.tolerance,
        "conventions": {name: list(modules) for name, modules in certificate.conventions.items()},
        "rules": {rule: len(modules) for rule, modules in certificate.rules.items()},
        "bias_share": float(tensor.bias.norm() / tensor.output.norm()),
        "unexplained": unexplained_bias(tensor),
        "blocks": tensor.operator.recording.anatomy.stack,
        "shape": tensor.shape,
    }
    return found | _verdict(tensor, certificate.failures, before == fingerprint(tiny))


def _verdict(tensor: AttentionTensor, failures: tuple[str, ...], untouched: bool) -> dict[str, str]:
    if not untouched:
        return {"status": "refused", "reason": "the model was not left as it was found"}
    if not bool(torch.isfinite(tensor.output).all()):
        return {"status": "not_built", "reason": "the random model's output is not finite"}
    if failures:
        return {"status": "refused", "reason": f"certificate: {', '.join(failures)} too large"}
    if float(tensor.apply(tensor.input).norm()) == 0.0:
        return {"status": "refused", "reason": "nothing of the input is carried to the output"}
    return {"status": "certified"}


def _told(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:400]}"


def fingerprint(tiny: TinyModel) -> tuple[Any, ...]:
    """Everything of a model that a lens must leave alone: outputs, parameters, flags, attributes and hooks."""
    with torch.no_grad():
        output = tiny.model(**tiny.arguments)
    values = [value for value in output.values() if isinstance(value, Tensor)] if hasattr(output, "values") else []
    weights = [*tiny.model.parameters(), *tiny.model.buffers()]
    return (
        tuple(_digest(value) for value in values),
        tuple((_digest(weight), weight.requires_grad, weight._version) for weight in weights),
        tuple((name, _attributes(module)) for name, module in tiny.model.named_modules()),
    )


def _digest(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    hooks = tuple(len(value) for name, value in vars(module).items() if name.endswith("_hooks"))
    return module.training, tuple(sorted(vars(module))), hooks


def unexplained_bias(tensor: AttentionTensor) -> float:
    r"""What is left of B when the model's additive parameters are zero, against ‖F(X)‖.

    The affine function is homogeneous of degree one in X and all its additive parameters together. What remains is a
    constant in the model's code, or something held that should have been carried.
    """
    program = tensor.program
    names = program.constants.names
    constants = [
        torch.zeros_like(value) if value is not None and _is_additive(names.get(n, "")) else value
        for n, value in (
            (n, program.constants[n] if n in program.used else None) for n in range(len(program.constants))
        )
    ]
    left = replace(program, constants=Constants(constants)).run(*program.zeros())
    return float(torch.cat(left, 1).norm() / tensor.output.norm())


def _is_additive(name: str) -> bool:
    owner, last = (["", *name.split(".")])[-2:]
    return "bias" in last or "norm" not in owner and re.search(r"embed|token|pos(?!t)", f"{owner}.{last}") is not None


_BEGUN = "begun"
"""What a process sends first."""


# Many cases ----------------------------------------------------------------------------------------------------------


def sweep(
    table: Iterable[Case],
    *,
    workers: int = 2,
    limit_seconds: float = 120.0,
    work: Callable[[Case], FamilyRecord] = examine,
) -> Iterator[FamilyRecord]:
    """Examine cases in parallel processes, one process each; records come as they are finished.

    A case that runs out of time or takes its process down is recorded as refused, with that reason. Its time begins
    when its process does: on a busy machine the imports alone may take long.
    """
    context = multiprocessing.get_context(
        "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else None
    )
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(["bench.families.run", "transformers.models.llama.modeling_llama"])
    waiting = list(table)[::-1]
    running: dict[Any, _Running] = {}
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                case = waiting.pop()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_report, args=(theirs, work, case), daemon=True)
                process.start()
                theirs.close()
                running[ours] = _Running(case, process)
            wait(list(running), timeout=1.0)
            for pipe in list(running):
                record = _collect(pipe, running[pipe], limit_seconds)
                if record is not None:
                    running.pop(pipe).process.join()
                    pipe.close()
                    yield record
    finally:
        for one in running.values():
            one.process.kill()


@dataclass
class _Running:
    """A case with its process, and when that began to work."""

    case: Case
    process: Any
    began: float | None = None


def _report(pipe: Connection, work: Callable[[Case], FamilyRecord], case: Case) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    pipe.send(_BEGUN)
    try:
        pipe.send(work(case))
    except BaseException as error:  # noqa: BLE001  whatever the model's code does becomes a line in the table
        pipe.send(FamilyRecord(**case._asdict(), status="refused", reason=f"error: {_told(error)}"))


def _collect(pipe: Connection, one: _Running, limit_seconds: float) -> FamilyRecord | None:
    """The record of a case that is done, dead or out of time; None while it is at work."""
    seconds = 0.0 if one.began is None else time.monotonic() - one.began
    if pipe.poll():
        try:
            found = pipe.recv()
        except EOFError:
            one.process.join()
            reason = f"crashed: the process ended with code {one.process.exitcode}"
        else:
            if found != _BEGUN:
                return found
            one.began = time.monotonic()
            return None
    elif seconds > limit_seconds:
        one.process.kill()
        reason = f"ran out of time after {limit_seconds:.0f} s"
    else:
        return None
    return FamilyRecord(**one.case._asdict(), status="refused", reason=reason, seconds=round(seconds, 1))
