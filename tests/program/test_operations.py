"""Every operation of a program: affine where it says so, and its transpose is the transpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.program.program import Constants, Program
from tensorlens.program.steps import OPERATIONS, Held, Slot, Spec, Step, fit, mapped
from tensorlens.program.verify import verify


class Live(NamedTuple):
    """Stands for a live argument of some shape."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float64


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape) + len(shape)))


def i(*values: Any) -> Tensor:
    return torch.tensor(values)


C = torch.complex128
ATTENTION = (r(1, 2, 5, 4), r(1, 2, 5, 4) + 1, r(1, 2, 5, 4) - 1)
GROUPED = (r(1, 4, 5, 4), r(1, 2, 5, 4) + 1, r(1, 2, 5, 4) - 1)

PAIR = (r(3), r(3) + 1)

SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    "reshape": [(Live((2, 6)), (3, 4))],
    "permute": [(Live((2, 3, 4)), (2, 0, 1))],
    "expand": [(Live((1, 3)), (2, 4, 3))],
    "cast": [(Live((3,)), torch.float64)],
    "index": [
        (Live((4, 3)), (slice(1, 3), 0)),
        (Live((4, 3)), (i(0, 0, 2),)),
        (Live((4, 3)), (slice(None), i(1, 1))),
        (Live((4, 3, 2)), (i(0, 1), None, i(1, 1))),
        (Live((4, 3)), (..., None, slice(0, 3, 2))),
    ],
    "narrow": [(Live((4, 3)), 0, 1, 2)],
    "select": [(Live((4, 3)), 1, -1)],
    "index_select": [(Live((4, 3)), 0, i(3, 0, 0))],
    "gather": [(Live((4, 3)), 1, i([0, 0], [1, 2], [2, 2], [0, 1]))],
    "cat": [([Live((2, 3)), r(1, 3), Live((4, 3))], 0)],
    "stack": [([Live((2, 3)), r(2, 3), Live((2, 3))], 1)],
    "flip": [(Live((4, 3)), (0, 1))],
    "repeat_interleave": [(Live((4, 3)), 2, -1)],
    "triangle": [(Live((4, 4)), 1, True), (Live((4, 4)), 0, False)],
    "as_strided": [(Live((12,)), (3, 3), (2, 3), 1)],
    "as_strided_scatter": [
        (Live((12,)), Live((3, 2)), (3, 2), (4, 1), 1),
        (r(12), Live((3, 2)), (3, 2), (4, 1), 1),
        (Live((12,)), r(3, 2), (3, 2), (4, 1), 1),
    ],
    "sum": [(Live((2, 3, 4)), (0, -1), False), (Live((2, 3)), (1,), True)],
    "mean": [(Live((2, 3, 4)), (0, -1), False), (Live((2, 3)), (1,), True)],
    "cumsum": [(Live((2, 3)), 1)],
    "add": [(Live((2, 3)), r(3)), (r(2, 3), Live((3,))), (Live((2, 3)), Live((1, 3))), (Live((3,)), 2.0)],
    "sub": [(Live((2, 3)), r(3)), (r(2, 3), Live((3,))), (Live((2, 3)), Live((1, 3))), (1, Live((3,)))],
    "mul": [(Live((2, 3)), r(3)), (r(2, 3), Live((3,))), (Live((3,)), 2.0)],
    "gain": [(Live((2, 3)), r(2, 3).clamp_min(0))],
    "div": [(Live((2, 3)), r(3) + 3), (Live((2, 3)), 4)],
    "blend": [(Live((2, 3)), Live((3,)), r(3), r(2, 3))],
    "where": [(r(2, 3) > 0, Live((2, 3)), Live((3,))), (r(2, 3) > 0, Live((2, 3)), 0.5), (r(3) > 0, r(3), Live((3,)))],
    "matmul": [(Live((2, 3, 4)), r(4, 5)), (r(2, 3, 4), Live((4, 5))), (Live((4,)), r(4, 5)), (r(3, 4), Live((4,)))],
    "linear": [
        *((Live((2, 3, 4)), r(5, 4), r(5)), (Live((2, 4)), r(5, 4)), (Live((2, 4)), r(5, 4), Live((5,)))),
        (Live((2, 4)), (torch.arange(20, dtype=torch.int8).reshape(5, 4), r(10), r(10), None, (5, 4)), r(5)),
        (Live((2, 4)), (torch.arange(10, dtype=torch.uint8), r(5), None, r(16), (5, 4))),
    ],
    "einsum": [("bij,jk,kb->bi", Live((2, 3, 4)), r(4, 5), r(5, 2)), ("ij,kj->ik", r(2, 3), Live((4, 3)))],
    "grouped_mm": [],  # in float64 torch has none; see test_grouped_products
    "convolution": [
        (Live((2, 4, 7)), r(6, 2, 3), r(6), (2,), (1,), (1,), False, (0,), 2),
        (Live((1, 4, 5)), r(4, 3, 3), None, (2,), (1,), (1,), True, (1,), 1),
    ],
    "solve": [
        (r(3, 3) + 3 * torch.eye(3), Live((3, 2)), None, True, False),
        (r(3, 3).tril() + 3 * torch.eye(3), Live((3, 2)), False, True, False),
    ],
    "constant": [],  # takes nothing live
    "put": [
        (Live((4, 3)), (slice(1, 3),), Live((2, 3))),
        (Live((4, 3)), (i(0, 2),), Live((2, 3)), True),
        (r(4, 3), (0,), Live((3,))),
        (Live((4, 3)), (r(4, 3) > 0,), 0.5),
    ],
    "index_add": [(Live((4, 3)), 0, i(1, 1), Live((2, 3)), 2.0), (r(4, 3), 0, i(1, 3), Live((2, 3)))],
    "scatter": [(Live((4, 3)), 1, i([0], [2], [1], [1]), Live((4, 1))), (Live((2, 3)), 1, i([0], [2]), 1.5)],
    "scatter_add": [(Live((4, 3)), 1, i([0], [2], [1], [1]), Live((4, 1))), (r(2, 3), 1, i([0], [2]), Live((3, 2)))],
    "norm": [
        (Live((2, 3, 4)), r(2, 3, 1).abs(), r(4), r(4), (-1,), True),
        (Live((2, 3, 4)), r(2, 3, 1).abs(), None, None, (-1,), False, r(2, 3, 4)),
        (Live((2, 3, 4)), r(2, 3, 1).abs(), r(4), None, (-1,), True, r(2, 3, 4) - r(2, 3, 4).mean(-1, keepdim=True)),
    ],
    "softmax": [(Live((2, 3)), r(2, 3).softmax(-1), -1, r(2, 3)), (Live((2, 3)), r(2, 3).softmax(0), 0)],
    "attention": [
        (*ATTENTION[:2], Live((1, 2, 5, 4)), None, True, None, False),
        (*GROUPED[:2], Live((1, 2, 5, 4)), r(5, 5), False, 0.3, True),
    ],
    "live_attention": [
        (*(Live((1, 2, 5, 4)) for _ in range(3)), r(1, 2, 5, 4), ATTENTION, None, True, None, False, (1.0, 1.0, 1.0)),
        (Live((1, 4, 5, 4)), None, Live((1, 2, 5, 4)), None, GROUPED, r(5, 5), False, 0.3, True, (0.5, 0.5, 0.5)),
        (*(Live((1, 2, 5, 4)) for _ in range(3)), None, ATTENTION, r(5, 5) > -1, False, None, False, (0.5, 0.5, 0.5)),
    ],
    "diagonal": [(Live((3, 3)),)],
    "diag": [(Live((3,)),)],
    "diag_embed": [(Live((2, 3)),)],
    "roll": [(Live((4, 3)), 1, 0)],
    "trace": [(Live((3, 3)),)],
    "view_as_real": [(Live((3,), C),)],
    "view_as_complex": [(Live((3, 2)),)],
    "real": [(Live((3,), C),)],
    "imag": [(Live((3,), C),)],
    "conj_physical": [(Live((3,)),)],
    "complex": [(Live((3,)), r(3)), (Live((3,)), Live((3,)))],
    "take": [(Live((3, 2)), i(0, 5, 5))],
    "repeat": [(Live((2, 3)), 2, 1, 2)],
    "index_copy": [(Live((4, 3)), 0, i(1, 3), Live((2, 3)))],
    "avg_pool1d": [(Live((1, 2, 6)), 2)],
    "avg_pool2d": [(Live((1, 2, 4, 4)), 2)],
    "avg_pool3d": [(Live((1, 1, 4, 4, 4)), 2)],
    "adaptive_avg_pool1d": [(Live((1, 2, 6)), 4)],
    "adaptive_avg_pool2d": [(Live((1, 2, 4, 4)), 3)],
    "adaptive_avg_pool3d": [(Live((1, 1, 4, 4, 4)), 3)],
    "interpolate": [(Live((1, 2, 4, 4)), (6, 6))],
    "fold": [(Live((1, 8, 4)), (4, 4), 2, 1, 0, 2)],
    "window": [(Live((1, 2, 4, 4)), 2)],
    "pixel_shuffle": [(Live((1, 4, 2, 2)), 2)],
    "pixel_unshuffle": [(Live((1, 1, 4, 4)), 2)],
    "channel_shuffle": [(Live((1, 4, 2, 2)), 2)],
    "pad": [(Live((2, 3)), (1, 2)), (Live((2, 3)), (1, 2), "constant", 0.5), (Live((1, 2, 4)), (1, 1), "reflect")],
    "derivative": [
        ((Live((3,)), Live((3,))), r(3), "aten.hypot.default", (PAIR, ()), (0, 1), PAIR, None, False),
        ((Live((3, 3)),), r(3, 3), "aten.linalg_qr.default", ((r(3, 3),), ()), (0,), (r(3, 3),), 1, False),
        ((Live((3,)),), None, "aten.linalg_cross.default", (PAIR, (("dim", -1),)), (1,), PAIR[1:], None, True),
    ],
    **{
        name: [(Live((4, 6), C),)]
        for name in ("fft", "ifft", "fftn", "ifftn", "fft2", "ifft2", "fftshift", "ifftshift")
    },
    **{name: [(Live((4, 6)),)] for name in ("rfft", "rfftn", "rfft2", "ihfft")},
    **{name: [(Live((4, 4), C),)] for name in ("irfft", "irfftn", "irfft2", "hfft")},
}

CASES = [(name, n) for name, samples in SAMPLES.items() for n in range(len(samples))]


class Case:
    """An operation with some arguments: as a function of the live ones."""

    def __init__(self, name: str, n: int) -> None:
        self.operation, self.args = OPERATIONS[name], SAMPLES[name][n]
        self.live: list[Live] = []
        mapped_live(self.args, lambda one: self.live.append(one) or one)

    def at(self, values: list[Tensor]) -> Tensor:
        given = iter(values)
        return self.operation.run(*mapped_live(self.args, lambda one: next(given)))

    def random(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(one.shape, dtype=one.dtype, generator=generator) for one in self.live]

    def pull(self, u: Tensor) -> tuple[Tensor, ...]:
        specs = mapped_live(self.args, lambda one: Spec(one.shape, one.dtype, torch.device("cpu")))
        pulled = self.operation.pull(u, specs, {})
        return tuple([fit(g, Spec(*one, torch.device("cpu"))) for g, one in zip(pulled, self.live, strict=True)])


def mapped_live(value: Any, change: Callable[[Live], Any]) -> Any:
    """Like `mapped`, which would take a named tuple apart."""
    if isinstance(value, Live):
        return change(value)
    if type(value) in (tuple, list):
        return type(value)([mapped_live(one, change) for one in value])
    return value


def inner(a: Tensor, b: Tensor) -> float:
    """The real inner product."""
    return float((a.conj() * b).real.sum())


def test_every_operation_has_a_sample() -> None:
    assert set(SAMPLES) == set(OPERATIONS)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_it_is_affine_in_what_is_live(name: str, n: int) -> None:
    case = Case(name, n)
    x, y = case.random(1), case.random(2)
    middle = case.at([0.25 * a + 0.75 * b for a, b in zip(x, y, strict=True)])
    assert torch.allclose(middle, 0.25 * case.at(x) + 0.75 * case.at(y), atol=1e-12)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_its_transpose_is_the_transpose(name: str, n: int) -> None:
    case = Case(name, n)
    x, zero = case.random(1), [torch.zeros_like(one) for one in case.random(1)]
    moved = case.at(x) - case.at(zero)
    u = torch.randn(moved.shape, dtype=moved.dtype, generator=torch.Generator().manual_seed(3))
    pulled = case.pull(u)
    assert [g.shape for g in pulled] == [one.shape for one in x]
    expected = sum(inner(g, one) for g, one in zip(pulled, x, strict=True))
    assert inner(u, moved) == pytest.approx(expected, rel=1e-10, abs=1e-10)


@pytest.mark.parametrize(("name", "n"), CASES)
def test_the_table_of_structure_agrees(name: str, n: int) -> None:
    verify(_program(name, n))


@pytest.mark.parametrize(("name", "n"), CASES)
def test_the_linear_part_is_the_function_without_its_value_at_zero(name: str, n: int) -> None:
    program, case = _program(name, n), Case(name, n)
    x, zero = case.random(1), [torch.zeros_like(one) for one in case.random(1)]
    assert torch.allclose(program.linear.run(*x)[0], case.at(x) - case.at(zero), atol=1e-12)


def _program(name: str, n: int) -> Program:
    """One step."""
    constants, slots = list[Tensor](), list[int]()

    def code(value: Any) -> Any:
        if isinstance(value, Tensor):
            constants.append(value)
            return Held(len(constants) - 1)
        return value

    def slot(_: Live) -> Slot:
        slots.append(len(slots))
        return Slot(slots[-1])

    args = mapped(mapped_live(SAMPLES[name][n], slot), code)
    case = Case(name, n)
    values = [*case.random(1), case.at(case.random(1))]
    specs = {k: Spec(tuple(v.shape), v.dtype, v.device) for k, v in enumerate(values)}
    out = len(slots)
    steps = (Step(out, name, args),)
    return Program(steps=steps, constants=Constants(constants), specs=specs, inputs=tuple(slots), outputs=(out,))


def test_grouped_products() -> None:
    operation, offsets = OPERATIONS["grouped_mm"], torch.tensor([2, 5], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    x, w, u = (torch.randn(s, generator=generator).bfloat16() for s in ((5, 16), (2, 16, 8), (5, 8)))
    expected = torch.cat([x[:2] @ w[0], x[2:] @ w[1]])
    assert torch.allclose(operation.run(x, w, offsets).float(), expected.float(), rtol=2e-2, atol=2e-2)
    (pulled,) = operation.pull(u, (Spec((5, 16), x.dtype, x.device), w, offsets), {})
    expected = torch.cat([u[:2] @ w[0].mT, u[2:] @ w[1].mT])
    assert torch.allclose(pulled.float(), expected.float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("step", "fault"),
    [
        (Step(1, "mul", (Slot(0), Slot(0))), "multiplies two live values"),
        (Step(1, "softmax", (Slot(0), Slot(0), -1)), "not linear in its argument 1"),
        (Step(1, "exp", (Slot(0),)), "not known to be linear"),
        (
            Step(
                1, "derivative", ((Slot(0),), None, "aten.exp.default", ((Held(0),), ()), (0,), (Held(0),), None, True)
            ),
            "for a linear kernel",
        ),
        (Step(1, "add", (Held(0), 1.0)), "takes nothing live"),
        (Step(1, "add", (Slot(7), 1.0)), "no step before it wrote"),
        (Step(1, "add", (Slot(0), Held(3))), "constant that is not there"),
    ],
)
def test_what_is_not_linear_is_refused_by_structure(step: Step, fault: str) -> None:
    spec = Spec((3,), torch.float64, torch.device("cpu"))
    program = Program(steps=(step,), constants=Constants([r(3)]), specs={0: spec, 1: spec}, inputs=(0,), outputs=(1,))
    with pytest.raises(NotLinearError, match=fault):
        verify(program)
