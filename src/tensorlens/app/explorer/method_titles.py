"""`QUESTIONS`: what a method answers, as a newcomer would ask it; its name stands beside it in small print."""

from __future__ import annotations

QUESTIONS = {
    "tensor.in_class": "Why this word?",
    "tensor.in_out": "What made this output?",
    "tensor.contribution": "How much came from each input?",
    "tensor.norm": "What could move this output?",
}
"""Methods that are not named here, baselines and controls, keep their names."""
