"""A device without float64, as Apple's GPUs are: every number is found there too, and is the same.

The device is pretended on the CPU (`pretended_device`); where there is a real one with CUDA, float64 on it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from pretended_device import WIDE, pretended
from tiny_language import tiny_lens, write_relation
from tiny_study import TEXTS, lens_on
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tensorlens as tl
from tensorlens.models import precision
from tensorlens.operators.bounds import product_bound
from tensorlens.operators.spectrum import operator_norm
from tensorlens.recording import block_calls
from tensorlens.studies import fidelity, perturbation, relations

pytestmark = pytest.mark.usefixtures("unchecked")

MODELS = ("llama", "neox-serial", "bert-classifier")
Work = Callable[[tl.Lens], Any]


def lens(name: str) -> tl.Lens:
    return tl.Lens(zoo.build(name, dtype=torch.float32), name=name)


@pytest.fixture(autouse=True)
def unknown() -> Iterator[None]:
    """What is known of devices is asked again."""
    precision._knows_float64.cache_clear()
    yield
    precision._knows_float64.cache_clear()


class Refusing(TorchDispatchMode):
    """For a real device."""

    n_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **kwargs or {})
        there = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor) and t.is_cuda]
        self.n_seen += bool(there)
        if any(tensor.dtype in WIDE for tensor in there):
            raise TypeError(f"{func}: float64 on the device")
        return made


@contextmanager
def refusing(lens: tl.Lens) -> Iterator[Any]:
    """Float64 on the model's device is refused: a real one where there is one."""
    if torch.cuda.is_available():
        lens.model.cuda()
        with Refusing() as mode:
            yield mode
    else:
        with pretended(lens.model) as mode:
            yield mode


def same(lens: tl.Lens, again: tl.Lens, work: Work) -> None:
    """The work gives on the device what it gives on the CPU, and was done on the device."""
    expected = _numbers(work(lens))
    with refusing(again) as mode:
        found = work(again)
    assert mode.n_seen > 20
    tolerance = 1e-4 if torch.cuda.is_available() else 1e-5
    for one, other in zip(_numbers(found), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def _numbers(found: Any) -> list[torch.Tensor]:
    leaves = [
        leaf.scores if isinstance(leaf, tl.TokenMap | tl.ComponentMap) else leaf
        for leaf in tree_leaves(found, is_leaf=lambda value: isinstance(value, tl.TokenMap | tl.ComponentMap))
    ]
    return [torch.as_tensor(leaf).cpu().double() for leaf in leaves if not isinstance(leaf, str)]


# One tensor ----------------------------------------------------------------------------------------------------------


def _mapped(*names: str, **options: Any) -> Work:
    """Each method at every output and at the last, of one tensor; or its refusal."""

    def work(lens: tl.Lens) -> Any:
        T, found = lens(zoo.sample(lens.name)), []
        for name, where in product(names, (None, -1)):
            with suppress(tl.MethodError, tl.InputError):
                made = T.map(name, where, **options)
                found.append((made.scores, made.bias_share))
        return found

    return work


@pytest.mark.parametrize("model", MODELS)
def test_every_method(model: str):
    same(lens(model), lens(model), _mapped(*tl.METHODS))


@pytest.mark.parametrize("options", [{"norm": "spectral"}, {"probes": 3}, {"precision": "tf32"}])
def test_other_norms(options: dict[str, Any]):
    same(lens("llama"), lens("llama"), _mapped("tensor.norm", **options))


@pytest.mark.parametrize("model", MODELS)
def test_the_operator_and_its_certificate(model: str):
    def work(lens: tl.Lens) -> Any:
        T = lens(zoo.sample(model))
        proved = T.certificate(engines="all")
        assert proved.passed and T.heads({0: [1]}).certificate().passed
        part = T.blocks(1, 3)
        return [T.rows(-1), part.dense(), T @ T.input, T.T @ T.output, T.bias, part.certificate().passed]

    same(lens(model), lens(model), work)


def test_spectra_and_bounds():
    def work(lens: tl.Lens) -> Any:
        T = lens(zoo.sample("neox-serial"))
        mean = tl.MeanTensor([T, T])
        bound = product_bound(T.operator.recording)
        return [tl.spectrum(T, k=2).values, operator_norm(T).value, mean(T.input), bound.value]

    same(lens("neox-serial"), lens("neox-serial"), work)


def test_an_input_too_long_for_kept_factors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_calls, "SHARE_OF_RECORDING", 0.0)
    work = _mapped("tensor.in_class", target=5)
    same(lens("llama"), lens("llama"), lambda lens: (work(lens), lens(zoo.sample("llama")).certificate().passed))


# Around it -----------------------------------------------------------------------------------------------------------


def _speaking() -> tl.Lens:
    lens = tiny_lens("neox")
    lens.model.float()
    return lens


def test_batches_answers_and_the_inside():
    def work(lens: tl.Lens) -> Any:
        T = lens("Red and blue")
        answer = lens.answer("Red is", answer=" so")  # transformers would ask the device for events
        patched = tl.patching(lens, "Red and blue", "Sea and blue", verify=True)
        return [
            [one.scores for one in lens.maps(["Red and blue", "Sea", "So it is"], "tensor.in_class", batch_size=3)],
            [answer.map(rows=rows).scores for rows in ("answer", "tokens")],
            answer.map(rows="tokens", through=True).scores,
            [T.components(effect=effect).scores for effect in ("total", "direct")],
            T.score(block=1, head=1, query=-1, key=3).scores,
            [patched.predicted, patched.true, patched.pearson, patched.rank_correlation],
        ]

    same(_speaking(), _speaking(), work)


@pytest.mark.filterwarnings("ignore:.*converge")
def test_the_studies(tmp_path: Path):
    methods = ["tensor.norm", "tensor.in_out", "tensor.in_class", "rollout.glob_enc", "alti", "control.random"]

    def run_perturbation(lens: tl.Lens, folder: Path) -> None:
        texts = TEXTS[:2]
        common = {"methods": methods, "grid": (0.0, 0.3), "n_tokens": 6, "progress": False}
        perturbation(lens, texts, folder, replacements=("mean",), **common)

    def run_relations(lens: tl.Lens, folder: Path) -> None:
        write_relation(tmp_path / "data" / "commonsense" / "fruit.json")
        sizes = {"n_splits": 1, "top_k": 300, "min_test": 2, "max_test": 2, "scales": (0.0, 1.0)}
        relations(lens, tmp_path / "data", folder, progress=False, **sizes)

    def run_fidelity(lens: tl.Lens, folder: Path) -> None:
        sizes = {"sizes": (0.1, 1.0), "n_random": 1, "n_token": 1, "n_probes": 2, "stride": 1}
        fidelity(lens, TEXTS[1:2], folder, progress=False, **sizes)

    for run, made in ((run_perturbation, lens_on), (run_relations, _speaking), (run_fidelity, lens_on)):
        run(made(), tmp_path / run.__name__)
        again = made()
        with refusing(again) as mode:
            run(again, tmp_path / f"{run.__name__}-there")
        assert mode.n_seen > 100
        whole, there = (tmp_path / f"{run.__name__}{end}" / "summary.json" for end in ("", "-there"))
        expected, found = (tree_leaves(json.loads(path.read_text())) for path in (whole, there))
        if not torch.cuda.is_available():
            for one, other in zip(found, expected, strict=True):
                assert one == (pytest.approx(other, rel=1e-3, abs=1e-5) if isinstance(other, float) else other)


def test_the_pretended_device_refuses_what_a_real_one_does():
    model = torch.nn.Linear(2, 2)
    with pretended(model):
        x = torch.ones(2, device=model.weight.device)
        assert (x.device.type, x.cpu().device.type, x.cpu().double().dtype) == ("mps", "cpu", torch.float64)
        for wrong in (
            lambda: model(x).double(),
            lambda: torch.zeros(2, dtype=torch.float64, device=x.device),
            lambda: x.to("cpu", torch.float64),
            lambda: torch.zeros(2, dtype=torch.float64).to(x.device),
            lambda: x.numpy(),
        ):
            with pytest.raises(TypeError):
                wrong()
        with pytest.raises(RuntimeError, match="one device"):
            model(x) + torch.ones(2)
