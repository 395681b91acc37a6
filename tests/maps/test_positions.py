"""Positions as columns of their own, and what came through a subspace."""

from __future__ import annotations

import laws
import pytest
import torch
import zoo

import tensorlens as tl


@pytest.mark.parametrize("method", ["tensor.in_class", "tensor.in_out"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_words_and_positions_sum_to_the_columns(family, method):
    T = tl.Lens(zoo.build(family), rules=tl.Rules.attn_lrp())(zoo.sample(family))
    whole, split = T.map(method, -1), T.map(method, -1, positions=True)
    n = len(T.tokens)
    assert split.in_tokens == (*T.tokens, *(f"position {j}" for j in range(n)))
    words, places = split.scores[:, :n], split.scores[:, n:]
    assert laws.relative(words + places - whole.scores, whole.scores) <= 1e-10
    assert float(split.bias_share[0]) == pytest.approx(float(whole.bias_share[0]), abs=1e-12)


def test_a_positions_column_is_what_its_own_vector_carries():
    model, ids = zoo.build("gpt2"), zoo.sample("gpt2")
    T = tl.Lens(model)(ids)
    split = T.map("tensor.in_class", -1, target=3, positions=True).scores[0, len(ids) :]
    u = torch.zeros(1, *T.output.shape, dtype=T.dtype)
    u[0, -1] = model.lm_head.weight[3]
    by_hand = (T.adjoint(u)[0] * model.transformer.wpe.weight[: len(ids)]).sum(-1).detach()
    assert laws.relative(split - by_hand, by_hand) <= 1e-10


@pytest.mark.parametrize(
    ("family", "said"),
    [("llama", "does not add positions"), ("bert-mlm", "more than add"), ("vit", "no word embeddings")],
)
def test_where_positions_are_not_added_they_are_refused(family, said):
    T = tl.Lens(zoo.build(family))(zoo.sample(family))
    with pytest.raises(tl.MethodError, match=said):
        T.map("tensor.in_out", 0, positions=True)
    with pytest.raises(tl.InputError, match="without groups"):
        T.map("tensor.norm", 0, positions=True)


@pytest.mark.parametrize("rules", ["paper", "attn_lrp"])
@pytest.mark.parametrize("block", [0, 1])
def test_parts_through_and_beside_a_subspace_sum_to_the_output(rules, block):
    T = tl.Lens(zoo.build("gpt2"), rules=rules)(zoo.sample("gpt2"))
    rest = T.blocks(block, T.n_blocks)
    width = rest.input.shape[1]
    basis = torch.randn(3, width, dtype=T.dtype, generator=torch.Generator().manual_seed(2))
    through, beside = T.split(block, basis)
    assert laws.relative(through + beside + rest.bias - T.output, T.output) <= 1e-10
    for same in (basis.mT, 5 * basis.flip(0), torch.cat([basis, basis.sum(0, keepdim=True)])):
        assert laws.relative(T.split(block, same).through - through, through) <= 1e-10
    state = rest.input  # the projection by least squares, one token after the other
    weights = torch.linalg.lstsq(basis.mT, state.mT).solution
    expected = rest @ (basis.mT @ weights).mT
    assert laws.relative(through - expected, expected) <= 1e-10
    everything, nothing = T.split(block, torch.eye(width))
    assert laws.relative(everything + rest.bias - T.output, T.output) <= 1e-10 and float(nothing.norm()) <= 1e-10


def test_what_is_not_a_basis_is_refused():
    T = tl.Lens(zoo.build("gpt2"))(zoo.sample("gpt2"))
    for wrong in (torch.zeros(2, 5), torch.full((1, T.n_channels), float("nan")), torch.zeros(1, 2, T.n_channels)):
        with pytest.raises(tl.InputError, match="`basis` must be finite directions"):
            T.split(0, wrong)
    with pytest.raises(tl.InputError, match="block"):
        T.split(9, torch.zeros(1, T.n_channels))
