"""timm's architectures with random weights: each exact by its own frozen gradients, or refused; no map of zeros."""

from __future__ import annotations

import pytest
from strangers.timm_zoo import FAMILIES, build, judge_timm, names

pytestmark = pytest.mark.large


@pytest.mark.parametrize("name", names())
def test_exact_or_refused(name: str):
    pytest.importorskip("timm", reason="needs the package timm")
    try:
        build(name)
    except LookupError as error:
        pytest.skip(str(error))
    verdict = judge_timm(name)
    assert verdict.outcome in ("exact", "refused"), f"{name}: {verdict}"


def test_the_zoo_is_wide():
    assert len(FAMILIES) >= 15 and len(names()) >= 60
