"""Fidelity: the model itself at other inputs, its Jacobian, the errors, and the bounds on every layout."""

from __future__ import annotations

import math

import equations as eq
import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.operators.bounds import product_bound
from tensorlens.operators.spectrum import spectral_norm
from tensorlens.studies import FidelityOptions, fidelity
from tensorlens.studies.fidelity_report import error_table, norm_table
from tensorlens.studies.fidelity_study import (
    distance_to_jacobian,
    errors_along,
    jacobian_times,
    random_directions,
    token_directions,
)
from tensorlens.studies.plain_model import plain_states, true_function

LAYOUTS = {
    "post_ln": ["bert", "albert"],
    "pre_ln": ["gpt2", "llama", "vit", "modernbert"],
    "parallel": ["neox-parallel", "phi"],
    "sandwich": ["gemma3"],
    "post_sublayer": ["olmo2"],
}
EVERY = [name for names in LAYOUTS.values() for name in names]
GATED = ["llama", "gemma3", "olmo2"]


def tensor(name: str, scale: float = 1.0, **rules) -> tl.AttentionTensor:
    model = zoo.build(name)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    return tl.Lens(model, rules=tl.Rules(**rules))(zoo.sample(name))


def true_norm(T: tl.AttentionTensor) -> float:
    return float(torch.linalg.matrix_norm(eq.unfold(T.dense()), ord=2))


# The model itself ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "include_final_norm"), [*((name, True) for name in EVERY), ("gpt2", False)])
def test_true_function_at_x_is_the_output(name, include_final_norm):
    T = tensor(name, include_final_norm=include_final_norm)
    for part in (T, T.blocks(1, 3), T.blocks(1, 2)):
        found = true_function(part.operator.recording, part.operator.span, part.input)
        assert torch.allclose(found, part.output, atol=1e-6)


def test_a_plain_run_leaves_the_model_as_it_was():
    model = zoo.build("gpt2").train()
    anatomy = tl.Lens(model).anatomy
    before = [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()]
    ids = torch.tensor([zoo.sample("gpt2")])
    plain_states(anatomy, {"input_ids": ids}, read=(0,))
    with pytest.raises(RuntimeError):
        plain_states(anatomy, {"input_ids": ids}, put={1: torch.zeros(1, 2, 3, dtype=torch.float64)})
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks), m.training) for m in model.modules()] == before


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_jacobian_products_equal_the_autograd_jacobian(name):
    T = tensor(name)
    recording, span = T.operator.recording, T.operator.span
    jacobian = torch.autograd.functional.jacobian(lambda x: true_function(recording, span, x, grad=True), T.input)
    units = torch.stack([one.unit for one in random_directions(T, 2, seed=0)])
    expected = torch.einsum("idje,nje->nid", jacobian, units)
    assert torch.allclose(jacobian_times(T, units), expected, atol=1e-6)
    distance = (T.dense() - jacobian).norm() / jacobian.norm()
    assert distance_to_jacobian(T, 100, seed=0)["relative"] == pytest.approx(float(distance), rel=0.1)


@pytest.mark.parametrize("name", ["gpt2", "bert", "neox-parallel"])
def test_tensor_error_is_linear_and_jacobian_error_quadratic(name):
    """METHOD.md 1.5: T is exact at X and no Taylor expansion around it."""
    T = tensor(name)
    errors = errors_along(T, random_directions(T, 1, seed=0)[0], [1e-3, 1e-2])
    assert errors["tensor"][1] / errors["tensor"][0] == pytest.approx(10, rel=0.05)
    assert errors["jacobian"][1] / errors["jacobian"][0] == pytest.approx(100, rel=0.1)
    assert errors["tensor"][0] > 0.1 * errors["nothing"][0]


def test_token_direction_ends_at_the_other_token():
    T = tensor("bert")
    for one in token_directions(T, 3, seed=0):
        assert one.natural_size is not None
        moved = T.input + one.natural_size * T.input.norm() * one.unit
        place, other = (int(part) for part in one.name.split(" → "))
        ids = list(zoo.sample("bert"))
        ids[place] = other
        assert torch.allclose(moved, tl.Lens(zoo.build("bert"))(ids).input)


# Bounds --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_product_bound_is_never_below_the_norm(name, scale):
    T = tensor(name, scale)
    recording = T.operator.recording
    measured, weights = (product_bound(recording, reading=reading).log10 for reading in ("measured", "weights"))
    assert math.log10(true_norm(T)) <= measured <= weights + 1e-9
    part = T.blocks(1, 3)
    assert math.log10(true_norm(part)) <= product_bound(recording, part.operator.span, "measured").log10


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("gate", ["freeze_up", "half"])
def test_product_bound_holds_for_every_gate_rule(name, gate):
    T = tensor(name, gate=gate)
    measured, weights = (product_bound(T.operator.recording, reading=r).log10 for r in ("measured", "weights"))
    assert math.log10(true_norm(T)) <= measured <= weights + 1e-9


def test_product_bound_has_a_factor_for_each_block_and_leaves_a_final_norm_out_when_told():
    with_norm, without = (tensor("llama", include_final_norm=flag) for flag in (True, False))
    bound = product_bound(with_norm.operator.recording)
    assert len(bound.blocks) == 3
    assert bound.log10 == pytest.approx(sum(bound.blocks) + bound.final_norm)
    assert product_bound(without.operator.recording).final_norm == 0
    assert bound.value == pytest.approx(10**bound.log10)


def test_printed_bound_fails_where_the_variance_exceeds_one():
    """METHOD.md 1.7.4: the print divides by the variance. Sub-layers of almost no size leave only the norms."""
    model = zoo.build("bert")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("output.dense.weight"):
                parameter.mul_(1e-3)
            if name.endswith("LayerNorm.weight"):
                parameter.fill_(3.0)
    T = tl.Lens(model)(zoo.sample("bert"))
    norm = math.log10(true_norm(T))
    assert product_bound(T.operator.recording, reading="printed").log10 < norm - 1
    assert product_bound(T.operator.recording, reading="weights").log10 >= norm


def test_paper_prints_no_bound_for_other_layouts():
    with pytest.raises(tl.MethodError, match="post-LN blocks only"):
        product_bound(tensor("gpt2").operator.recording, reading="printed")


@pytest.mark.parametrize("name", ["bert", "gemma3"])
def test_measured_norm_is_the_largest_singular_value_from_below(name):
    T = tensor(name)
    found, true = spectral_norm(T), true_norm(T)
    assert 0.999 * true <= found <= true * (1 + 1e-6)


@pytest.mark.parametrize("name", ["bert", "llama", "neox-parallel", "olmo2"])
def test_proposition_holds_for_tensor_and_for_no_tensor_at_all(name):
    """METHOD.md 1.7.7: T = 0 with B = F(X) satisfies it too, with a smaller right-hand side."""
    T = tensor(name)
    norm = true_norm(T)
    errors = errors_along(T, random_directions(T, 1, seed=1)[0], [0.01, 0.1, 1.0, 10.0])
    for size, error, change in zip(errors["sizes"], errors["tensor"], errors["nothing"], strict=True):
        right = norm * size * float(T.input.norm() / T.output.norm()) + change
        assert error <= right * (1 + 1e-6)
        assert change <= right


# Runs ----------------------------------------------------------------------------------------------------------------


def test_run_writes_curves_bounds_and_properties_and_goes_on(tmp_path):
    lens = tl.Lens(zoo.build("bert"), name="tiny-bert")
    options = FidelityOptions(sizes=(0.01, 0.1, 1.0), n_random=1, n_token=1, n_probes=4, stride=2)
    summary = fidelity(lens, zoo.sample("bert"), tmp_path / "run", options=options, progress=False).summary
    assert summary["holds"]
    assert set(summary["kinds"]) == {"random", "token"}
    assert summary["kinds"]["random"]["sizes"] == [0.01, 0.1, 1.0]
    assert summary["norms"]["log10_printed"] is not None
    assert {record["kind"] for record in summary["properties"]} == {"single", "prefix", "suffix"}
    assert "product, from weights" in [row["what"] for row in norm_table(summary)]
    assert "random" in [row["direction"] for row in error_table(summary)]
    again = fidelity(lens, zoo.sample("bert"), tmp_path / "run", options=options, progress=False).summary
    assert again == summary
    report = (tmp_path / "run" / "report.html").read_text()
    assert report.count("<svg") == 2 and "<script" not in report


def test_options_are_checked():
    with pytest.raises(tl.InputError, match="positive"):
        FidelityOptions(sizes=(0.0,))
    with pytest.raises(tl.InputError, match="at least one direction"):
        FidelityOptions(n_random=0, n_token=0)
