"""The operator at one input: applied, transposed, sliced, certified."""
