"""`freeze`: run a model once and hold it still; `FrozenModel`: the affine function that remains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensorlens.errors import AnatomyError, InputError
from tensorlens.freezing.conventions import Rules
from tensorlens.freezing.interception import own_precision
from tensorlens.freezing.layouts import Layout, first_tensor
from tensorlens.freezing.layouts import find_state as find_state
from tensorlens.freezing.layouts import put_state as put_state
from tensorlens.freezing.tape import Tape
from tensorlens.freezing.traced import constant, plain
from tensorlens.freezing.walk import Heads as Heads
from tensorlens.freezing.walk import Reached as Reached
from tensorlens.freezing.walk import Span as Span
from tensorlens.freezing.walk import StartAtEmbedding
from tensorlens.freezing.walk import Walk as Walk
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.plain_pass import evaluating


class FirstGraph(NamedTuple):
    """What the recording was made with: its autograd graph, in which every factor is a constant.

    Attributes:
        leaves: $X^0$, (1, token, channel): the encoder's tokens, then the decoder's.
        end: $X^N$ with the graph; None where the rules make another state the output.
        readout: The same for what the model ended with.
    """

    leaves: tuple[Tensor, ...]
    end: Tensor | None
    readout: Tensor


@dataclass
class FrozenModel:
    r"""The model with every factor held at one input: the affine function $\tilde F_X$.

    Holds no L·D·L·D tensor: the hidden states, the tape, and a reference to the model, whose weights it uses. For the
    first cotangents pulled through all blocks it also has the graph of the recording, if that is small; they use it
    up, and later ones replay.

    Attributes:
        anatomy: Where the model's parts are.
        inputs: What the model was called with.
        rules: The conventions in force.
        tape: The factors held.
        hidden: $X^0 … X^N$, each (1, token, channel); `hidden[n]` enters block n, the last is the output. With an
            encoder, the encoder's tokens come first and the decoder's after them; the last is the decoder's alone.
        layouts: How the model's own code lays out each of them.
        splits: How many of the tokens of each belong to the encoder.
        block_outputs: What each block returned, for passes that start further up.
        body: Path of the part whose output is $X^N$.
        n_encoder_blocks: How many of the blocks are the encoder's.
        starts_at_embedding: Whether $X^0$ is the token embeddings, because the model uses them in other ways than as
            the state entering block 0; otherwise it is that state.
        embedding_layout: How the model's own code lays out the embeddings, if it starts there.
        side_channels: Blocks that read something of $X^0$ or of earlier blocks beside the hidden state.
        readout: What the recording ended with: the input of the unembedding, or the logits of another head; None
            without a head.
        weights: What the model's parameters were at the recording, to notice a change.
        first_graph: The graph of the recording, until it is used.
    """

    anatomy: Anatomy
    inputs: dict[str, Any]
    rules: Rules
    tape: Tape = field(default_factory=Tape)
    hidden: list[Tensor] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    splits: list[int] = field(default_factory=list)
    block_outputs: list[Any] = field(default_factory=list)
    body: str = ""
    body_unknown: bool = True
    n_encoder_blocks: int = 0
    starts_at_embedding: bool = False
    embedding_layout: Layout | None = None
    side_channels: list[str] = field(default_factory=list)
    readout: Tensor | None = None
    weights: Fingerprint | None = None
    first_graph: FirstGraph | None = field(default=None, repr=False)

    def check_weights(self) -> None:
        """Raise if the weights are no longer those of the recording: its factors belong to no others."""
        if self.weights is not None and self.weights != fingerprint(self.anatomy.model):
            raise InputError(
                "The weights of the model have changed since this pass was recorded, and what it holds belongs to the "
                "old ones. Ask the lens for the input again."
            )

    @property
    def n_blocks(self) -> int:
        """Number of blocks, counted by call."""
        return len(self.block_outputs)

    @property
    def first_layout(self) -> Layout:
        """How the model lays out $X^0$."""
        return self.embedding_layout or self.layouts[0]

    @property
    def n_text_tokens(self) -> int | None:
        """Number of tokens of a text, as far as the inputs say."""
        for name, axis in (("input_ids", -1), ("inputs_embeds", 1), ("decoder_input_ids", -1)):
            if isinstance(self.inputs.get(name), Tensor):
                return self.inputs[name].shape[axis]
        return None

    @property
    def has_head(self) -> bool:
        """Whether the model goes on after $X^N$, to logits."""
        return self.body != ""

    @property
    def pools(self) -> bool:
        """Whether the head gives one set of logits for the whole input, and not one for each token."""
        return self.anatomy.unembedding is None and self.readout is not None and self.readout.dim() == 2

    def logits(self, out_token: int, classes: Tensor | None = None) -> Tensor:
        """Logits (class,) at the input of the recording, read at one output; of all classes if None are named."""
        assert self.readout is not None, "asked of a model with a head"
        return self.read_logits(self.readout, out_token, classes)[0].detach()

    def own_logits(self, out_token: int) -> Tensor:
        """Logits (class,) as the model itself gives them, after whatever its code does behind the unembedding."""
        self.check_weights()
        model = self.anatomy.model
        keeps = self.anatomy.unembedding is not None and "logits_to_keep" in signature(model.forward).parameters
        chosen = {"logits_to_keep": torch.tensor([out_token], device=self.hidden[-1].device)} if keeps else {}
        with own_precision(), torch.no_grad(), evaluating(model):
            logits = model(**self.inputs, **chosen).logits[0]
        return logits if logits.dim() == 1 else logits[0 if keeps else out_token]

    def push(self, x: Tensor, span: Span, heads: Heads | None = None) -> Tensor:
        r"""$\tilde F_X(x)$ over the blocks of `span`: (batch, token, channel) to (batch, token, channel). Affine."""
        self.check_weights()
        with own_precision(), torch.no_grad():
            return plain(Walk(self, span=span, x=x, heads=heads).go())

    def pull(
        self, cotangents: Tensor, span: Span, heads: Heads | None = None, *,
        read: Callable[[Tensor], Tensor] | None = None, to_logits: bool = False, chunk: int = 64,
    ) -> Tensor:  # fmt: skip
        r"""$T^\top u$ for cotangents (batch, …) of what `read` takes from the output, by default all of it.

        One forward replay, and one backward pass for each cotangent, `chunk` of them at a time. The first time, the
        recording stands for the replay.
        """
        read = read or (lambda y: y[0])
        first = None if heads else self._take_first_graph(span, to_logits)
        if first is not None:
            self.check_weights()
            # What goes wrong here, such as a tensor written over since, goes wrong or right by a replay.
            with suppress(RuntimeError), own_precision(), torch.enable_grad():
                return _gradients(read(first[1]), first[0], cotangents, chunk)
            del first
        with self.graph(span, heads, to_logits=to_logits) as (x, y, _):
            return _gradients(read(y), (x,), cotangents, chunk)

    def _take_first_graph(self, span: Span, to_logits: bool) -> tuple[tuple[Tensor, ...], Tensor] | None:
        """The state that entered the model and what came out, joined by the graph of the recording; once."""
        graph = self.first_graph
        end = None if graph is None else graph.readout if to_logits else graph.end
        if end is None or span != (0, self.n_blocks):
            return None
        # Out of the instance in one step, so that of two threads one has it. The class says that there is none.
        graph = self.__dict__.pop("first_graph", None)
        return None if graph is None else (graph.leaves, end)

    @contextmanager
    def graph(
        self, span: Span, heads: Heads | None = None, *, to_logits: bool = False
    ) -> Iterator[tuple[Tensor, Tensor, Walk]]:
        """The state entering `span`, what the frozen model makes of it, joined by an autograd graph, and the pass."""
        self.check_weights()
        with own_precision(), torch.enable_grad():
            x = self.hidden[span.start].detach().clone().requires_grad_()
            walk = Walk(self, span=span, x=x, grad=True, heads=heads, to_logits=to_logits)
            yield x, plain(walk.go()), walk

    def push_to_head(self, x: Tensor, start: int = 0, heads: Heads | None = None) -> Tensor:
        """What the frozen model and its frozen head end with on `x`: the unembedding's input, or logits. Affine."""
        self.check_weights()
        with own_precision(), torch.no_grad():
            return plain(Walk(self, span=Span(start, self.n_blocks), x=x, heads=heads, to_logits=True).go())

    def push_logits(self, x: Tensor, out_token: int, start: int = 0, heads: Heads | None = None) -> Tensor:
        """Logits (batch, class) of the frozen model and its frozen head on `x`, read at `out_token`. Affine.

        For a language model they are the numbers straight out of the unembedding, before any soft cap or scale.
        """
        with torch.no_grad():
            return self.read_logits(self.push_to_head(x, start, heads), out_token)

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
            logits = torch.stack([self.read_logits(state, int(i), classes)[0] for i in out_tokens])
            return (logits * weights[:, classes].to(logits)).sum(1)

        units = torch.eye(len(rows), device=weights.device, dtype=self.hidden[0].dtype)
        return self.pull(units, Span(start, self.n_blocks), heads, read=read, to_logits=True)

    def reference(self) -> Tensor:
        """$X^N$ from the model left to itself, no rule applied: what the frozen model must reproduce."""
        with own_precision(), torch.no_grad():
            return constant(Walk(self).go())

    def read_logits(self, state: Tensor, out_token: int, classes: Tensor | None = None) -> Tensor:
        """Logits of one output from what a pass to the logits ended with."""
        unembedding = self.anatomy.unembedding
        if unembedding is not None:
            weight, bias = _weights(unembedding, state)
            if classes is not None:
                weight, bias = weight[classes], None if bias is None else bias[classes]
            return torch.nn.functional.linear(state[:, out_token], weight, bias)
        logits = state if state.dim() == 2 else state[:, out_token]
        return logits if classes is None else logits[:, classes]


def _gradients(y: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, chunk: int) -> Tensor:
    """The gradients (batch, token, channel) at the leaves, one after the other, for each cotangent of y."""
    unused_are_zero = len(leaves) > 1  # as parts of one leaf would be
    if len(cotangents) == 1:
        found = torch.autograd.grad(y, leaves, cotangents[0], materialize_grads=unused_are_zero)
        return found[0] if len(found) == 1 else torch.cat([part.to(found[0].device) for part in found], 1)
    parts = []
    for some in cotangents.split(chunk):
        found = torch.autograd.grad(
            y, leaves, some, is_grads_batched=True, retain_graph=True, materialize_grads=unused_are_zero
        )
        parts.append(torch.cat([part[:, 0].to(found[0].device) for part in found], 1))
    return torch.cat(parts)


Fingerprint = tuple[tuple[int, int, torch.dtype], ...]
"""Identity, version (-1 for an inference tensor, which has none) and type of each parameter."""


def fingerprint(model: nn.Module) -> Fingerprint | None:
    """Changes with every write to a parameter; None where parameters come and go with off-loading."""
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return None
    return tuple((id(p), -1 if p.is_inference() else p._version, p.dtype) for p in parameters)


def _weights(layer: nn.Linear, state: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a layer, fetched if accelerate has put them off the device."""
    if not layer.weight.is_meta:
        return layer.weight, layer.bias
    hook: Any = layer._hf_hook
    stored = next(part.weights_map for part in getattr(hook, "hooks", (hook,)) if getattr(part, "weights_map", None))
    return stored["weight"].to(state), None if layer.bias is None else stored["bias"].to(state)


def freeze(anatomy: Anatomy, inputs: dict[str, Any], rules: Rules | None = None) -> FrozenModel:
    """Run the model once on `inputs` and hold every factor.

    Args:
        anatomy: The model and where its parts are.
        inputs: Keyword arguments for the model's forward, one sample.
        rules: The conventions; the defaults of `Rules` if None.
    """
    with own_precision():
        inputs = {name: value.clone() if _is_inference(value) else value for name, value in inputs.items()}
    for candidate in (anatomy, *anatomy.alternatives()):
        frozen = _recorded(FrozenModel(anatomy=candidate, inputs=inputs, rules=rules or Rules()))
        if frozen.block_outputs:
            return frozen
    raise AnatomyError(
        f"The blocks in `{anatomy.stack}` of `{type(anatomy.model).__name__}` never ran on this input. "
        "Expected the forward pass to go through them; pass the path of the right list as `blocks=`."
    )


def _is_inference(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_inference()


def _recorded(frozen: FrozenModel, *, grad: bool = True) -> FrozenModel:
    grad = grad and _let_gradients_pass(fingerprint(frozen.anatomy.model))
    walk = readout = None
    try:
        with own_precision(), torch.set_grad_enabled(grad):
            walk = Walk(frozen, recording=True, grad=grad, to_logits=True)
            readout = plain(walk.go())
    except StartAtEmbedding:
        frozen.starts_at_embedding = True
    except Exception:
        # Code may fail for its gradients alone: a write in place, a custom derivative. Without them it is held.
        if not grad:
            raise
        grad = False
    if walk is None or readout is None:
        del walk  # and the graph it began
        return _recorded(
            FrozenModel(
                anatomy=frozen.anatomy,
                inputs=frozen.inputs,
                rules=frozen.rules,
                starts_at_embedding=frozen.starts_at_embedding,
            ),
            grad=grad,
        )
    if frozen.block_outputs and len(frozen.hidden) <= frozen.n_blocks:
        raise AnatomyError(
            f"`{type(frozen.anatomy.model).__name__}` ended without a state after its last block in "
            f"`{frozen.anatomy.stack}`. Pass the path of the list of blocks that leads to the output as `blocks=`."
        )
    frozen.weights = fingerprint(frozen.anatomy.model)  # now, since a first pass may rescale or cast weights for good
    if frozen.has_head:
        frozen.readout = constant(readout)
    if walk.grad and walk.leaves:
        end = walk.end if frozen.rules.include_final_norm else None
        frozen.first_graph = FirstGraph(tuple(walk.leaves), end, readout)
    if frozen.block_outputs and not frozen.rules.include_final_norm:
        frozen.hidden[-1] = frozen.layouts[-2].to_tokens(first_tensor(frozen.block_outputs[-1]))
        frozen.layouts[-1] = frozen.layouts[-2]
    return frozen


def _let_gradients_pass(weights: Fingerprint | None) -> bool:
    """Whether a graph can keep the weights: off-loaded ones come and go, and inference tensors are kept by none."""
    return weights is not None and all(version >= 0 for _, version, _ in weights)
