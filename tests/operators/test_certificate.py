"""What a certificate says beside the laws: what passes on, what is held, half precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor, nn

import tensorlens as tl
from tensorlens.operators import operator as operators
from tensorlens.program.program import Program
from tensorlens.recording import calls


def tensor(name: str, **options: Any) -> tl.AttentionTensor:
    return tl.Lens(zoo.build(name, **options))(zoo.sample(name))


def test_it_is_measured_once_and_says_what_folded_blocks_give() -> None:
    T = tensor("gpt2")
    assert T.certificate() is T.certificate() and "folded" not in T.certificate().errors
    again = tensor("gpt2")
    again.rows(3)
    assert again.certificate().passed and again.certificate().errors["folded"] < 1e-12


def test_it_runs_the_model_at_most_eight_times() -> None:
    model: Any = zoo.build("gpt2")
    T, calls = tl.Lens(model)(zoo.sample("gpt2")), []
    model.transformer.h[1].register_forward_pre_hook(lambda *_: calls.append(1))
    T.certificate()
    assert 0 < len(calls) <= 8


class Lost(nn.Module):
    """Passes nothing of its input on."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return 0 * x + 1


def test_a_block_that_passes_nothing_on_is_no_plain_pass() -> None:
    model: Any = zoo.build("gpt2")
    model.transformer.h[1] = Lost(model.transformer.h[1])
    certificate = tl.Lens(model)(zoo.sample("gpt2")).certificate()
    assert not certificate.passed and certificate.carried < 1e-12
    assert any("block 1 passes nothing" in said for said in certificate.reservations)
    assert "passes nothing" in str(certificate)


class Skipped(nn.Module):
    """Two blocks, the first of which passes nothing on, with the embedding led around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.blocks = nn.ModuleList([Plain(), Plain(), Plain()])

    def forward(self, input_ids: Tensor) -> Tensor:
        start = x = self.embed(input_ids)
        for n, block in enumerate(self.blocks):
            x = block(x, n == 1) + (start if n == 1 else 0)
        return x


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor, is_silent: bool) -> Tensor:
        return torch.full_like(x, 0.5) if is_silent else x + self.down(self.up(x).relu())


def test_a_silent_block_is_noticed_where_the_input_is_led_around_it() -> None:
    certificate = tl.Lens(Skipped().double().eval())([3, 5, 7]).certificate()
    assert certificate.moves > 0.1 and certificate.silent == (1,) and len(certificate.passing) == 3
    assert certificate.failures == ("block 1 passes nothing on",)
    assert min(certificate.passing[0], certificate.passing[2]) > 0.1


class Shortcut(Skipped):
    """Nearly all of the last block's state comes by a shortcut around the block before it."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.blocks[0](self.embed(input_ids), False)
        return self.blocks[2](1e9 * x + self.blocks[1](x, False), False)


def test_a_block_is_measured_from_its_own_state_and_not_from_what_the_one_before_gave() -> None:
    certificate = tl.Lens(Shortcut().double().eval())([3, 5, 7]).certificate()
    assert certificate.passed and min(certificate.passing) > 0.1 and len(certificate.passing) == 3


class Parallel(Plain):
    """Hands one stream on as it is and works on another."""

    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return x, super().forward(y, False)


class Streams(nn.Module):
    """Two stages in a row, whose ends then go side by side through further blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(29, 16)
        self.first, self.second = (nn.ModuleList([Plain(), Plain()]) for _ in range(2))
        self.both, self.last = nn.ModuleList([Parallel(), Parallel()]), Plain()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.first:
            x = block(x, False)
        y = 2 * x[:, ::2]
        for block in self.second:
            y = block(y, False)
        for block in self.both:
            x, y = block(x, y)
        return self.last(y, False)


def test_a_block_that_gives_to_another_stream_than_the_next_state_is_not_silent() -> None:
    T = tl.Lens(Streams().double().eval())([3, 5, 7, 2])
    certificate = T.certificate()
    assert certificate.passed and min(certificate.passing) > 0.1 and len(certificate.passing) >= 6


def test_a_large_state_before_a_norm_is_not_silence() -> None:
    model: Any = zoo.build("gpt2")
    with torch.no_grad():
        model.transformer.wte.weight.mul_(1e9)
    certificate = tl.Lens(model)(zoo.sample("gpt2")).certificate()
    assert not certificate.silent and certificate.moves > 0 and min(certificate.passing) > 0.01


class InFloat32(Plain):
    """Casts its state, as norms of some models do."""

    def forward(self, x: Tensor, is_silent: bool) -> Tensor:
        return super().forward(x.float().double(), is_silent)


def test_the_tolerance_follows_from_the_casts_of_the_model() -> None:
    tolerances = []
    for n in range(4):
        model = Autocast(enabled=False)
        for i in range(n):
            model.blocks[i] = InFloat32()
        certificate = tl.Lens(model.double().eval(), blocks="blocks")([3, 5, 7]).certificate()
        tolerances.append(certificate.tolerance)
        assert certificate.passed
    assert tolerances == [1e-10] + [2e-6 * n**0.5 for n in (1, 2, 3)]


class Autocast(nn.Module):
    """Computes its feed-forwards in bfloat16, by its own code."""

    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(29, 16), nn.ModuleList([Plain() for _ in range(3)])
        self.enabled = enabled

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            for block in self.blocks:
                x = block(x, False)
        return x


def test_autocast_within_a_forward_is_part_of_the_model() -> None:
    torch.manual_seed(0)
    model = Autocast().eval()
    T = tl.Lens(model)([3, 5, 7])
    certificate = T.certificate()
    assert certificate.passed and certificate.tolerance == 5e-2
    assert any("bfloat16, whose rounding may hide" in said for said in certificate.reservations)
    assert torch.equal(T.output, model(torch.tensor([[3, 5, 7]]))[0].float())
    dense = T.dense()
    model.enabled = False
    plain = tl.Lens(model)([3, 5, 7])
    assert plain.certificate().tolerance == 1e-4 and not plain.certificate().reservations
    assert 1e-4 < float((dense - plain.dense()).norm() / plain.dense().norm()) < 0.1  # a relu may fall the other way


def test_what_modules_hold_is_reported() -> None:
    T = tensor("gpt2")
    certificate = T.certificate()
    mlp = certificate.held["transformer.h.1.mlp"]
    assert 0 < mlp < 5 and len(certificate.held) > 20 and "largest parts in B" in str(certificate)
    whole = certificate.held["transformer.ln_f"]
    assert whole == pytest.approx(float(T.bias.norm() / T.output.norm()))


def test_a_module_without_biases_holds_nothing() -> None:
    certificate = tensor("llama").certificate()
    held = certificate.held
    assert held["model.layers.1.mlp.down_proj"] == held["model.layers.2.self_attn.o_proj"] == 0
    assert "parts in B" not in str(certificate)


def test_how_much_is_carried_is_reported() -> None:
    T = tensor("gpt2")
    certificate = T.certificate()
    carried = (T.output - T.bias).norm() / T.output.norm()
    assert certificate.carried == pytest.approx(float(carried)) and len(certificate.passing) == 3
    assert min(certificate.passing) > 0.1 and not certificate.reservations


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize(("name", "attention"), [("gpt2", "sdpa"), ("llama", "sdpa"), ("bert", "eager")])
def test_half_precision_is_judged_in_float32(
    name: str, attention: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "SHARE_OF_RECORDING", 0.0 if is_long else 0.3)
    model = zoo.build(name, attention, dtype=torch.bfloat16)
    T = tl.Lens(model)(zoo.sample(name))
    assert T.operator.recording.is_streamed == is_long
    before = [(id(p), p.dtype, p._version) for p in model.parameters()]
    certificate = T.certificate()
    assert certificate.passed and not certificate.reservations, str(certificate)
    assert certificate.errors["linearity, float32"] < 1e-5 and certificate.seconds["float32"] > 0
    assert certificate.errors["adjoint, float32"] < 1e-5 < certificate.rounded["adjoint"]
    assert [(id(p), p.dtype, p._version) for p in model.parameters()] == before


def test_rounding_alone_does_not_decide() -> None:
    certificate = tensor("gpt2", dtype=torch.bfloat16).certificate()
    rough = {law: 0.2 for law in certificate.rounded}
    assert rough.keys() == {"linearity", "adjoint"}
    assert replace(certificate, errors=certificate.errors | rough, rounded=rough).passed
    assert not replace(certificate, errors=certificate.errors | rough, rounded={}).passed
    assert not replace(certificate, errors=certificate.errors | {"linearity, float32": 0.01}).passed


def test_a_fault_of_one_per_cent_does_not_hide_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pull = Program.pull
    monkeypatch.setattr(Program, "pull", lambda self, *us: tuple(1.01 * u for u in pull(self, *us)))
    certificate = tensor("gpt2", dtype=torch.bfloat16).certificate()
    assert certificate.errors["adjoint, float32"] > 2e-4 and "adjoint, float32" in certificate.failures


def test_one_output_costs_one_pull_and_nothing_is_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    T, pulls = tensor("gpt2"), []
    pull = Program.pull_each

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("not for a single output")

    monkeypatch.setattr(operators, "FoldedBlocks", fails)
    monkeypatch.setattr(Program, "run_each", fails)
    monkeypatch.setattr(Program, "pull_each", lambda self, several: pulls.append(len(several)) or pull(self, several))
    with monkeypatch.context() as patch:
        patch.setattr(operators.FrozenOperator, "bias", T.output)  # for the share of the bias
        T.map(out_token=-1)
    assert pulls == [1]
