"""What a pass held in memory goes with its last user, and does not wait for Python to search for cycles."""

from __future__ import annotations

import gc
import weakref

import pytest
from zoo import build, sample

import tensorlens as tl


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("rules", ["paper", "attn_lrp"])
def test_what_a_tensor_held_is_freed_with_it(name: str, rules: str) -> None:
    lens = tl.Lens(build(name), rules=rules)
    T = lens(sample(name))
    T.map(out_token=-1)
    held = T.program.constants
    own = [weakref.ref(held[n]) for n in T.program.used if n not in held.names]
    assert len(own) > 5
    collects = gc.isenabled()
    gc.disable()
    try:
        del T, held
        assert not [ref for ref in own if ref() is not None]
    finally:
        if collects:
            gc.enable()
