"""Memory that several tensors show, numbers of other types, and values that leave: exact, or refused by a sentence."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from strangers.models import IDS, Attention, Block, D, FeedForward, H, Plain, randomised
from strangers.oracle import gap
from strangers.test_functions import IDS as SHORT
from strangers.test_functions import Inner, W, derivative, model_of
from torch import Tensor, nn
from torch.nn import functional as F

import tensorlens as tl

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")


def windows_written(z: Tensor) -> Tensor:
    y = z.clone()
    windows = y.unfold(-1, 4, 4)
    windows[..., 0].zero_()
    windows[..., 1] += windows[..., 2]
    return y


def turned_under_a_view(z: Tensor) -> Tensor:
    y = z.clone()
    other = y.squeeze(0)
    other.t_()
    return other.mT[None] + 2 * y


def emptied_complex(z: Tensor) -> Tensor:
    y = z.clone()
    y.narrow(0, 0, 1).zero_()
    return z + torch.view_as_complex(y.unflatten(-1, (-1, 2))).real.sum(-1, keepdim=True)


SPARSE = torch.diag(W).to_sparse()

LINEAR: dict[str, Inner] = {
    "windows written to": lambda z, g: windows_written(z),
    "axes turned in place under another view": lambda z, g: turned_under_a_view(z),
    "a sparse constant": lambda z, g: (SPARSE @ z[0].mT).mT[None],
    "a sparse constant by rows": lambda z, g: torch.sparse.mm(SPARSE.to_sparse_csr(), z[0].mT).mT[None],
    "complex view of what was emptied": lambda z, g: emptied_complex(z),
    "times a conjugate": lambda z, g: torch.view_as_real(pairs(z) * TURNED.conj()).flatten(-2),
    "frequencies of a conjugate": lambda z, g: torch.view_as_real(torch.fft.ihfft(z).resolve_conj()).flatten(2)[
        ..., :16
    ],
    "backwards by name": lambda z, g: torch.flip(z, dims=(1, 2)),
    "put by names": lambda z, g: torch.zeros_like(z).index_put(indices=(TOP,), values=z[:, :1].expand_as(z)),
    "steps from a constant": lambda z, g: torch.diff(z, dim=1, prepend=W.expand(1, 1, -1)),
    "taken by a wider mask": lambda z, g: z[..., :1].masked_select(W > 0).view(1, 4, 8).tile(2),
}


def pairs(z: Tensor) -> Tensor:
    return torch.view_as_complex(z.unflatten(-1, (-1, 2)))


TOP = torch.tensor([0])
TURNED = torch.polar(W[:8].exp(), W[8:])


@pytest.mark.parametrize("member", ["paper", "jacobian"])
@pytest.mark.parametrize("name", LINEAR)
def test_it_is_linear_in_every_member(name: str, member: str, tmp_path: Path) -> None:
    model = model_of(LINEAR[name])
    T = tl.Lens(model, rules=getattr(tl.Rules, member)())(SHORT)
    assert gap(T.dense(), derivative(model, T.input)) < 1e-12
    assert T.certificate().passed
    again = tl.AttentionTensor.load(T.save(tmp_path / "T.safetensors"))
    assert torch.equal(again @ T.input, T @ T.input)


@pytest.mark.parametrize("member", ["paper", "attn_lrp"])
def test_a_changed_sign_is_held(member: str) -> None:
    model = model_of(lambda z, g: torch.copysign(z, g))
    T = tl.Lens(model, rules=getattr(tl.Rules, member)())(SHORT)
    assert gap(T @ (2 * T.output - T.input), 2 * (T @ T.output) - T @ T.input) < 1e-12
    assert gap(T.dense(), derivative(model, T.input)) < 1e-12


def overlapping(z: Tensor) -> Tensor:
    windows = z.clone().unfold(-1, 2, 1)
    windows[windows > 0] = 0.0
    return windows.mean(-1).repeat(1, 1, 2)[..., : z.shape[-1]]


library = torch.library.Library("strangers", "DEF")
library.define("opaque(Tensor x) -> Tensor")
library.impl("opaque", lambda x: 2 * x.flip(-1), "CPU")


@pytest.mark.parametrize("member", ["paper", "jacobian"])
@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (lambda z, g: overlapping(z), "several numbers share memory"),
        (lambda z, g: torch.mul(z, 2.0, out=g.clone()[..., :3]), "`out=` of another shape"),
        (lambda z, g: torch.ops.strangers.opaque(z), "`opaque`"),
        (lambda z, g: z.clone().index_fill_(-1, torch.tensor([0, 5]), 0.5), "`index_fill_`"),
        (lambda z, g: copy.copy(z.detach()), "`torch.save`, `copy.copy` or another process"),
        (lambda z, g: z[0].to_sparse().to_dense()[None], "`_to_sparse`"),
        (lambda z, g: pickle.loads(pickle.dumps(z.detach())), "`torch.save`, `copy.copy` or another process"),
        (lambda z, g: torch.save(z.detach(), io.BytesIO()) or z, "`torch.save`, `copy.copy` or another process"),
    ],
)
def test_it_is_refused_by_a_sentence(inner: Inner, reason: str, member: str) -> None:
    with pytest.raises(tl.NotLinearError, match=reason):
        tl.Lens(model_of(inner), rules=getattr(tl.Rules, member)())(SHORT)


class ByLogSum(Attention):
    """Softmax spelled out, where masked scores are infinite."""

    def weights(self, scores: Tensor) -> Tensor:
        return (scores - scores.logsumexp(-1, keepdim=True)).exp()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        later = torch.ones(x.shape[-2], x.shape[-2], dtype=torch.bool).triu(1)
        return self.proj((self.weights(self.scores(q, k).masked_fill(later, -torch.inf)) @ v).mT.flatten(1, 2).mT)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / 2


class ByDistance(ByLogSum):
    """A kernel of which torch has no forward derivative."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return -torch.cdist(q, k)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


def of_blocks(build: Callable[[], Any]) -> Any:
    return randomised(Plain(build))


@pytest.mark.parametrize("member", ["paper", "jacobian"])
def test_what_is_masked_by_an_infinity_does_not_move(member: str) -> None:
    T = tl.Lens(of_blocks(lambda: Block(ByLogSum())), rules=getattr(tl.Rules, member)())(list(IDS))
    assert gap(T @ T.input + T.bias, T.output) < 1e-12 and T.certificate().passed


def test_a_member_that_holds_a_kernel_is_certified_though_its_derivative_cannot_be_pushed() -> None:
    found = tl.Lens(of_blocks(lambda: Block(ByDistance())))(list(IDS)).certificate()
    assert found.passed and any("finite differences cannot check" in said for said in found.reservations)


def in_bfloat16(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.gelu(x.float() @ torch.eye(x.shape[-1])).to(x.dtype)


def test_rows_of_weights_of_several_types_are_those_of_the_transpose() -> None:
    T = tl.Lens(of_blocks(lambda: Block(mlp=FeedForward(in_bfloat16))))(list(IDS))
    one = torch.zeros_like(T.output)
    one[5, 0] = 1
    assert gap(T.rows(5)[0], T.T @ one) < 1e-2


class ByIntegers(FeedForward):
    """Both factors rounded to whole numbers and multiplied as such."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.abs().amax(-1, keepdim=True) / 127
        scale = self.up.weight.abs().amax() / 127
        product = (x / size).round().to(torch.int8).to(torch.int32) @ (self.up.weight / scale).round().int().mT
        return self.down(F.gelu(product.to(x.dtype) * size * scale))


def test_a_product_of_whole_numbers_is_carried() -> None:
    T = tl.Lens(of_blocks(lambda: Block(mlp=ByIntegers())))(list(IDS))
    assert T.certificate().passed and gap(T @ T.input + T.bias, T.output) < 1e-12
    assert T.certificate().held["blocks.0.mlp.down"] < 0.9


class Masked(Attention):
    """What is done to the matrix after the softmax."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (H, -1)).transpose(-3, -2) for t in self.qkv(x).chunk(3, -1))
        return self.proj((self.change((q @ k.mT).softmax(-1)) @ v).transpose(-3, -2).flatten(-2))


@pytest.mark.parametrize("change", [torch.nan_to_num, torch.tril, lambda a: torch.where(a > 0.01, a, 0.0)])
def test_heads_of_a_matrix_that_is_cut_after_its_softmax(change: Callable[[Tensor], Tensor]) -> None:
    block = tl.Lens(of_blocks(lambda: Block(Masked(change))))(list(IDS)).blocks(0, 1)
    parts = sum(block.heads({0: [head]}) @ block.input for head in range(H))
    none = block.without_heads({0: range(H)}) @ block.input
    assert gap(parts - (H - 1) * none, block @ block.input) < 1e-12


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x)).clamp_(max=0.5)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_scripted_part_of_a_model() -> None:
    part: Any = torch.jit.script(Scripted().double())
    model = randomised(Plain(lambda: Block(mlp=part)))
    T = tl.Lens(model)(IDS)
    assert gap(T @ T.input + T.bias, model(torch.tensor([IDS]))[0].detach()) < 1e-12 and T.certificate().passed


class PartByPart(nn.Module):
    """One part of the channels, mixed over tokens, is added to another: all layers read four channels."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        a, b, rest = x.split([4, 4, D - 8], -1)
        return torch.cat([a + self.down(self.up(b).cumsum(1).relu()), b, rest], -1)


def test_as_many_tokens_as_a_part_has_channels() -> None:
    model = randomised(Plain(PartByPart))
    assert [tl.Lens(model)(list(range(n))).shape for n in (5, 4)] == [(5, D) * 2, (4, D) * 2]
