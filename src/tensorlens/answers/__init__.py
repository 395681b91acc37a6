"""Whole answers of a language model, and what of the prompt they stand on."""
