"""Families: the certificate of every model type that transformers can build."""
