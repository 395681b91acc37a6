"""Semantic adapters: modules whose meaning is lost when their code is read one torch function at a time.

An adapter is a function of the running pass, the module, its own forward and the call's arguments. Adapters go
before the rules for torch functions; the first class in the module's ancestry that has one decides, and it applies
only if the module's forward is that class's own. They are keyed
by the qualified name of the class, so that nothing has to be imported. Add your own with `adapter`:

    @tl.adapter("my_package.layers.CubicActivation")
    def cubic(run, module, forward, z):
        return tl.activate(run, "cubic", z, lambda z: z**2)
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from copy import copy
from functools import lru_cache, partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from tensorlens.errors import NotLinearError
from tensorlens.recording.live import found_in, is_live, raw, value_of
from tensorlens.recording.rules import activations
from tensorlens.recording.rules.activations import activate

Adapter = Callable[..., Any]
ADAPTERS: dict[str, Adapter] = {}


def adapter(*class_names: str) -> Callable[[Adapter], Adapter]:
    """Register an adapter for module classes, named as ``package.module.Class``.

    A name with one part more, ``package.module.Class.attribute``, means the module that such a module has under that
    name, whatever its class.
    """

    def register(function: Adapter) -> Adapter:
        ADAPTERS.update(dict.fromkeys(class_names, function))
        return function

    return register


def find_adapter(module: nn.Module, place: str | None = None) -> Adapter | None:
    """The adapter for a module's place in its parent, or for its class or nearest ancestor that has one.

    Args:
        module: What is about to run.
        place: Class of its parent and the name it has there, ``package.module.Class.attribute``.
    """
    if place in ADAPTERS:
        return ADAPTERS[place]
    for cls in type(module).__mro__:
        if (found := ADAPTERS.get(qualified(cls))) is not None:
            return found if _has_forward_of(module, cls) else None
    return None


def has_adapter(cls: type) -> bool:
    """Whether a class or one of its ancestors has an adapter, which need not apply to every module."""
    return not ADAPTERS.keys().isdisjoint(_ancestors(cls))


def adapted_places() -> set[str]:
    """Classes whose parts may have adapters, by the names that these have in them."""
    return {name.rpartition(".")[0] for name in ADAPTERS}


@lru_cache(maxsize=4096)
def _ancestors(cls: type) -> list[str]:
    return [qualified(one) for one in cls.__mro__]


@lru_cache(maxsize=4096)
def qualified(cls: type) -> str:
    """The name by which adapters know a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _has_forward_of(module: nn.Module, cls: type) -> bool:
    """Whether a module runs the adapted class's forward: no subclass, instance or patch has replaced it."""
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))  # accelerate calls what it found
    forward: Any = cls.forward  # type: ignore[attr-defined]
    is_own = own is None or getattr(own, "__func__", None) is forward
    writer = next(one for one in cls.__mro__ if "forward" in vars(one))
    is_written_there = getattr(forward, "__qualname__", None) == f"{writer.__qualname__}.forward"
    return is_own and is_written_there and type(module).forward is forward


def _activation(gain: Callable[[Tensor], Tensor]) -> Adapter:
    """An element-wise activation module with φ(0) = 0 and a gain in closed form."""

    def run_activation(run: Any, module: nn.Module, forward: Callable[..., Any], z: Tensor) -> Any:
        return activate(run, type(module).__name__, z, gain, forward) if is_live(z) else forward(z)

    return run_activation


def _quotient_activation(run: Any, module: nn.Module, forward: Callable[..., Any], z: Tensor) -> Any:
    """An element-wise activation module with φ(0) = 0 and no closed form."""
    if not is_live(z):
        return forward(z)
    return activate(run, type(module).__name__, z, partial(activations.quotient, forward), forward)


# The GELUs that transformers spells out in Python: products of primitives, which the rules for torch functions would
# take apart. Those that call one torch function need no entry.
for _name, _gain in {
    "NewGELUActivation": activations.gelu_tanh,
    "FastGELUActivation": activations.gelu_tanh,
    "AccurateGELUActivation": activations.gelu_tanh,
    "QuickGELUActivation": activations.gelu_quick,
    "GELUActivation": activations.gelu,
    "GELUTanh": activations.gelu_tanh,
    "PytorchGELUTanh": activations.gelu_tanh,
    "MishActivation": activations.mish,
}.items():
    adapter(f"transformers.activations.{_name}")(_activation(_gain))


@adapter("transformers.models.gemma3n.modeling_gemma3n.Gemma3nTextAltUp.modality_router")
def gate_layer(run: Any, module: nn.Module, forward: Callable[..., Any], x: Tensor) -> Any:
    """A layer whose output only says how much of each stream to take: held."""
    if run.rules.gate in ("half", "taylor"):
        return forward(x)
    run.note("gate: layer held")
    return forward(value_of(x))


@adapter(
    "transformers.models.lfm2.modeling_lfm2.Lfm2ShortConv",
    "transformers.models.lfm2_moe.modeling_lfm2_moe.Lfm2MoeShortConv",
)
def gated_convolution(run: Any, module: Any, forward: Callable[..., Any], hidden_states: Tensor, **_: Any) -> Any:
    """C ⊙ conv(B ⊙ x): both gates are held, the convolution stays linear."""
    if run.rules.gate in ("half", "taylor"):
        return forward(hidden_states, **_)
    run.note("gate: convolution, B and C held")
    before, after, x = module.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
    before, after = value_of(before), value_of(after)
    mixed = module.conv(before * x)[..., : x.shape[-1]]
    return module.out_proj((after * mixed).transpose(-1, -2).contiguous())


adapter(
    "transformers.models.bloom.modeling_bloom.BloomGelu",
    "transformers.activations.ClippedGELUActivation",
    "transformers.activations.XIELUActivation",
    "transformers.activations.ReLUSquaredActivation",
)(_quotient_activation)


# Recurrences ----------------------------------------------------------------------------------------------------------
#
# Functions that a module's code calls by name, and whose arguments have roles of their own. Such a call does not go
# through torch or through a module, so nothing reports it. Instead the forward runs as the same code over a copy of its
# names, in which the functions below are replaced; the function, its module and other threads are untouched. In a
# recurrence, what gates is held and what is carried stays linear:
# - selective scan (Mamba, Jamba, Falcon-Mamba, Zamba): the step Δ, B, C and the gate z are held; carried is u.
# - chunked scan (Mamba-2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2): Δ, B, C are held; carried is x.
# - gated delta rule (Qwen3-Next and kin, OLMo hybrid) and Kimi delta attention: query, key, decay and β are held;
#   carried are the values.

KERNELS: dict[str, tuple[str, ...]] = {}
"""Names of the arguments that are held, by the name of the function."""


def kernel(*function_names: str, hold: str) -> None:
    """Declare that functions of these names keep some of their arguments fixed and are linear in the others.

    Args:
        function_names: Names by which the model's code calls them.
        hold: Names of the arguments that gate, separated by spaces.
    """
    KERNELS.update(dict.fromkeys(function_names, tuple(hold.split())))
    _calls.cache_clear()


def with_kernels(run: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, with the kernels it calls by name replaced."""
    if not isinstance(forward, MethodType):
        return forward
    function, names = _calls(forward.__func__)
    if not names:
        return forward
    replaced = {name: _holding(run, name, function.__globals__[name]) for name in names}
    return MethodType(with_names(function, replaced), forward.__self__)


def with_names(function: FunctionType, replaced: dict[str, Any]) -> FunctionType:
    """The same code over a copy of its names, some of them replaced."""
    names = {**function.__globals__, **replaced}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def calls_kernels(forward: Any) -> bool:
    """Whether a forward calls kernels by name."""
    return bool(_calls(forward)[1])


@lru_cache(maxsize=4096)
def _calls(function: Any) -> tuple[Any, tuple[str, ...]]:
    """The function below its decorators, and the names in its code that stand for kernels."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType):
        return function, ()
    return function, tuple(
        name for name in function.__code__.co_names if name in KERNELS and name in function.__globals__
    )


def _holding(run: Any, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def run_kernel(*args: Any, **kwargs: Any) -> Any:
        if run.rules.gate in ("half", "taylor"):
            return function(*args, **kwargs)  # its products by their own rules
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            if key in KERNELS[name] and is_live(value):
                bound.arguments[key] = value_of(value)
        run.note(f"recurrence: {name}, {' '.join(KERNELS[name])} held")
        result = function(*bound.args, **bound.kwargs)
        for carried in found_in(result):
            carried.role = None  # no longer fresh out of the activation before the recurrence
        return result

    return run_kernel


kernel("mamba_selective_scan", "selective_scan_fn", "mamba_inner_fn", hold="delta A B C D z gate dt delta_bias")
kernel(
    "mamba2_chunk_scan",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "mamba2_split_conv1d_scan_combined",
    hold="dt A B C D z dt_bias",
)
kernel(
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_gated_delta_rule",
    "fused_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
    hold="query key q k g beta A_log dt_bias",
)


# Packed weights -------------------------------------------------------------------------------------------------------
#
# A step takes the packed parts of a quantised weight, and unpacks the weight each time it runs. The parts are (codes,
# scale, zero point, code book, shape), as `program.operations.unpacked` takes them: the memory of the model's own
# weight, by reference. Nothing is kept at full size, and a saved program does not need the package.

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
