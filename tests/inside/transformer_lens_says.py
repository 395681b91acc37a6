"""What TransformerLens says of a model in a folder; run apart, where the package is: `FOLDER TEXT POSITIVE NEGATIVE`.

Prints JSON: direct logit attribution of every head and feed-forward at the last token, and the J-lens of the text.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import transformers
from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens  # type: ignore[import-not-found]


def bridge(folder: str) -> Any:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return TransformerBridge.boot_transformers(folder, hf_model=model.eval(), tokenizer=tokenizer, device="cpu")


def attribution(folder: str, text: str, tokens: tuple[int, int]) -> tuple[list[str], list[float]]:
    model = bridge(folder)
    model.enable_compatibility_mode()
    model.cfg.use_attn_result = True
    _, cache = model.run_with_cache(model.to_tokens(text))
    labels: list[str] = []
    values: list[float] = []
    for stack, names in (
        cache.stack_head_results(layer=-1, pos_slice=-1, return_labels=True),
        cache.decompose_resid(layer=-1, pos_slice=-1, mode="mlp", incl_embeds=True, return_labels=True),
    ):
        found = cache.logit_attrs(stack, tokens=tokens[0], incorrect_tokens=tokens[1], pos_slice=-1, has_batch_dim=True)
        labels += names
        values += found[:, 0].tolist()
    return labels, values


def main() -> None:
    folder, text, positive, negative = sys.argv[1:]
    torch.set_grad_enabled(True)
    lens = JacobianLens.fit(bridge(folder), [text], corpus="test", skip_first_positions=2, show_progress=False)
    with torch.no_grad():
        labels, values = attribution(folder, text, (int(positive), int(negative)))
    ids = bridge(folder).to_tokens(text)[0].tolist()  # it may put a token at the start
    jacobians = {str(layer): matrix.tolist() for layer, matrix in lens.jacobians.items()}
    print(json.dumps({"ids": ids, "labels": labels, "values": values, "jacobians": jacobians}, allow_nan=False))


if __name__ == "__main__":
    main()
