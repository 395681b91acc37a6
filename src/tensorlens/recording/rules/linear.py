"""Functions that are linear in everything live: shapes, sums, casts, gathers, writes by index. Nothing is held."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tensorlens.errors import NotLinearError, words
from tensorlens.program.steps import LINEAR_FUNCTIONS, leaves, mapped
from tensorlens.recording.conventions import Role, after_linear
from tensorlens.recording.live import (
    FOLLOWED,
    Live,
    Whole,
    found_in,
    is_live,
    now,
    raw,
    refuse_coarse,
    role_of,
    value_of,
)
from tensorlens.recording.tape import Tape, family, of_value, rule


def role_after(name: str, *args: Any) -> Role | None:
    """The role of a linear function's result, from the roles of its arguments."""
    for value in args:
        kind = type(value)
        if kind in FOLLOWED and value.role is not None or kind is tuple or kind is list:
            break
    else:
        return None  # the usual case
    met = found_in(args)
    roles = [x.role for x in met if type(x) is Live]
    if not any(roles):
        # A held factor passes its role on to a live tensor.
        held = next((x.role for x in met if x.role is Role.ATTENTION), None)
        return held if held and not roles else None
    reads_weight = any(isinstance(value, Tensor) and type(value) not in FOLLOWED for value in leaves(args))
    return after_linear(name, roles, now.tape.rules, reads_weight=reads_weight)


def same(x: Live, value: Tensor, role: Role | None) -> Live:
    """The same numbers in another tensor: no step at all."""
    return x if value is x else now.tape.live(value, now.tape.slot_of(x), role)


# Shapes ---------------------------------------------------------------------------------------------------------------


@of_value("view reshape flatten unflatten ravel squeeze unsqueeze view_as reshape_as")
def reshaped(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers in other axes."""
    x = args[0]
    if type(x) is not Live:
        return value  # only the shape of the live argument is read
    spec = x.spec
    if value.dtype is not spec.dtype:
        raise run.refusal(f"{name} as another type of numbers")
    shape = tuple(value.shape)
    if shape == spec.shape:
        return same(x, value, x.role and role_after(name, x))
    return run.emit("reshape", value, x, shape, role=x.role and role_after(name, x))


@of_value("transpose permute t get:T get:mT")
def permuted(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Axes in another order."""
    x = args[0]
    axes = list(range(value.dim()))
    if name == "transpose":
        i, j = (*args[1:], *kwargs.values())
        axes[i], axes[j] = axes[j], axes[i]
    elif name == "permute":
        given = (*args[1:], *kwargs.values())
        axes = [axis % len(axes) for axis in (given if type(given[0]) is int else given[0])]
    elif name in ("t", "get:T"):
        axes.reverse()
    else:
        axes[-2:] = axes[:-3:-1]
    return run.emit("permute", value, x, tuple(axes), role=x.role and role_after(name, x))


@of_value("expand expand_as broadcast_to")
def expanded(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Repeated along axes of length one."""
    x = args[0]
    if type(x) is not Live:
        return value
    return run.emit("expand", value, x, tuple(value.shape), role=x.role and role_after(name, x))


@of_value("contiguous clone detach alias positive resolve_conj resolve_neg lift_fresh lift _conj_copy view_copy")
def unchanged(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same numbers. `detach` changes none of them, so T includes paths that training leaves out."""
    x = args[0]
    return same(x, value, x.role and (role_after(name, x) or (x.role if x.role is Role.GATE else None)))


@rule("detach_ get:data")
def itself(x: Live, *_: Any) -> Any:
    """The same tensor under a different name."""
    return torch.detach(x)


COARSE = frozenset(getattr(torch, name) for name in words("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64"))
"""Types in which nothing is linear."""


@of_value("to type type_as float double half bfloat16 _to_copy cpu cuda int long short char byte bool")
def cast_rule(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """In a different type, or on a different device. Whole numbers made of live ones are decisions."""
    x = args[0]
    if value is x or type(x) is not Live or not isinstance(value, Tensor):
        return value
    kind, spec = value.dtype, x.spec
    if kind in COARSE:
        run.note(f"held: cast to {str(kind).removeprefix('torch.')}")
        return run.decided(value) if kind is torch.bool else _rounded(x, value)
    if kind.itemsize == 1:
        raise run.refusal(f"a cast to {kind}")
    role = x.role and role_after("to", x)
    if kind is spec.dtype and value.device == spec.device:
        return same(x, value, role)
    run.note_cast(value, spec.dtype)
    moves = (value.device,) if value.device != spec.device else ()
    return run.emit("cast", value, x, kind, *moves, role=role)


def _rounded(x: Live, value: Tensor) -> Whole:
    """Integers, with the truncated live numbers behind them: a model may compute with them, as quantised layers do."""
    cut = torch.trunc(x)
    is_same = bool(raw(lambda: (value_of(cut) == value).all()))  # not where they overflow
    return now.tape.whole(value, cut if is_same else None)


# Parts ----------------------------------------------------------------------------------------------------------------


@of_value("getitem")
def item(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x[at]."""
    x, at = args
    if type(x) is not Live:
        return value
    if run.n_samples > 1 and not _takes_all(at[0] if isinstance(at, tuple) and at else at, len(x)):
        run.note_part("getitem", x)
    parts = at if isinstance(at, tuple) else (at,)
    for one in parts:
        if type(one) is slice:
            if type(one.start) in _EDGES and type(one.stop) in _EDGES and type(one.step) in _EDGES:
                continue
        elif type(one) is int or one is ... or one is None:
            continue
        parts = _plain_index(parts)
        break
    return run.emit("index", value, x, parts, role=x.role and role_after("getitem", x))


_EDGES = (int, type(None))
"""Types of the edges of a plain slice."""


def _takes_all(at: Any, n: int) -> bool:
    """Whether an index takes all of an axis."""
    return at is None or at is ... or isinstance(at, slice) and len(range(*at.indices(n))) == n


def _plain_index(at: Any) -> tuple[Any, ...]:
    """An index as steps store it: numbers, slices of numbers and tensors."""
    return tuple([_plain_part(one) for one in (at if isinstance(at, tuple) else (at,))])


def _plain_part(part: Any) -> Any:
    if isinstance(part, slice):
        return slice(*(None if edge is None else int(edge) for edge in (part.start, part.stop, part.step)))
    if isinstance(part, Tensor):
        return (
            raw(torch.atleast_1d, value_of(part))[0].item()
            if part.dim() == 0 and part.dtype != torch.bool
            else value_of(part)
        )
    if isinstance(part, (list, range)):
        return torch.tensor(list(part))
    return part if part is None or part is ... or isinstance(part, bool) else int(part)


@rule("index")
def indexed(x: Any, indices: Any) -> Any:
    """The kernel of an index by tensors."""
    return x[tuple([slice(None) if one is None else one for one in indices])]


@rule("slice")
def sliced(x: Live, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """The kernel of an index by a slice."""
    dim %= x.dim()
    end = None if end is None or end >= x.shape[dim] else end
    return x[(*[slice(None)] * dim, slice(start, end, step))]


@of_value(
    "chunk split split_with_sizes tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes unbind unbind_copy"
)
def parted(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Split along an axis. Each part is a step of its own, so unused ones can be dropped."""
    x, is_unbound, start, found = args[0], name.startswith("unbind"), 0, []
    place = 1 if is_unbound else 2
    axis = kwargs.get("dim", args[place] if len(args) > place else 0) % x.dim()
    role = x.role and role_after("split", x)
    if axis == 0:
        run.note_part(name, x)
    for n, part in enumerate(value):
        if is_unbound:
            found.append(run.emit("select", part, x, axis, n, role=role))
        else:
            found.append(run.emit("narrow", part, x, axis, start, part.shape[axis], role=role))
            start += part.shape[axis]
    return type(value)(found)


@rule("iter")
def iterate(x: Live) -> Any:
    """`for row in x`."""
    return iter(x.unbind(0))


@of_value("narrow select index_select gather")
def taken(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Entries along one axis: a range, one, any, or a different one for each position of the result."""
    x, dim, *where = (*args, *[kwargs[key] for key in ("dim", "start", "length", "index") if key in kwargs])[:4]
    if type(x) is not Live:
        return value
    size = x.shape[dim]
    if name == "narrow":
        where[0] = int(where[0]) % size if where[1] else int(where[0])
    else:
        where = [int(where[0]) % size if name == "select" else value_of(where[0])]
    if name != "gather" and dim % x.dim() == 0 and not (name == "narrow" and where[1] == size):
        run.note_part(name, x)
    return run.emit(name, value, x, dim, *where, role=x.role and role_after(name, x))


@of_value("cat stack")
def joined(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenated along an axis, or stacked along a new one."""
    parts = list(args[0] if args else kwargs["tensors"])
    dim = kwargs["dim"] if "dim" in kwargs else args[1] if len(args) > 1 else 0
    parts = [
        part if part.dtype is value.dtype else part.to(value.dtype)
        for part in parts
        if name == "stack" or part.shape != (0,) or value.dim() == 1  # torch skips empty ones
    ]
    return run.emit(name, value, parts, dim % value.dim(), role=role_after(name, *parts))


@of_value("flip")
def flipped(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Backwards along axes."""
    x, *dims = (*args, *kwargs.values())
    dims = dims[0] if isinstance(dims[0], (tuple, list)) else dims
    return run.emit("flip", value, x, tuple(dims), role=role_after("flip", x))


@rule("repeat_interleave")
def repeated_in_a_row(x: Any, repeats: Any, dim: int | None = None, output_size: Any = None) -> Any:
    """Each entry of an axis, repeated several times in a row."""
    if not is_live(x):
        return raw(torch.repeat_interleave, x, value_of(repeats), dim)
    if dim is None:
        x, dim = x.reshape(-1), 0
    if not isinstance(repeats, int):
        places = raw(lambda: torch.arange(x.shape[dim], device=x.device).repeat_interleave(value_of(repeats)))
        return x.index_select(dim, places)
    value = raw(Tensor.repeat_interleave, x, repeats, dim)
    return now.tape.emit("repeat_interleave", value, x, repeats, dim, role=role_after("repeat_interleave", x))


@of_value("repeat tile")
def tiled(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The whole tensor, repeated along axes."""
    x = args[0]
    sizes = [1] * (value.dim() - x.dim()) + list(x.shape)
    times = tuple([n // size if size else 1 for n, size in zip(value.shape, sizes, strict=True)])
    return run.emit("repeat", value, x, times, role=role_after("repeat", x))


@of_value("tril triu")
def triangular(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Zero above a diagonal, or below it."""
    x, diagonal = (*args, *kwargs.values(), 0)[:2]
    return run.emit("triangle", value, x, diagonal, name == "triu", role=role_after(name, x))


@rule("as_strided")
def restrided(x: Live, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """A view of the memory of x by strides, which must show all of it."""
    run = now.tape
    offset = raw(Tensor.storage_offset, x) if storage_offset is None else storage_offset
    value = raw(Tensor.as_strided, x, size, stride, offset)
    return run.emit("as_strided", value, run.writes.flat(x), tuple(size), tuple(stride), offset)


# Sums -----------------------------------------------------------------------------------------------------------------


@of_value("sum mean")
def summed(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Over axes, or over all of them."""
    x, dims, keepdim = args[0], None, False
    if len(args) > 1 and not isinstance(args[1], torch.dtype):
        dims, keepdim = args[1], args[2] if len(args) > 2 else False
    if kwargs:
        dims, keepdim = kwargs.get("dim", dims), kwargs.get("keepdim", keepdim)
    spec = x.spec
    if value.dtype is not spec.dtype:
        if spec.dtype in COARSE:
            return value
        x = x.to(value.dtype)
    n = len(spec.shape)
    dims = (dims,) if type(dims) is int else tuple(dims) if dims else tuple(range(n))
    if run.n_samples > 1 and any([dim % n == 0 for dim in dims]):
        run.note_part(name, x)
    return run.emit(name, value, x, dims, keepdim, role=x.role and role_after(name, x))


@rule("cumsum")
def running_sums(x: Any, dim: int, dtype: Any = None) -> Any:
    """Cumulative sums."""
    x = x if dtype is None else x.to(dtype)
    return now.tape.emit("cumsum", raw(torch.cumsum, x, dim), x, dim, role=role_after("cumsum", x))


@of_value("add sub rsub")
def added(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A + b, a - b, with a factor of b."""
    a, b = args[0], args[1] if len(args) > 1 else kwargs["other"]
    alpha = kwargs.get("alpha", 1) if kwargs else args[2] if len(args) > 2 else 1
    if name == "rsub":
        a, b, name = b, a, "sub"
    if alpha != 1:
        b = b * alpha
    kind, role = value.dtype, None
    if type(a) in FOLLOWED and a.role or type(b) in FOLLOWED and b.role:
        role = role_after(name, a, b)
    # A live operand is cast to the type of the sum, so that its cotangent gets its own type.
    if type(a) is Live and a.spec.dtype is not kind:
        a = a.to(kind)
    if type(b) is Live and b.spec.dtype is not kind:
        b = b.to(kind)
    return run.emit(name, value, a, b, role=role)


@of_value("neg")
def negated(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """-x."""
    return run.emit("mul", value, args[0], -1, role=args[0].role and role_after("neg", args[0]))


# Choices of values by masks and places ------------------------------------------------------------------------------


@rule("where")
def chosen(condition: Any, *both: Any, **named: Any) -> Any:
    """`a` where a mask is true, `b` elsewhere."""
    if not both and not named:
        return raw(torch.where, condition)
    a, b = (*both, *(named[key] for key in ("input", "self", "other") if key in named))[:2]
    if condition.dtype != torch.bool and isinstance(a, Tensor) and a.dtype == torch.bool:
        condition, a = a, condition  # `x.where(mask, y)`
    condition = value_of(condition)
    value = raw(torch.where, condition, a, b)
    role = role_after("where", a, b)
    a, b = (x.to(value.dtype) if is_live(x) and x.dtype != value.dtype else x for x in (a, b))
    return now.tape.emit("where", value, condition, a, b, role=role)


@rule("masked_fill")
def mask_filled(x: Any, mask: Any, value: Any) -> Any:
    """`x` with a number where a mask is true."""
    mask, fill = value_of(mask), value
    if isinstance(fill, Tensor) and not is_live(fill):
        fill = value_of(fill).to(x.dtype)
    result = raw(Tensor.masked_fill, x, mask, fill)
    return now.tape.emit("where", result, mask, fill, x, role=role_after("masked_fill", x))


@rule("masked_select")
def picked(x: Live, mask: Tensor) -> Any:
    """The values where a mask is true, along one axis."""
    x, mask = torch.broadcast_tensors(x, mask)
    return x[mask]


@rule("masked_scatter")
def poured(x: Any, mask: Any, source: Any) -> Any:
    """`x` with values of a source, in their order, where a mask is true."""
    value = raw(Tensor.masked_scatter, x, mask, source)
    mask = raw(torch.broadcast_to, value_of(mask), value.shape)
    n = int(raw(Tensor.sum, mask))
    source = source.reshape(-1)[:n]
    x = x if x.shape == value.shape else x.expand(value.shape)
    return now.tape.emit("put", value, x, (mask,), source)


@rule("setitem")
def assign(x: Tensor, at: Any, new: Any) -> None:
    """`x[at] = new`: linear in both."""
    run = now.tape
    if not (is_live(x) or is_live(new)):
        run.writes.before_write(x)
        raw(Tensor.__setitem__, x, mapped(at, value_of), new)
        return
    refuse_coarse(run, x, new)
    base = x if is_live(x) else raw(Tensor.clone, x)
    value = raw(Tensor.clone, x)
    raw(Tensor.__setitem__, value, mapped(at, value_of), new)
    if is_live(new) and new.dtype != x.dtype:
        new = new.to(x.dtype)
    run.writes.write(x, run.emit("put", value, base, _plain_index(at), new, role=role_of(x)))


@family("index_put _index_put_impl")
def index_put(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x` with values written or added at some indices."""
    x, indices, values = (*args, *[kwargs[key] for key in ("indices", "values") if key in kwargs])[:3]
    accumulate = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    at = tuple([slice(None) if one is None else value_of(one) for one in indices])
    value = raw(Tensor.index_put, x, [None if one is None else value_of(one) for one in indices], values, accumulate)
    return run.emit("put", value, x, at, values, accumulate)


@of_value("index_add index_copy")
def rows_put(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x` with rows of a source written or added at some indices."""
    x, dim, index, source = (*args, *[kwargs[key] for key in ("dim", "index", "source") if key in kwargs])[:4]
    alpha = (kwargs.get("alpha", 1),) if name == "index_add" else ()
    return run.emit(name, value, x, dim, value_of(index), source, *alpha)


@of_value("scatter scatter_add scatter_reduce")
def scattered(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sums over an index are linear; maxima and products are not."""
    names = ("dim", "index", "src", "value", "reduce")
    given = [*args, *(kwargs[key] for key in names if key in kwargs)]
    x, dim, index, source = given[:4]
    reduce = given[4] if len(given) > 4 and isinstance(given[4], str) else "add" if name == "scatter_add" else None
    index = value_of(index)
    if isinstance(source, Tensor) and source.dim() and source.shape != index.shape:
        source = source[tuple(slice(n) for n in index.shape)]
    if reduce in ("add", "sum", "mean"):
        return _summed_there(x, dim, index, source, is_mean=reduce == "mean", with_own=kwargs.get("include_self", True))
    if name == "scatter" and reduce is None:
        return run.emit("scatter", value, x, dim, index, source)
    raise run.refusal(f"{name} by {reduce}")


def _summed_there(x: Any, dim: int, index: Tensor, source: Any, *, is_mean: bool, with_own: bool) -> Any:
    """`x` with numbers of a source added at some indices, or averaged there, with or without its own numbers."""
    base = x if with_own else torch.scatter(x, dim, index, 0.0)
    total = raw(torch.scatter_add, base, dim, index, source)
    found = now.tape.emit("scatter_add", total, base, dim, index, source)
    if not is_mean:
        return found
    ones = raw(torch.full_like, x, float(with_own))
    counts = raw(lambda: ones.scatter_add(dim, index, torch.ones_like(value_of(source))).clamp_min(1))
    return found / counts


# Functions without a form of their own ------------------------------------------------------------------------------


@of_value(
    " ".join(
        [
            *(name for name in LINEAR_FUNCTIONS if name not in ("repeat", "index_copy", "window")),
            *(f"fft_{name}" for name in LINEAR_FUNCTIONS if "fft" in name),
            "get:real",
            "get:imag",
            "conj",
            "_conj",
        ]
    )
)
def plainly(run: Tape, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Linear in the first argument: the same function as a step."""
    name = name.removeprefix("fft_").removeprefix("get:").replace("_conj", "conj").replace("conj", "conj_physical")
    name = "conj_physical" if name.startswith("conj_physical") else name
    live = [n for n, arg in enumerate(args) if is_live(arg)]
    if live and live != [0] and name != "complex":
        raise run.refusal(f"{name} with a second live argument")
    role = role_after(name, *args)
    return run.emit(name, value, *args, role=role, **kwargs)


@family("unfold im2col")
def windows(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Windows along one axis; `torch.nn.functional.unfold` has the same name, and makes windows along two."""
    given = dict(zip(("x", "dimension", "size", "step"), args, strict=False)) | kwargs
    if name == "im2col" or function is torch.nn.functional.unfold:
        return run.emit("window", raw(function, *args, **kwargs), *args, role=role_after(name, args[0]), **kwargs)
    x, axis, size, step = args[0], given["dimension"] % args[0].dim(), given["size"], given["step"]
    starts = raw(torch.arange, 0, x.shape[axis] - size + 1, step, device=x.device)
    places = raw(lambda: starts[:, None] + torch.arange(size, device=x.device))
    taken = x.index_select(axis, raw(Tensor.flatten, places)).unflatten(axis, places.shape).movedim(axis + 1, -1)
    return same(taken, raw(function, *args, **kwargs), taken.role)  # the windows are views of x


@rule("pad")
def padded(x: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
    """Padding at the ends of the last axes."""
    if not is_live(x) or is_live(value):
        raise now.tape.refusal("pad with a live number")
    made = raw(torch.nn.functional.pad, x, pad, mode, value)
    return now.tape.emit("pad", made, x, tuple(pad), mode, value, role=role_after("pad", x))


@rule("pad_constant")
def padded_by_a_number(x: Any, pad: Any, value: Any = 0) -> Any:
    """Padding, as the arguments of its kernel."""
    return padded(x, pad, "constant", value)


# What is not part of the model's computation ---------------------------------------------------------------------


@family("register_hook register_post_accumulate_grad_hook retain_grad")
def look_at_gradients(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ignore a hook on a gradient, which is not part of the pass."""
    return RemovableHandle(OrderedDict()) if name != "retain_grad" else None


@family("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout native_dropout")
def dropout(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The identity: T describes the model in evaluation mode."""
    given = dict(zip(("p", "training"), args[1:], strict=False)) | kwargs
    if given.get("p", 0.5) and given.get("training", given.get("train", True)):
        raise NotLinearError(
            f"`{name}` is also active in evaluation mode, so the model's output changes from call to call. "
            f"Pass it `training=self.training`. {run.refusal(name)}"
        )
    return args[0] if name != "native_dropout" else (args[0], None)


@family("new_tensor new_full full_like")
def filled_like(run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """New tensors of constants, in the shape of a live one."""
    given = [*args[1:], *kwargs.values()]
    if not any(map(is_live, found_in(given))):
        return raw(function, *args, **kwargs)
    if name == "new_tensor" and is_live(given[0]):
        return given[0].to(device=kwargs.get("device") or args[0].device, dtype=kwargs.get("dtype") or given[0].dtype)
    raise NotLinearError(
        f"`{name}` makes a new tensor of live numbers in `{run.module or 'the model'}`, which no rule follows. "
        "Write `x.expand(shape)` for one of them, and `torch.stack` for several."
    )


@rule("copy")
def copied(x: Tensor, source: Any, non_blocking: bool = False) -> Any:
    """The kernel of `copy_`, out of place."""
    source = source if source.dtype == x.dtype else source.to(x.dtype)
    return source if source.shape == x.shape else source.expand(x.shape)


@rule("copy_")
def copy_in(x: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    """`x.copy_(y)`."""
    return now.tape.writes.write(x, source)


@rule("fill_ zero_")
def fill(x: Tensor, value: Any = 0) -> Tensor:
    """`x.fill_(value)`."""
    return now.tape.writes.write(x, value)


REASONS = {
    "set:data set_ resize_ set:real set:imag swap_": "`x.data = y`, or `x.set_(y)`, with a live tensor: what was "
    "computed from x before and what it holds now cannot be told apart. Write `x = y`, or `x.copy_(y)`.",
    "grad backward _make_dual": "The model differentiates live values inside its own forward (`torch.autograd.grad`, "
    "`backward` or `torch.func`), and no rule says what the operator carries through a derivative. Write the "
    "derivative out in plain torch functions.",
}
"""Why some functions that torch could run are refused."""

for _names, _reason in REASONS.items():

    @family(_names)
    def refuse(
        run: Tape, function: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = _reason
    ) -> NoReturn:
        """Refuse a function, with the reason."""
        raise NotLinearError(f"{reason} {run.refusal(name)}")
