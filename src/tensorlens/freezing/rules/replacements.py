r"""Affine functions that stand for nonlinear steps, each with the right value at X.

One function for products, one for everything smooth. Both are exact affine functions of the live arguments, wherever
they are evaluated; their constants come out by themselves in the replay at zero, which is B.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tensorlens.errors import NotLinearError
from tensorlens.freezing.traced import Interpreter, constant, plain

Weights = tuple[float, float]
"""How much of a product follows the first factor, and how much the second."""

WEIGHTS: dict[str, Weights] = {
    "first held": (0.0, 1.0),
    "second held": (1.0, 0.0),
    "half": (0.5, 0.5),
    "taylor": (1.0, 1.0),
}


def hold_value(run: Interpreter, operation: str, x: Tensor) -> Tensor:
    """The value of `x` in the recording."""
    return run.keep_factor(operation, lambda: constant(x))


def product(
    run: Interpreter, names: tuple[str, str], multiply: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor,
    choice: str,
) -> Tensor:  # fmt: skip
    r"""$w_a\, a b^0 + w_b\, a^0 b + (1 - w_a - w_b)\, a^0 b^0$: a bilinear function of two live tensors.

    Args:
        run: The running pass.
        names: Under which the two factors are kept.
        multiply: The bilinear function.
        a: The first factor.
        b: The second factor.
        choice: A key of `WEIGHTS`.
    """
    of_a, of_b = WEIGHTS[choice]
    first = hold_value(run, names[0], a) if of_b else None
    second = hold_value(run, names[1], b) if of_a else None
    if second is None:
        return multiply(first, plain(b))  # type: ignore[arg-type]
    if first is None:
        return multiply(plain(a), second)
    both = of_a * multiply(plain(a), second) + of_b * multiply(first, plain(b))
    rest = 1 - of_a - of_b
    return both + rest * multiply(first, second) if rest else both


def pinned(x: Tensor, x0: Tensor) -> Tensor:
    """`x0` with the gradient of `x`: where a function of it is differentiated is the recording, wherever x is."""
    return x0 + _moving(x, x.detach())


def _moving(x: Tensor, x0: Tensor) -> Tensor:
    """How far x is from `x0`. What is masked by −∞ does not move, and −∞ - (−∞) would be NaN."""
    return torch.where(x0.isfinite(), x - x0, 0)


def scaled_gradient(x: Tensor, weight: float) -> Tensor:
    """`x` itself, whose gradient counts `weight` times."""
    if weight == 1 or not x.requires_grad:
        return x
    alias = x.view_as(x)
    alias.register_hook(partial(torch.mul, weight))
    return alias


def taylor(run: Interpreter, operation: str, function: Callable[..., Any], *inputs: Tensor) -> Any:
    r"""$f(x^0) + J_f(x^0)(x - x^0)$ for a smooth function of live tensors, which may give several tensors.

    With a graph only the derivative counts: f is evaluated at the recorded point, and autograd has its Jacobian there.
    Without one, the product with the Jacobian is added to the recorded value.
    """
    # Copies, since a model may write over its state in place after a norm has read it.
    at = run.keep_factor(operation, lambda: tuple(constant(x).clone() for x in inputs))
    live = [plain(x) for x in inputs]
    with torch._C.DisableTorchFunctionSubclass():
        if run.recording:
            return function(*live)
        if run.grad:
            return function(*(pinned(x, x0) for x, x0 in zip(live, at, strict=True)))
        at = [x0.expand(x.shape).contiguous() for x, x0 in zip(live, at, strict=True)]
        try:
            return _first_order(function, at, [_moving(x, x0) for x, x0 in zip(live, at, strict=True)])
        except NotImplementedError as error:  # torch's own, of a function without a second derivative
            raise NotLinearError(
                f"Nothing can be pushed through `{operation}` by its derivative: {error} What goes by backward "
                "passes (In+Out, In+Class, `T.T @ u`) works, and so do members that hold it, such as `Rules.paper()`."
            ) from error


def _first_order(function: Callable[..., Any], at: list[Tensor], steps: list[Tensor]) -> Any:
    with torch.enable_grad():
        points = [x0.detach().requires_grad_() for x0 in at]
        return _moved(function(*points), points, steps)


def _moved(result: Any, points: list[Tensor], steps: list[Tensor]) -> Any:
    """What a function gave at `points`, moved along its tangent.

    By two backward passes: Jᵀv is linear in v, and its own adjoint is J. Forward-mode differentiation would allow one
    thread at a time.
    """
    if isinstance(result, (tuple, list)):
        return type(result)([_moved(part, points, steps) for part in result])
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result
    v = torch.zeros_like(result, requires_grad=True)
    pulled = torch.autograd.grad(result, points, v, create_graph=True, materialize_grads=True)
    pairs = [(pull, step) for pull, step in zip(pulled, steps, strict=True) if pull.requires_grad]
    if not pairs:  # the derivative is zero everywhere
        return result.detach()
    pulls, along = zip(*pairs, strict=True)
    return result.detach() + torch.autograd.grad(pulls, v, along, materialize_grads=True)[0]
