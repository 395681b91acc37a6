"""Shared set-up: few threads, since the tests run in two processes, and a real browser."""

from __future__ import annotations

import os
import shutil

import jaxtyping
import pytest

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

LONGEST = (
    "bench/test_families.py",
    "test_laws.py",
    "app/test_study_commands.py",
    "test_callers_modes.py",
    "test_no_float64.py",
    "studies/test_kills.py",
    "operators/test_folded.py",
    "test_batches.py",
    "freezing/test_rules_members.py",
)
"""Files of tests that come first: a long one that comes last keeps the other process waiting for it."""


def pytest_configure(config):
    if not config.getoption("numprocesses", default=None):  # a process that hands tests to others needs no torch
        import torch
        import transformers

        torch.set_num_threads(1)
        transformers.logging.set_verbosity_error()


def pytest_collection_modifyitems(items):
    first = {f"tests/{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.nodeid.partition("::")[0], len(first)))


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
