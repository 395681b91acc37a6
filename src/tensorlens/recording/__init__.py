"""Recording: one pass of the user's model becomes a program.

The state that enters the first block is made *live*: a subclass of tensors that carries its rules wherever the
model's code carries it. Every torch function that meets it appends affine steps to a tape and returns the model's own
value. The user's code runs once and is not needed again.
"""
