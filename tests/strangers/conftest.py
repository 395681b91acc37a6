"""Strangers are tried as users run the package: without the run-time checks of shapes, which take ten times as long."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def as_users_run_it(unchecked: None) -> None:
    return None
