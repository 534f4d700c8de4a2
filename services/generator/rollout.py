"""What a generator does with a job: sample groups of completions, score them, write them down.

    prompts + newest policy -> engine -> rewards -> rollouts/*.parquet -> summaries

Everything a trainer needs is in the rows: token ids and log-probabilities as the engine gave them,
and the version that gave them.
"""

from collections.abc import Sequence

import structlog

from offbeat import keys
from offbeat.contracts.jobs import GenerateInput, GenerateOutput
from offbeat.tables import PromptRow, encode_rollouts
from offbeat.worker import JobContext
from services.generator.rows import report_failures, scored_rollouts, summary
from services.generator.sample import Generator, Group, sample, sampling_of

log = structlog.get_logger(__name__)


def generate(context: JobContext, generator: Generator) -> GenerateOutput:
    """Sample the groups of the job with the newest version at hand."""
    lease, spec = context.lease, context.lease.spec
    job = lease.input
    assert isinstance(job, GenerateInput)
    groups = requested_groups(job, generator.prompts(job.prompts_key), spec.rollout.group_size)
    sampling = sampling_of(spec.rollout, spec.rollout.temperature)

    with (
        generator.models.use(spec.model) as model,
        model.policies(lease.run_id).newest(job.min_version, check=context.check) as policy,
    ):
        sampled = sample(model, policy, groups, sampling, context.check)
    rollouts, failures = scored_rollouts(lease, generator, sampled)
    report_failures(lease, generator.tell, failures)

    context.check()
    key = keys.rollouts(lease.run_id, lease.job_id, lease.attempt)
    body = encode_rollouts(rollouts, [part.label for part in spec.rewards])
    generator.store.put(key, body)
    summaries = tuple(
        summary([row for row in rollouts if row.group_id == group.group_id]) for group in groups
    )
    num_tokens = sum(group.num_tokens for group in summaries)
    engine_s = round(sampled.seconds, 3)
    log.info("Generated.", version=policy.version, tokens=num_tokens, engine_s=engine_s)
    return GenerateOutput(
        rollouts_key=key,
        groups=summaries,
        generated_tokens=num_tokens,
        generate_s=sampled.seconds,
        stored_bytes=len(body),
    )


def requested_groups(
    job: GenerateInput, prompts: Sequence[PromptRow], group_size: int
) -> list[Group]:
    """The groups of a job with their prompts; sample k draws from the stream `seed + k`."""
    return [
        Group(
            group_id=group.group_id,
            prompt=prompts[group.prompt_row],
            seeds=tuple(range(group.seed, group.seed + group_size)),
        )
        for group in job.groups
    ]
