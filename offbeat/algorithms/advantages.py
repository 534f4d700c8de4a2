"""Advantages from rewards: how much better a sample is than the others of its group.

`rewards_GS` is one row a group. NaN or infinity marks a sample that could not be scored, or a place
that a smaller group leaves empty; it takes no part in any mean and has advantage 0. A group with
fewer than two scorable samples, or with equal rewards, carries no signal: exactly 0 throughout.
Standard deviations are population ones, which are defined for any number of survivors.
"""

from collections.abc import Callable

import torch
from torch import Tensor

STD_EPSILON = 1e-8
"""Keeps the division finite; TRL AsyncGRPO's value, small enough not to bias binary rewards."""


def group_mean(rewards_GS: Tensor) -> Tensor:
    """R - mean_g (Dr. GRPO, arXiv 2503.20783)."""
    scorable_GS = rewards_GS.isfinite()
    filled_GS = rewards_GS.where(scorable_GS, 0.0)
    count_G1 = scorable_GS.sum(1, keepdim=True)
    mean_G1 = filled_GS.sum(1, keepdim=True) / count_G1.clamp(min=1)
    signal_GS = scorable_GS & ~without_signal(rewards_GS)[:, None]
    return (filled_GS - mean_G1).where(signal_GS, 0.0)


def group_mean_std(rewards_GS: Tensor) -> Tensor:
    """(R - mean_g) / (std_g + epsilon) (GRPO, arXiv 2402.03300)."""
    centred_GS = group_mean(rewards_GS)
    count_G1 = rewards_GS.isfinite().sum(1, keepdim=True).clamp(min=1)
    std_G1 = (centred_GS.square().sum(1, keepdim=True) / count_G1).sqrt()
    return centred_GS / (std_G1 + STD_EPSILON)


def batch_std(rewards_GS: Tensor) -> Tensor:
    """(R - mean_g) / (std of all rewards of the step + epsilon) (arXiv 2508.08221)."""
    scorable_N = rewards_GS[rewards_GS.isfinite()]
    std = scorable_N.std(correction=0) if scorable_N.numel() else torch.zeros(())
    return group_mean(rewards_GS) / (std + STD_EPSILON)


def leave_one_out(rewards_GS: Tensor) -> Tensor:
    """R_i - mean of the others = (R_i - mean_g) n / (n - 1) (RLOO, arXiv 2402.14740)."""
    count_G1 = rewards_GS.isfinite().sum(1, keepdim=True)
    return group_mean(rewards_GS) * count_G1 / (count_G1 - 1).clamp(min=1)


def without_signal(rewards_GS: Tensor) -> Tensor:
    """For each group: whether its scorable rewards are fewer than two, or all equal."""
    scorable_GS = rewards_GS.isfinite()
    highest_G = rewards_GS.where(scorable_GS, -torch.inf).amax(1)
    lowest_G = rewards_GS.where(scorable_GS, torch.inf).amin(1)
    return highest_G <= lowest_G


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "group_mean": group_mean,
    "group_mean_std": group_mean_std,
    "batch_std": batch_std,
    "leave_one_out": leave_one_out,
}
