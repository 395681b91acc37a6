r"""Decode one split of a relation: the mean affine operator, LRE and the controls, on the same prompts.

The tensor's prediction is $\hat z = \bar T·X + \bar B$ at the last token (Eq. 26), ending before the final norm; the
model's own final norm and unembedding read it out, as for LRE. `Predictor` is what all of them have in common: a term
that a scale may multiply, and a constant.

LRE, the linear relational embedding of Hernandez et al. (2024), is the baseline. Per example,
$W_i = \partial z/\partial h$ and $b_i = z_i - W_i h_i$, where h is the state of the subject's last token, z that
which leaves the last block at the last token, before the final norm. A relation is the mean of both, and predicts
$\hat z = \beta \bar W h + \bar b$, read out by the model's own final norm and unembedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tensorlens.errors import InputError
from tensorlens.models.anatomy import Anatomy
from tensorlens.models.inputs import forward_parameters
from tensorlens.studies.plain_model import PlainStates, plain_states, read_out
from tensorlens.tensor import AttentionTensor

EMBEDDING = "embedding"
Start = int | str
"""Where the subject is read: entering that block, or, as `EMBEDDING`, what the token embedding gives."""

JACOBIAN_CHUNK = {"cuda": 320, "cpu": 64}
"""Cotangents that go back together."""


@dataclass(frozen=True, kw_only=True)
class LocalLinear:
    """The model's own first-order expansion at one example: z = W·h + b there.

    Attributes:
        weight: W, the Jacobian.
        bias: b, which makes the expansion exact at the example.
    """

    weight: Float[Tensor, "out_channel in_channel"]
    bias: Float[Tensor, "out_channel"]  # noqa: UP037


def expand_locally(
    anatomy: Anatomy, ids: Sequence[int], position: int, starts: Sequence[Start]
) -> tuple[dict[Start, LocalLinear], dict[Start, Tensor]]:
    """The expansion at one prompt, from each start, by one forward pass and D backward passes for all of them."""
    device = next(anatomy.model.parameters()).device
    inputs = {"input_ids": torch.tensor([list(ids)], device=device), "use_cache": False}
    blocks = [start for start in starts if not isinstance(start, str)]
    states = plain_states(anatomy, inputs, read=blocks, grad=True)
    assert states.leaving is not None and states.embedded is not None, "a pass over token ids meets both"
    z = states.leaving[0, -1]
    sources = {start: states.embedded if isinstance(start, str) else states.entering[start] for start in starts}
    jacobians = _jacobians(z, list(sources.values()), position)
    subjects = {start: source[0, position].detach() for start, source in sources.items()}
    expansions = {
        start: LocalLinear(weight=weight, bias=z.detach() - weight @ subjects[start])
        for start, weight in zip(starts, jacobians, strict=True)
    }
    return expansions, subjects


def _jacobians(z: Tensor, sources: list[Tensor], position: int) -> list[Tensor]:
    units = torch.eye(len(z), dtype=z.dtype, device=z.device)
    parts: list[list[Tensor]] = [[] for _ in sources]
    for chunk in units.split(JACOBIAN_CHUNK.get(z.device.type, 64)):
        gradients = torch.autograd.grad(z, sources, chunk, is_grads_batched=True, retain_graph=True)
        for part, gradient in zip(parts, gradients, strict=True):
            part.append(gradient[:, 0, position].clone())
    return [torch.cat(part) for part in parts]


# Predictions ----------------------------------------------------------------------------------------------------------


FORWARD_CHUNK = 32


@dataclass(frozen=True, kw_only=True)
class Predictor:
    r"""Predictions $\hat z = \beta\,v + b$ of one method, with what is needed to choose β on training examples alone.

    Attributes:
        linear: v for each test sample.
        constant: b.
        held_out_linear: For each training example, v from the other examples.
        held_out_constant: The same for b.
    """

    linear: Float[Tensor, "sample channel"]
    constant: Float[Tensor, "channel"]  # noqa: UP037
    held_out_linear: Float[Tensor, "example channel"]
    held_out_constant: Float[Tensor, "example channel"]

    def at(self, scale: float) -> Float[Tensor, "sample channel"]:
        """The predictions with one scale."""
        return scale * self.linear + self.constant


def run_prompts(anatomy: Anatomy, prompts: Sequence[Sequence[int]], starts: Sequence[int]) -> PlainStates:
    """One plain pass over prompts of one length; its `output` are the logits at the last token."""
    device = next(anatomy.model.parameters()).device
    entering: dict[int, list[Tensor]] = {start: [] for start in starts}
    embedded, logits = [], []
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(anatomy.model) else {}
    for chunk in torch.tensor([list(ids) for ids in prompts], device=device).split(FORWARD_CHUNK):
        states = plain_states(anatomy, {"input_ids": chunk, "use_cache": False} | last_only, read=starts)
        assert states.embedded is not None, "token ids go through their embedding"
        found = getattr(states.output, "logits", None)
        if found is None or found.dim() != 3:
            raise InputError(
                f"Relation decoding needs a language model; `{type(anatomy.model).__name__}` predicts no next token. "
                "Load it as one (AutoModelForCausalLM)."
            )
        for start in starts:
            entering[start].append(states.entering[start])
        embedded.append(states.embedded)
        logits.append(found[:, -1])
    states_in = {start: torch.cat(parts) for start, parts in entering.items()}
    return PlainStates(entering=states_in, embedded=torch.cat(embedded), output=torch.cat(logits))


def tensor_predictors(
    tensors: Sequence[AttentionTensor], test: Float[Tensor, "sample token channel"], subject_tokens: Sequence[int]
) -> dict[str, Predictor]:
    r"""`full`, which sees the whole prompt, and `subject`, which sees the subject's tokens alone.

    Both are $\hat z = \bar T_{[L]}·x + \bar b$ with the mean operator at the last token (Eq. 26). For the second, all
    else is in the constant: $\bar b = \tfrac1m\sum_i F(X_i) - T_i[subj]\,x_{subj}$, as LRE does with one token.
    """
    own = torch.stack([tensor.input for tensor in tensors])
    outputs = torch.stack([tensor.output[-1] for tensor in tensors])
    biases = torch.stack([tensor.bias[-1] for tensor in tensors])
    states = torch.cat([test, only_tokens(test, subject_tokens), own, only_tokens(own, subject_tokens)])
    across = torch.stack([tensor.apply(states)[:, -1] for tensor in tensors], dim=1)  # (state, example, channel)
    of_test, of_subjects, full, subject = across.split([len(test), len(test), len(own), len(own)])
    rests = outputs - _diagonal(subject)
    return {
        "full": _predictor(of_test.mean(1), biases, full),
        "subject": _predictor(of_subjects.mean(1), rests, subject),
    }


def lre_predictor(
    expansions: Sequence[LocalLinear], own: Float[Tensor, "example channel"], test: Float[Tensor, "sample channel"]
) -> Predictor:
    """LRE from one start, for the states of the subject's last token."""
    weight = torch.stack([part.weight for part in expansions]).mean(0)
    across = torch.stack([own @ part.weight.T for part in expansions], dim=1)
    biases = torch.stack([part.bias for part in expansions])
    return _predictor(test @ weight.T, biases, across)


def only_tokens(x: Float[Tensor, "sample token channel"], tokens: Sequence[int]) -> Tensor:
    """States with every other token set to zero."""
    kept = torch.zeros_like(x)
    kept[:, list(tokens)] = x[:, list(tokens)]
    return kept


def _predictor(linear: Tensor, constants: Tensor, across: Tensor) -> Predictor:
    """With each example's prediction from the others; of a single example, from itself, as there is no other."""
    n = len(constants)
    others = torch.ones(n, n).fill_diagonal_(0) / (n - 1) if n > 1 else torch.ones(1, 1)
    others = others.to(across)
    return Predictor(
        linear=linear,
        constant=constants.mean(0),
        held_out_linear=torch.einsum("ik,ikd->id", others, across),
        held_out_constant=others @ constants,
    )


def _diagonal(across: Tensor) -> Tensor:
    return across[torch.arange(len(across)), torch.arange(len(across))]


# Choices that look at training examples only -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """A scale and how well it does on the training examples, each predicted from the others.

    Attributes:
        scale: β.
        agreement: Share of the examples where the prediction is the model's own.
        log_probability: Mean log-probability of the model's own answer.
    """

    scale: float
    agreement: float
    log_probability: float


def tune_scale(anatomy: Anatomy, predictor: Predictor, answers: Sequence[int], grid: Sequence[float]) -> Tuned:
    """The scale that agrees most often with the model on held-out training examples; ties by probability."""
    if not grid:
        raise InputError("The grid of scales is empty; expected at least one number, such as 1.0.")
    scales = torch.tensor(list(grid)).to(predictor.linear)
    states = scales[:, None, None] * predictor.held_out_linear + predictor.held_out_constant
    logits = read_out(anatomy, states.flatten(0, 1)).float()
    expected = torch.tensor(list(answers), device=logits.device).repeat(len(grid))
    right = (logits.argmax(-1) == expected).float().reshape(len(grid), -1).mean(1)
    said = logits.log_softmax(-1).gather(1, expected[:, None]).reshape(len(grid), -1).mean(1)
    best = max(range(len(grid)), key=lambda i: (float(right[i]), float(said[i])))
    return Tuned(scale=float(grid[best]), agreement=float(right[best]), log_probability=float(said[best]))
