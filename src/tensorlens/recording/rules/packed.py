"""Linear layers with packed weights: a step takes the packed parts, and unpacks the weight each time it runs.

Packed parts are (codes, scale, zero point, code book, shape), as `program.operations.unpacked` takes them: the memory
of the model's own weight, by reference. Nothing is kept at full size, and a saved program does not need the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any

from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.recording.live import is_live, raw, value_of
from tensorlens.recording.rules.modules import adapter

Packed = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[int, ...]]


def parts_of(run: Any, weight: Any) -> Packed | None:
    """The parts of a weight that torchao has packed; None for another one.

    Raises:
        NotLinearError: The layer rounds its inputs too, or its blocks are not rows of numbers.
    """
    if not all(hasattr(weight, name) for name in ("qdata", "scale", "block_size")):
        return None
    if getattr(weight, "act_quant_kwargs", None) or getattr(weight, "activation_quantization", None):
        raise NotLinearError(f"The layer rounds its inputs to few bits. {run.refusal('linear')}")
    shape = tuple(weight.shape)
    if weight.scale.numel() > 1 and math.prod(weight.block_size[:-1]) > 1 or weight.qdata.shape != shape:
        raise NotLinearError(f"A {type(weight).__name__} of this layout is not known. {run.refusal('linear')}")
    return weight.qdata, weight.scale, getattr(weight, "zero_point", None), None, shape


@adapter("bitsandbytes.nn.modules.Linear4bit")
def four_bit_layer(run: Any, module: Any, forward: Callable[..., Any], x: Tensor) -> Any:
    """A layer with 4-bit weights, two of which are in each byte."""
    value = forward(value_of(x))
    if not is_live(x):
        return value
    from bitsandbytes import functional  # pyright: ignore[reportMissingImports]

    weight, state = module.weight, module.weight.quant_state
    scale = state.absmax
    if getattr(state, "packing_format_for_cpu", False):  # where CPUs have bfloat16 the bytes stand in another order
        weight, scale = raw(functional._convert_weight_packed_for_cpu_inverse, weight.data, copy(state))[0], scale.T
    elif state.nested:
        scale = raw(functional.dequantize_blockwise, scale, state.state2) + state.offset
    if math.prod(state.shape) % state.blocksize:
        raise NotLinearError(f"The last block of the weight is not full. {run.refusal('linear')}")
    run.note("weight: 4 bit")
    parts = (weight, scale.float(), None, state.code.float(), tuple(state.shape))
    return run.emit("linear", value, x, parts, module.bias)
