"""A few cotangents on a GPU: what is replayed as a graph of kernels is what the launches give, for every output."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import zoo

import tensorlens as tl
from tensorlens.operators import few_cotangents, folded

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs of kernels exist on a GPU alone")


@pytest.fixture(params=["bert", "llama"])
def tensor(request: pytest.FixtureRequest):
    return tl.Lens(zoo.build(request.param, "sdpa").cuda())(zoo.sample(request.param))


def pulled(T, out_token: int, n: int = 8) -> torch.Tensor:
    units = torch.eye(T.shape[1], device="cuda")[None, :n]
    piece = next(iter(T.operator.pull_outputs((out_token,), units)))
    rows = torch.zeros(T.n_tokens, n, T.n_channels, device="cuda")
    rows[slice(*piece.tokens)] = piece.rows
    return rows


def exact(T, out_token: int, n: int = 8) -> torch.Tensor:
    return T.rows(out_token)[:n].transpose(0, 1)


def test_a_graph_serves_every_output_and_leaves_earlier_results_alone(tensor) -> None:
    found = {(i, again): pulled(tensor, i) for again in range(3) for i in range(tensor.shape[0])}
    assert tensor.operator.folded._kept_pulls._graphs, "some shape came again"
    for (i, _), rows in found.items():
        torch.testing.assert_close(rows, exact(tensor, i), rtol=1e-4, atol=1e-5)


def test_threads_share_a_graph(tensor) -> None:
    outputs = list(range(tensor.shape[0])) * 8
    for _ in range(2):
        pulled(tensor, 0)
    with ThreadPoolExecutor(4) as pool:
        for i, rows in zip(outputs, pool.map(lambda i: pulled(tensor, i), outputs), strict=True):
            torch.testing.assert_close(rows, exact(tensor, i), rtol=1e-4, atol=1e-5)


def test_few_graphs_are_kept(tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_cotangents, "MOST_GRAPHS", 2)
    for n in (8, 9, 10, 11):
        for _ in range(3):
            torch.testing.assert_close(pulled(tensor, 3, n), exact(tensor, 3, n), rtol=1e-4, atol=1e-5)
    assert len(tensor.operator.folded._kept_pulls._graphs) == 2


def test_many_rows_are_launched(tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "MOST_ROWS_KEPT", 8)
    for _ in range(3):
        torch.testing.assert_close(pulled(tensor, 3), exact(tensor, 3), rtol=1e-4, atol=1e-5)
    assert "_kept_pulls" not in tensor.operator.folded.__dict__
