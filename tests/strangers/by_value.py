"""A witness for a model whose states nobody has named: they are looked for by value among what its modules pass.

Where the model is run under `Frozen()`, its own gradients are then the operator between the two. So nothing is taken
from the package but the two states that it claims to join, and those must be states of the model with the right axes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from strangers.cases import Verdict
from strangers.frozen import Frozen
from strangers.oracle import gap, randn, states
from torch import Tensor, nn

import tensorlens as tl

TOLERANCE, IN_FLOAT32 = 1e-8, 1e-6
"""For models that compute in float64 throughout, and for those whose own code casts to float32."""


def tensors(value: Any) -> list[Tensor]:
    """Every tensor of floats in what a module takes or gives."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for one in values for tensor in tensors(one)]


def widths(layer: nn.Module) -> set[int]:
    """How many channels a layer takes and gives."""
    if isinstance(layer, nn.Linear):
        return {layer.in_features, layer.out_features}
    if isinstance(layer, (nn.Conv1d, nn.Conv2d)):
        return {layer.in_channels, layer.out_channels}
    weight = getattr(layer, "weight", None)
    return {weight.numel()} if "norm" in type(layer).__name__.lower() and isinstance(weight, Tensor) else set()


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm and nothing else: a head that begins with pooling and holds a norm is none."""
    return "norm" in type(module).__name__.lower() and all(p.dim() < 2 for p in module.parameters())


def layouts(state: Tensor, module: nn.Module) -> list[Callable[[Tensor], Tensor]]:
    """Ways to read a state of one sample as (token, channel), the batch axis anywhere.

    In a picture, channels are the axis whose size the weights of the module have; both, if the weights have both.
    """
    if state.dim() == 4 and state.shape[0] == 1:
        sizes = {size for layer in module.modules() for size in widths(layer) if size > 3}  # 2 and 3 are coordinates
        last, first = (lambda s: s[0].flatten(0, 1)), (lambda s: s[0].flatten(1).T)
        return [last] * (state.shape[3] in sizes) + [first] * (state.shape[1] in sizes) or [first]
    if state.dim() == 3 and state.shape[0] == 1:
        return [lambda s: s[0]]
    if state.dim() == 3 and state.shape[1] == 1:
        return [lambda s: s[:, 0]]
    return [lambda s: s] if state.dim() == 2 else []


def matching(state: Tensor, wanted: Tensor, module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    for read in layouts(state, module) if state.numel() == wanted.numel() else []:
        if gap(read(state.detach()), wanted) < 1e-6:
            return read
    return None


class Watch:
    """One run of a model, with what its modules passed, and the first place where the state entered."""

    def __init__(
        self,
        model: nn.Module,
        call: Callable[[nn.Module], Any],
        first: Tensor,
        last: Tensor,
        *,
        leaf: bool,
        from_early: bool = False,
    ) -> None:
        self.first, self.last, self.leaf, self.from_early = first, last, leaf, from_early
        self.x: Tensor | None = None
        self.old: Tensor | None = None
        self.y: Tensor | None = None
        self.read_x: Any = None
        self.read_y: Any = None
        self.used, self.used_within, self.norm_after, self.from_head = 0, 0, "", False
        self.early: list[Tensor] = []
        hooks: list[Any] = []
        for module in model.modules():
            hooks.append(module.register_forward_pre_hook(self._entering, with_kwargs=True))
            hooks.append(module.register_forward_hook(self._leaving))
        try:
            call(model)
        finally:
            for hook in hooks:
                hook.remove()

    def _entering(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.x is not None:
            is_after = self.y is not None and is_norm(module)
            if is_after and any(matching(one, self.last, module) for one in tensors([args, kwargs])):
                self.norm_after = type(module).__name__
            return self._replaced(args, kwargs)  # another module may have taken the state only for its shape
        for old in tensors([args, kwargs]):
            read = matching(old, self.first, module)
            if read is None:
                continue
            self.read_x, self.x = read, old.detach().clone().requires_grad_() if self.leaf else old
            self.old = old
            return self._replaced(args, kwargs)
        return None

    def _replaced(self, args: Any, kwargs: Any) -> Any:
        old, new = self.old, self.x
        return tuple(new if a is old else a for a in args), {k: new if v is old else v for k, v in kwargs.items()}

    def _leaving(self, module: nn.Module, args: Any, output: Any) -> Any:
        is_layer = not list(module.children()) and any(True for _ in module.parameters())
        self.used += is_layer
        self.used_within += is_layer and self.x is not None
        if self.x is None:
            if is_layer and self.from_early and isinstance(output, Tensor) and not output.requires_grad:
                self.early.append(output.detach().requires_grad_())
                return self.early[-1].clone()  # which the model may write into
            return None
        for state in tensors(output):
            read = matching(state, self.last, module)
            if read is not None:
                is_head = isinstance(module, nn.Linear) and module.in_features != module.out_features
                self.from_head = is_head if self.y is None else self.from_head
                # A copy: an activation that works in place may write into the state.
                self.y, self.read_y, self.norm_after = state.clone(), read, ""
        return None


def leads_around(model: nn.Module, call: Callable[[nn.Module], Any], T: Any) -> bool:
    """Whether something that X⁰ was made of reaches X^N around X⁰: a residual that began before it."""
    with torch.enable_grad():
        watch = Watch(model, call, T.input, T.output, leaf=True, from_early=True)

    def is_made_of(one: Any, early: Tensor) -> bool:
        if one is None or not one.requires_grad:
            return False
        return torch.autograd.grad(one.sum(), early, retain_graph=True, allow_unused=True)[0] is not None

    return any(is_made_of(watch.old, early) and is_made_of(watch.y, early) for early in watch.early)


def judge_by_value(model: nn.Module, call: Callable[[nn.Module], Any], given: Any, *, share: float = 0.5) -> Verdict:
    """Exact, refused or wrong, for a model that is run by `call` and given to a lens as `given`.

    Args:
        model: In evaluation mode, in float64.
        call: Runs it on the same input.
        given: What the lens gets.
        share: How many of the layers that ran must lie behind X⁰.
    """
    try:
        T = tl.Lens(model)(given)
        first, last = T.input, T.output
        u = randn(9, *last.shape, seed=5)
        v = states(T, 1)[0]
        answers = {"adjoint of 1": T.T @ u[:1], "adjoint of 9": T.T @ u, "apply": T @ v, "value": T @ first + T.bias}
        row = T.rows(last.shape[0] - 1)[:3] if first.numel() * last.shape[1] < 4e6 else None
        passed = bool(T.certificate().passed)
    except tl.TensorLensError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        return Verdict("crash", f"{type(error).__name__}: {str(error)[:300]}")
    return _against(model, call, T, u, v, answers, row, passed, share)


def _against(
    model: Any, call: Any, T: Any, u: Tensor, v: Tensor, answers: Any, row: Any, passed: bool, share: float
) -> Verdict:
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.enable_grad(), Frozen() as frozen:
        watch = Watch(model, call, T.input, T.output, leaf=True)
    if watch.x is None or watch.y is None:
        lost = "X⁰" if watch.x is None else "X^N"
        return Verdict("wrong", f"{lost} of T {T.shape} is no state of the model, with these axes", passed)
    if not watch.y.requires_grad:
        return Verdict("wrong", f"X^N of T {T.shape} does not depend on the state that is X⁰", passed)
    y = watch.read_y(watch.y)

    def pull(cotangents: Tensor) -> Tensor:
        rows = [torch.autograd.grad(y, watch.x, one, retain_graph=True, allow_unused=True)[0] for one in cotangents]
        return torch.stack([watch.read_x(torch.zeros_like(watch.x) if one is None else one) for one in rows])

    pulled = pull(u)
    errors = {name: gap(answers[name], pulled[: len(answers[name])]) for name in ("adjoint of 1", "adjoint of 9")}
    errors["apply"] = gap((u * answers["apply"]).sum((1, 2)), (pulled * v).sum((1, 2)))
    errors["value"] = gap(answers["value"], T.output)
    if row is not None:
        unit = torch.zeros(len(row), *T.output.shape, dtype=u.dtype)
        unit[:, -1, : len(row)] = torch.eye(len(row), dtype=u.dtype)
        errors["row"] = gap(row, pull(unit))
    tolerance = IN_FLOAT32 if frozen.casts else TOLERANCE
    bad = sorted(((k, e) for k, e in errors.items() if not e <= tolerance), key=lambda item: -item[1])
    if bad:
        return Verdict("wrong", ", ".join(f"{k} {e:.2g}" for k, e in bad), passed)
    scale = float(T.output.norm() / T.input.norm())
    if float(answers["apply"].norm()) < 1e-6 * scale * float(v.norm()):
        return Verdict("wrong", "passes nothing of a random state on", passed)
    within = watch.used_within / max(1, watch.used)
    if within < share:
        return Verdict("wrong", f"T {T.shape} covers {within:.0%} of the layers that ran", passed)
    if leads_around(model, call, T):
        return Verdict("wrong", f"X⁰ of T {T.shape} is not all of the state: a part goes around it", passed)
    if watch.from_head:
        return Verdict("wrong", f"X^N of T {T.shape} is what the head gives", passed)
    if watch.norm_after:
        return Verdict("wrong", f"X^N of T {T.shape} is before the final {watch.norm_after}", passed)
    if not passed:
        return Verdict("wrong", f"exact, but not certified: {T.certificate().errors}", passed)
    return Verdict("exact", f"{max(errors.values()):.1e}, T {T.shape}, {T.n_blocks} blocks, {within:.0%} of layers")
