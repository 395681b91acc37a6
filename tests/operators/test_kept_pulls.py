"""A few cotangents on a GPU: which pulls are kept as graphs, and that a replay gives what the launches give."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import zoo
from tensorlens.folding import pull as folded
from tensorlens.folding import pull_few as few_cotangents

import tensorlens as tl
from tensorlens.models.precision import tf32

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs of kernels exist on a GPU alone")


class Relaunched:
    """In place of a graph where there is no GPU: the same pull, launched again in the graph's own memory."""

    def __init__(self, blocks, rows: torch.Tensor, first: int) -> None:
        self.blocks, self.rows, self.first = blocks, torch.empty_like(rows), first

    def replay(self, rows: torch.Tensor) -> torch.Tensor:
        return few_cotangents.pull_few(self.blocks, self.rows.copy_(rows), self.first).clone()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> few_cotangents.KeptPulls:
    """Pulls through all blocks of a small model but the last, as on a GPU."""
    monkeypatch.setattr(few_cotangents, "_Captured", Relaunched)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    rows = tl.Lens(zoo.build("bert"))(zoo.sample("bert")).operator.folded
    assert rows is not None
    return few_cotangents.KeptPulls([rows.block(1), rows.block(0)])


def some_rows(kept: few_cotangents.KeptPulls, n: int, seed: int) -> torch.Tensor:
    n_tokens, (n_channels, _) = len(kept.blocks[0].gain), kept.blocks[0].up.shape
    return torch.randn(n_tokens, n, n_channels, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_a_shape_is_launched_once_then_captured_then_replayed(kept) -> None:
    for seed, n_graphs in enumerate((0, 1, 1, 1)):
        rows = some_rows(kept, 4, seed)
        expected = few_cotangents.pull_few(kept.blocks, rows.clone(), 0)
        torch.testing.assert_close(kept.pull(rows, 0), expected)
        assert len(kept._graphs) == n_graphs


def test_the_oldest_graph_goes_and_comes_back_when_needed(kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_cotangents, "MOST_GRAPHS", 2)
    for n in (2, 3, 4, 2):
        for seed in range(3):
            expected = few_cotangents.pull_few(kept.blocks, some_rows(kept, n, seed), 0)
            torch.testing.assert_close(kept.pull(some_rows(kept, n, seed), 0), expected)
    assert [key[1] for key in kept._graphs] == [4, 2]


def test_nothing_is_captured_inside_of_a_users_capture(kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    for seed in range(3):
        kept.pull(some_rows(kept, 4, seed), 0)
    assert not kept._graphs


def test_what_cannot_be_captured_is_launched(kept, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def fails(*_: object) -> None:
        tried.append(1)
        raise torch.OutOfMemoryError("no room for a graph")

    monkeypatch.setattr(few_cotangents, "_Captured", fails)
    for seed in range(4):
        expected = few_cotangents.pull_few(kept.blocks, some_rows(kept, 4, seed), 0)
        torch.testing.assert_close(kept.pull(some_rows(kept, 4, seed), 0), expected)
    assert len(tried) == 1


def test_products_in_tf32_have_a_graph_of_their_own(kept) -> None:
    for allowed in (False, True):
        with tf32(allowed):
            for seed in range(2):
                kept.pull(some_rows(kept, 4, seed), 0)
    assert len(kept._graphs) == 2


# On a GPU ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["bert", "llama"])
def tensor(request: pytest.FixtureRequest):
    return tl.Lens(zoo.build(request.param, "sdpa").float().cuda())(zoo.sample(request.param))


def pulled(T, out_token: int, n: int = 8) -> torch.Tensor:
    units = torch.eye(T.shape[1], device="cuda")[None, :n]
    piece = next(iter(T.operator.pull_outputs((out_token,), units)))
    rows = torch.zeros(T.n_tokens, n, T.n_channels, device="cuda")
    rows[slice(*piece.tokens)] = piece.rows
    return rows


def exact(T, out_token: int, n: int = 8) -> torch.Tensor:
    return T.rows(out_token)[:n].transpose(0, 1)


@gpu
def test_a_graph_serves_every_output_and_leaves_earlier_results_alone(tensor) -> None:
    found = {(i, again): pulled(tensor, i) for again in range(3) for i in range(tensor.shape[0])}
    assert tensor.operator.folded._kept_pulls._graphs, "some shape came again"
    for (i, _), rows in found.items():
        torch.testing.assert_close(rows, exact(tensor, i), rtol=1e-4, atol=1e-5)


@gpu
def test_threads_share_a_graph(tensor) -> None:
    outputs = list(range(tensor.shape[0])) * 8
    for _ in range(2):
        pulled(tensor, 0)
    with ThreadPoolExecutor(4) as pool:
        for i, rows in zip(outputs, pool.map(lambda i: pulled(tensor, i), outputs), strict=True):
            torch.testing.assert_close(rows, exact(tensor, i), rtol=1e-4, atol=1e-5)


@gpu
def test_few_graphs_are_kept(tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_cotangents, "MOST_GRAPHS", 2)
    for n in (8, 9, 10, 11):
        for _ in range(3):
            torch.testing.assert_close(pulled(tensor, 3, n), exact(tensor, 3, n), rtol=1e-4, atol=1e-5)
    assert len(tensor.operator.folded._kept_pulls._graphs) == 2


@gpu
def test_many_rows_are_launched(tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folded, "MOST_ROWS_KEPT", 8)
    for _ in range(3):
        torch.testing.assert_close(pulled(tensor, 3), exact(tensor, 3), rtol=1e-4, atol=1e-5)
    assert "_kept_pulls" not in tensor.operator.folded.__dict__
