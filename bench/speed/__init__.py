"""How long things take, beside the model's own passes and beside the paper's way: ``python -m bench.speed``."""
