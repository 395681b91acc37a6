"""Ctrl-C at any moment: the model is bit for bit what it was, no module reports, gradients are on or off as before."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from portrait import assert_same, portrait
from torch import nn
from torch._dynamo import eval_frame
from torch.nn.modules import module as global_hooks
from zoo import build, sample

import tensorlens as tl
from tensorlens.freezing import interception, traced

pytestmark = [
    pytest.mark.usefixtures("unchecked"),
    # An interrupt inside a destructor cannot go anywhere.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

MODEL = "neox-serial"


def world() -> dict[str, Any]:
    """What a pass changes of torch while it runs."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "fused": torch.backends.mha.get_fastpath_enabled(),
        "custom": vars(torch.autograd.Function)["apply"],
        "checkpoint": getattr(torch.utils.checkpoint, interception._CHECKPOINT),
        "enter": torch.inference_mode.__enter__,
        "modes": torch._C._len_torch_dispatch_stack(),
        "saved": torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        "active": traced.active(),
        "wrapped": len(interception._wrapped),
        "users": len(interception._REPORTING_FUNCTIONS._users),
        "stance": eval_frame._stance,
        "hooks": (len(global_hooks._global_forward_hooks), len(global_hooks._global_forward_pre_hooks)),
    }


def tensor(model: nn.Module) -> tl.AttentionTensor:
    return tl.Lens(model)(sample(MODEL))


WORKS: tuple[Callable[[nn.Module], Any], ...] = (
    tensor,
    lambda model: tensor(model).map("tensor.in_class", out_token=-1, target=5),
    lambda model: tensor(model).map("tensor.norm", out_token=-1),
    lambda model: tensor(model).without_heads({0: [1]}).map("tensor.in_out", out_token=-1),
    lambda model: tensor(model).map("rollout.attn", out_token=-1),
    lambda model: tensor(model).map("gradient.integrated", out_token=-1),
    lambda model: tensor(model).components(target=5),
    lambda model: tensor(model).predictions(),
    lambda model: tensor(model).certificate(),
)
"""Recording, the graph that is kept, folded rows, replays, looking on, the model left to itself."""


def interrupted(work: Callable[[], None], after: float) -> bool:
    """Whether the work was cut short by an interrupt after so many seconds of processor time."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_PROF, after)
            work()
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except KeyboardInterrupt:  # perhaps just after the work, on the way to stopping the timer, which rings once
        return True
    finally:
        signal.signal(signal.SIGPROF, before)
    return False


def interrupt_often(n: int, seed: int) -> None:
    model = build(MODEL, "sdpa", torch.float32).train()
    for work in WORKS:  # what is computed once and remembered
        work(model)
    expected, around, seconds = portrait(model), world(), [took(work, model) for work in WORKS]
    draw, n_interrupted = random.Random(seed), 0
    while n_interrupted < n:
        which = draw.randrange(len(WORKS))
        n_interrupted += interrupted(partial(WORKS[which], model), draw.uniform(1e-3, seconds[which]))
        assert world() == around, n_interrupted
        if n_interrupted % 20 == 0:
            assert_same(dict(expected), portrait(model))
    gc.collect()
    assert_same(dict(expected), portrait(model))
    assert tensor(model).certificate().passed


def took(work: Callable[[nn.Module], Any], model: nn.Module) -> float:
    began = time.process_time()
    work(model)
    return time.process_time() - began


def test_random_interrupts_leave_nothing_behind():
    interrupt_often(30, seed=0)


@pytest.mark.large
def test_a_thousand_random_interrupts_leave_nothing_behind():
    interrupt_often(1000, seed=1)


# At every module -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["_start_reporting", "_stop_reporting"])
def test_an_interrupt_at_any_module_leaves_none_of_them_patched(step: str, monkeypatch: pytest.MonkeyPatch):
    """While modules are wrapped, and while they are put back."""
    model = build(MODEL, dtype=torch.float32).train()
    expected, around, original = portrait(model), world(), getattr(interception, step)
    n_modules = len(list(model.modules()))
    for at, is_before in product(range(n_modules), (True, False)):
        seen = []

        def cut(*args: Any, at: int = at, is_before: bool = is_before, seen: list[int] = seen) -> None:
            seen.append(1)
            if is_before and len(seen) == at + 1:
                raise KeyboardInterrupt
            original(*args)
            if len(seen) == at + 1:
                raise KeyboardInterrupt

        monkeypatch.setattr(interception, step, cut)
        with pytest.raises(KeyboardInterrupt):
            tl.Lens(model)(sample(MODEL))
        assert world() == around
        assert_same(dict(expected), portrait(model))
    monkeypatch.undo()
    assert tensor(model).certificate().passed
