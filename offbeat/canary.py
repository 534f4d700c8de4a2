"""Whether an engine computes with the policy that it was given: the check of a version's canary.

The trainer continued a short prompt greedily under the new version (n) and gave the same tokens
their log-probabilities under the parent (p). The engine continues the prompt greedily too (e).
Three tests, all over the tokens that both have in common:

1. **Tokens.** They are equal up to the first place where two candidates are so close that rounding
   decides. At that place the engine's token must be a near-tie of the trainer's: about as likely,
   and no more likely than a half, which two rivals cannot both exceed. What follows it is ignored.
2. **Distance.** The mean of |e - n|, that place included, is at most `mean_abs_max`: no other model
   and no other run passes.
3. **Direction.** Where n and p are far enough apart to be told from one another,

       c = <e - p, n - p> / |n - p|^2

   is above a half: c is 1 for the new version and 0 for its parent, whatever the size of the step,
   so a stale adapter is caught long before it fails the second test.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from offbeat.contracts.run_spec import ModelSection
from offbeat.contracts.weights import Canary

LOG_HALF = math.log(0.5)
SEPARATION_MIN = 0.5
"""Half-way between the parent, 0, and the new version, 1."""


@dataclass(frozen=True, kw_only=True)
class CanaryTolerance:
    """How far arithmetic of one precision may carry two right computations apart, in nats."""

    mean_abs_max: float
    change_min: float
    """|n - p| from which on the direction counts: noise along it is then far below a half of it."""


TOLERANCES: Mapping[str, CanaryTolerance] = {
    # Between the two attention and cache layouts of SmolLM2-135M: mean at most 0.014 a token; along
    # n - p 0.013 (root mean square over 48 canaries), at most 0.04. Other engines are given a
    # multiple. A step at learning rate 5e-4 moves a canary by 0.2 to 0.8, at 1e-4 by about 0.1.
    "bfloat16": CanaryTolerance(mean_abs_max=0.15, change_min=0.2),
    "float32": CanaryTolerance(mean_abs_max=0.01, change_min=0.005),
    # The trainer's base model is of 4 bits, the engine's is not: another model answers, and the
    # check tells how far it is. It still refuses an adapter that is none of this run.
    "nf4": CanaryTolerance(mean_abs_max=1.0, change_min=4.0),
}
"""By the type that the base model computes in, or by its quantisation."""


def tolerance_of(model: ModelSection) -> CanaryTolerance:
    """That of a run's model."""
    return TOLERANCES[model.dtype if model.quantization == "none" else model.quantization]


@dataclass(frozen=True, kw_only=True)
class CanaryVerdict:
    """What came of the check."""

    ok: bool
    mean_abs_difference: float
    separation: float | None
    """c; none where the step was too small to see."""
    reason: str
    """What was found, as a sentence for the run's log."""


def verify_canary(
    canary: Canary, ids: Sequence[int], logprobs: Sequence[float], tolerance: CanaryTolerance
) -> CanaryVerdict:
    """Compare the engine's greedy tokens and log-probabilities with the canary's.

    The engine may have stopped early at an end-of-text token; it must have given one token at
    least.
    """
    pairs = list(zip(ids, canary.completion_ids, logprobs, canary.logprobs, strict=False))
    num_equal = next((k for k, pair in enumerate(pairs) if pair[0] != pair[1]), len(pairs))
    compared = pairs[: num_equal + 1]
    differences = [abs(engine - trainer) for _, _, engine, trainer in compared]
    mean = math.fsum(differences) / len(differences) if differences else math.inf
    separation = _separation(canary, logprobs[:num_equal], tolerance.change_min)

    problem = None
    if not mean <= tolerance.mean_abs_max:
        problem = f"its log-probabilities are off by {mean:.4f} on average"
    elif num_equal < len(pairs) and not _is_near_tie(*compared[-1][2:], tolerance.mean_abs_max):
        own, expected, *_ = compared[-1]
        problem = f"token {num_equal} is {own} and not {expected}, and that is no near-tie"
    elif separation is not None and not separation > SEPARATION_MIN:
        problem = f"it resembles the parent version (c = {separation:.2f})"
    return CanaryVerdict(
        ok=problem is None,
        mean_abs_difference=mean,
        separation=separation,
        reason=problem or "it answers as the trainer did",
    )


def _is_near_tie(engine: float, trainer: float, tolerance: float) -> bool:
    return abs(engine - trainer) <= tolerance and max(engine, trainer) <= LOG_HALF + tolerance


def _separation(canary: Canary, logprobs: Sequence[float], change_min: float) -> float | None:
    known = list(zip(logprobs, canary.logprobs, canary.parent_logprobs, strict=False))
    change = math.fsum((new - parent) ** 2 for _, new, parent in known)
    if math.sqrt(change) < change_min:
        return None
    return math.fsum((own - parent) * (new - parent) for own, new, parent in known) / change
