"""What a worker is told and what it answers.

The queue carries a `JobMessage`: an id and an attempt. The worker leases the job over HTTP and gets
the rest with the lease; only the attempt that holds the lease can complete the job.
"""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from offbeat.contracts.base import Contract
from offbeat.contracts.bounds import ByteCount, Count, Metrics, ObjectKey, Positive, Version
from offbeat.contracts.chat import ChatInput, ChatOutput
from offbeat.contracts.rollouts import GroupSummary
from offbeat.contracts.weights import Manifest, Sha256


class JobKind(StrEnum):
    """The kinds of work. `prepare` (in a supervised run `tokenize`) and `init` happen once a run,
    `replay` and `chat` when a user asks."""

    PREPARE = "prepare"
    TOKENIZE = "tokenize"
    INIT = "init"
    GENERATE = "generate"
    EVALUATE = "evaluate"
    TRAIN = "train"
    REPLAY = "replay"
    CHAT = "chat"

    @property
    def role(self) -> "WorkerRole":
        """The kind of worker that does it."""
        return WorkerRole.TRAINER if self in TRAINER_KINDS else WorkerRole.GENERATOR


TRAINER_KINDS = (JobKind.TOKENIZE, JobKind.INIT, JobKind.TRAIN, JobKind.REPLAY)


class JobStatus(StrEnum):
    """`queued -> leased -> done | failed | dead | cancelled`."""

    QUEUED = "queued"
    LEASED = "leased"
    DONE = "done"
    FAILED = "failed"
    """A permanent failure: trying again would fail in the same way."""
    DEAD = "dead"
    """Out of attempts."""
    CANCELLED = "cancelled"


class WorkerRole(StrEnum):
    """Which queue a worker listens to."""

    GENERATOR = "generator"
    TRAINER = "trainer"


class JobMessage(Contract):
    """All that goes through the broker."""

    job_id: str
    attempt: Annotated[int, Field(ge=1)]


class PrepareInput(Contract):
    """Read the data, check every row, render and tokenise the prompts."""

    kind: Literal["prepare"] = "prepare"


class TokenizeInput(Contract):
    """Read the data of a supervised run, check every row, render and tokenise the examples."""

    kind: Literal["tokenize"] = "tokenize"


class InitInput(Contract):
    """Publish version 0: the seeded initial adapter, whose B is zero."""

    kind: Literal["init"] = "init"
    prompts_key: str
    """The prompts of the run, or its examples."""
    eval_prompts_key: str | None = None


class GroupRequest(Contract):
    """One group to generate: a prompt and the name of its samples."""

    group_id: str
    prompt_row: Annotated[int, Field(ge=0)]
    """Row of `prompts.parquet`."""
    seed: Annotated[int, Field(ge=0, lt=2**63)]
    """Sample k of the group draws from the stream `seed + k`."""


class GenerateInput(Contract):
    """Sample `group_size` completions of a few prompts with the newest version at hand."""

    kind: Literal["generate"] = "generate"
    prompts_key: str
    groups: Annotated[tuple[GroupRequest, ...], Field(min_length=1)]
    min_version: Annotated[int, Field(ge=0)]
    """The oldest version that may be used; a worker without it waits until it is published."""


class EvaluateInput(Contract):
    """Answer the held-out prompts with exactly this version."""

    kind: Literal["evaluate"] = "evaluate"
    prompts_key: str
    version: Annotated[int, Field(ge=0)]


class ReadyGroup(Contract):
    """A generated group, where it lies, and the version that made it."""

    group_id: str
    rollouts_key: str
    policy_version: Annotated[int, Field(ge=0)]
    adapter_sha256: Sha256


class ExampleBatch(Contract):
    """The examples of a step of a supervised run, and where its held-out ones lie."""

    examples_key: str
    rows: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """Rows of that table."""
    eval_examples_key: str | None


class StepInput(Contract):
    """One optimizer step from `base_version` to `base_version + 1`, over the named groups or, in a
    supervised run, over the named examples."""

    base_version: Annotated[int, Field(ge=0)]
    groups: tuple[ReadyGroup, ...] = ()
    examples: ExampleBatch | None = None

    @model_validator(mode="after")
    def _has_one_kind_of_data(self) -> Self:
        if bool(self.groups) == (self.examples is not None):
            raise ValueError("a step is over groups or over examples: name one of the two")
        return self


class TrainInput(StepInput):
    """Take the step and publish the version that it makes."""

    kind: Literal["train"] = "train"
    num_refilled: Annotated[int, Field(ge=0)] = 0
    """Groups that dynamic sampling replaced to find these."""


class ReplayInput(StepInput):
    """Take a step again that was taken long ago, and compare; nothing is published."""

    kind: Literal["replay"] = "replay"


JobInput = Annotated[
    PrepareInput
    | TokenizeInput
    | InitInput
    | GenerateInput
    | EvaluateInput
    | TrainInput
    | ReplayInput
    | ChatInput,
    Field(discriminator="kind"),
]


class PreparedData(Contract):
    """Where the prompts lie, or the examples of a supervised run; row counts of both tables."""

    prompts_key: ObjectKey
    num_prompts: Positive
    eval_prompts_key: ObjectKey | None
    num_eval_prompts: Count
    stored_bytes: ByteCount = 0
    """What was put into the object store, for the project's quota."""


class PrepareOutput(PreparedData):
    """The prompts are ready."""

    kind: Literal["prepare"] = "prepare"


class TokenizeOutput(PreparedData):
    """The examples are ready."""

    kind: Literal["tokenize"] = "tokenize"
    num_target_tokens: Count
    """Tokens of the training examples that the loss is taken on."""
    num_cut: Count
    """Examples of both tables that `sft.max_length` has cut off."""


class InitOutput(Contract):
    """The manifest of version 0 that won."""

    kind: Literal["init"] = "init"
    manifest: Manifest


class GenerateOutput(Contract):
    """One Parquet object with every group of the job."""

    kind: Literal["generate"] = "generate"
    rollouts_key: ObjectKey
    groups: tuple[GroupSummary, ...]
    generated_tokens: Count
    generate_s: Annotated[float, Field(ge=0)]
    """Time in the engine."""
    stored_bytes: ByteCount = 0
    """What was put into the object store, for the project's quota."""


class EvaluateOutput(Contract):
    """Mean reward and accuracy on the held-out prompts."""

    kind: Literal["evaluate"] = "evaluate"
    version: Version
    rollouts_key: ObjectKey
    metrics: Metrics
    """`eval/reward`, `eval/pass@1`, ... by name."""
    stored_bytes: ByteCount = 0
    """What was put into the object store, for the project's quota."""


class TrainOutput(Contract):
    """The manifest of the new version that won."""

    kind: Literal["train"] = "train"
    manifest: Manifest
    publish_s: Annotated[float, Field(ge=0)] = 0.0
    """Time for the upload, most of it beside the next step."""


class ReplayOutput(Contract):
    """The hashes of the adapter that was published and of the one that was made again."""

    kind: Literal["replay"] = "replay"
    version: Positive
    published_sha256: Sha256
    recomputed_sha256: Sha256


JobOutput = Annotated[
    PrepareOutput
    | TokenizeOutput
    | InitOutput
    | GenerateOutput
    | EvaluateOutput
    | TrainOutput
    | ReplayOutput
    | ChatOutput,
    Field(discriminator="kind"),
]
