"""Pure torch: rewards to advantages, losses, corrections, divergences, packing, log-probabilities.

No I/O, no model and no configuration: every function takes tensors and numbers and returns tensors.
A registry is a dict; adding an algorithm is one function and one entry.

Axes: G group, S sample of the step (in rewards_GS: sample of the group), N target token,
B row, T position in a row, D hidden size, V vocabulary.
"""
