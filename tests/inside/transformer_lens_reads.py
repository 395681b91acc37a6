"""TransformerLens opens a lens and saves one; run apart, where the package is: `FOLDER LENS TEXT OUT`.

Prints the three words that the lens reads at every layer and position, as ids; writes its own lens of the text to OUT.
"""

from __future__ import annotations

import json
import sys

import torch
from transformer_lens.tools.analysis.jacobian_lens import JacobianLens  # type: ignore[import-not-found]
from transformer_lens_says import bridge


def main() -> None:
    folder, file, text, out = sys.argv[1:]
    torch.set_grad_enabled(True)
    model = bridge(folder)
    read = JacobianLens.load(file).readout(model, text, top_k=3)
    JacobianLens.fit(model, [text], corpus="test", skip_first_positions=2, show_progress=False).save(
        out, dtype=torch.float32
    )
    words = {str(layer): ids.tolist() for layer, ids in read.lens_topk_indices.items()}
    print(json.dumps({"tokens": read.tokens.tolist(), "words": words}))


if __name__ == "__main__":
    main()
