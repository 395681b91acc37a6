"""Whole answers of a language model, and the parts of the prompt that they are based on."""
