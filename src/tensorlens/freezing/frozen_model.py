"""`freeze`: run a model once and hold it still; `FrozenModel`: the affine function that remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError
from tensorlens.freezing.passes import Pass, running
from tensorlens.freezing.rules import Rules
from tensorlens.freezing.tape import Tape
from tensorlens.freezing.traced import constant, mark, plain
from tensorlens.models.anatomy import Anatomy

Heads = dict[int, Tensor]
"""For each block named, a multiplier for each head."""


class Reached(BaseException):
    """Ends a forward pass early with the state asked for. Not an `Exception`, so that no model catches it."""

    def __init__(self, state: Tensor) -> None:
        self.state = state


class Span(NamedTuple):
    """From the state entering block `start` to the state entering block `stop`; `stop` = number of blocks is $X^N$."""

    start: int
    stop: int


@dataclass
class FrozenModel:
    r"""The model with every factor held at one input: the affine function $\tilde F_X$.

    Holds no graph and no L·D·L·D tensor: the hidden states, the tape, and a reference to the model, whose weights it
    uses.

    Attributes:
        anatomy: Where the model's parts are.
        inputs: What the model was called with.
        rules: The conventions in force.
        tape: The factors held.
        hidden: $X^0 … X^N$, each (1, token, channel); `hidden[n]` enters block n, the last is the output.
        block_outputs: What each block returned, for passes that start further up.
        body: Path of the part whose output is $X^N$.
        readout: What the recording ended with: the input of the unembedding, or the logits of another head; None
            without a head.
    """

    anatomy: Anatomy
    inputs: dict[str, Any]
    rules: Rules
    tape: Tape = field(default_factory=Tape)
    hidden: list[Tensor] = field(default_factory=list)
    block_outputs: list[Any] = field(default_factory=list)
    body: str = ""
    readout: Tensor | None = None

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.block_outputs)

    @property
    def has_head(self) -> bool:
        """Whether the model goes on after $X^N$, to logits."""
        return self.body != ""

    @property
    def pools(self) -> bool:
        """Whether the head gives one set of logits for the whole input, and not one for each token."""
        return self.anatomy.unembedding is None and self.readout is not None and self.readout.dim() == 2

    def logits(self, out_token: int) -> Tensor:
        """Logits (class,) at the input of the recording, read at one output."""
        assert self.readout is not None, "asked of a model with a head"
        return self._read(self.readout, out_token)[0]

    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        r"""$\tilde F_X(x)$ over the blocks of `span`: (batch, token, channel) to (batch, token, channel). Affine."""
        with torch.no_grad():
            return plain(Walk(self, span=span, x=x, heads=heads).go())

    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *,
        read: Callable[[Tensor], Tensor] | None = None, to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        r"""$T^\top u$ for cotangents (batch, …) of what `read` takes from the output, by default all of it.

        One forward replay, and one backward pass for each cotangent, `chunk` of them at a time.
        """
        with self.graph(span, heads, to_logits=to_logits) as (x, y, _):
            y = y[0] if read is None else read(y)
            if len(cotangents) == 1:
                return torch.autograd.grad(y, x, cotangents[0])[0]
            parts = [
                torch.autograd.grad(y, x, part, is_grads_batched=True, retain_graph=True)[0][:, 0]
                for part in cotangents.split(chunk)
            ]
            return torch.cat(parts)

    @contextmanager
    def graph(
        self, span: Span, heads: Heads | None = None, *, to_logits: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Walk]]:
        """The state entering `span`, what the frozen model makes of it, joined by an autograd graph, and the pass."""
        with torch.enable_grad():
            x = self.hidden[span.start].detach().clone().requires_grad_()
            walk = Walk(self, span=span, x=x, grad=True, heads=heads, to_logits=to_logits)
            yield x, plain(walk.go()), walk

    def push_logits(self, x: Tensor, out_token: int, start: int = 0, heads: Heads | None = None) -> Tensor:
        """Logits (batch, class) of the frozen model and its frozen head on `x`, read at `out_token`. Affine.

        For a language model they are the numbers straight out of the unembedding, before any soft cap or scale.
        """
        with torch.no_grad():
            state = plain(Walk(self, span=Span(start, self.n_blocks), x=x, heads=heads, to_logits=True).go())
            return self._read(state, out_token)

    def pull_logits(self, weights: Tensor, out_tokens: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """Gradients (row, token, channel) of weighted sums of logits, one backward pass for each.

        Args:
            weights: (row, class), sparse in practice: only the classes with a weight are read.
            out_tokens: The output each row is read at.
            start: The block whose input the gradient is taken at.
            heads: Multipliers of heads.
        """
        classes = weights.abs().sum(0).nonzero()[:, 0]
        rows = torch.arange(len(weights), device=weights.device)

        def read(state: Tensor) -> Tensor:
            logits = torch.stack([self._read(state, int(i), classes)[0] for i in out_tokens])
            return (logits * weights[:, classes].to(logits)).sum(1)

        units = torch.eye(len(rows), device=weights.device, dtype=self.hidden[0].dtype)
        return self.pull(units, Span(start, self.n_blocks), heads, read=read, to_logits=True)

    def reference(self) -> Tensor:
        """$X^N$ from the model left to itself, no rule applied: what the frozen model must reproduce."""
        with torch.no_grad():
            return Walk(self).go()

    def _read(self, state: Tensor, out_token: int, classes: Tensor | None = None) -> Tensor:
        """Logits of one output from what a pass to the logits ended with."""
        unembedding = self.anatomy.unembedding
        if unembedding is not None:
            weight, bias = unembedding.weight, unembedding.bias
            if classes is not None:
                weight, bias = weight[classes], None if bias is None else bias[classes]
            return torch.nn.functional.linear(state[:, out_token], weight, bias)
        logits = state if state.dim() == 2 else state[:, out_token]
        return logits if classes is None else logits[:, classes]


def freeze(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> FrozenModel:
    """Run the model once on `inputs` and hold every factor.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward, one sample.
        rules: The conventions; the defaults of `Rules` if None.
    """
    frozen = FrozenModel(anatomy=anatomy, inputs=inputs, rules=rules or Rules())
    with torch.no_grad():
        readout = Walk(frozen, recording=True, to_logits=True).go()
    if not frozen.block_outputs:
        raise AnatomyError(
            f"The blocks in `{anatomy.stack}` of `{type(anatomy.model).__name__}` never ran on this input. "
            "Expected the forward pass to go through them; pass the path of the right list as `blocks=`."
        )
    if frozen.has_head:
        frozen.readout = constant(readout)
    if not frozen.rules.include_final_norm:
        frozen.hidden[-1] = _first_tensor(frozen.block_outputs[-1])
    return frozen


class Walk(Pass):
    """A pass from one state to another: it skips the blocks before, substitutes the state, and stops at the end."""

    def __init__(
        self, frozen: FrozenModel, *, span: Span | None = None, x: Tensor | None = None, recording: bool = False,
        grad: bool = False, heads: Heads | None = None, to_logits: bool = False,
    ) -> None:  # fmt: skip
        names = {id(module): name for name, module in frozen.anatomy.model.named_modules()}
        super().__init__(names=names, tape=frozen.tape, recording=recording, rules=frozen.rules, grad=grad, heads=heads)
        self.frozen, self.span, self.x, self.to_logits = frozen, span, x, to_logits
        self.n_entered = 0
        self.block_ids = {id(block) for block in frozen.anatomy.blocks}

    def go(self) -> Tensor:
        """Run the model until the state asked for is reached."""
        model = self.frozen.anatomy.model
        try:
            with running(self, model):
                output = model(**self.frozen.inputs)
        except Reached as reached:
            return reached.state
        return _state_of(output)

    def run_module(
        self, module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Blocks, the body and the unembedding are where a walk begins and ends."""
        if id(module) in self.block_ids and self.block is None:
            return self._run_block(forward, args, kwargs)
        if self.to_logits and module is self.frozen.anatomy.unembedding:
            raise Reached(args[0])
        output = forward(*args, **kwargs)
        if self.n_entered and self.module == self.frozen.body and self.block is None:
            self._leave_body(_state_of(output))
        return output

    def _run_block(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        n, self.n_entered = self.n_entered, self.n_entered + 1
        state = find_state(args, kwargs, self.module)
        if not (self.recording or self.span):
            return self._leave_block(n, forward(*args, **kwargs))
        if self.recording:
            self._record_entry(n, state)
        elif n == self._span.stop and not self.to_logits:
            raise Reached(state)
        elif n < self._span.start:
            return self.frozen.block_outputs[n]
        if n == (0 if self.recording else self._span.start):
            args, kwargs = put_state(args, kwargs, self._substitute(state))
        self.block, self.place = n, f"block {n}"
        output = forward(*args, **kwargs)
        self.block, self.place = None, f"after block {n}"
        return self._leave_block(n, output)

    @property
    def _span(self) -> Span:
        assert self.span is not None, "a replay has a span"
        return self.span

    def _substitute(self, state: Tensor) -> Tensor:
        x = constant(state).clone() if self.x is None else self.x.view_as(self.x)
        return mark(x, live=True)

    def _record_entry(self, n: int, state: Tensor) -> None:
        if n == 0:
            has_head = getattr(self.frozen.anatomy.model, "base_model", None) is not self.frozen.anatomy.model
            self.frozen.body = self.path[1] if has_head and len(self.path) > 2 else self.path[0]
        self.frozen.hidden.append(constant(state).clone())

    def _leave_block(self, n: int, output: Any) -> Any:
        if self.recording:
            self.frozen.block_outputs.append(_constants(output))
        elif n == self.frozen.n_blocks - 1 and not (self.rules.include_final_norm or self.to_logits):
            raise Reached(_first_tensor(output))
        return output

    def _leave_body(self, state: Tensor) -> None:
        if self.recording:
            self.frozen.hidden.append(constant(state))
        elif not self.to_logits:
            raise Reached(state)


# Where the hidden state is in what blocks take and give --------------------------------------------------------------


def find_state(args: tuple[Any, ...], kwargs: dict[str, Any], module: str = "") -> Tensor:
    """The hidden state among a block's arguments: `hidden_states`, or the first tensor of floats."""
    candidates = [kwargs["hidden_states"]] if "hidden_states" in kwargs else [*args, *kwargs.values()]
    for value in candidates:
        if isinstance(value, Tensor) and value.is_floating_point():
            if value.dim() != 3:
                raise AnatomyError(
                    f"The state entering `{module}` has shape {tuple(value.shape)}; expected (batch, token, channel). "
                    "Pass the path of a list of token-wise blocks as `blocks=`."
                )
            return value
    raise AnatomyError(
        f"`{module}` was called without a hidden state. Pass the path of the right list of blocks as `blocks=`."
    )


def put_state(args: tuple[Any, ...], kwargs: dict[str, Any], state: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments with another hidden state."""
    old = find_state(args, kwargs)
    return (
        tuple(state if value is old else value for value in args),
        {name: state if value is old else value for name, value in kwargs.items()},
    )


def _first_tensor(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else _first_tensor(output[0])


def _state_of(output: Any) -> Tensor:
    for name in ("last_hidden_state", "logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return _first_tensor(output)


def _constants(output: Any) -> Any:
    if isinstance(output, (tuple, list)):
        return type(output)(_constants(part) for part in output)
    return constant(output) if isinstance(output, Tensor) else output
