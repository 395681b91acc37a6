"""Shared set-up: few threads, since the tests run in two processes, and a real browser."""

from __future__ import annotations

import os
import shutil

import jaxtyping
import pytest
import torch
import transformers

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()


@pytest.fixture
def unchecked():
    """As users run it, without the run-time shape checks, which would meet bad input before our own errors do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def browser():
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.fail("No Chromium found. Install it (Debian: apt-get install chromium) or name it in CHROMIUM.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()
