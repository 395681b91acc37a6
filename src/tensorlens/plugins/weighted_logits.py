r"""A weighted sum of logits, $\sum_c w_c\,\mathrm{logit}_c$, by channel of the input state, for plug-ins."""

from __future__ import annotations

from torch import Tensor

from tensorlens.maps.targets import no_head, one_output
from tensorlens.tensor import AttentionTensor
from tensorlens.tolerances import in_float64


def logits_of(T: AttentionTensor, out_token: int) -> tuple[int, Tensor]:
    """An output as a position, and the logits (class,) there.

    Raises:
        MethodError: the model has no head.
    """
    recording = T.operator.recording
    if recording.readout is None:
        raise no_head(recording.name)
    place = one_output(recording, out_token)
    return place, recording.logits_at(place)


def logit_parts(T: AttentionTensor, weights: Tensor, out_token: int) -> tuple[Tensor, float]:
    r"""$(T^\top u) ⊙ X^0$ (token, channel) on the CPU, with u the cotangent of the weighted sum; and that sum.

    Args:
        T: The operator.
        weights: (class,) on the logits.
        out_token: The output whose logits they are.
    """
    place, logits = logits_of(T, out_token)
    operator = T.operator
    weights = weights.to(logits)
    pulled = operator.pull_from_head(operator.recording.head_cotangent(weights, place))[0]
    return (pulled * operator.input).cpu(), float((in_float64(weights) * in_float64(logits)).sum())
