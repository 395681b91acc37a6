"""What TransformerLens says of circuits; run apart, where the package is: `FOLDER FILE`.

The file holds JSON: `clean`, `corrupted`, `target` (two tokens), and `circuits`, each a list of edges between
`["embedding"]`, `["head", block, head]`, `["mlp", block]` and `["target"]`. Prints what each circuit recovers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from transformer_lens.model_bridge import TransformerBridge  # type: ignore[import-not-found]
from transformer_lens.tools.analysis.attribution_patching import Node, faithfulness  # type: ignore[import-not-found]


def writers(name: list[Any], position: int) -> list[Any]:
    if name[0] == "embedding":
        return [Node(kind="embed", position=position)]
    if name[0] == "head":
        return [Node(kind="attn_head_out", layer=name[1], head=name[2], position=position)]
    return [Node(kind="mlp_out", layer=name[1], position=position)]


def readers(name: list[Any], position: int, last: int) -> list[Any]:
    if name[0] == "target":
        return [Node(kind="logits", layer=last, position=position)]
    if name[0] == "head":
        kinds = ("q_input", "k_input", "v_input")
        return [Node(kind=kind, layer=name[1], head=name[2], position=position) for kind in kinds]
    return [Node(kind="mlp_in", layer=name[1], position=position)]


def main() -> None:
    folder, file = sys.argv[1:]
    asked = json.loads(Path(file).read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, hf_model=model.eval(), tokenizer=tokenizer, device="cpu")
    clean, corrupted = (torch.tensor([asked[name]]) for name in ("clean", "corrupted"))
    first, second = asked["target"]
    last, found = model.config.num_hidden_layers - 1, []
    for circuit in asked["circuits"]:
        edges = [
            (writer, reader)
            for source, end in circuit
            for position in range(clean.shape[1])
            for writer in writers(source, position)
            for reader in readers(end, position, last)
        ]
        judged = faithfulness(bridge, clean, corrupted, lambda y: y[0, -1, first] - y[0, -1, second], edges)
        found.append(judged.recovered)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
