"""What cannot be made exactly linear is refused with the operation and its module, never approximated."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from zoo import build, sample

import tensorlens as tl
from tensorlens.freezing import recorder
from tensorlens.freezing.audit import LeakAudit
from tensorlens.freezing.rules.linear import linear
from tensorlens.freezing.rules.table import RULES


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


def test_a_kernel_with_its_own_backward_is_refused():
    with pytest.raises(tl.NotLinearError, match="custom autograd function `Kernel` hides a step: `aten.mul"):
        tl.Lens(with_activation(Custom()))(sample("gpt2"))


def test_an_adapter_from_outside_gives_a_module_its_meaning(monkeypatch):
    from tensorlens.freezing.rules import modules as adapters

    monkeypatch.setattr(adapters, "ADAPTERS", dict(adapters.ADAPTERS))
    model = with_activation(Cubic())
    seen = []

    @tl.adapter(f"{Cubic.__module__}.Cubic")
    def cubic(run, module, forward, z):
        seen.append(module)
        return tl.activate(run, "cubic", z, lambda z: z**2 / 10)

    T = tl.Lens(model)(sample("gpt2"))
    assert len(seen) == 3
    assert T.certificate().passed
    assert "activation gain: cubic" in T.certificate().rules


def test_the_certificate_sees_a_rule_that_is_wrong(monkeypatch):
    """A rule that lets a norm through unheld reproduces F(X) exactly; linearity and completeness tell."""
    monkeypatch.setitem(RULES, "layer_norm", linear)
    certificate = tl.Lens(build("gpt2"))(sample("gpt2")).certificate()
    assert certificate.errors["value"] < 1e-12
    assert not certificate.passed
    assert {"linearity", "adjoint", "completeness"} & set(certificate.failures)


def test_a_zero_pre_activation_is_neither_nan_nor_wrong():
    model = build("gpt2")
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_fc.weight.zero_()
            block.mlp.c_fc.bias.zero_()
    T = tl.Lens(model)(sample("gpt2"))
    factors = T.operator.recording.factors
    gain = next(factor for site, factor in factors.items() if site.operation == "NewGELUActivation")
    assert torch.equal(gain, torch.full_like(gain, 0.5))
    assert torch.isfinite(T.dense()).all()


class LeavingWhenLong(nn.Module):
    """Adds a constant to short inputs, and to long ones what numpy made of them."""

    def forward(self, x):
        return x + (torch.ones_like(x) if x.shape[1] < 8 else torch.from_numpy(x.detach().numpy().copy()))


def test_every_length_is_audited_that_no_audited_one_encloses(monkeypatch):
    lens, audits = tl.Lens(build("gpt2")), []
    monkeypatch.setattr(recorder, "LeakAudit", lambda where: audits.append(1) or LeakAudit(where))
    for length, n_audits in ((5, 1), (5, 1), (9, 2), (7, 2), (8, 2), (3, 3), (4, 3), (10, 4)):
        lens(list(range(3, 3 + length)))
        assert len(audits) == n_audits, length


def test_a_leak_of_long_inputs_is_refused_though_short_ones_pass():
    lens = tl.Lens(with_activation(LeavingWhenLong()))
    lens([3, 4, 5])
    lens([3, 4, 5, 6])
    with pytest.raises(tl.NotLinearError):
        lens(list(range(3, 13)))


def test_embeddings_are_compared_with_the_first_state_once_for_a_kind_of_input(monkeypatch):
    lens, n_compared, equal = tl.Lens(build("bert")), [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda *tensors: n_compared.append(1) or equal(*tensors))
    for length, n in ((5, 1), (5, 1), (9, 1), (7, 1)):
        lens(torch.arange(3, 3 + length).tolist())
        assert len(n_compared) == n, length
    with torch.no_grad():
        lens.model.get_input_embeddings().weight.mul_(2)  # another state of the model
    lens([3, 4, 5])
    assert len(n_compared) == 2


def test_another_way_through_the_model_is_audited_between_known_lengths(monkeypatch):
    class Odd(nn.Module):
        def forward(self, x):
            return 2 * x if x.shape[1] % 2 else x

    lens, audits = tl.Lens(with_activation(Odd())), []
    monkeypatch.setattr(recorder, "LeakAudit", lambda where: audits.append(1) or LeakAudit(where))
    for length, n_audits in ((3, 1), (9, 2), (5, 2), (6, 3), (6, 3), (4, 4)):
        T = lens(list(range(3, 3 + length)))
        assert len(audits) == n_audits, length
    assert T.certificate().passed


def test_a_rule_that_gives_other_numbers_than_the_model_is_noticed_at_once(monkeypatch):
    monkeypatch.setitem(RULES, "layer_norm", lambda run, function, args, kwargs: linear(run, torch.neg, args[:1], {}))
    with pytest.raises(tl.NotLinearError, match="gave other numbers than by itself"):
        tl.Lens(build("vit"))(sample("vit"))


def test_rounding_that_a_model_magnifies_is_not_taken_for_a_missed_step():
    class Chaotic(nn.Module):
        def forward(self, x):
            for _ in range(5):
                x = torch.sin(200 * x)
            return x

    T = tl.Lens(with_activation(Chaotic()))([3, 4, 5])
    certificate = T.certificate()
    assert not certificate.passed and certificate.errors["value"] > certificate.tolerance
    assert any("magnifies rounding" in one for one in certificate.reservations)


def test_numbers_that_are_not_finite_are_said():
    class Overflow(nn.Module):
        def forward(self, x):
            return x * 1e200 * 1e200

    certificate = tl.Lens(with_activation(Overflow()))([3, 4, 5]).certificate()
    assert not certificate.passed and any("not finite" in one for one in certificate.reservations)
