"""Models nobody here wrote, by how they are put together: exact by the witness, or refused; never silently wrong."""

from __future__ import annotations

import copy

import pytest
import torch
from strangers.cases import Stranger, as_parameters, check, ids, judge
from strangers.known_layouts import STRANGERS
from strangers.models import MetaLlama, Plain, randomised

import tensorlens as tl

pytestmark = pytest.mark.filterwarnings("ignore")  # strangers may warn of what they do


@pytest.mark.parametrize("stranger", as_parameters(STRANGERS))
def test_exact_or_refused(stranger: Stranger):
    check(stranger, judge(stranger))


def test_buffers_written_in_place_are_left_to_the_user():
    model = randomised(MetaLlama())
    before = model(ids())
    caches = [layer.attention.cache_v.clone() for layer in model.layers]
    tl.Lens(model)({"tokens": ids(), "start_pos": 0})
    for layer, cache in zip(model.layers, caches, strict=True):
        assert type(layer.attention.cache_v) is torch.Tensor and torch.equal(layer.attention.cache_v, cache)
        assert not vars(layer.attention.cache_v)  # what we leave there is copied with the model
    assert torch.equal(copy.deepcopy(model)(ids()), before)


class Copied(Plain):
    """A state that is copied with everything that hangs on it, as code that keeps states for later does."""

    def body(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedded(input_ids)
        for block in self.blocks:
            x = block(copy.deepcopy(x.detach())) + x
        return self.norm(x)


def test_a_deep_copy_of_a_live_tensor_is_live():
    assert tl.Lens(randomised(Copied()))(ids()[0]).certificate().passed
