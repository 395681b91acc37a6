"""Which operation is linear in which argument: a table independent of rules and operations, and a walk that applies it.

A program that passes is affine by its structure, whatever its constants are: every step is of a kind that the table
knows, its live arguments stand where the table allows them, and it reads only what earlier steps wrote.
"""

from __future__ import annotations

from tensorlens.errors import NotLinearError, words
from tensorlens.program.program import Program
from tensorlens.program.steps import NOT_PLAIN, Slot, Step, leaves

TOGETHER = {
    0: "reshape permute expand cast index narrow select index_select gather cat stack flip repeat_interleave triangle "
    "as_strided sum mean cumsum div gain constant diagonal diag diag_embed roll trace view_as_real "
    "view_as_complex real imag conj_physical take repeat window avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d interpolate fold pixel_shuffle pixel_unshuffle "
    "channel_shuffle fft ifft rfft irfft fftn ifftn fft2 ifft2 rfftn irfftn rfft2 irfft2 hfft ihfft "
    "fftshift ifftshift",
    1: "solve",
    2: "attention",
}
"""Operations that are affine in the argument at one place, all others being constants."""

SEVERAL = {
    "add": (0, 1),
    "sub": (0, 1),
    "blend": (0, 1),
    "where": (1, 2),
    "linear": (0, 2),
    "convolution": (0, 2),
    "put": (0, 2),
    "index_add": (0, 3),
    "index_copy": (0, 3),
    "scatter": (0, 3),
    "scatter_add": (0, 3),
    "as_strided_scatter": (0, 1),
    "pad": (0, 3),
    "norm": (0, 3),
    "softmax": (0, 3),
    "live_attention": (0, 1, 2, 3),
    "complex": (0, 1),
    "derivative": (0, 1),
}
"""Operations that are affine in several arguments together."""

EITHER = {"mul": (0, 1), "matmul": (0, 1), "grouped_mm": (0, 1), "einsum": tuple(range(1, 9))}
"""Operations that are linear in one of several arguments, the others being constants."""

LINEAR_KERNELS = words("linalg_cross _trilinear convolution max_unpool2d max_unpool3d grid_sampler_2d grid_sampler_3d")
"""Kernels that are linear in one of their arguments; all others are followed by their derivative at X."""

_PLACES: dict[str, tuple[int, ...]] = {
    **{name: (place,) for place, names in TOGETHER.items() for name in names.split()},
    **SEVERAL,
    **EITHER,
}


def verify(program: Program) -> None:
    """Raise unless every step is affine by its structure.

    Raises:
        NotLinearError: says which step is not, and in which module.
    """
    written, n_constants = set(program.inputs), len(program.constants)
    for step in program.steps:
        fault = fault_of(step, written, n_constants)
        if fault is not None:
            raise NotLinearError(
                f"Step {step.out} of the program, `{step.operation}` in `{step.module or 'the model'}`, {fault}. "
                "Expected steps that are affine in what is live."
            )
        written.add(step.out)
    missing = set(program.outputs) - written
    if missing:
        raise NotLinearError(f"The program ends in values {sorted(missing)} that none of its steps made.")


def fault_of(step: Step, written: set[int], n_constants: int) -> str | None:
    """The fault of a step, or None."""
    allowed, n_live = _PLACES.get(step.operation), len(step.slots)
    if allowed is None:
        return "is not known to be linear in anything"
    if not n_live and step.operation != "constant":
        return "takes nothing live"
    for place, value in enumerate(step.args):
        kind = type(value)
        is_plain = kind is not Slot and (kind not in (tuple, list) or NOT_PLAIN.isdisjoint(map(type, value)))
        if place not in allowed and not is_plain and Slot in map(type, leaves(value)):
            return f"is not linear in its argument {place}"
    if n_live > 1 and step.operation in EITHER:
        return "multiplies two live values"
    if step.operation == "derivative" and step.args[7] and step.args[2].split(".")[1] not in LINEAR_KERNELS:
        return f"takes `{step.args[2]}` for a linear kernel"
    if Slot in map(type, step.options.values()):
        return "takes something live as an option"
    if not written.issuperset(step.slots):
        return "reads a value that no step before it wrote"
    return "reads a constant that is not there" if max(step.held, default=-1) >= n_constants else None
