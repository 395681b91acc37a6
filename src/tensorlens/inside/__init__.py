"""Inside the tensor: what each head and feed-forward carries of a target, and why a head looked where it did."""
