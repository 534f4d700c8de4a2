"""Schedules, clipping and AdamW as pure functions."""

import pytest
import torch

from offbeat.contracts.run_spec import TrainSection
from offbeat.errors import NotFiniteError
from services.trainer.gradient import Gradient
from services.trainer.optimizer import clipped, learning_rate, next_state, updated
from services.trainer.state import starting_state


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [1 / 3, 2 / 3, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1 / 3, 2 / 3, 1.0, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_the_rate_follows_the_step_alone(scheduler: str, expected: list[float]) -> None:
    train = TrainSection.model_validate(
        {"steps": 6, "learning_rate": 1.0, "warmup_steps": 2, "lr_scheduler": scheduler}
    )
    assert [learning_rate(train, step) for step in range(6)] == pytest.approx(expected)


def test_clipping_scales_all_gradients_by_the_total_norm() -> None:
    gradients = {"a": torch.tensor([3.0]), "b": torch.tensor([0.0, 4.0])}
    scaled, norm = clipped(gradients, 1.0)
    assert norm == 5.0
    assert scaled["a"].tolist() == pytest.approx([0.6], abs=1e-6)
    assert scaled["b"].tolist() == pytest.approx([0.0, 0.8], abs=1e-6)
    unscaled, _ = clipped(gradients, 10.0)
    assert torch.equal(unscaled["a"], gradients["a"])


def test_updates_one_by_one_equal_one_long_lived_optimizer() -> None:
    """And the state that was given stays as it was."""
    start = torch.tensor([1.0, -2.0, 3.0])
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5)
    state = starting_state({"w": start.clone()})
    states = [state]
    for step in range(3):
        gradient = torch.tensor([0.5, -1.0, 0.25]) * (step + 1)
        parameter.grad = gradient.clone()
        optimizer.step()
        state = updated(state, {"w": gradient}, rate=0.1, weight_decay=0.5)
        states.append(state)
        assert torch.equal(state.masters["w"], parameter)
    assert state.num_updates == 3
    assert not state.masters["w"].requires_grad
    assert torch.equal(states[0].masters["w"], start)
    assert states[0].exp_avg["w"].count_nonzero() == 0


def test_a_step_that_forwarded_nothing_keeps_the_state_but_not_the_schedule() -> None:
    train = TrainSection(steps=4, learning_rate=1.0, lr_scheduler="linear")
    state = starting_state({"w": torch.ones(2)})
    gradient = Gradient(gradients={"w": torch.zeros(2)}, loss=0.0, is_empty=True)
    same, metrics = next_state(state, gradient, train, 2)
    assert same is state
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.5}


def test_a_gradient_that_is_not_finite_is_refused() -> None:
    state = starting_state({"w": torch.ones(2)})
    gradient = Gradient(gradients={"w": torch.tensor([1.0, torch.nan])}, loss=0.0, is_empty=False)
    with pytest.raises(NotFiniteError, match=r"norm of the gradient is nan"):
        next_state(state, gradient, TrainSection(steps=1), 0)
