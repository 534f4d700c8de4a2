"""The `evaluate` job: answer the held-out prompts with exactly one version."""

import math
import statistics
from collections.abc import Sequence

import structlog

from offbeat import keys
from offbeat.contracts.jobs import EvaluateInput, EvaluateOutput
from offbeat.contracts.rollouts import Rollout
from offbeat.rewards.scores import RewardFailure
from offbeat.tables import PromptRow, encode_rollouts
from offbeat.worker import JobContext
from services.generator.rows import report_failures, scored_rollouts
from services.generator.sample import Generator, Group, sample, sampling_of

log = structlog.get_logger(__name__)

BATCH_SAMPLES_MAX = 256
"""Samples between two reports of progress."""
SOLVED = 1.0
"""A sample with at least this reward passes."""


def evaluate(context: JobContext, generator: Generator) -> EvaluateOutput:
    """Sample every held-out prompt with the version of the job."""
    lease, spec = context.lease, context.lease.spec
    job = lease.input
    assert isinstance(job, EvaluateInput)
    num_samples = spec.eval.samples_per_prompt
    groups = evaluation_groups(generator.prompts(job.prompts_key), num_samples)
    sampling = sampling_of(spec.rollout, spec.eval.temperature)
    num_groups = max(BATCH_SAMPLES_MAX // num_samples, 1)

    rollouts: list[Rollout] = []
    failures: list[RewardFailure] = []
    with (
        generator.models.use(spec.model) as model,
        model.policies(lease.run_id).exact(job.version, check=context.check) as policy,
    ):
        for start in range(0, len(groups), num_groups):
            batch = groups[start : start + num_groups]
            sampled = sample(model, policy, batch, sampling, context.check)
            rows, problems = scored_rollouts(lease, generator, sampled)
            rollouts += rows
            failures += problems
            context.progress = len(rollouts) / (len(groups) * num_samples)
    report_failures(lease, generator.tell, failures)

    context.check()
    key = keys.evaluation(lease.run_id, job.version, lease.job_id, lease.attempt)
    body = encode_rollouts(rollouts, [part.label for part in spec.rewards])
    generator.store.put(key, body)
    metrics = evaluation_metrics(rollouts, num_samples)
    log.info("Evaluated.", version=job.version, **metrics)
    return EvaluateOutput(
        version=job.version, rollouts_key=key, metrics=metrics, stored_bytes=len(body)
    )


def evaluation_groups(prompts: Sequence[PromptRow], num_samples: int) -> list[Group]:
    """Every prompt, named by itself; all versions draw from the same streams."""
    return [
        Group(
            group_id=prompt.prompt_id,
            prompt=prompt,
            seeds=tuple(range(row * num_samples, (row + 1) * num_samples)),
        )
        for row, prompt in enumerate(prompts)
    ]


def evaluation_metrics(rollouts: Sequence[Rollout], num_samples: int) -> dict[str, float]:
    """The series of an evaluation; a sample without a reward counts as not passed.

    `rollouts` holds the samples of each prompt next to one another.
    """
    rewards = [row.reward for row in rollouts if row.reward is not None]
    passed = [row.reward is not None and row.reward >= SOLVED for row in rollouts]
    num_passed = [sum(passed[i : i + num_samples]) for i in range(0, len(passed), num_samples)]
    metrics = {
        f"eval/pass@{k}": statistics.fmean(pass_at_k(num_samples, c, k) for c in num_passed)
        for k in sorted({1, num_samples})
    }
    if rewards:
        metrics["eval/reward"] = statistics.fmean(rewards)
    metrics["eval/mean_length"] = statistics.fmean(len(row.completion_ids) for row in rollouts)
    metrics["eval/num_prompts"] = float(len(num_passed))
    return metrics


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased probability that one of k samples passes: 1 - C(n - c, k) / C(n, k)
    (Chen et al. 2021, arXiv 2107.03374)."""
    return 1 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
