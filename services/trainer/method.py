"""What a kind of run has its trainers do in its own way: two functions, looked up by the kind."""

from collections.abc import Callable
from dataclasses import dataclass

from offbeat.contracts.jobs import InitInput, StepInput
from offbeat.contracts.weights import Manifest
from offbeat.worker import JobContext
from services.trainer.metrics import Timer
from services.trainer.policy import Policy
from services.trainer.publish import Draft, Trainer
from services.trainer.state import TrainerState

First = Callable[[JobContext, Trainer, Policy, TrainerState, InitInput, Timer], Draft]
Step = Callable[[JobContext, Trainer, Policy, Manifest, TrainerState, StepInput, Timer], Draft]


@dataclass(frozen=True, kw_only=True)
class Method:
    """The versions of a run, as drafts that are published in one way for all kinds."""

    first: First
    """Version 0, with the state that it has."""
    step: Step
    """The version that follows from the parent's state and the step's data."""
