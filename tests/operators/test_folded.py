"""Blocks folded into matrices give the rows, norms and sketches that pulls through the program give."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.axes import Range
from tensorlens.memory import Portions, in_parts
from tensorlens.models.runner import compute_type
from tensorlens.operators import operator as operators
from tensorlens.operators.operator import FrozenOperator
from tensorlens.operators.spectrum import (
    frobenius_norms,
    largest_singular_values,
    sketched_norms,
    spectral_norm,
    spectral_norms,
    spectrum,
)
from tensorlens.program import folding
from tensorlens.program.paths import wiring
from tensorlens.recording.recording import Recording, Span


@cache
def recording_of(name: str, attention: str) -> Recording:
    return tl.Lens(zoo.build(name, attention))(zoo.sample(name)).operator.recording


def operator(name: str, **options: Any) -> FrozenOperator:
    return FrozenOperator(recording_of(name, zoo.ZOO[name].attentions[-1]), **options)


def by_pulls(T: FrozenOperator, out_token: int) -> Tensor:
    """T[i] by the program alone: nothing is shared with the folded way but the recording."""
    units = torch.zeros(T.shape[1], *T.output.shape, dtype=T.dtype)
    units[range(T.shape[1]), out_token, range(T.shape[1])] = 1
    return T.pull(units)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-6) -> bool:
    return bool((found - expected).norm() <= tolerance * expected.norm())


@pytest.fixture(params=["as it is", "P formed, in steps", "P not formed"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways through the blocks, and work in small portions."""
    if request.param != "as it is":
        monkeypatch.setattr(folding, "folding_pays", lambda *_: request.param.startswith("P formed"))
        monkeypatch.setitem(folding.MIXED_TOGETHER, "cpu", 5)
        monkeypatch.setitem(folding.BYTES_OF_SCALED, "cpu", 3 * 16 * 24 * 8)
    return request.param


@pytest.mark.parametrize(("name", "attention"), zoo.CASES)
def test_folded_rows_are_the_rows(name: str, attention: str, path: str) -> None:
    T = FrozenOperator(recording_of(name, attention))
    assert T.folded is not None
    for i in (0, T.shape[0] - 1):
        assert close(T.rows(i), by_pulls(T, i))


@pytest.mark.parametrize("name", ["bert", "gpt2", "gemma3", "mistral", "neox-parallel", "olmo2", "dinov2"])
def test_folded_rows_of_parts_and_with_heads_left_out(name: str, path: str) -> None:
    T = operator(name, heads={1: torch.tensor([1.0, 0.0, 0.5, 1.0])}, span=Span(0, 2))
    assert close(T.rows(2), by_pulls(T, 2))
    assert close(operator(name, span=Span(1, 3)).rows(2), by_pulls(operator(name, span=Span(1, 3)), 2))


@pytest.mark.parametrize("gate", ["freeze_gate", "freeze_up", "half"])
@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_folded_rows_under_every_gate_rule(name: str, gate: Any) -> None:
    T = tl.Lens(zoo.build(name), rules=tl.Rules(gate=gate))(zoo.sample(name)).operator
    assert close(T.rows(3), by_pulls(T, 3))


def test_without_the_final_norm() -> None:
    T = tl.Lens(zoo.build("gpt2"), rules=tl.Rules(include_final_norm=False))(zoo.sample("gpt2")).operator
    assert T.folded is not None
    assert close(T.rows(3), by_pulls(T, 3))


@pytest.mark.parametrize("name", ["bert", "mistral", "modernbert", "phi"])
@pytest.mark.parametrize("most", [5, 40, 4096])
def test_norms_do_not_depend_on_the_pieces(name: str, most: int, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.MOST_COTANGENTS, "cpu", most)
    T = operator(name)
    expected = torch.stack([by_pulls(T, i).norm(dim=(0, 2)) for i in range(T.shape[0])])
    assert close(frobenius_norms(T, range(T.shape[0])), expected)
    assert close(frobenius_norms(T, (4, 1, 2)), expected[[4, 1, 2]])


@pytest.mark.parametrize("name", ["llama", "modernbert"])
def test_a_batch_of_cotangents_is_pulled_as_one_by_one(name: str) -> None:
    T = operator(name)
    u = torch.randn(operators.ENOUGH_TO_FOLD, *T.shape[:2], dtype=T.dtype)
    assert close(T.adjoint(u), T.pull(u))


def test_only_tokens_in_sight_are_carried() -> None:
    T = operator("mistral")  # a window of 3 tokens, 3 blocks
    assert T.folded is not None
    assert T.folded.pull_outputs((6,), torch.eye(16, dtype=T.dtype)[None])[1] == Range(0, 7)
    first = FrozenOperator(T.recording, Span(1, 3)).folded
    assert first is not None
    assert first.pull_outputs((6,), torch.eye(16, dtype=T.dtype)[None])[1] == Range(2, 7)
    assert first.pull_outputs((1,), torch.eye(16, dtype=T.dtype)[None])[1] == Range(0, 2)


def test_what_cannot_be_folded_goes_by_pulls(monkeypatch: pytest.MonkeyPatch) -> None:
    T = operator("gpt2")
    expected = frobenius_norms(T, (1, 5))
    unfolded = operator("gpt2")
    monkeypatch.setitem(unfolded.__dict__, "folded", None)
    assert close(frobenius_norms(unfolded, (1, 5)), expected)
    assert close(unfolded.rows(4), T.rows(4))


@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-5), ("tf32", 1e-5), ("bfloat16", 3e-2)])
def test_precision_is_what_was_asked_for(precision: Any, tolerance: float) -> None:
    T, low = operator("bert"), operator("bert", precision=precision)
    assert close(low.rows(2), T.rows(2), tolerance)
    assert close(frobenius_norms(low, (0, 3)), frobenius_norms(T, (0, 3)), tolerance)
    assert not close(low.rows(2), T.rows(2), 1e-9)


# What people do to a model: hooks, layers replaced. Folding follows, or gives way.


def scale_output(block: Any) -> None:
    block.register_forward_hook(lambda _, __, out: (1.5 * out[0], *out[1:]) if isinstance(out, tuple) else 1.5 * out)


def project_input(block: Any) -> None:
    direction = torch.nn.functional.normalize(torch.ones(16, dtype=torch.float64), dim=0)
    block.register_forward_pre_hook(lambda _, args: (args[0] - (args[0] @ direction)[..., None] * direction, *args[1:]))


def hook_mlp(block: Any) -> None:
    block.mlp.register_forward_hook(lambda _, __, out: 0.5 * out)


def replace_norm(block: Any) -> None:
    block.ln_2 = nn.LayerNorm(16, elementwise_affine=False).double()


def replace_activation(block: Any) -> None:
    block.mlp.act = nn.ReLU()


class Twice(nn.Module):
    """A block's feed-forward followed by another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Sequential(nn.Linear(16, 16), nn.GELU()).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.inner(x))


def add_layer(block: Any) -> None:
    block.mlp = Twice(block.mlp)


HABITS: dict[str, tuple[Callable[[Any], None], bool]] = {
    "hook": (scale_output, True),
    "pre-hook": (project_input, False),
    "hook inside": (hook_mlp, True),
    "norm": (replace_norm, True),
    "activation": (replace_activation, True),
    "another layer": (add_layer, False),
}
"""What is done, and whether the block still folds."""


@pytest.mark.parametrize("habit", HABITS)
def test_folding_follows_what_was_done_to_a_model_or_gives_way(habit: str) -> None:
    model: Any = zoo.build("gpt2")
    change, folds = HABITS[habit]
    change(model.transformer.h[1])
    T = tl.Lens(model)(zoo.sample("gpt2")).operator
    assert (T.folded is not None) == folds
    assert close(T.rows(3), by_pulls(T, 3), 1e-9)
    u = torch.randn(9, *T.shape[:2], dtype=T.dtype)
    assert close(T.adjoint(u), T.pull(u), 1e-9)


def test_a_block_of_another_make_is_refused_with_what_was_missing() -> None:
    model: Any = zoo.build("gpt2")
    add_layer(model.transformer.h[1])
    recording = tl.Lens(model)(zoo.sample("gpt2")).operator.recording
    assert wiring(recording.part(Span(0, 1)), 0, "GPT-2").branches
    with pytest.raises(
        tl.AnatomyError, match="Block 1 of `GPT2LMHeadModel` cannot be folded: .*Rows and norms are computed by"
    ):
        folding.FoldedBlocks(
            [recording.part(Span(n, n + 1)) for n in range(3)], 0, recording.name, recording.states[0].dtype
        )


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma3"])
def test_an_input_as_long_as_a_weight_is_wide_confuses_nothing(name: str) -> None:
    widths = {size for parameter in zoo.build(name).parameters() for size in parameter.shape if size <= 40}
    for n_tokens in {1, 2, *widths}:
        T = tl.Lens(zoo.build(name))([4 + i % 20 for i in range(n_tokens)]).operator
        assert T.folded is not None and close(T.rows(0), by_pulls(T, 0))


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(tl.InputError, match="`precision` must be one of float32, tf32, bfloat16; got 'int8'"):
        compute_type("int8", torch.float32)


# Memory --------------------------------------------------------------------------------------------------------------


def test_pieces_cover_every_cotangent_once_even_when_memory_runs_out() -> None:
    pieces, done = Portions(5, 6, 17), torch.zeros(5, 6)
    tries = 0

    def work(size: int) -> int:
        if size > 4:
            raise torch.OutOfMemoryError("out of memory")
        return size

    for outputs, cotangents in pieces:
        tries += 1
        if pieces.attempt(lambda: work(outputs.size * cotangents.size)) is not None:  # noqa: B023
            done[slice(*outputs), slice(*cotangents)] += 1
    assert (done == 1).all() and tries > 10


def test_parts_cover_every_item_once_even_when_memory_runs_out() -> None:
    def work(part: Tensor) -> Tensor:
        if len(part) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return part

    parts = in_parts(torch.arange(20), 16, work)
    assert torch.equal(torch.cat(parts), torch.arange(20)) and max(map(len, parts)) == 2
    with pytest.raises(tl.SizeError, match="smallest piece of work, one state"):
        in_parts(torch.arange(4), 2, lambda part: work(torch.arange(4)))
    with pytest.raises(RuntimeError, match="something else"):
        in_parts(torch.arange(4), 2, lambda part: (_ for _ in ()).throw(RuntimeError("something else")))


def test_states_pushed_are_halved_when_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    T = operator("llama")
    x = torch.randn(9, *T.input.shape, dtype=T.dtype)
    expected, several, sizes = T.push(x), FrozenOperator._several, []

    def scarce(self: FrozenOperator, each: Any, items: Tensor) -> Tensor:
        if len(items) > 3:
            raise torch.OutOfMemoryError("out of memory")
        sizes.append(len(items))
        return several(self, each, items)

    monkeypatch.setattr(FrozenOperator, "_several", scarce)
    torch.testing.assert_close(T.push(x), expected)
    assert max(sizes) <= 3 and sum(sizes) == 9


def test_out_of_memory_with_one_cotangent_says_so() -> None:
    def work() -> None:
        raise torch.OutOfMemoryError("out of memory")

    pieces = Portions(1, 1, 1)
    with pytest.raises(tl.SizeError, match="smallest piece"):
        for _ in pieces:
            pieces.attempt(work)


def test_running_out_of_memory_halves_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    T = operator("bert")
    expected = frobenius_norms(T, range(7))
    assert T.folded is not None
    pull = T.folded.pull_outputs

    def scarce(out_tokens: Any, starts: Tensor, *args: Any, **options: Any) -> Any:
        if len(out_tokens) * starts.shape[1] > 10:
            raise torch.OutOfMemoryError("out of memory")
        return pull(out_tokens, starts, *args, **options)

    monkeypatch.setattr(T.folded, "pull_outputs", scarce)
    assert close(frobenius_norms(T, range(7)), expected)


# Sketches and spectra ------------------------------------------------------------------------------------------------


def test_a_sketch_is_within_its_standard_error() -> None:
    T = operator("bert")
    exact, (found, error) = frobenius_norms(T, range(7)), sketched_norms(T, range(7), n_probes=400)
    assert ((found - exact).abs() < 5 * error).all()
    assert (error < 0.1 * exact).all()
    assert torch.equal(found, sketched_norms(T, range(7), n_probes=400).norms)
    assert not torch.equal(found, sketched_norms(T, range(7), n_probes=400, seed=1).norms)


def test_the_standard_error_is_as_large_as_the_errors_are() -> None:
    T = operator("bert")
    exact = frobenius_norms(T, (3,))[0]
    sketches = [sketched_norms(T, (3,), 64, seed) for seed in range(150)]
    errors = torch.stack([sketch.norms[0] - exact for sketch in sketches])
    said = torch.stack([sketch.standard_error[0] for sketch in sketches])
    ratio = errors.square().mean().sqrt() / said.square().mean().sqrt()
    assert 0.85 < ratio < 1.15


def test_one_probe_has_no_standard_error() -> None:
    found, error = sketched_norms(operator("bert"), (2,), n_probes=1)
    assert bool((found > 0).all()) and bool(error.isnan().all())


def test_a_sketch_of_a_causal_model_is_zero_above_the_diagonal() -> None:
    found, error = sketched_norms(operator("gpt2"), range(7), n_probes=4)
    assert (found.triu(1) == 0).all() and (error.triu(1) == 0).all()


def test_spectral_norms_are_the_largest_singular_values() -> None:
    T = operator("bert")
    expected = torch.linalg.svdvals(T.rows(1).transpose(0, 1))[:, 0]
    assert close(spectral_norms(T, (1,))[0], expected)
    wide = torch.randn(3, 50, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert close(largest_singular_values(wide), torch.linalg.svdvals(wide)[:, 0], 1e-4)


def test_spectrum_of_the_whole_operator_and_of_a_block() -> None:
    T = operator("gpt2")
    u, values, v = torch.linalg.svd(T.dense().reshape(7 * 16, 7 * 16))
    found = spectrum(T, k=4, tolerance=1e-9)
    assert close(found.values, values[:4], 1e-4)
    assert ((found.out_vectors[0].flatten() @ u[:, 0]).abs() - 1).abs() < 1e-3
    assert ((found.in_vectors[0].flatten() @ v[0]).abs() - 1).abs() < 1e-3
    assert abs(spectral_norm(T, tolerance=1e-9) - float(values[0])) < 1e-4 * float(values[0])
    block = spectrum(T, 5, 2, k=3)
    assert close(block.values, torch.linalg.svdvals(T.rows(5)[:, 2])[:3])
    assert 0 < float(block.share.sum()) <= 1 + 1e-9 and block.entropy > 0


def test_a_spectrum_needs_both_tokens_or_none() -> None:
    with pytest.raises(tl.InputError, match="both `out_token` and `in_token`"):
        spectrum(operator("gpt2"), 1)


def test_a_gate_that_is_split_folds_both_branches() -> None:
    """Under `half` the gate and the up branch are both live, so the feed-forward is twice as wide."""
    half = tl.Lens(zoo.build("llama"), rules=tl.Rules(gate="half"))(zoo.sample("llama"))
    d, inner = 16, 24
    assert half.operator.folded is not None and half.operator.folded.n_inner == 2 * inner
    block = half.operator.folded.block(0)
    assert block.up.shape == (d, 2 * inner)
