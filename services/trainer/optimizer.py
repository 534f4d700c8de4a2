"""From a state and its gradients to the next state: schedule, clipping, AdamW. Pure functions."""

import math

import torch
from torch import Tensor, nn

from offbeat.contracts.run_spec import TrainSection
from offbeat.errors import NotFiniteError
from services.trainer.gradient import Gradient
from services.trainer.model import Tensors
from services.trainer.state import TrainerState

CLIP_EPSILON = 1e-6
"""As in `torch.nn.utils.clip_grad_norm_`: keeps the division finite for a gradient of zero."""


def next_state(
    state: TrainerState, gradient: Gradient, train: TrainSection, step: int
) -> tuple[TrainerState, dict[str, float]]:
    """The state after the update that makes version `step + 1`, and what there is to report.

    A step that forwarded nothing (no group with a signal) makes no update: weights and moments
    stay. The schedule goes by version and advances all the same. Raises `NotFiniteError` where
    the gradient is not finite.
    """
    rate = learning_rate(train, step)
    metrics = {"loss": gradient.loss, "grad_norm": 0.0, "learning_rate": rate}
    if gradient.is_empty:
        return state, metrics
    gradients, norm = clipped(gradient.gradients, train.max_grad_norm)
    if not math.isfinite(norm):
        raise NotFiniteError(f"the norm of the gradient is {norm}")
    new_state = updated(state, gradients, rate=rate, weight_decay=train.weight_decay)
    return new_state, {**metrics, "grad_norm": norm}


def learning_rate(train: TrainSection, step: int) -> float:
    """The rate of the update that makes version `step + 1`.

    Warmup rises linearly and is never zero; linear and cosine decay would reach zero one step after
    the last.
    """
    if step < train.warmup_steps:
        return train.learning_rate * (step + 1) / (train.warmup_steps + 1)
    done = (step - train.warmup_steps) / (train.steps - train.warmup_steps)
    factor = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[train.lr_scheduler]
    return train.learning_rate * factor


def clipped(gradients: Tensors, norm_max: float) -> tuple[dict[str, Tensor], float]:
    """The gradients scaled down to a total norm of `norm_max`, and the norm before."""
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    scale = (norm_max / (norm + CLIP_EPSILON)).clamp(max=1.0)
    return {name: gradient * scale for name, gradient in gradients.items()}, float(norm)


def updated(
    state: TrainerState, gradients: Tensors, *, rate: float, weight_decay: float
) -> TrainerState:
    """The state after one step of `torch.optim.AdamW`; the given one is left as it is."""
    masters = {name: nn.Parameter(master.clone()) for name, master in state.masters.items()}
    optimizer = torch.optim.AdamW(list(masters.values()), lr=rate, weight_decay=weight_decay)
    for name, master in masters.items():
        master.grad = gradients[name]
        optimizer.state[master] = {
            "step": torch.tensor(float(state.num_updates)),
            "exp_avg": state.exp_avg[name].clone(),
            "exp_avg_sq": state.exp_avg_sq[name].clone(),
        }
    optimizer.step()
    moments = {name: optimizer.state[master] for name, master in masters.items()}
    return TrainerState(
        masters={name: master.detach() for name, master in masters.items()},
        exp_avg={name: moment["exp_avg"] for name, moment in moments.items()},
        exp_avg_sq={name: moment["exp_avg_sq"] for name, moment in moments.items()},
        num_updates=state.num_updates + 1,
    )
