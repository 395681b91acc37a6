"""A program as text: it fits a screen or two, and every step says what it does and in which module."""

from __future__ import annotations

import re

import pytest
import zoo

import tensorlens as tl


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_a_program_of_three_blocks_fits_two_screens(name: str) -> None:
    T = tl.Lens(zoo.build(name))(zoo.sample(name))
    lines = str(T.program).splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 120
    assert [line.split()[1] for line in lines if line.startswith("block ")] == ["0", "1", "2"]
    steps = [line for line in lines if re.match(r"  x\d+ ", line)][1:]
    assert len(steps) == len(T.program.steps)
    # A step names a weight of its module, or the module, unless it is the block's own.
    named = [line for line in steps if re.search(r"\.weight|\s{2,}[a-z][\w.]*$|(add|mul|cast)\(", line)]
    assert named == steps


def test_steps_say_what_they_do() -> None:
    text = str(tl.Lens(zoo.build("gpt2"))(zoo.sample("gpt2")).program)
    assert re.search(r"x\d+ +1×7×16 +norm\(x0, 1/σ=⟨1×7×1⟩, ln_1.weight, .bias, axes=\(-1\), centred=True\)\n", text)
    assert re.search(r"x\d+ +7×48 +linear\(x\d+, attn.c_attn.weight, .bias\)\n", text)
    assert "after the blocks" in text and "between" not in text
