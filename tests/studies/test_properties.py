"""Properties of slices against matrices whose answer is known, and of ranges of blocks."""

from __future__ import annotations

import math

import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.operators.spectrum import (
    effective_rank,
    hoyer_sparsity,
    perplexity,
    singular_values,
    stable_rank,
)
from tensorlens.studies import block_ranges, tensor_properties
from tensorlens.studies.properties import mean_properties, slice_properties


def test_singular_values_equal_the_decomposition():
    matrix = torch.randn(3, 5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert torch.allclose(singular_values(matrix), torch.linalg.svdvals(matrix), atol=1e-9)
    assert torch.allclose(singular_values(matrix.mT), torch.linalg.svdvals(matrix), atol=1e-9)


def test_ranks_of_known_spectra():
    values = torch.tensor([[1.0, 1, 1, 1], [1, 0, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.float64)
    assert stable_rank(values).tolist() == pytest.approx([4, 1, 1.25, 0])
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert effective_rank(values).tolist() == pytest.approx([4, 1, math.exp(entropy), 0])


def test_perplexity_and_sparsity_at_their_ends():
    assert float(perplexity(torch.ones(6))) == pytest.approx(6)
    assert float(hoyer_sparsity(torch.ones(6))) == pytest.approx(0, abs=1e-6)
    assert float(hoyer_sparsity(torch.eye(6)[2])) == pytest.approx(1)
    assert float(hoyer_sparsity(torch.ones(1))) == 1


def test_slice_of_identity_on_one_token():
    rows = torch.zeros(4, 3, 4, dtype=torch.float64)
    rows[:, 1] = torch.eye(4)
    found = slice_properties(rows)
    assert found["stable_rank"] == pytest.approx(4)
    assert found["effective_rank"] == pytest.approx(4)
    assert found["token_perplexity"] == pytest.approx(1)
    assert found["token_sparsity"] == pytest.approx(1)
    assert found["pair_stable_rank"] == pytest.approx([0, 4, 0])
    assert found["pair_norm"] == pytest.approx([0, 2, 0])


def test_ranges_cover_the_ends():
    ranges = {(r.kind, r.start, r.stop) for r in block_ranges(5, stride=2)}
    assert ranges == {
        *(("single", n, n + 1) for n in (0, 2, 4)),
        *(("prefix", 0, n) for n in (2, 4, 5)),
        *(("suffix", n, 5) for n in (0, 2, 4)),
    }
    with pytest.raises(tl.InputError, match="got 'middle'"):
        block_ranges(4, ["middle"])


@pytest.mark.parametrize(("name", "out_token"), [("llama", zoo.N_TOKENS - 1), ("bert", 0)])
def test_properties_of_a_model(name, out_token):
    T = tl.Lens(zoo.build(name))(zoo.sample(name))
    found = tensor_properties(T, ranges=block_ranges(T.n_blocks, ["single", "prefix"]))
    assert {record["out_token"] for record in found} == {out_token}
    whole = next(record for record in found if (record["start"], record["stop"]) == (0, 3))
    rows = T.rows(out_token).flatten(1)
    assert whole["stable_rank"] == pytest.approx(
        float((rows.norm() / torch.linalg.matrix_norm(rows, 2)) ** 2), rel=1e-5
    )
    share = (T.output[out_token] * T.bias[out_token]).sum() / T.output[out_token].square().sum()
    assert whole["bias_share"] == pytest.approx(float(share))
    if name == "llama":
        assert all(record["bias_size"] == 0 for record in found)
    means = mean_properties([found, found])
    assert means[0]["stable_rank"] == pytest.approx(found[0]["stable_rank"])
    assert means[0]["n_inputs"] == 2
    pairs = min(found[-1]["pair_effective_rank"]), max(found[-1]["pair_effective_rank"])
    assert pairs[0] <= means[-1]["mean_pair_effective_rank"] <= pairs[1]
