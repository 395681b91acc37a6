"""Two inputs: the similarity of their vectors as a sum over pairs of tokens."""
