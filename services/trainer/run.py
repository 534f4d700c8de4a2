"""What a trainer does with a job: one optimizer step, from a published version to the next.

    parent's state + rollouts -> advantages -> rows -> gradient -> AdamW -> files -> published

A step depends on nothing else, so the same parent and the same rollouts give the same bytes on the
same hardware. It may stop anywhere before the publish and leaves no trace. The first complete
publish of a version wins; whoever comes second adopts the winner's and drops its own. The upload is
left to run beside the next step, which starts from the version in memory.

`init` makes version 0 and publishes it in the same way; `replay` audits a step by taking it again.
The steps of a supervised run are in `sft.py`, those of full fine-tuning in `full.py`; `METHODS` is
where the kinds of run part.
"""

from collections.abc import Mapping

import structlog

from offbeat.contracts.jobs import (
    InitInput,
    InitOutput,
    ReplayInput,
    ReplayOutput,
    StepInput,
    TrainInput,
    TrainOutput,
)
from offbeat.contracts.leases import Lease
from offbeat.contracts.run_kinds import RunKind
from offbeat.contracts.weights import ADAPTER_WEIGHTS, Manifest
from offbeat.tables import decode_prompts
from offbeat.worker import HandIn, JobContext
from services.trainer import checkpoint, full, sft
from services.trainer.batch import StepBatch
from services.trainer.canary import canary_prompt, first_canary, next_canary
from services.trainer.gradient import micro_batches, step_gradient
from services.trainer.initial import initial_adapter
from services.trainer.method import Method
from services.trainer.metrics import (
    Metrics,
    Timer,
    packing_metrics,
    reward_metrics,
    sample_metrics,
    token_metrics,
)
from services.trainer.optimizer import next_state
from services.trainer.parent import parent_or_next, published_version, stored_state
from services.trainer.policy import Policy
from services.trainer.publish import Draft, Trainer, publish, seal
from services.trainer.rollouts import Group, fetch_groups, refusal
from services.trainer.skipped import update_or_skip
from services.trainer.state import TrainerState, starting_state

log = structlog.get_logger(__name__)


def init(context: JobContext, trainer: Trainer) -> InitOutput:
    """Publish version 0: the seeded adapter, or the one that `lora.init_from` names."""
    lease = context.lease
    assert isinstance(lease.input, InitInput)
    if published := trainer.versions.get(lease.run_id, 0):
        return InitOutput(manifest=published)
    if lease.spec.is_full:
        return full.init(context, trainer)
    timer = Timer()
    policy = trainer.memory.policy(lease.spec)
    adapter = initial_adapter(lease.spec, policy, trainer.store, trainer.versions)
    state = starting_state({name: master.to(policy.device) for name, master in adapter.items()})
    draft = METHODS[lease.spec.kind].first(context, trainer, policy, state, lease.input, timer)
    sealed = seal(lease, policy, draft, timer)
    trainer.memory.keep(sealed.manifest, state)
    return InitOutput(manifest=publish(context, trainer, sealed, None).manifest)


def train(context: JobContext, trainer: Trainer) -> TrainOutput | HandIn:
    """Publish version `base_version + 1`: one optimizer step over the named groups."""
    lease = context.lease
    assert isinstance(lease.input, TrainInput)
    number = lease.input.base_version + 1
    parent = parent_or_next(context, trainer, lease.input.base_version)
    if parent.version == number:
        log.info("The version is published already: adopted it.", version=number)
        return TrainOutput(manifest=parent)
    if lease.spec.is_full:
        return full.train(context, trainer, parent)

    timer = Timer()
    policy = trainer.memory.policy(lease.spec)
    state = trainer.memory.state(parent) or stored_state(trainer, policy, parent)
    step = METHODS[lease.spec.kind].step
    draft = step(context, trainer, policy, parent, state, lease.input, timer)
    sealed = seal(lease, policy, draft, timer)
    trainer.memory.keep(sealed.manifest, draft.state)
    log.info("The step is computed.", version=number, step_s=round(timer.total_s(), 2))
    return HandIn(lambda: publish(context, trainer, sealed, parent))


def replay(context: JobContext, trainer: Trainer) -> ReplayOutput:
    """Take a published step again, from what lies in the store, and compare the adapters."""
    lease = context.lease
    assert isinstance(lease.input, ReplayInput)
    if lease.spec.is_full:
        return full.replay(context, trainer)
    published = published_version(trainer, lease.run_id, lease.input.base_version + 1)
    parent = published_version(trainer, lease.run_id, lease.input.base_version)
    policy = trainer.memory.policy(lease.spec)
    state = stored_state(trainer, policy, parent)
    step = METHODS[lease.spec.kind].step
    draft = step(context, trainer, policy, parent, state, lease.input, Timer())
    files = checkpoint.describe(checkpoint.encode(draft.state, policy, lease.spec))
    recomputed = next(file.sha256 for file in files if file.name == ADAPTER_WEIGHTS)
    return ReplayOutput(
        version=published.version,
        published_sha256=published.adapter_sha256,
        recomputed_sha256=recomputed,
    )


def _first_version(
    context: JobContext,
    trainer: Trainer,
    policy: Policy,
    state: TrainerState,
    job: InitInput,
    timer: Timer,
) -> Draft:
    """Version 0, whose canary continues the first prompt."""
    prompts = decode_prompts(trainer.store.get(job.prompts_key))
    prompt_ids = canary_prompt(prompts[0].prompt_ids)
    return Draft(
        version=0,
        state=state,
        make_canary=lambda: first_canary(policy, state.masters, prompt_ids),
    )


def _next_version(
    context: JobContext,
    trainer: Trainer,
    policy: Policy,
    parent: Manifest,
    state: TrainerState,
    step: StepInput,
    timer: Timer,
) -> Draft:
    """The version that follows from the parent's state and the step's groups."""
    spec = trainer.memory.settled(context.lease.spec)
    base_version, number = step.base_version, step.base_version + 1
    policy.install(state.masters)

    with timer.part("rollout_fetch"):
        groups, dropped_group_ids = _usable_groups(trainer, context.lease, step)
    batch = StepBatch.of_groups(groups, spec)
    micro = micro_batches(batch, spec, policy.device)

    def between(done: float) -> None:
        context.progress = done
        context.check()
        trainer.rollouts.prefetch(context.waiting_rollouts)

    def compute() -> tuple[TrainerState, Metrics]:
        with timer.part("fwd_bwd"):
            gradient, tokens = step_gradient(
                policy, micro, batch, spec, version=number, between=between
            )
        with timer.part("optimizer"):
            new_state, metrics = next_state(state, gradient, spec.train, base_version)
        return new_state, metrics | token_metrics(tokens, batch.samples, base_version, spec.train)

    update = update_or_skip(trainer.store, context.lease, step, parent, state, compute)
    return Draft(
        version=number,
        state=update.state,
        make_canary=lambda: next_canary(policy, update.state.masters, parent.proof, state.masters),
        metrics={
            **reward_metrics(batch),
            **sample_metrics(batch.samples, base_version),
            **packing_metrics(micro),
            **update.metrics,
        },
        num_tokens=int(batch.lengths_S.sum()),
        dropped_group_ids=dropped_group_ids,
        skipped=update.skipped,
    )


def _usable_groups(
    trainer: Trainer, lease: Lease, job: StepInput
) -> tuple[list[Group], tuple[str, ...]]:
    """The groups to train on, and the ids of those that were refused."""
    usable: list[Group] = []
    dropped: list[str] = []
    for group_id, group in fetch_groups(trainer.rollouts, job.groups).items():
        versions = {sample.policy_version for sample in group}
        hashes = {
            version: trainer.versions.adapter_sha256(lease.run_id, version) for version in versions
        }
        reason = refusal(group, job.base_version, lease.spec.staleness, hashes)
        if reason is None:
            usable.append(group)
        else:
            dropped.append(group_id)
            log.warning("Refused a group.", group=group_id, reason=reason)
    return usable, tuple(dropped)


METHODS: Mapping[RunKind, Method] = {
    "grpo": Method(first=_first_version, step=_next_version),
    "sft": Method(first=sft.first_version, step=sft.next_version),
}
