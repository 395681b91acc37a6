"""Shared set-up: few threads, since the tests run in two processes."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture
def unchecked():
    """As users run it, without the run-time shape checks, which would meet bad input before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
