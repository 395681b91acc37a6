"""A saved T is a file and nothing else: it needs no model and no transformers, and damage is named."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from damage import ALL, BYTES, SAMPLE, refusals
from zoo import build, sample

import tensorlens as tl

ALONE = """
import sys, torch
import tensorlens as tl
torch.set_num_threads(int(sys.argv[3]))  # sums are split among threads, and round by that
T = tl.AttentionTensor.load(sys.argv[1])
found = T.map("tensor.in_class", out_token=-1).scores
assert "transformers" not in sys.modules, "transformers was imported"
torch.save({"map": found, "pulled": T.T @ T.output, "pushed": T @ T.input}, sys.argv[2])
"""


def check_alone(T: tl.AttentionTensor, folder: Path) -> None:
    """Load a saved T in a process of its own and compare its answers bit for bit."""
    path, found = T.save(folder / "T.safetensors"), folder / "found.pt"
    arguments = [str(path), str(found), str(torch.get_num_threads())]
    subprocess.run([sys.executable, "-c", ALONE, *arguments], check=True)
    answers = torch.load(found)
    assert torch.equal(answers["map"], T.map("tensor.in_class", out_token=-1).scores)
    assert torch.equal(answers["pulled"], T.T @ T.output) and torch.equal(answers["pushed"], T @ T.input)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_it_is_the_same_in_a_process_without_transformers(name: str, tmp_path: Path):
    check_alone(tl.Lens(build(name))(sample(name)), tmp_path)


@pytest.mark.large
def test_so_is_that_of_real_weights(tmp_path: Path):
    check_alone(tl.load("smollm2-135m", device="cpu")("The Eiffel Tower is located in the city of"), tmp_path)


def test_a_used_lens_and_its_tensors_travel():
    lens = tl.Lens(build("gpt2"))
    T = lens(sample("gpt2"))
    T.map("tensor.norm")
    T.certificate()
    list(lens.maps([sample("gpt2"), sample("gpt2")[:4]], "tensor.in_out", progress=False))
    expected = T.map("tensor.in_class", out_token=-1).scores
    there, other = pickle.loads(pickle.dumps((T, lens)))
    assert torch.equal(there.map("tensor.in_class", out_token=-1).scores, expected)
    assert torch.equal(other(sample("gpt2")).map("tensor.in_class", out_token=-1).scores, expected)
    part = T.blocks(1, 3)
    assert torch.equal(pickle.loads(pickle.dumps(part)) @ part.input, part @ part.input)


@pytest.mark.parametrize("count", [SAMPLE, pytest.param(ALL, marks=pytest.mark.large)])
def test_a_damaged_file_is_named_or_read(count: int, tmp_path: Path):
    T = tl.Lens(build("gpt2"))(sample("gpt2"))
    path = T.save(tmp_path / "T.safetensors")

    def read(file: Path) -> None:
        loaded = tl.AttentionTensor.load(file)
        _ = loaded @ loaded.input, loaded.T @ loaded.output

    assert refusals("saved tensor", count, path, BYTES, read) > 0.3 * count
