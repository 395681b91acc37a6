"""Deliberate faults: each is noticed, and the law that notices it is named here.

Paths that leave torch are refused when the input is recorded, or are held and then found by *capture*. Paths that only
the level of kernels sees are exact; with that level switched off, they are found too.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

import tensorlens as tl
from tensorlens.operators.operator import FrozenOperator
from tensorlens.program.steps import OPERATIONS, Held, Step, leaves, mapped
from tensorlens.program.verify import verify
from tensorlens.recording.recording import Recording
from tensorlens.recording.tape import Kernels

Patch = pytest.MonkeyPatch
Function = Callable[[Tensor], Tensor]

# A path that the capture loses ---------------------------------------------------------------------------------------


def by_ctypes(x: Tensor) -> Tensor:
    """Doubled by memory alone: what torch is asked for is an address."""
    x = x.contiguous()
    found = torch.empty(x.shape, dtype=x.dtype)
    ctypes.memmove(found.data_ptr(), x.data_ptr(), x.nbytes)
    return 2 * found


def by_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(2 * x.detach().numpy())


def by_thread(x: Tensor) -> Tensor:
    with ThreadPoolExecutor() as pool:
        return pool.submit(lambda: 2 * x).result()


def by_silent_thread(x: Tensor) -> Tensor:
    """What goes wrong in the thread is not said; zeros are left."""
    found = torch.zeros(x.shape, dtype=x.dtype)
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: found.copy_(2 * x)).exception()
    return found


def scripted(x: Tensor) -> Tensor:
    return torch.tanh(x) * 2.0


def by_autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ torch.eye(x.shape[-1], dtype=x.dtype)


class Block(nn.Module):
    def __init__(self, function: Function | None) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        attention = (x @ x.transpose(1, 2) / 4).softmax(-1)
        x = x + attention @ self.mix(x)
        y = self.up(x).relu()
        return x + self.down(y if self.function is None else self.function(y).to(y.dtype))


class Model(nn.Module):
    """Three blocks, the second of which has an odd function in its feed-forward."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList([Block(None), Block(function), Block(None)])
        self.to(dtype).eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return x


IDS = [3, 5, 7, 11, 2]


@pytest.mark.parametrize("function", [by_ctypes, by_numpy, by_thread, by_silent_thread])
def test_a_path_that_leaves_torch_is_refused(function: Function) -> None:
    with pytest.raises(tl.NotLinearError):
        tl.Lens(Model(function), blocks="blocks")(IDS)


@pytest.mark.parametrize("function", [by_ctypes, by_numpy])
def test_and_where_it_is_hidden_from_the_recording_capture_finds_it(function: Function) -> None:
    """As a kernel hides it that torch's dispatcher does not see: nothing of ours is in force while it runs."""

    def hidden(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            return function(x.detach().as_subclass(Tensor))

    certificate = tl.Lens(Model(hidden), blocks="blocks")(IDS).certificate()
    assert certificate.failures == ("capture",), str(certificate)
    assert certificate.captured[1] > 2e-2 > max(certificate.captured[0], certificate.captured[2])


def hidden_part(share: float) -> Function:
    """A path of which a share is lost: of what the block carries it is somewhat less, beside the residual."""

    def function(x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
            held = x.detach().as_subclass(Tensor).clone()
        return (1 - share) * x + share * held

    return function


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_gap_is_as_large_as_the_path_that_was_lost(dtype: torch.dtype) -> None:
    """A lost path of 2 % of what its block carries is noticed; smaller ones are measured, and not judged."""
    gaps = {}
    for share in (1.0, 0.3, 0.03):
        certificate = tl.Lens(Model(hidden_part(share), dtype), blocks="blocks")(IDS).certificate()
        gaps[share] = certificate.captured[1]
        assert ("capture" in certificate.failures) == (gaps[share] > 2e-2), str(certificate)
    assert gaps[0.3] == pytest.approx(0.3 * gaps[1.0], rel=0.3) and gaps[0.03] < 2e-2 < gaps[0.3]
    assert certificate.captured[0] < 1e-3


def lost(self: Kernels, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """A kernel that no rule sees."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore")  # torch.jit's own, that it is old
@pytest.mark.parametrize(("name", "dtype"), [("scripted", torch.float64), ("autocast", torch.float32)])
def test_a_path_that_only_kernels_see_is_exact_and_without_them_capture_finds_it(
    name: str, dtype: torch.dtype, monkeypatch: Patch
) -> None:
    lens = tl.Lens(Model(torch.jit.script(scripted) if name == "scripted" else by_autocast, dtype), blocks="blocks")
    certificate = lens(IDS).certificate()
    assert certificate.passed, str(certificate)
    monkeypatch.setattr(Kernels, "__torch_dispatch__", lost)
    assert lens(IDS).certificate().failures == ("capture",)


# A program that is wrong ----------------------------------------------------------------------------------------------


def with_steps(T: tl.AttentionTensor, change: Callable[[Step], Step]) -> tl.AttentionTensor:
    """The same tensor with some steps of its program changed."""
    recording = T.operator.recording
    program = replace(recording.program, steps=tuple(map(change, recording.program.steps)))
    return tl.AttentionTensor(FrozenOperator(replace(recording, program=program)), T.context)


def tensor(name: str) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name))(zoo.sample(name))


def step_of(T: tl.AttentionTensor, operation: str) -> Step:
    """A step of block 1 that T needs."""
    return next(step for step in T.program.steps if step.operation == operation and step.block == 1)


def test_a_wrong_constant_is_noticed_by_value() -> None:
    T = tensor("gpt2")
    constants: Any = T.program.constants
    place = next(leaf.index for leaf in leaves(step_of(T, "mul").args) if type(leaf) is Held)
    constants.values[place] = 1.01 * constants[place]
    failures = T.certificate().failures
    assert "value" in failures and "completeness" in failures


def test_a_dropped_residual_is_noticed_by_value() -> None:
    T = tensor("gpt2")
    step = step_of(T, "add")
    dropped = with_steps(T, lambda one: replace(one, args=(one.args[0], 0.0)) if one is step else one)
    failures = dropped.certificate().failures
    assert "value" in failures and "completeness" in failures


def test_a_step_that_is_not_linear_is_noticed_by_structure() -> None:
    T = tensor("gpt2")
    step = step_of(T, "mul")

    def squared(leaf: Any) -> Any:
        return step.args[0] if type(leaf) is Held else leaf

    both = with_steps(T, lambda one: replace(one, args=mapped(one.args, squared)) if one is step else one)
    with pytest.raises(tl.NotLinearError, match="multiplies two live values"):
        verify(both.program)


def test_a_cut_in_the_wrong_place_is_noticed_by_composition() -> None:
    """Blocks 0 and 1 end where block 0 does: the second half begins with a state that has been there before."""
    T = tensor("gpt2")
    slots, part = T.operator.recording.slots, Recording.part

    def wrong(self: Recording, span: Any, *args: Any, **options: Any) -> Any:
        cut = replace(self, slots=(slots[0], slots[2], *slots[2:])) if span.start == 1 and span.stop == 3 else self
        return part(cut, span, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recording, "part", wrong)
        assert T.certificate().failures == ("composition",)


def test_a_wrong_transpose_is_noticed_by_adjoint(monkeypatch: Patch) -> None:
    linear = OPERATIONS["linear"]
    right = linear.transpose
    assert right is not None

    def wrong(u: Tensor, x: Any, weight: Tensor, bias: Any = None) -> Any:
        square = weight.shape[0] == weight.shape[1]
        return right(u, x, weight.mT.contiguous() if square else weight, bias)

    T = tensor("llama")
    monkeypatch.setattr(linear, "transpose", wrong)
    failures = T.certificate().failures
    assert set(failures) == {"adjoint", "completeness", "logits"}
