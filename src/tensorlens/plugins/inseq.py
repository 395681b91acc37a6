r"""Inseq: importing this file registers the attribution method ``"tensorlens"``.

For each generated token, $A_j = ⟨(T^\top u)_j, X^0_j⟩$ with $u$ from the derivative of inseq's attributed function by
the logits. For ``logit``, the default here, and ``contrast_logits_diff``, a row and its step score ``bias`` sum to the
function. Functions that are not linear in the logits, such as ``probability``, are explained to the first order.
"""

from __future__ import annotations

from typing import Any

import torch
from inseq.attr.attribution_decorators import set_hook, unset_hook  # type: ignore[import-not-found]
from inseq.attr.feat import FeatureAttribution  # type: ignore[import-not-found]
from inseq.data.attribution import CoarseFeatureAttributionStepOutput  # type: ignore[import-not-found]
from torch import Tensor

from tensorlens.lens import Lens
from tensorlens.plugins.weighted_logits import logit_parts
from tensorlens.recording.conventions import Rules


class TensorLensAttribution(FeatureAttribution):
    """T inside inseq's generation loop.

    Args:
        attribution_model: Inseq's model.
        rules: The conventions, as for `Lens`.
        **kwargs: As for every method of inseq.
    """

    method_name = "tensorlens"

    def __init__(self, attribution_model: Any, rules: Rules | str | None = None, **kwargs: Any) -> None:
        self.lens = Lens(attribution_model.model, attribution_model.tokenizer, rules=rules)
        self._default_before: str | None = None
        super().__init__(attribution_model, **kwargs)

    @set_hook
    def hook(self, **kwargs: Any) -> None:
        """Make ``logit`` inseq's default function: T is linear in logits."""
        self._default_before = self.attribution_model._default_attributed_fn_id
        if self._default_before == "probability":
            self.attribution_model._default_attributed_fn_id = "logit"

    @unset_hook
    def unhook(self, **kwargs: Any) -> None:
        """Restore inseq's default function."""
        self.attribution_model._default_attributed_fn_id = self._default_before

    def get_attribution_args(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The options of a call of ``model.attribute`` for this method, which has `rules`, and all others."""
        return {k: v for k, v in kwargs.items() if k == "rules"}, {k: v for k, v in kwargs.items() if k != "rules"}

    def attribute_step(
        self, attribute_fn_main_args: dict[str, Any], attribution_args: dict[str, Any] | None = None
    ) -> CoarseFeatureAttributionStepOutput:
        """Scores (sample, token) of one generated token per sample, and the share of the biases."""
        inputs, more = attribute_fn_main_args["inputs"], attribute_fn_main_args["additional_forward_args"]
        rules = (attribution_args or {}).get("rules")
        lens = self.lens if rules is None else self.lens.with_rules(rules)
        weights = self._weights(inputs, more)
        is_paired = self.attribution_model.is_encoder_decoder
        ids, masks = _ids(more[1:] if is_paired and len(inputs) == 1 else more, is_paired)
        found = [torch.zeros(one.shape) for one in ids]
        biases = torch.zeros(len(weights))
        for k, row in enumerate(weights):
            kept = [mask[k].bool() for mask in masks]
            given = [one[k][keep] for one, keep in zip(ids, kept, strict=True)]
            names = ("input_ids", "decoder_input_ids")
            T = lens({name: one[None] for name, one in zip(names, given, strict=False)})
            parts, value = logit_parts(T, row, -1)
            scores = parts.sum(-1, dtype=torch.float64)
            biases[k] = value - float(scores.sum())
            for whole, keep, part in zip(found, kept, scores.split([len(one) for one in given]), strict=True):
                whole[k, keep.cpu()] = part.float()
        source, target = found if is_paired else (None, found[0])
        return CoarseFeatureAttributionStepOutput(
            source_attributions=source,
            target_attributions=target if not is_paired or len(inputs) > 1 else None,
            step_scores={"bias": biases},
        )

    def _weights(self, inputs: tuple[Tensor, ...], more: tuple[Any, ...]) -> Tensor:
        """(sample, class): the derivative of the attributed function by the logits of the last output."""
        leaves: list[Tensor] = []

        def cut(_module: Any, _args: Any, output: Any) -> Any:
            output.logits = output.logits.detach().requires_grad_()
            leaves.append(output.logits)
            return output

        handle = self.attribution_model.model.register_forward_hook(cut)
        try:
            with torch.enable_grad():
                value = self.attribution_model.forward(*inputs, *more)
        finally:
            handle.remove()
        (slopes,) = torch.autograd.grad(value.sum(), leaves[0])
        return slopes[:, -1].detach()


def _ids(more: tuple[Any, ...], is_paired: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids and masks, of encoder and decoder if there are two, as inseq's formatters pass them."""
    ids = list(more[:2] if is_paired else more[:1])
    masks = more[4:6] if is_paired else more[3:4]
    return ids, [torch.ones_like(one) if mask is None else mask for one, mask in zip(ids, masks, strict=True)]
