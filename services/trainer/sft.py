"""A supervised run's versions: the first one, and each step from a version to the next.

    parent's state + examples -> rows -> gradient of the cross-entropy -> AdamW -> validation

A step depends on nothing else, and what becomes of its draft is the same as in any other run: see
`run.py`. Where a version is to be validated, its loss on the held-out examples belongs to the step
that makes it, so no other worker is needed.
"""

from offbeat.contracts.jobs import InitInput, StepInput
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import Manifest
from offbeat.worker import JobContext
from services.trainer.canary import canary_prompt, first_canary, next_canary
from services.trainer.metrics import Metrics, Timer, packing_metrics
from services.trainer.model import Tensors
from services.trainer.optimizer import next_state
from services.trainer.policy import Policy
from services.trainer.publish import Draft, Trainer
from services.trainer.sft_batch import example_batches, examples_of
from services.trainer.sft_gradient import sft_gradient, validation
from services.trainer.skipped import update_or_skip
from services.trainer.state import TrainerState


def first_version(
    context: JobContext,
    trainer: Trainer,
    policy: Policy,
    state: TrainerState,
    job: InitInput,
    timer: Timer,
) -> Draft:
    """Version 0, whose canary continues the beginning of the first example."""
    spec = trainer.memory.settled(context.lease.spec)
    [example] = examples_of(trainer.examples(job.prompts_key), [0])
    prompt_ids = canary_prompt(example.ids[: example.is_target.index(True)])
    return Draft(
        version=0,
        state=state,
        make_canary=lambda: first_canary(policy, state.masters, prompt_ids),
        validate=lambda: _validated(
            context, trainer, policy, spec, state.masters, 0, job.eval_prompts_key, timer
        ),
    )


def next_version(
    context: JobContext,
    trainer: Trainer,
    policy: Policy,
    parent: Manifest,
    state: TrainerState,
    step: StepInput,
    timer: Timer,
) -> Draft:
    """The version that follows from the parent's state and the step's examples."""
    assert step.examples is not None, "the steps of a supervised run name examples"
    spec, base_version = trainer.memory.settled(context.lease.spec), step.base_version
    number = base_version + 1
    held_out_key = step.examples.eval_examples_key
    with timer.part("example_fetch"):
        table = trainer.examples(step.examples.examples_key)
        examples = examples_of(table, step.examples.rows)
    batches = example_batches(examples, spec.train, policy.device)
    policy.install(state.masters)

    def between(done: float) -> None:
        context.progress = done
        context.check()

    def compute() -> tuple[TrainerState, Metrics]:
        with timer.part("fwd_bwd"):
            gradient, seen = sft_gradient(
                policy, batches, spec.train, version=number, between=between
            )
        with timer.part("optimizer"):
            new_state, metrics = next_state(state, gradient, spec.train, base_version)
        return new_state, metrics | seen

    update = update_or_skip(trainer.store, context.lease, step, parent, state, compute)
    num_tokens = sum(len(example.ids) for example in examples)
    return Draft(
        version=number,
        state=update.state,
        make_canary=lambda: next_canary(policy, update.state.masters, parent.proof, state.masters),
        validate=lambda: _validated(
            context,
            trainer,
            policy,
            spec,
            update.state.masters,
            number,
            held_out_key,
            timer,
        ),
        metrics={
            **update.metrics,
            "num_tokens": num_tokens,
            "epoch": number * spec.sft.batch_size / len(table),
            **packing_metrics(batches),
        },
        num_tokens=num_tokens,
        skipped=update.skipped,
    )


def _validated(
    context: JobContext,
    trainer: Trainer,
    policy: Policy,
    spec: RunSpec,
    masters: Tensors,
    version: int,
    examples_key: str | None,
    timer: Timer,
) -> Metrics:
    """The metrics of a version on the held-out examples; none where it is not to be validated."""
    if version not in spec.validated_versions or examples_key is None:
        return {}
    with timer.part("eval"):
        table = trainer.examples(examples_key)
        examples = examples_of(table, range(len(table)))
        policy.install(masters)
        batches = example_batches(examples, spec.train, policy.device)
        return validation(policy, batches, context.check)
