"""Inside the tensor: how much of a target each head and feed-forward carries, and why a head attended where it did."""
