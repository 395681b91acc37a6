"""Models of other packages: each exact by its own frozen gradients, or refused by a clear error."""

from __future__ import annotations

import pytest
from strangers import torchvision_stub
from strangers.foreign import FOREIGNERS, Foreigner, judge_foreigner

pytestmark = pytest.mark.large


@pytest.mark.parametrize("one", [pytest.param(one, id=one.name) for one in FOREIGNERS])
def test_exact_or_refused(one: Foreigner):
    torchvision_stub.install()
    pytest.importorskip(one.package, reason=f"needs the package {one.package}")
    verdict = judge_foreigner(one)
    assert verdict.outcome in ("exact", "refused"), f"{one.name}: {verdict}"
