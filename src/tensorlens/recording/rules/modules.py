"""Semantic adapters: for modules whose meaning is lost when their code is read one torch function at a time.

An adapter is a function of the running pass, the module, its own forward and the call's arguments. Adapters go
before the rules for torch functions; the first class in the module's ancestry that has one decides, and it applies
only if the module's forward is that class's own. They are keyed by the qualified name of the class, so nothing has to
be imported. Add your own with `adapter`:

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

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorlens.errors import NotLinearError
from tensorlens.recording.live import found_in, is_live, raw, value_of
from tensorlens.recording.rules import nonlinear
from tensorlens.recording.rules.nonlinear import activate
from tensorlens.recording.tape import Tape, family

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
        module: The module that is about to run.
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
    """Names of submodules that may have adapters, by the class that contains them."""
    return {name.rpartition(".")[0] for name in ADAPTERS}


@lru_cache(maxsize=4096)
def _ancestors(cls: type) -> list[str]:
    return [qualified(one) for one in cls.__mro__]


@lru_cache(maxsize=4096)
def qualified(cls: type) -> str:
    """The name by which adapters know a class."""
    return f"{cls.__module__}.{cls.__qualname__}"


def _has_forward_of(module: nn.Module, cls: type) -> bool:
    """Whether a module runs the forward of the adapted class, not one of a subclass, an instance or a patch."""
    own = module.__dict__.get("_old_forward", module.__dict__.get("forward"))  # accelerate calls what it found
    forward: Any = cls.forward  # type: ignore[attr-defined]
    is_own = own is None or getattr(own, "__func__", None) is forward
    writer = next(one for one in cls.__mro__ if "forward" in vars(one))
    is_written_there = getattr(forward, "__qualname__", None) == f"{writer.__qualname__}.forward"
    return is_own and is_written_there and type(module).forward is forward


def _activation(gain: Callable[[Tensor], Tensor] | None = None) -> Adapter:
    """An element-wise activation module with φ(0) = 0, its gain in closed form if there is one."""

    def run_activation(run: Any, module: nn.Module, forward: Callable[..., Any], z: Tensor) -> Any:
        name, own = type(module).__name__, gain or partial(nonlinear.quotient, forward)
        return activate(run, name, z, own, forward) if is_live(z) else forward(z)

    return run_activation


# GELUs that transformers writes out in Python: products of primitives, which the rules for torch functions would
# split. Those that call one torch function need no entry.
for _name, _gain in {
    "NewGELUActivation": nonlinear.gelu_tanh,
    "FastGELUActivation": nonlinear.gelu_tanh,
    "AccurateGELUActivation": nonlinear.gelu_tanh,
    "QuickGELUActivation": nonlinear.gelu_quick,
    "GELUActivation": nonlinear.gelu,
    "GELUTanh": nonlinear.gelu_tanh,
    "PytorchGELUTanh": nonlinear.gelu_tanh,
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
    "transformers.activations.MishActivation",
    "transformers.activations.XIELUActivation",
    "transformers.activations.ReLUSquaredActivation",
)(_activation())


# Recurrences ----------------------------------------------------------------------------------------------------------
#
# Functions that a module's code calls by name, and whose arguments have roles of their own. Such a call does not go
# through torch or through a module, so nothing reports it. Instead the forward runs as the same code over a copy of its
# globals, in which the functions below are replaced; the function, its module and other threads are untouched. In a
# recurrence, the gates are held and the carried values stay linear:
# - selective scan (Mamba, Jamba, Falcon-Mamba, Zamba): the step Δ, B, C and the gate z are held; u is carried.
# - chunked scan (Mamba-2, Bamba, Falcon-H1, Granite hybrid, Nemotron-H, Zamba2): Δ, B, C are held; x is carried.
# - gated delta rule (Qwen3-Next, OLMo hybrid) and Kimi delta attention: query, key, decay and β are held;
#   the values are carried.

KERNELS: dict[str, tuple[str, ...]] = {}
"""Names of the arguments that are held, by the name of the function."""


def kernel(*function_names: str, hold: str) -> None:
    """Declare that functions of these names keep some of their arguments fixed and are linear in the others.

    Args:
        function_names: Names by which the model's code calls them.
        hold: Names of the arguments that are gates, separated by spaces.
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
    """The same code with a copy of its globals, some of them replaced."""
    names = {**function.__globals__, **replaced}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def calls_kernels(forward: Any) -> bool:
    """Whether a forward calls kernels by name."""
    return bool(_calls(forward)[1])


@lru_cache(maxsize=4096)
def _calls(function: Any) -> tuple[Any, tuple[str, ...]]:
    """The function without its decorators, and the names of kernels in its code."""
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
            return function(*args, **kwargs)  # its products have their own rules
        bound = signature.bind(*args, **kwargs)
        for key, value in bound.arguments.items():
            if key in KERNELS[name] and is_live(value):
                bound.arguments[key] = value_of(value)
        run.note(f"recurrence: {name}, {' '.join(KERNELS[name])} held")
        result = function(*bound.args, **bound.kwargs)
        for carried in found_in(result):
            carried.role = None  # no longer the direct result of the activation before the recurrence
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
# scale, zero point, code book, shape), as `program.steps.unpacked` takes them: the memory of the model's own
# weight, by reference. Nothing is kept at full size, and a saved program does not need the package.

Packed = tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[int, ...]]


def parts_of(run: Any, weight: Any) -> Packed | None:
    """The parts of a weight that torchao has packed; None for any other weight.

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
    if getattr(state, "packing_format_for_cpu", False):  # on CPUs with bfloat16 the bytes are in a different order
        weight, scale = raw(functional._convert_weight_packed_for_cpu_inverse, weight.data, copy(state))[0], scale.T
    elif state.nested:
        scale = raw(functional.dequantize_blockwise, scale, state.state2) + state.offset
    if math.prod(state.shape) % state.blocksize:
        raise NotLinearError(f"The last block of the weight is not full. {run.refusal('linear')}")
    run.note("weight: 4 bit")
    parts = (weight, scale.float(), None, state.code.float(), tuple(state.shape))
    return run.emit("linear", value, x, parts, module.bias)


# Recurrent layers -----------------------------------------------------------------------------------------------------
#
# torch computes its recurrent layers in one call. They are split into steps, each with its own rule.

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, list[Any]], State]


def _gru(x: Tensor, state: State, weights: list[Any]) -> State:
    """One step: h' = (1 - z) ⊙ n + z ⊙ h with n = tanh(W x + r ⊙ (U h)); the gates r and z are factors."""
    (h,), (w_in, w_h, b_in, b_h) = state, weights
    from_x, from_h = F.linear(x, w_in, b_in).chunk(3, -1), F.linear(h, w_h, b_h).chunk(3, -1)
    reset, update = (torch.sigmoid(from_x[i] + from_h[i]) for i in (0, 1))
    new = torch.tanh(from_x[2] + reset * from_h[2])
    return ((1 - update) * new + update * h,)


def _lstm(x: Tensor, state: State, weights: list[Any]) -> State:
    """One step: c' = f ⊙ c + i ⊙ g and h' = o ⊙ tanh(c'); i, f and o are factors."""
    (h, c), (w_in, w_h, b_in, b_h) = state, weights
    i, f, g, o = (F.linear(x, w_in, b_in) + F.linear(h, w_h, b_h)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


CELLS: dict[str, Cell] = {"gru": _gru, "lstm": _lstm}


@family("gru_cell lstm_cell")
def cell(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One step."""
    kind = name.removesuffix("_cell")
    x, state, *weights = args
    weights = [*weights, None, None][:4]
    found = CELLS[kind](x, tuple(state) if kind == "lstm" else (state,), weights)
    return found if kind == "lstm" else found[0]


@family("gru lstm")
def layers(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All steps of all layers, in both directions if the layer is bidirectional."""
    kind = name
    if not isinstance(args[3], bool):
        raise NotLinearError(
            f"`{kind}` of packed sequences has no rule. Expected padded tensors; call the layer without "
            "`pack_padded_sequence`, or register an adapter for its class with `tensorlens.adapter`."
        )
    x, start, flat, has_biases, n_layers, _, _, bidirectional, batch_first = args
    start = tuple(start) if kind == "lstm" else (start,)
    x = x.transpose(0, 1) if batch_first else x
    n_directions, size = 1 + bidirectional, 4 if has_biases else 2
    if len(flat) != n_layers * n_directions * size:
        raise NotLinearError(f"`{kind}` with projections has no rule. Expected `proj_size=0`.")
    ends: list[State] = []
    for layer in range(n_layers):
        outputs = []
        for direction in range(n_directions):
            n = layer * n_directions + direction
            weights = [*flat[n * size : (n + 1) * size], None, None][:4]
            steps, end = _one_way(CELLS[kind], x, tuple(s[n] for s in start), weights, backwards=direction == 1)
            outputs.append(steps)
            ends.append(end)
        x = outputs[0] if n_directions == 1 else torch.cat(outputs, -1)
    return (x.transpose(0, 1) if batch_first else x, *(torch.stack(parts) for parts in zip(*ends, strict=True)))


def _one_way(step: Cell, x: Tensor, state: State, weights: list[Any], *, backwards: bool) -> tuple[Tensor, State]:
    found = []
    for row in x.flip(0).unbind(0) if backwards else x.unbind(0):
        state = step(row, state, weights)
        found.append(state[0])
    return torch.stack(found[::-1] if backwards else found), state
