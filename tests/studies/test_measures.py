"""What a perturbation does, as numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_study import TEXTS, lens_on

from tensorlens.errors import InputError
from tensorlens.maps.token_map import TokenMap
from tensorlens.studies import PerturbationOptions, options
from tensorlens.studies import perturbation_study as measures
from tensorlens.studies.datasets import read_dataset
from tensorlens.studies.perturbation_report import auc
from tensorlens.studies.perturbation_samples import Texts


@pytest.mark.parametrize("n", [1, 2, 7, 20, 126])
def test_the_number_replaced_is_the_fraction_rounded_up(n):
    masks = measures.masks_along(list(range(n)), n + 2, options.GRID)
    assert masks.sum(1).tolist() == [math.ceil(n * percent / 100) for percent in (5, 10, 15, 20, 25, 30)]
    assert not masks[:, n:].any()
    assert bool((masks[1:] >= masks[:-1]).all())


def test_ties_go_by_position_and_signs_count_unless_told():
    scores = torch.tensor([0.0, 2.0, -3.0, 2.0])
    assert measures.ranking(scores, [0, 1, 2, 3], "most", absolute=False) == [1, 3, 0, 2]
    assert measures.ranking(scores, [0, 1, 2, 3], "most", absolute=True) == [2, 1, 3, 0]
    assert measures.ranking(scores, [3, 2, 0], "least", absolute=False) == [2, 0, 3]
    with pytest.raises(InputError, match="cannot be ranked"):
        measures.ranking(torch.tensor([0.0, math.nan]), [0, 1], "most", absolute=False)


def test_measures_by_hand():
    clean, moved = torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 4.0], [1.0, 2.0]])
    assert measures.hidden_state_mse(clean, moved).tolist() == [2.0, 0.0]
    logits, others = torch.tensor([0.0, math.log(3)]), torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    assert measures.probability_drop(logits, others).tolist() == pytest.approx([0.5, 0.0])
    assert auc(np.array([0.0, 1.0, 2.0]), [0.0, 0.1, 0.3]) == pytest.approx((0.05 + 0.3) / 0.3)
    for grid in ([0.1, 0.2], [0.0], [0.0, 0.2, 0.2], [0.0, 1.5]):
        with pytest.raises(InputError, match="rising fractions"):
            options.check_grid(grid)


def test_the_true_order_beats_random_on_a_linear_model():
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20, 1, generator=generator).double() * torch.tensor([[1.0, -2.0, 0.5]]).double()

    def area(scores):
        masks = measures.masks_along(measures.ranking(scores, range(20), "most", absolute=False), 20, options.GRID)
        outputs = (~masks).double() @ weights
        moved = [0.0, *measures.hidden_state_mse(weights.sum(0), outputs).tolist()]
        return auc(np.array(moved), options.GRID)

    oracle = area(weights.norm(dim=1))
    assert all(oracle > area(torch.rand(20, generator=generator)) for _ in range(20))


def test_probes_of_a_study_estimate_norms_alone():
    lens, methods = lens_on("gpt2"), ("tensor.norm", "tensor.contribution")
    chosen = PerturbationOptions(methods=methods, norm_probes=2)
    [found] = measures.GroupMaps(lens, methods, chosen).of([Texts(lens, read_dataset(TEXTS[:1]), chosen).load(0)])
    assert isinstance(found, dict)
    norms, contributions = (found[name] for name in methods)
    assert isinstance(norms, TokenMap) and isinstance(contributions, TokenMap)
    assert "standard_error" in norms.meta and "standard_error" not in contributions.meta
    assert contributions.scores.allclose(lens(TEXTS[0]).map("tensor.contribution", -1).scores, rtol=1e-5)
