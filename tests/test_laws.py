"""The laws of the attention tensor, for every family, eager and fused attention, with random biases and gains."""

from __future__ import annotations

import laws
import pytest
import torch
from portrait import assert_same, outputs, portrait
from zoo import CASES, ZOO, build, sample

import tensorlens as tl
from tensorlens.tolerances import CAPTURE


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(case))
def fresh(request):
    name, attention = request.param
    model = build(name, attention)
    return name, model, portrait(model), outputs(model, name)


@pytest.fixture(scope="module")
def case(fresh):
    name, model, *_ = fresh
    return name, model, tl.Lens(model)(sample(name))


@pytest.fixture(scope="module")
def dense(case):
    return case[2].dense()


def tolerance(name: str) -> float:
    return laws.TOLERANCE_FLOAT32_INSIDE if ZOO[name].casts else laws.TOLERANCE


def reference(name: str, model: torch.nn.Module) -> torch.Tensor:
    """X^N of the untouched model, by its own output."""
    body = model.base_model.decoder if name == "opt" else model.base_model
    value = sample(name)
    argument = {"pixel_values": value[None]} if ZOO[name].vision else {"input_ids": torch.tensor([value])}
    with torch.no_grad():
        return body(**argument).last_hidden_state[0]


def test_value(case):
    name, model, T = case
    assert laws.value(T, reference(name, model)) <= tolerance(name)


def test_linearity_away_from_the_input(case):
    name, _, T = case
    assert laws.linearity(T) <= tolerance(name)


def test_adjoint(case):
    name, _, T = case
    assert laws.adjoint(T) <= tolerance(name)


def test_composition_of_blocks(case):
    name, _, T = case
    assert laws.composition(T) <= tolerance(name)


def test_completeness_by_joint_homogeneity(case):
    name, _, T = case
    assert laws.homogeneity(T) <= tolerance(name)


def test_bias_is_found_two_ways(case):
    name, _, T = case
    probe = torch.randn(*T.output.shape, dtype=T.dtype, generator=torch.Generator().manual_seed(5))
    _, by_gradient = laws.gradients(T, probe)
    assert abs((probe * T.bias).sum() - by_gradient) <= tolerance(name) * T.output.norm()
    assert ZOO[name].has_biases == bool(T.bias.norm() > 1e-3)


def test_certificate_passes_within_its_own_tolerance(case):
    name, _, T = case
    certificate = T.certificate()
    assert certificate.passed, str(certificate)
    assert certificate.errors.pop("capture") <= CAPTURE / 4
    assert max(certificate.errors.values()) <= laws.TOLERANCE_FLOAT32_INSIDE  # however many casts its own allows for
    assert certificate.tolerance <= 10 * laws.TOLERANCE_FLOAT32_INSIDE
    assert not certificate.conventions, "no product of two live branches should be left to a convention"


def test_dense_equals_rows_equals_apply_on_units(case, dense):
    name, _, T = case
    units = torch.eye(T.n_tokens * T.n_channels, dtype=T.dtype).reshape(-1, T.n_tokens, T.n_channels)
    by_columns = T.apply(units).reshape(T.n_tokens, T.n_channels, *T.shape[:2]).permute(2, 3, 0, 1)
    assert laws.relative(dense - by_columns, dense) <= tolerance(name)
    assert torch.equal(T.rows(-1), T.rows(T.shape[0] - 1))
    assert laws.relative(dense[0] - T.rows(0), dense[0]) <= tolerance(name)


def test_causality(case, dense):
    assert (laws.above_diagonal(dense) == 0) == ZOO[case[0]].causal


def test_in_out_rows_sum_to_the_output_less_its_bias(case):
    name, _, T = case
    found = T.map("tensor.in_out").scores.sum(1)
    expected = (T.output * (T.output - T.bias)).sum(1)
    assert laws.relative(found - expected, expected) <= 10 * tolerance(name)


def test_heads_add_up_to_the_whole(case):
    """With the residual and the biases held, the heads' parts of T and of B add to T and B."""
    name, _, T = case
    block, x = 1, laws.states(T, 1, scale=1.0)[0]
    n_heads = T.operator.recording.n_heads[block]
    assert n_heads == 4

    def affine(part: tl.AttentionTensor) -> torch.Tensor:
        return part.apply(x) + part.bias

    without_any = affine(T.heads({block: []}))
    parts = sum(affine(T.heads({block: [head]})) - without_any for head in range(n_heads))
    whole = affine(T)
    assert laws.relative(without_any + parts - whole, whole) <= tolerance(name)
    one_way, other_way = affine(T.without_heads({block: [0]})), affine(T.heads({block: [1, 2, 3]}))
    assert laws.relative(one_way - other_way, whole) <= tolerance(name)
    assert laws.relative(affine(T.heads({block: [0]})) - whole, whole) > 1e-3


def test_two_recordings_agree_bit_for_bit(case):
    name, model, T = case
    again = tl.Lens(model)(sample(name))
    assert torch.equal(T.output, again.output)
    assert torch.equal(T.bias, again.bias)
    assert torch.equal(T.rows(1), again.rows(1))


def test_model_is_untouched_by_all_of_the_above(fresh, case):
    name, model, before, expected = fresh
    case[2].rows(0), case[2].map("tensor.in_out")  # where it is asked for alone
    assert_same(before, portrait(model))
    assert torch.equal(outputs(model, name), expected)


@pytest.mark.parametrize("name", ["mistral", "gemma3", "modernbert"])
def test_sliding_window_bounds_one_block_and_grows_over_blocks(name):
    T = tl.Lens(build(name))(sample(name))
    spans = [T.blocks(n, n + 1).map("tensor.norm").scores.nonzero() for n in range(T.n_blocks)]
    reach = [int((found[:, 0] - found[:, 1]).abs().max()) for found in spans]
    assert min(reach) == 2, "the window lets a token see two others on one side"
    whole = T.map("tensor.norm").scores.nonzero()
    assert int((whole[:, 0] - whole[:, 1]).abs().max()) > min(reach)
