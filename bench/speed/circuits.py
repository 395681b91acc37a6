"""Patching beside TransformerLens, and a circuit judged at ten sizes: SmolLM2's shape, random weights, one pair.

`python -m bench.speed.circuits`; TransformerLens is timed where it can be imported.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models

import tensorlens as tl
from bench.speed.models import SMOLLM2
from bench.speed.timing import timed

N_TOKENS, TARGET = 19, (11, 12)


def model_of_its_shape(device: str) -> Any:
    """A random model of SmolLM2's shape."""
    torch.manual_seed(0)
    config = hf.LlamaConfig(**SMOLLM2, num_hidden_layers=30, vocab_size=49152)
    return hf.LlamaForCausalLM(config).to(device).eval()


def in_transformer_lens(model: Any, clean: torch.Tensor, corrupted: torch.Tensor) -> Any:
    """One pair by TransformerLens: two runs with hooks, and the gradient of the clean one."""
    bridge = importlib.import_module("transformer_lens.model_bridge").TransformerBridge
    words = Tokenizer(models.BPE(vocab={"<s>": 0, "a": 1}, merges=[]))
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="<s>")
    with tempfile.TemporaryDirectory() as folder:  # it asks for the config by name
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        tokenizer = hf.AutoTokenizer.from_pretrained(folder)
        made = bridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device=str(model.device))
    wanted = ("attn.o.hook_in", "attn.hook_out", "mlp.hook_out")

    def run(ids: torch.Tensor, *, back: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        values: dict[str, Any] = {}
        gradients: dict[str, Any] = {}

        def keep(into: dict[str, Any]) -> Any:
            def hooked(value: Any, hook: Any) -> None:
                into[hook.name] = (value[0] if isinstance(value, tuple) else value).detach().clone()

            return hooked

        def is_wanted(name: str) -> bool:
            return name.endswith(wanted)

        hooks = {"fwd_hooks": [(is_wanted, keep(values))], "bwd_hooks": [(is_wanted, keep(gradients))] if back else []}
        with torch.set_grad_enabled(back), made.hooks(**hooks):
            logits = made(ids, return_type="logits", prepend_bos=False)[0, -1]
            if back:
                (logits[TARGET[0]] - logits[TARGET[1]]).backward()
        return values, gradients

    def work() -> float:
        (ours, gradients), (theirs, _) = run(clean, back=True), run(corrupted, back=False)
        return float(sum(((theirs[name] - ours[name]) * gradients[name]).sum() for name in gradients))

    return work


def main() -> None:
    """Print a table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model_of_its_shape(device)
    clean = torch.randint(0, 49152, (1, N_TOKENS), generator=torch.Generator().manual_seed(1))
    corrupted = clean.clone()
    corrupted[0, 8] += 1
    a, b = clean[0].tolist(), corrupted[0].tolist()
    rows: list[tuple[str, str]] = []
    for rules in ("paper", "jacobian"):
        lens = tl.Lens(model, rules=rules)

        def patch(lens: tl.Lens = lens, **more: Any) -> Any:
            return tl.patching(lens, a, b, TARGET, progress=False, **more)

        rows.append((f"tl.patching, {rules}, predicted", str(timed(patch))))
        if rules == "jacobian":
            rows.append(("tl.patching, all 330 true effects", str(timed(lambda: patch(verify=True), n=3))))
    try:
        model.requires_grad_(True)
        rows.append(
            (
                "TransformerLens, predicted",
                str(timed(in_transformer_lens(model, clean.to(device), corrupted.to(device)))),
            )
        )
    except Exception as error:  # noqa: BLE001  # whatever the other package raises is told
        rows.append(("TransformerLens, predicted", f"{type(error).__name__}: {error}"[:160]))
    model.requires_grad_(False)
    lens = tl.Lens(model, rules="half_gate")
    rows.append(
        ("tl.circuit, all edges scored", str(timed(lambda: tl.circuit(lens, a, b, TARGET, progress=False), n=3)))
    )
    circuit = tl.circuit(lens, a, b, TARGET, progress=False)
    sizes = [min(1.0, 5000 / circuit.size) * k / 10 for k in range(1, 11)]
    judged = timed(lambda: circuit.faithfulness(sizes, progress=False), n=3)
    rows.append((f"faithfulness at ten sizes up to 5,000 of {circuit.size} edges", str(judged)))
    sys.stdout.write("\n".join(f"| {name} | {value} |" for name, value in rows) + "\n")


if __name__ == "__main__":
    main()
