"""The program: what one pass of a model does to its input, as a straight-line list of affine steps.

A *slot* is a live value, a *constant* is a held one, and a *step* is one operation that is affine in its live
arguments, with everything else bound. Every question about the operator is answered from this list: run forwards it
gives T·x (or T·x + B), run at zero it gives B, walked backwards by transposes it gives Tᵀu, cut between two states it
is a range of blocks. Nothing here knows models, rules or modules.
"""
