"""What cannot be made exactly linear is refused with the operation and its module, never approximated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import build, sample

import tensorlens as tl


class Strange(nn.Module):
    def forward(self, x):
        return torch.lgamma(x.abs() + 1)


class Kernel(torch.autograd.Function):
    """As a compiled kernel: nothing inside is visible."""

    @staticmethod
    def forward(ctx, x):
        with torch._C.DisableTorchFunctionSubclass():
            return x * 3.0

    @staticmethod
    def backward(ctx, gradient):
        return 3.0 * gradient


class Custom(nn.Module):
    def forward(self, x):
        return Kernel.apply(x)


class Spectral(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x, dim=-1).abs()


class Rounded(nn.Module):
    def forward(self, x):
        return (8 * x).round() / 8


class Leaving(nn.Module):
    def forward(self, x):
        return x + torch.from_numpy(x.detach().numpy())


class Cubic(nn.Module):
    def forward(self, x):
        return x**3 / 10


def with_activation(activation: nn.Module) -> nn.Module:
    model = build("gpt2")
    for block in model.transformer.h:
        block.mlp.act = activation
    return model


def test_an_operation_without_a_rule_is_named_with_its_module():
    with pytest.raises(
        tl.NotLinearError, match=r"`lgamma` in `transformer.h.0.mlp.act` \(block 0\).*tensorlens.adapter"
    ):
        tl.Lens(with_activation(Strange()))(sample("gpt2"))


def test_the_absolute_value_of_a_complex_number_is_held_by_its_direction():
    T = tl.Lens(with_activation(Spectral()))(sample("gpt2"))
    assert T.certificate().passed


def test_rounded_activations_are_carried_and_not_swallowed_by_the_bias():
    whole = tl.Lens(with_activation(nn.Identity()))(sample("gpt2"))
    T = tl.Lens(with_activation(Rounded()))(sample("gpt2"))
    assert T.certificate().passed
    share, expected = (float(t.bias.norm() / t.output.norm()) for t in (T, whole))
    assert share == pytest.approx(expected, rel=0.2)


def test_values_that_leave_for_numpy_are_refused():
    with pytest.raises(tl.NotLinearError, match="`numpy` takes .* values that depend on the input out of torch"):
        tl.Lens(with_activation(Leaving()))(sample("gpt2"))


def test_what_no_function_explains_is_seen_beneath_as_kernels():
    T = tl.Lens(with_activation(Custom()))(sample("gpt2"))
    assert {step.operation for step in T.program.steps if step.module == "transformer.h.0.mlp.act"} == {"mul"}
    assert T.certificate().passed


def test_a_zero_pre_activation_is_neither_nan_nor_wrong():
    model = build("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.weight.zero_()
            block.mlp.c_fc.bias.zero_()
    T = tl.Lens(model)(sample("gpt2"))
    step = next(step for step in T.program.steps if step.module == "transformer.h.0.mlp.act")
    gain = T.program.constants[step.args[1].index]
    assert torch.equal(gain, torch.full_like(gain, 0.5))
    assert torch.isfinite(T.dense()).all()


class LeavingWhenLong(nn.Module):
    """Adds a constant to short inputs, and to long ones what numpy made of them."""

    def forward(self, x):
        return x + (torch.ones_like(x) if x.shape[1] < 8 else torch.from_numpy(x.detach().numpy().copy()))


def test_a_leak_of_long_inputs_is_refused_though_short_ones_pass():
    lens = tl.Lens(with_activation(LeavingWhenLong()))
    lens([3, 4, 5])
    lens([3, 4, 5, 6])
    with pytest.raises(tl.NotLinearError):
        lens(list(range(3, 13)))


def test_a_model_that_magnifies_rounding_is_not_taken_for_a_missed_step():
    class Chaotic(nn.Module):
        def forward(self, x):
            for _ in range(5):
                x = torch.sin(200 * x)
            return x

    certificate = tl.Lens(with_activation(Chaotic()))([3, 4, 5]).certificate()
    assert certificate.failures == ("capture",)
    assert any("amplifies rounding" in one for one in certificate.reservations)


def test_numbers_that_are_not_finite_are_said():
    class Overflow(nn.Module):
        def forward(self, x):
            return x * 1e200 * 1e200

    certificate = tl.Lens(with_activation(Overflow()))([3, 4, 5]).certificate()
    assert not certificate.passed and any("not finite" in one for one in certificate.reservations)
