"""Checkpoints, and models seen from outside.

Everything that finds, converts and loads weights is here: bundled packages, `.gguf` files, local folders and
the hub (`loading`, `conversions`), and where the parts of a loaded model are (`anatomy`).
Nothing here knows about recordings, operators or maps.
"""
