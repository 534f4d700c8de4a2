"""The trainer's state at one version: all that the next step depends on besides its rollouts.

It is immutable: a step makes a new one. Whatever fails before the new version is published leaves
the old state whole, in memory as in the store. There is no random state to keep, because dropout is
drawn from the run's seed and the version.
"""

from dataclasses import dataclass

import torch

from services.trainer.model import Tensors


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Adapter masters and AdamW's moments, all float32 and all with the same names."""

    masters: Tensors
    exp_avg: Tensors
    exp_avg_sq: Tensors
    num_updates: int
    """Updates of the optimizer so far; a step without a trainable sample makes none."""


def starting_state(masters: Tensors) -> TrainerState:
    """These weights before the first update."""
    return TrainerState(
        masters=masters,
        exp_avg={name: torch.zeros_like(master) for name, master in masters.items()},
        exp_avg_sq={name: torch.zeros_like(master) for name, master in masters.items()},
        num_updates=0,
    )
