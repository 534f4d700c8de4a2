"""A run of full fine-tuning: its versions, on a model whose weights are changed in place.

    the model at the parent + examples -> gradient of the cross-entropy -> AdamW -> record

Each version has a record, which names its parent's by hash: two attempts that computed the same
have the same one. Every `checkpoint_every`-th has the state too, which goes to the store beside the
next step, and the last one is written as a folder that `from_pretrained` loads.

What holds another version than the parent's, as a trainer that has just started, restores the last
state before it and takes the steps since then again: which examples they had follows from the spec.
"""

import math
from dataclasses import dataclass

import structlog

from offbeat.contracts.jobs import (
    ExampleBatch,
    InitInput,
    InitOutput,
    ReplayInput,
    ReplayOutput,
    StepInput,
    TrainInput,
    TrainOutput,
)
from offbeat.contracts.run_spec import RunSpec
from offbeat.contracts.weights import STATE_RECORD, Manifest
from offbeat.data.epochs import step_rows
from offbeat.errors import NotFiniteError
from offbeat.worker import HandIn, JobContext
from services.trainer import checkpoint
from services.trainer.full_model import FullModel
from services.trainer.metrics import Metrics, Timer, packing_metrics
from services.trainer.optimizer import learning_rate
from services.trainer.parent import published_version
from services.trainer.publish import Sealed, Trainer, origin, publish
from services.trainer.sft_batch import example_batches, examples_of
from services.trainer.sft_gradient import sft_gradient, validation
from services.trainer.skipped import Update, update_or_skip

log = structlog.get_logger(__name__)


class Record(checkpoint.StateScalars):
    """What tells a version from any other one."""

    version: int
    parent_sha256: str | None
    """Of the parent's record; none for the base model."""
    loss: float | None = None
    """Of the step that made the version, as its gradient's norm; none where it was skipped."""
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a job of such a run works with."""

    context: JobContext
    trainer: Trainer
    model: FullModel
    spec: RunSpec
    timer: Timer

    @classmethod
    def of(cls, context: JobContext, trainer: Trainer) -> "Job":
        """Load the model, unless it is there."""
        model = trainer.memory.full_model(context.lease.spec)
        spec = trainer.memory.settled(context.lease.spec)
        return cls(context=context, trainer=trainer, model=model, spec=spec, timer=Timer())


def init(context: JobContext, trainer: Trainer) -> InitOutput:
    """Publish version 0, the base model, of which nothing has to be stored."""
    job = Job.of(context, trainer)
    assert isinstance(context.lease.input, InitInput)
    job.trainer.memory.forget()
    job.model.begin_anew()
    metrics = _validated(job, 0, context.lease.input.eval_prompts_key)
    sealed = _sealed(job, None, Update(state=0, metrics={}), metrics)
    return InitOutput(manifest=publish(context, trainer, sealed, None).manifest)


def train(context: JobContext, trainer: Trainer, parent: Manifest) -> TrainOutput | HandIn:
    """Publish the version that follows from the parent's and the step's examples."""
    job = Job.of(context, trainer)
    step = context.lease.input
    assert isinstance(step, TrainInput)
    assert step.examples is not None, "the steps of a supervised run name examples"
    update = _update(job, step, parent, step.examples)
    number = step.base_version + 1
    validated = _validated(job, number, step.examples.eval_examples_key)
    sealed = _sealed(job, parent, update, validated)
    log.info("The step is computed.", version=number, step_s=round(job.timer.total_s(), 2))
    return HandIn(lambda: publish(context, trainer, sealed, parent))


def replay(context: JobContext, trainer: Trainer) -> ReplayOutput:
    """Take a published step again, from what lies in the store, and compare the records."""
    job = Job.of(context, trainer)
    step = context.lease.input
    assert isinstance(step, ReplayInput)
    assert step.examples is not None, "the steps of a supervised run name examples"
    published = published_version(trainer, context.lease.run_id, step.base_version + 1)
    parent = published_version(trainer, context.lease.run_id, step.base_version)
    trainer.memory.forget()
    update = _update(job, step, parent, step.examples)
    [record] = checkpoint.describe(_record_file(job, parent, update))
    return ReplayOutput(
        version=published.version,
        published_sha256=published.sha256,
        recomputed_sha256=record.sha256,
    )


def _stand_at(job: Job, version: Manifest, examples: ExampleBatch) -> None:
    """Have the model hold this version. Raises `ObjectNotFoundError` where the state before it was
    removed."""
    memory, trainer, every = job.trainer.memory, job.trainer, job.spec.train.checkpoint_every
    if memory.holds(version):
        return
    memory.forget()
    first = version.version - version.version % every
    if first == 0:
        job.model.begin_anew()
    else:
        saved = published_version(trainer, version.run_id, first)
        [body] = checkpoint.download(trainer.store, saved, (STATE_RECORD,)).values()
        job.model.restore(saved, Record.model_validate_json(body).num_updates)
    log.info("Went back to a version whose state is stored.", version=first)
    for number in range(first, version.version):
        _take_again(job, published_version(trainer, version.run_id, number + 1), examples)
    memory.keep(version)


def _take_again(job: Job, made: Manifest, examples: ExampleBatch) -> None:
    """The step that made this version, which is published already."""
    if made.skipped is not None:
        return
    num_examples = len(job.trainer.examples(examples.examples_key))
    rows = step_rows(job.spec, made.version - 1, num_examples)
    _, metrics = _compute(job, made.version - 1, examples.model_copy(update={"rows": rows}))
    log.info(
        "Took a step again, whose state is not stored.",
        version=made.version,
        loss=metrics["loss"],
        published_loss=made.metrics.get("loss"),
    )


def _update(job: Job, step: StepInput, parent: Manifest, examples: ExampleBatch) -> Update[int]:
    """The update of the parent's weights, or none where it would not be finite."""
    _stand_at(job, parent, examples)
    return update_or_skip(
        job.trainer.store,
        job.context.lease,
        step,
        parent,
        job.model.num_updates,
        lambda: _compute(job, step.base_version, examples),
    )


def _compute(job: Job, base_version: int, batch: ExampleBatch) -> tuple[int, Metrics]:
    """Change the model's weights by one step over these examples. Raises `NotFiniteError`, and has
    changed nothing, where loss or gradient are not."""
    train, model = job.spec.train, job.model
    with job.timer.part("example_fetch"):
        table = job.trainer.examples(batch.examples_key)
        examples = examples_of(table, batch.rows)
    batches = example_batches(examples, train, model.device, is_full=True)

    def between(done: float) -> None:
        job.context.progress = done
        job.context.check()

    with job.timer.part("fwd_bwd"):
        gradient, seen = sft_gradient(
            model, batches, train, version=base_version + 1, between=between
        )
    job.trainer.memory.forget()
    rate = learning_rate(train, base_version)
    with job.timer.part("optimizer"):
        norm = model.update(rate, train.weight_decay, train.max_grad_norm)
    if not math.isfinite(norm):
        raise NotFiniteError(f"the norm of the gradient is {norm}")
    return model.num_updates, {
        "loss": gradient.loss,
        "grad_norm": norm,
        "learning_rate": rate,
        **seen,
        "num_tokens": sum(len(example.ids) for example in examples),
        "epoch": (base_version + 1) * job.spec.sft.batch_size / len(table),
        **packing_metrics(batches),
    }


def _sealed(job: Job, parent: Manifest | None, update: Update[int], validated: Metrics) -> Sealed:
    """The version as it is published; what is large of it is on its way to the store already."""
    number = parent.version + 1 if parent else 0
    files = _record_file(job, parent, update)
    metrics = {**update.metrics, **validated}
    manifest = Manifest(
        **origin(job.context.lease, number, files),
        metrics={**metrics, **job.timer.metrics(int(metrics.get("num_tokens", 0)))},
        skipped=update.skipped,
    )
    job.trainer.memory.keep(manifest)
    if number == job.spec.train.steps:
        log.info("Writing the model.", version=number, prefix=manifest.prefix)
        written = job.model.write_folder(manifest.prefix)
        return Sealed(manifest=manifest, files=files, uploaded=lambda: written)
    if number and number % job.spec.train.checkpoint_every == 0:
        log.info("Saving the state.", version=number, prefix=manifest.prefix)
        return Sealed(manifest=manifest, files=files, uploaded=job.model.save(manifest.prefix))
    return Sealed(manifest=manifest, files=files)


def _record_file(job: Job, parent: Manifest | None, update: Update[int]) -> dict[str, bytes]:
    record = Record(
        version=parent.version + 1 if parent else 0,
        parent_sha256=parent.sha256 if parent else None,
        spec_sha256=checkpoint.spec_sha256(job.context.lease.spec),
        num_updates=update.state,
        loss=update.metrics.get("loss"),
        grad_norm=update.metrics.get("grad_norm"),
    )
    return {STATE_RECORD: record.model_dump_json().encode()}


def _validated(job: Job, version: int, examples_key: str | None) -> Metrics:
    """The metrics on the held-out examples; none where the version is not to be validated."""
    if version not in job.spec.validated_versions or examples_key is None:
        return {}
    with job.timer.part("eval"):
        table = job.trainer.examples(examples_key)
        examples = examples_of(table, range(len(table)))
        batches = example_batches(examples, job.spec.train, job.model.device, is_full=True)
        return validation(job.model, batches, job.context.check)
