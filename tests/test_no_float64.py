"""Devices without float64, as Apple's GPUs are: sums that need it go by `in_float64`, which leaves such a device."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorlens as tl
from tensorlens import tolerances

SOURCE = Path(tl.__file__).parent
ON_THE_CPU = {
    "tolerances.py",  # the one place that asks the device
    "maps/token_map.py",  # scores of a finished map
    "pairs/pair_map.py",  # the same
    "pairs/similarity.py",  # after `.cpu()`
    "studies/judge_study.py",  # scores of a finished map
}
"""Files that call `.double()`."""


def test_only_one_place_widens_numbers_on_a_device():
    found = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "double"
    }
    assert found == ON_THE_CPU


@pytest.fixture
def nowhere_wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every device is one that does not know float64."""
    monkeypatch.setattr(tolerances, "_knows_float64", lambda device: False)
    yield


QUESTIONS: dict[str, Callable[[tl.AttentionTensor], Any]] = {
    "certificate": lambda T: T.certificate().passed,
    "norms": lambda T: T.map("tensor.norm").scores,
    "in_class": lambda T: T.map("tensor.in_class", -1).scores,
    "spectrum": lambda T: tl.spectrum(T, k=2).values,
    "components": lambda T: T.components(-1, 7).scores,
}


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_same_numbers_where_sums_leave_the_device(name: str, nowhere_wide: None):
    T = tl.Lens(zoo.build("llama", dtype=torch.float32))(zoo.sample("llama"))
    there = QUESTIONS[name](T)
    precision_there = tolerances.in_float64(T.output)
    assert precision_there.dtype is torch.float64 and precision_there.device.type == "cpu"
    torch.testing.assert_close(torch.as_tensor(there), torch.as_tensor(QUESTIONS[name](T)))


class Refusing(TorchDispatchMode):
    """Refuses float64 on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        there = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor) and t.is_cuda]
        if any(tensor.dtype in (torch.float64, torch.complex128) for tensor in there):
            raise TypeError(f"{func}: float64 on the device")
        return made


@contextmanager
def on_a_gpu(model: torch.nn.Module) -> Iterator[None]:
    model.cuda()
    with Refusing():
        yield


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", QUESTIONS)
def test_no_kernel_of_a_gpu_sees_float64(name: str, nowhere_wide: None):
    model = zoo.build("llama", dtype=torch.float32)
    with on_a_gpu(model):
        found = QUESTIONS[name](tl.Lens(model)(zoo.sample("llama")))
    assert torch.as_tensor(found).isfinite().all()
