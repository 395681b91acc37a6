"""The operator at one input: applied, transposed, sliced, certified; and the equations it must obey."""
