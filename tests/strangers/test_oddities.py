"""Models nobody here wrote, by what they compute and where: exact by the witness, or refused; never silently wrong."""

from __future__ import annotations

import pytest
from strangers import adversary, odd_arrangements, odd_hooks, odd_operations, odd_streams, odd_structures, odd_types
from strangers.cases import Stranger, as_parameters, check, judge

pytestmark = pytest.mark.filterwarnings("ignore")  # strangers may warn of what they do


@pytest.mark.parametrize("stranger", as_parameters(odd_structures.STRANGERS))
def test_odd_structures(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(odd_operations.STRANGERS))
def test_odd_operations(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(odd_hooks.STRANGERS))
def test_hooks_and_heads(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(odd_streams.STRANGERS))
def test_odd_streams(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(odd_types.STRANGERS))
def test_roundings(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(odd_arrangements.STRANGERS))
def test_beginning_end_and_state(stranger: Stranger):
    check(stranger, judge(stranger))


@pytest.mark.parametrize("stranger", as_parameters(adversary.STRANGERS))
def test_written_to_mislead(stranger: Stranger):
    check(stranger, judge(stranger))
