"""Rules that are reached by kernels run beneath autograd, and find derivatives all the same."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlens as tl


class Plain(TorchDispatchMode):
    """A mode of the model's own, such as those that count operations or choose what a checkpoint keeps."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextmanager
def nothing():
    yield


class Tower(nn.Module):
    def __init__(self, around=nothing, inside=nothing) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))
        self.around, self.inside = around, inside

    def forward(self, inputs_embeds):
        with self.around():
            for block in self.blocks:
                with self.inside(), torch._C.DisableTorchFunctionSubclass():  # as in a scripted function
                    inputs_embeds = inputs_embeds + torch.nn.functional.gelu(block(inputs_embeds)).tanh()
        return inputs_embeds


@pytest.mark.parametrize("modes", [{}, {"around": Plain}, {"inside": Plain}], ids=["none", "around", "inside"])
def test_derivatives_of_what_only_kernels_show(modes):
    torch.manual_seed(0)
    model, (x, v) = Tower(**modes), torch.randn(2, 3, 5, dtype=torch.float64)
    expected = torch.autograd.functional.jvp(model, x[None], v[None])[1][0]
    T = tl.Lens(model, rules=tl.Rules.jacobian())(x)
    assert (T @ v - expected).norm() <= 1e-12 * expected.norm()
