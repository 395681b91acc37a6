"""Perturbation: hide the tokens a map calls important, and see how far the model moves (the paper's section 4.1)."""
