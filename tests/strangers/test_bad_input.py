"""What users give by mistake: an error that says what was expected, never a crash and never an answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from strangers.models import IDS, NanoGPT, Plain, WithHead, randomised, torch_encoder
from torch import nn

import tensorlens as tl
from tensorlens.models.runner import own_errors

FEW: dict[str, Callable[[tl.Lens, Any], Any]] = {
    "a head that is True": lambda lens, T: T.heads({0: [True]}),
    "a block that is True": lambda lens, T: T.heads({True: [0]}),
    "minus one prediction": lambda lens, T: T.predictions(-1),
    "half a prediction": lambda lens, T: T.predictions(2.5),
    "a mean of numbers": lambda lens, T: tl.MeanTensor([1]),  # type: ignore[list-item]
    "a mean of one tensor, not a list": lambda lens, T: tl.MeanTensor(T),
    "rules that do not exist": lambda lens, T: tl.Lens(lens.model, rules="papers"),
    "ids that are floats": lambda lens, T: lens([1.0, 2.0]),
    "a tensor of ids that are floats": lambda lens, T: lens(torch.tensor([[1.0, 2.0]])),
    "nothing in a dictionary": lambda lens, T: lens({}),
    "no batch": lambda lens, T: lens.batch([]),
    "sparse ids": lambda lens, T: lens(torch.tensor([[1, 2]]).to_sparse()),
    "ids without values": lambda lens, T: lens(torch.empty(1, 3, dtype=torch.long, device="meta")),
    "words in an array": lambda lens, T: lens(np.array(["a", "b"])),
    "objects in an array": lambda lens, T: lens(np.array([object()])),
    "a word where ids are": lambda lens, T: lens({"input_ids": "abc"}),
    "rows of two lengths": lambda lens, T: lens({"input_ids": [[1, 2], [3]]}),
    "a slice of words": lambda lens, T: T.map("tensor.in_out", out_token=slice("a", 2)),
    "no path to save at": lambda lens, T: T.save(None),  # type: ignore[arg-type]
    "a number as a path": lambda lens, T: T.map("tensor.in_out").save(5),  # type: ignore[arg-type]
    "no path to load from": lambda lens, T: tl.TokenMap.load(None),  # type: ignore[arg-type]
    "a path that no file can have": lambda lens, T: T.map("tensor.in_out").save("a\0.json"),
    "no method": lambda lens, T: lens.maps([list(IDS)], None),  # type: ignore[arg-type]
    "a number for rows left out": lambda lens, T: lens.maps([list(IDS)], skipped=5),  # type: ignore[arg-type]
    "a seed that is a word": lambda lens, T: lens.answer(list(IDS), seed="a"),  # type: ignore[arg-type]
    "components patched in no lens": lambda lens, T: tl.patching(5, [1, 2], [1, 3]),
    "a circuit of no lens": lambda lens, T: tl.circuit(5, [1, 2], [1, 3]),
    "a mean over texts of no lens": lambda lens, T: tl.CorpusTensor.fit(5, [[1, 2]]),
    "rules for a number": lambda lens, T: tl.rules_for(5),  # type: ignore[arg-type]
    "a sparse cotangent": lambda lens, T: T.T @ torch.zeros_like(T.output).to_sparse(),
}


@pytest.fixture(scope="module")
def lens() -> tl.Lens:
    return tl.Lens(randomised(WithHead()))


@pytest.mark.parametrize("mistake", FEW)
def test_a_mistake_is_named(lens: tl.Lens, mistake: str):
    T = lens(list(IDS))
    with pytest.raises(tl.InputError, match="[;.]"):  # what was wrong, and what to do
        FEW[mistake](lens, T)


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Plain()


def half_on_meta() -> nn.Module:
    model = randomised(Plain())
    model.norm = nn.LayerNorm(16, device="meta")
    return model


OF_THE_MODEL: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "floats for ids that have another name": (
        NanoGPT,
        torch.tensor([[1.0, 2.0]]),
        r"`NanoGPT` itself.*`idx` \(float64",
    ),
    "the same by name": (NanoGPT, {"idx": torch.tensor([[1.0, 2.0]])}, r"`NanoGPT` itself.*`idx` \(float64"),
    "an id that is none": (NanoGPT, {"idx": torch.tensor([[1, 300]])}, "`NanoGPT` itself.*IndexError"),
    "states of another width": (torch_encoder, torch.zeros(1, 5, 17), r"itself cannot run.*`src` \(float64 of shape"),
    "a model without values": (on_meta, list(IDS), "`embed.weight` of `Plain` is on the meta device"),
    "a part of a model without values": (half_on_meta, list(IDS), "`norm.weight` of `Plain` is on the meta device"),
}


@pytest.mark.parametrize("mistake", OF_THE_MODEL)
def test_what_the_model_itself_cannot_do_is_said(mistake: str):
    build, value, said = OF_THE_MODEL[mistake]
    model = build()
    with pytest.raises(tl.InputError, match=said):
        tl.Lens(model if "values" in mistake else randomised(model))(value)


def test_memory_that_runs_out_is_not_the_models_error():
    with pytest.raises(RuntimeError, match="can't allocate memory"), own_errors(nn.Linear(1, 1), {}):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


def test_it_is_said_of_a_later_input_too():
    lens = tl.Lens(randomised(NanoGPT()))
    lens({"idx": torch.tensor([[1, 2]])})
    with pytest.raises(tl.InputError, match="`NanoGPT` itself cannot run on this input: IndexError"):
        lens({"idx": torch.tensor([[1, 300]])})


def test_a_lens_file_whose_own_words_are_damaged_is_refused(tmp_path: Path):
    own = {"bias": torch.zeros(2, 3), "before": torch.zeros(0, 3, 3), "meta": "{}", "outputs": "later"}
    held = {"J": {0: torch.eye(3), 1: torch.eye(3)}, "n_prompts": 1}
    torch.save(held | {"tensorlens": own}, tmp_path / "whole.pt")
    assert tl.CorpusTensor.load(tmp_path / "whole.pt").outputs == "later"
    for damaged in ({"meta": "{'a"}, {"bias": None}, {"before": 1}, {"middle": "x"}):
        torch.save(held | {"tensorlens": own | damaged}, tmp_path / "damaged.pt")
        with pytest.raises(tl.InputError):
            tl.CorpusTensor.load(tmp_path / "damaged.pt")
