"""Rules that are reached by kernels run beneath autograd, and find derivatives all the same."""

import torch
from torch import nn

import tensorlens as tl


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5, dtype=torch.float64) for _ in range(2))

    def forward(self, inputs_embeds):
        for block in self.blocks:
            with torch._C.DisableTorchFunctionSubclass():  # as in a scripted function: only kernels are seen
                inputs_embeds = inputs_embeds + torch.nn.functional.gelu(block(inputs_embeds)).tanh()
        return inputs_embeds


def test_derivatives_of_what_only_kernels_show():
    torch.manual_seed(0)
    model, (x, v) = Tower(), torch.randn(2, 3, 5, dtype=torch.float64)
    expected = torch.autograd.functional.jvp(model, x[None], v[None])[1][0]
    T = tl.Lens(model, rules=tl.Rules.jacobian())(x)
    assert (T @ v - expected).norm() <= 1e-12 * expected.norm()
