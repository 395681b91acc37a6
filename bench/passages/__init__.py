"""Which passage of a prompt did an answer stand on? Needles and injected instructions (docs/results-answers.md)."""
